"""Saves and loads where the system refuses calls, as sandboxes and old kernels do: they take another way.

Each case runs in a process of its own, since a filter of system calls cannot be taken off again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import failing_calls

import waystation

if not failing_calls.SUPPORTED:
    pytest.skip("system calls are made to fail on Linux on x86-64 and Arm only", allow_module_level=True)

DEADLINE_S = 120.0

PROGRAM = """
import errno, os, resource, sys
import numpy as np
import waystation
from tests.support import failing_calls

target, case = sys.argv[1:]
state = {"large": np.arange(600_000, dtype=np.float64), "small": np.ones(7)}

def cold():
    for directory, _, files in os.walk(target):
        for file in files:
            descriptor = os.open(os.path.join(directory, file), os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

def check():
    cold()
    loaded = waystation.load(target)
    assert all(np.array_equal(loaded[name], state[name]) for name in state)

if case.startswith("late "):
    waystation.save(target, state)
    check()
    case = case.removeprefix("late ")
name, _, code = case.partition(" ")
if name == "memlock":
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
elif name == "nofile":
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
elif name != "nothing":
    for call in name.split(","):
        failing_calls.fail(call, getattr(errno, code))
waystation.save(target, state, overwrite=True)
check()
state["large"] = state["large"][::-1].copy()
waystation.save(target, state, overwrite=True)
check()
assert [entry for entry in os.listdir(os.path.dirname(target)) if "waystation" in entry] == []
print("right")
"""


def run(case: str, target: Path) -> subprocess.CompletedProcess[str]:
    # A call that hangs is the defect that is looked for; the deadline ends it.
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(target), case],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


@pytest.mark.share(16)
@pytest.mark.parametrize(
    "case",
    [
        "nothing",
        "io_uring_setup EPERM",
        "io_uring_setup ENOSYS",
        "io_uring_enter EPERM",
        "io_uring_register EPERM",
        "late io_uring_setup EPERM",
        "late io_uring_enter EPERM",
        "renameat2 ENOSYS",
        "renameat2 EPERM",
        "syncfs EPERM",
        "statx EPERM",
        "statx ENOSYS",
        "madvise EINVAL",
        "memlock",
        "nofile",
    ],
)
def test_a_refused_call_costs_no_save_and_no_load(case: str, tmp_path: Path) -> None:
    done = run(case, tmp_path / "checkpoint")
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_without_new_threads_a_save_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    done = run("late clone,clone3 EAGAIN", tmp_path / "checkpoint")
    assert done.returncode != 0
    assert "Unavailable: could not start a thread" in done.stderr, done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


WITHOUT_THREADS = """
import sys, threading
import numpy as np
import waystation
from waystation.errors import Unavailable

target, call = sys.argv[1:]
state = {"a": np.arange(3)}
waystation.save(target, state)
threading.stack_size(1 << 62)  # more than there is
try:
    if call == "save_async":
        waystation.save_async(target, state, overwrite=True)
    else:
        getattr(waystation, call)(target)
except Unavailable as error:
    assert "could not start a thread" in str(error), error
else:
    raise AssertionError("threads were started")
threading.stack_size(0)
assert np.array_equal(waystation.load(target)["a"], state["a"])
waystation.save(target, state, overwrite=True)
print("right")
"""


@pytest.mark.parametrize("call", ["save_async", "load_async", "load_checkpointables_async", "delete_async"])
@pytest.mark.share(4)
def test_what_cannot_go_to_the_background_is_refused_and_nothing_waits_for_it(
    call: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THREADS, str(tmp_path / "checkpoint"), call],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


WITHOUT_DESCRIPTORS = """
import os, resource, sys
import waystation
from waystation.errors import WaystationError

for target in sys.argv[1:]:
    assert waystation.load(target) == {"a": 1}
used = []
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
while True:
    try:
        used.append(os.dup(1))
    except OSError:
        break
refusals = []
for target in sys.argv[1:]:
    try:
        waystation.load(target)
    except WaystationError as error:
        refusals.append(error)
for descriptor in used:
    os.close(descriptor)
for error in refusals:
    print(type(error).__name__, error)
for target in sys.argv[1:]:
    assert waystation.load(target) == {"a": 1}
"""


def test_a_checkpoint_that_cannot_be_opened_is_not_said_to_be_none(tmp_path: Path) -> None:
    """What the system refuses tells nothing about what is there."""
    targets = [tmp_path / "native", tmp_path / "orbax"]
    for target, use_ocdbt in zip(targets, (None, True), strict=True):
        context = waystation.Context()
        context.array.saving.use_ocdbt = use_ocdbt
        with context:
            waystation.save(target, {"a": 1})
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS, *map(str, targets)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["Unavailable"] * len(targets), lines
    assert all("Too many open files" in line for line in lines), lines
