"""Kills the deletion of a checkpointable before each of its changes of the disk, and keeps what is left.

Run as a program, so that children are forked from a process without other threads, and without genuine Orbax:
`python -m tests.orbax.kill_deletion CHECKPOINT NAME DIRECTORY`. Each time a copy of the checkpoint is made as
`DIRECTORY/<number>/checkpoint`, and the checkpointable is deleted from that. Prints the changes, as JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from tests.support import system_calls

import waystation


def main(checkpoint: Path, name: str, directory: Path) -> None:
    """Walks through one deletion."""
    step = 0
    while True:
        path = directory / str(step) / "checkpoint"
        path.parent.mkdir()
        shutil.copytree(checkpoint, path)
        killed, changes = system_calls.run(
            lambda path=path: waystation.delete(path, checkpointable_name=name),  # type: ignore[misc]
            step,
        )
        if not killed:
            json.dump(changes, sys.stdout)
            return
        step += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
