"""Starts one fresh process for a measurement and takes its outcome, or the reason why there is none."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from benchmarks.distributed.session import Outcome
from benchmarks.session import ROOT


class Asked(Protocol):
    """What a process is asked to do."""

    def to_json(self) -> str:
        """As its argument."""
        ...


def spawn(module: str, request_of: Callable[[str, str], Asked], directory: Path, timeout_s: float) -> Outcome:
    """Runs `python -m module REQUEST`.

    Args:
        module: The program.
        request_of: Makes the request of a scratch directory and the path of the outcome; called last.
        directory: Where both are; the scratch directory is gone afterwards.
        timeout_s: When to give up.
    """
    directory.mkdir(parents=True, exist_ok=True)
    output, scratch = directory / "outcome.json", directory / "scratch"
    output.unlink(missing_ok=True)
    request = request_of(str(scratch), str(output))
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, request.to_json()],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=ROOT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"not finished after {timeout_s:.0f} s"}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    # One that ends itself does so by SIGKILL, once its outcome is written.
    if not output.exists() or done.returncode not in (0, -signal.SIGKILL):
        reason = f"the process ended with status {done.returncode}: {done.stderr[-2000:]}"
        return {"status": "failed", "reason": reason}
    outcome: Outcome = json.loads(output.read_text())
    return outcome
