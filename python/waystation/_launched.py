"""What a program tells `waystation launch`, which has started it and may start it again.

At its first save the program says which modules it has imported by then. The launch prepares the processes
that would take the place of this one only now, so that they do not slow its start down
(`waystation_launch.standbys`). Nothing here changes what is saved, and nothing that goes wrong here is told.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

# The name of an abstract socket of the launch, which ends with it, and which the kernel tells who writes.
FIRST_STEP_VARIABLE = "WAYSTATION_FIRST_STEP"

_told_by: set[int] = set()  # process ids: a forked child is not the process that the launch has started


def note_step() -> None:
    """The program has come to a step that it saves; tells the launch of the first one."""
    name = os.environ.get(FIRST_STEP_VARIABLE)
    if name is None or os.getpid() in _told_by:
        return
    _told_by.add(os.getpid())
    # The launch starts each process in a session of its own, and has no interest in what that starts.
    if os.getsid(0) == os.getpid():
        _tell(name)


def _tell(name: str) -> None:
    import json
    import socket
    import zlib

    told = {"environment": digest_of_environment(), "modules": _imported()}
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.setblocking(False)
        there.sendto(zlib.compress(json.dumps(told).encode(), 1), f"\0{name}")


def digest_of_environment() -> str:
    """What tells two sets of variables apart; `waystation_launch.standby` makes the same."""
    import hashlib

    told = b"\0".join(b"%s=%s" % each for each in sorted(os.environb.items()))
    return hashlib.sha256(told).hexdigest()


def _imported() -> list[str]:
    """The modules that were imported from files under their own names, in the order of their imports."""
    found = []
    for name, module in list(sys.modules.items()):
        spec = _spec_of(module)
        if spec is not None and spec.has_location and spec.name == name:
            found.append(name)
    return found


def _spec_of(module: object) -> ModuleSpec | None:
    """Asks no module that makes its attributes when it is asked, and takes what is none."""
    return module.__dict__.get("__spec__") if isinstance(module, ModuleType) else None
