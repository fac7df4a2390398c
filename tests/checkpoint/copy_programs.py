"""What other programs do with copies."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import waystation
from waystation.errors import WaystationError
from waystation.storage import AnyPath

# The function has the name of its module in the package.
copying: Any = importlib.import_module("waystation.checkpoint.copy")


def copy_slowly(environment: Mapping[str, str], source: AnyPath, destination: AnyPath) -> None:
    """Copies, file by file, so that it can be killed in the middle."""
    os.environ.update(environment)
    copying._JOB_BYTES = 1 << 20
    waystation.copy(source, destination, bytes_per_second=6 << 20)


def copy_and_tell(
    environment: Mapping[str, str], source: AnyPath, destination: AnyPath, outcomes: Any
) -> None:
    """Copies, and tells how that ended."""
    os.environ.update(environment)
    try:
        waystation.copy(source, destination)
    except WaystationError as error:
        outcomes.put(type(error).__name__)
    else:
        outcomes.put("copied")
