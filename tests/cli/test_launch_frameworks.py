"""Programs of JAX and torch under `waystation launch`, as its guide has them, and which of them died.

`make test` has the process that all others are connected to die under JAX, and another one under torch; `make
test-long` each of both.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.long import IS_LONG

SCRIPT = str(Path(sys.executable).parent / "waystation")
HANG_S = 240

CONNECT = {
    "jax": """
import jax
jax.distributed.initialize(
    num_processes=int(os.environ["WAYSTATION_PROCESS_COUNT"]),
    process_id=int(os.environ["WAYSTATION_PROCESS_INDEX"]),
    heartbeat_timeout_seconds=10,
)
""",
    "torch": """
import torch
torch.distributed.init_process_group("gloo")
""",
}
PROGRAM = """
import os, signal, sys, time
{connect}
from waystation import coordination
coordinator = coordination.current()
victim = int(sys.argv[1])
session = coordinator.open("a save", deadline_s=100)
assert session.round(lambda: b"x", lambda parts: b"".join(parts)) == b"xxx"
until = time.monotonic() + 60  # of work, in which the processes get to know each other
for other in [0, *session._watched]:
    while "pid" not in session._store.describe(other) and time.monotonic() < until:
        time.sleep(0.01)
session.barrier()
if coordinator.process_index == victim:
    print("about to die", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
session.barrier()
session.close()
"""


def launch(framework: str, victim: int, tmp_path: Path) -> tuple[dict[str, Any], str]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(connect=CONNECT[framework]))
    arguments = ["launch", "-n", "3", "--json", "--grace", "60", sys.executable, str(path), str(victim)]
    done = subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, timeout=HANG_S, check=False, cwd=tmp_path
    )
    assert done.returncode == (0 if victim < 0 else 1), done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("framework", ["jax", "torch"])
@pytest.mark.share(2)
def test_a_program_that_ends_well(framework: str, tmp_path: Path) -> None:
    document, _ = launch(framework, -1, tmp_path)
    assert [process["exit_code"] for process in document["processes"]] == [0, 0, 0]


VICTIMS = [("jax", 0), ("torch", 1)]


@pytest.mark.long
@pytest.mark.parametrize(("framework", "victim"), VICTIMS + ([("jax", 1), ("torch", 0)] if IS_LONG else []))
@pytest.mark.share(2)
def test_the_victim_is_named(framework: str, victim: int, tmp_path: Path) -> None:
    document, err = launch(framework, victim, tmp_path)
    processes = document["processes"]
    assert document["first_failure"] == victim
    assert document["report"][0].startswith(
        f"process {victim} (pid {processes[victim]['pid']}) was killed by SIGKILL first, after "
    )
    assert document["report"][0].endswith("; the others ended because of that")
    assert processes[victim]["last_lines"][-1] == "about to die"
    for index, process in enumerate(processes):
        assert process["told_to_end"] is None, "the others had to be ended"
        if index != victim and framework == "torch":
            assert process["exit_code"] == 1
            assert f"process {victim} (pid {processes[victim]['pid']} on " in process["last_lines"][-1]
    if framework == "torch":
        assert err.count("waystation.errors.Unavailable: ") >= 2
