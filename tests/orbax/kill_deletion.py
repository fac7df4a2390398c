"""Kills the deletion of a checkpointable before each of its changes of the disk, and keeps what is left.

Run as a program, so that children are forked from a process without other threads, and without genuine Orbax:
`python -m tests.orbax.kill_deletion CHECKPOINT NAME DIRECTORY`. Each time a copy of the checkpoint is made as
`DIRECTORY/<number>/checkpoint`, and the checkpointable is deleted from that. Prints the changes, as JSON. Of
many equal changes in a row it takes the first and the last (`tests.support.system_calls`).
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

    def run(directory: Path, kill_before: int | None) -> tuple[bool, list[str]]:
        path = directory / "checkpoint"
        shutil.copytree(checkpoint, path)
        return system_calls.run(lambda: waystation.delete(path, checkpointable_name=name), kill_before)

    _, whole = run(directory.with_name(f"{directory.name}-whole"), None)
    for step in system_calls.steps_to_walk(whole):
        killed, _ = run(directory / str(step), step)
        if not killed and step >= len(whole):
            json.dump(whole, sys.stdout)
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
