"""Where the agent's program is, which keeps versions in a host's memory: it is a package of its own."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from waystation.errors import NotFound

_NAME = "waystation-agent"
_VARIABLE = "WAYSTATION_AGENT"


def agent_program() -> Path:
    """Finds the agent's program.

    It is what the environment variable `WAYSTATION_AGENT` names, else what is installed beside this
    interpreter, else what is found on `PATH`.

    Raises:
        NotFound: There is none, or the variable names none.
    """
    named = os.environ.get(_VARIABLE)
    if named:
        if not _is_program(Path(named)):
            raise NotFound(f"{_VARIABLE} names '{named}', where no program is; mend it, or unset it")
        return Path(named)
    beside = Path(sysconfig.get_path("scripts")) / _NAME
    if _is_program(beside):
        return beside
    found = shutil.which(_NAME)
    if found is None:
        raise NotFound("the agent of the memory tier is not installed; run 'pip install waystation[memory]'")
    return Path(found)


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
