"""A save that failed and was never asked for its result: the program says so at its end, and has failed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waystation
from waystation import errors
from waystation.layouts.native import engine_job
from waystation.storage.attempts import Attempt

PROGRAM = """
import atexit, resource, signal, sys
import numpy, waystation

atexit.register(print, "an exit function was called")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
saving = waystation.save_async("checkpoint", {"a": numpy.zeros(1 << 20)})
"""
FAILED = "failed, and the program has ended without asking for the result: could not write the file"


def run(tmp_path: Path, end: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", PROGRAM + end]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.share(6)
@pytest.mark.parametrize("end", ["", "del saving", "sys.exit(0)", "import jax", "import torch"])
def test_the_program_fails(tmp_path: Path, end: str) -> None:
    code, out, err = run(tmp_path, end)
    assert (code, out) == (1, "an exit function was called\n")
    assert err.startswith(f"saving '{tmp_path}/checkpoint' {FAILED}")
    assert "Call result() on what the call returned. The program ends with status 1." in err


def test_a_directory_that_vanishes_does_not_hide_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = tmp_path / "run"
    run_job = engine_job.run

    def run_without_directory(*arguments: Any, **options: Any) -> Any:
        shutil.rmtree(parent)
        parent.write_bytes(b"")
        return run_job(*arguments, **options)

    monkeypatch.setattr(engine_job, "run", run_without_directory)
    with pytest.raises(errors.NotDirectory, match=r"could not (create|examine) .*: Not a directory"):
        waystation.save_async(parent / "1", {"a": np.zeros(1 << 18)}).result()


def test_a_removal_that_fails_does_not_hide_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise errors.DiskFull("no room")

    def fail_to_remove(*_: object) -> None:
        raise errors.Unavailable("the disk is gone")

    monkeypatch.setattr(engine_job, "run", fail)
    monkeypatch.setattr(Attempt, "discard", fail_to_remove)
    with pytest.raises(errors.DiskFull, match="no room") as caught:
        waystation.save(tmp_path / "1", {"a": np.zeros(1 << 18)})
    (note,) = caught.value.__notes__
    assert note == "then what the save had made could not be removed: the disk is gone"


BY_DCP = """
import resource, signal
import torch, waystation.integrations.dcp as dcp

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
saving = dcp.async_save({"a": torch.zeros(1 << 20)}, checkpoint_id="checkpoint")
"""


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("", 1),
        ("try: saving.result()\nexcept OSError: pass", 0),
        ("assert isinstance(saving.exception(), OSError)", 0),
        ("saving.add_done_callback(lambda ended: ended.exception())", 0),
        ("import concurrent.futures\nconcurrent.futures.wait([saving])", 1),
    ],
)
def test_a_future_that_nobody_asks_is_told_like_a_response(tmp_path: Path, end: str, expected: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BY_DCP + end], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == expected
    assert done.stderr.count(f"saving '{tmp_path}/checkpoint' {FAILED}") == expected


def test_a_failure_that_was_seen_is_the_business_of_the_program(tmp_path: Path) -> None:
    end = "try: saving.result()\nexcept OSError: print('seen')"
    assert run(tmp_path, end) == (0, "seen\nan exit function was called\n", "")


def test_what_was_cancelled_has_not_failed(tmp_path: Path) -> None:
    program = "import numpy, waystation\n"
    program += "waystation.save_async('checkpoint', {'a': numpy.zeros(1 << 24)}).cancel()"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_error_of_the_program_keeps_its_traceback(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "raise ValueError('of the program')")
    assert code == 1
    assert "ValueError: of the program" in err
    assert FAILED in err


def test_what_a_function_of_the_program_raised_is_told_with_what_became_of_the_save(tmp_path: Path) -> None:
    program = """
import waystation
context = waystation.Context()
context.array.saving.on_statistics = lambda statistics: 1 / 0
with context:
    waystation.save_async("checkpoint", {"a": 1})
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "raised by array.saving.on_statistics; '" in done.stderr
    assert "checkpoint' is whole" in done.stderr


def test_an_operation_does_not_wait_for_its_own_end(tmp_path: Path) -> None:
    asked: list[bool] = []

    def ask(_: waystation.SaveStatistics) -> None:
        begun.wait(60)
        with pytest.raises(errors.InvalidInput, match="its own end"):
            saving.result()
        asked.append(True)

    begun = threading.Event()
    context = waystation.Context()
    context.array.saving.on_statistics = ask
    with context:
        saving = waystation.save_async(tmp_path / "checkpoint", {"a": 1})
    begun.set()
    saving.result()
    assert asked == [True]


HELD = """
import gc, os, resource, signal, sys, weakref
import numpy, waystation
from pathlib import Path

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = os.path.abspath("checkpoint")
waystation.save(path, {"a": numpy.arange(1 << 10)})
for file in Path(path).rglob("*.safetensors"):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
gc.disable()

def fail(call, *arguments, **options):
    try:
        response = call(path, *arguments, **options)
        if call is waystation.load_async:
            response.result()
    except OSError if call is waystation.save else waystation.errors.Corrupt:
        return
    raise AssertionError("it did not fail")

def held():
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [link for link in links if os.path.exists(link) and os.path.realpath(link).startswith(path)]

array = numpy.zeros(1 << 20)
fail(waystation.save, {"a": array}, overwrite=True)
array = weakref.ref(array)
fail(waystation.load)
fail(waystation.load_async)
gc.collect()
assert array() is None, "an array of a save that failed"
assert held() == [], held()
"""


def test_what_has_failed_holds_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELD], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


# What an exit function begins, before and after the one of Waystation, which waits for what runs.
BEGUN_AT_EXIT = """
import atexit, resource, signal
import numpy, waystation

def begin(name):
    {call}

atexit.register(begin, "late")
waystation.save_async("first", {{"a": 1}}).result()
atexit.register(begin, "early")
"""
SAVE = 'waystation.save_async(name, {"a": numpy.ones(1 << 20)})'
STEP = """import waystation.training
    checkpointer = waystation.training.Checkpointer(name)
    checkpointer.save_async(7, {"a": numpy.ones(1 << 20)})"""
FAIL = f"""signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    saving = {SAVE}"""


def run_to_exit(tmp_path: Path, program: str) -> tuple[int, str]:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stderr


@pytest.mark.parametrize("call", [SAVE, STEP], ids=["save", "step"])
def test_the_program_ends_after_the_saves_that_exit_functions_begin(tmp_path: Path, call: str) -> None:
    assert run_to_exit(tmp_path, BEGUN_AT_EXIT.format(call=call)) == (0, "")
    for name in ("early", "late"):
        saved = tmp_path / name
        loaded = waystation.load(saved if call == SAVE else next(saved.glob("*7")))
        assert loaded["a"].sum() == 1 << 20


def test_saves_that_exit_functions_begin_and_that_fail_are_told(tmp_path: Path) -> None:
    code, err = run_to_exit(tmp_path, BEGUN_AT_EXIT.format(call=FAIL))
    assert code == 1
    for name in ("early", "late"):
        assert err.count(f"saving '{tmp_path}/{name}' {FAILED}") == 1


def test_an_exit_function_that_asks_for_a_failure_has_seen_it(tmp_path: Path) -> None:
    asking = f"{FAIL}\n    assert isinstance(saving.exception(), OSError)"
    assert run_to_exit(tmp_path, BEGUN_AT_EXIT.format(call=asking))[0] == 0


def test_the_first_save_of_all_may_begin_in_an_exit_function(tmp_path: Path) -> None:
    program = f"import atexit, waystation, numpy\nname = 'a'\natexit.register(lambda: {SAVE})"
    assert run_to_exit(tmp_path, program) == (0, "")
    assert waystation.load(tmp_path / "a")["a"].sum() == 1 << 20


def test_the_first_save_of_all_may_begin_when_the_main_thread_has_ended(tmp_path: Path) -> None:
    program = f"""
import threading, numpy, waystation

def save():
    threading.main_thread().join()
    name = "a"
    {SAVE}

threading.Thread(target=save).start()
"""
    assert run_to_exit(tmp_path, program) == (0, "")
    assert waystation.load(tmp_path / "a")["a"].sum() == 1 << 20
