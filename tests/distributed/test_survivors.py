"""One of three processes of a JAX program is killed in a save: the others say so, and end by themselves.

JAX would have them wait for the dead process in its shutdown, and abort them after 100 s (SIGABRT). An exit
code of their own shows that it did not.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.ports import claimed_ports
from tests.support.programs import HANG_S

PROGRAM = Path(__file__).with_name("surviving_program.py")  # which sets the environment when imported
COUNT = 3
EXIT_CODES = {"raised": 1, "handled": 0, "shut down": 0}


def _start(index: int, port: int, ending: str, directory: Path) -> subprocess.Popen[str]:
    with (directory / f"{index}.log").open("w") as log:
        return subprocess.Popen(
            [
                *(sys.executable, PROGRAM),
                *(str(index), str(COUNT), str(port), str(directory), ending),
            ],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )


def _kill_in_a_save(victim: subprocess.Popen[str]) -> None:
    assert victim.stdout is not None
    for line in victim.stdout:
        if line == "saved 3\n":
            victim.kill()
            return
    raise AssertionError("the process ended before it was killed")


@pytest.mark.share(4)
@pytest.mark.parametrize(("victim", "ending"), [(1, "handled"), (2, "raised"), (2, "shut down")])
def test_survivors_end_by_themselves(victim: int, ending: str, tmp_path: Path) -> None:
    with claimed_ports(1) as (port,):
        processes = [_start(index, port, ending, tmp_path) for index in range(COUNT)]
        try:
            _kill_in_a_save(processes[victim])
            for index, process in enumerate(processes):
                told, _ = process.communicate(timeout=HANG_S)
                log = (tmp_path / f"{index}.log").read_text()
                if index != victim:
                    assert f"process {victim} (pid {processes[victim].pid} on " in told, log
                    assert process.returncode == EXIT_CODES[ending], log
        finally:
            for process in processes:
                process.kill()
                process.communicate()
