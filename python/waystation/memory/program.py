"""Finds the agent's program, which keeps versions in a host's memory and is installed with this package."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sysconfig
from pathlib import Path

from waystation.errors import NotFound

_NAME = "waystation-agent"
_VARIABLE = "WAYSTATION_AGENT"


def agent_program() -> Path:
    """Finds the agent's program.

    It is the program that the environment variable `WAYSTATION_AGENT` names, else the one that was installed
    with this package, else the first on `PATH`.

    Raises:
        NotFound: No such program exists, or the variable names none.
    """
    named = os.environ.get(_VARIABLE)
    if named:
        if not _is_program(Path(named)):
            raise NotFound(f"{_VARIABLE} is '{named}', which is not an executable file; correct or unset it")
        return Path(named)
    for candidate in (_recorded(), Path(sysconfig.get_path("scripts")) / _NAME):
        if candidate is not None and _is_program(candidate):
            return candidate
    found = shutil.which(_NAME)
    if found is None:
        raise NotFound(
            f"'{_NAME}', the agent of the memory tier, is missing, though it is installed with "
            f"waystation: install waystation again, or name the program in {_VARIABLE}"
        )
    return Path(found)


def _recorded() -> Path | None:
    """Where the installer has put the program: after `pip install --target` not beside the interpreter."""
    try:
        files = importlib.metadata.files("waystation") or []
    except importlib.metadata.PackageNotFoundError:  # sources on PYTHONPATH
        return None
    return next((Path(os.path.normpath(file.locate())) for file in files if file.name == _NAME), None)


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
