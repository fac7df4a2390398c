"""Where a demo puts what it makes, and what it needs to be installed."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

from waystation.errors import Conflict, Unsupported

REPORT = "waystation-demo.json"  # its presence marks a directory as the demo's own


def require_packages(*names: str) -> None:
    """Raises Unsupported where one of these is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise Unsupported(f"the demo needs packages that are not installed: pip install {' '.join(missing)}")


def prepare(output: Path) -> None:
    """Makes a directory empty, and marks it as the demo's own; raises Conflict where it is not a demo's."""
    if output.exists() and not (output / REPORT).is_file() and any(output.iterdir()):
        raise Conflict("the output directory holds files that no demo wrote; name another", path=str(output))
    if (output / REPORT).is_file():
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    write_report(output, {})


def write_report(output: Path, report: dict[str, Any]) -> None:
    """Writes the report of a demo."""
    (output / REPORT).write_text(json.dumps(report, indent=1) + "\n")
