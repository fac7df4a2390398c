"""Programs that end without having closed their client."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.long import amount

PROGRAM = """
import sys

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)

from waystation import runtime

client = runtime.local({"left": 1, "right": 1})
add = client.make_virtual_device_set()
left, right = add.add_slice(devices=1, island="left"), add.add_slice(devices=1, island="right")
there = client.jit(lambda x: x @ x.T / x.shape[0], left)
back = client.jit(lambda x: x + 1, right)
x = np.ones((600, 600), np.float32)
for _ in range(40):
    x = back(there(x))
print("recorded", flush=True)
if sys.argv[1] == "raise":
    raise KeyError("of the program")
if sys.argv[1] == "closed":
    client.close()
"""


@pytest.mark.long
@pytest.mark.parametrize(("how", "status"), [("end", 0), ("raise", 1), ("closed", 0)])
@pytest.mark.share(3)
def test_a_program_that_ends_while_calls_run_ends_as_it_says(tmp_path: Path, how: str, status: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for _ in range(amount(1, 2)):
        ended = subprocess.run(
            [sys.executable, program, how], capture_output=True, text=True, timeout=120, check=False
        )
        assert "recorded" in ended.stdout
        assert ended.returncode != -signal.SIGABRT, ended.stderr
        assert ended.returncode == status, ended.stderr
        assert ("of the program" in ended.stderr) == (how == "raise"), ended.stderr
