"""Fuzzes the open path of published models: `python -m fuzz.open_path --seconds 60`.

Prints one line of JSON: the seed, how many executions there were, what came out of them, and a finding, if
there is one. With the seed and the number of an execution it runs again: `--seed SEED --first NUMBER
--executions 1 --keep DIRECTORY`, which leaves its files in the directory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import sys
import tempfile

from fuzz import watched

_MOST = 1 << 40


def main() -> int:
    """Runs as the arguments say; returns 1 for a finding."""
    parser = argparse.ArgumentParser(
        prog="python -m fuzz.open_path", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--seed", type=int, default=secrets.randbits(32), help="by default another one each time"
    )
    parser.add_argument("--first", type=int, default=0, help="the number of the first execution")
    parser.add_argument("--executions", type=int, default=_MOST, help="how many, at most")
    parser.add_argument("--seconds", type=float, help="how long, at most")
    parser.add_argument("--keep", metavar="DIRECTORY", help="a new directory for the files, which stay there")
    arguments = parser.parse_args()
    if arguments.executions == _MOST and arguments.seconds is None:
        parser.error("give --executions or --seconds")
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="waystation-fuzz-", dir=memory) as temporary:
        directory = arguments.keep or temporary
        if arguments.keep:
            os.mkdir(directory)
        outcome = watched.watch(
            lambda: _workload(arguments.seed, directory),
            arguments.first,
            watched.Limits(arguments.executions, arguments.seconds),
        )
    sys.stdout.write(json.dumps({"seed": arguments.seed, **dataclasses.asdict(outcome)}) + "\n")
    if outcome.finding is None:
        return 0
    sys.stderr.write(f"{outcome.finding}\nseed {arguments.seed}; see --help for how to run it again\n")
    return 1


def _workload(seed: int, directory: str) -> watched.Workload:
    # Not before the process is forked: the engine and NumPy have threads.
    from fuzz.open_path.check import Execution

    return Execution(seed, directory)


if __name__ == "__main__":
    sys.exit(main())
