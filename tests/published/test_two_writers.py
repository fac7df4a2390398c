"""Two processes that save to one place, or sum what the other saves: there is always one whole model."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support import lossy_mount
from tests.support.long import amount
from tests.support.warm_python import python

import waystation
from waystation import errors
from waystation.safetensors import load, save, verify_files, write_checksums
from waystation.safetensors.destination import Destination
from waystation.storage import names, signs_of_life, write_lock

BOUND_S = 120
SAVES = 30
FILES = {"one file": 1 << 30, "several files": 4000}

# Both writers save models of as many files, which have the same names, and of another number of files.
WRITER = """
import sys
import numpy as np
from waystation import safetensors

path, first, max_file_bytes, saves = sys.argv[1], *map(int, sys.argv[2:])
for number in range(saves):
    value = first + 2 * number
    arrays = {f"t{index}": np.full(1000, value, np.float32) for index in range(3 + number % 2)}
    safetensors.save(arrays, path, max_file_bytes=max_file_bytes, overwrite=True)
    print(value, flush=True)
"""


def save_model(path: Path, value: int = 0, max_file_bytes: int = 4000) -> None:
    arrays = {f"t{index}": np.full(1000, value, np.float32) for index in range(3)}
    save(arrays, path, max_file_bytes=max_file_bytes, overwrite=True)


def value_of(path: Path) -> int:
    """The value of every element of the model at a path; fails if it is made of two."""
    loaded = load(path, framework="numpy")
    values = {float(value) for array in loaded.values() for value in (array.min(), array.max())}
    assert len(values) == 1, f"two models were loaded as one: {values}"
    return int(values.pop())


@contextlib.contextmanager
def writers(
    path: Path, max_file_bytes: int, saves: int = SAVES, *, are_killed: bool = False
) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable if are_killed else python(), "-c", WRITER, str(path)]
    running = [
        subprocess.Popen(
            [*command, str(first), str(max_file_bytes), str(saves)], stdout=subprocess.PIPE, text=True
        )
        for first in (1, 2)
    ]
    try:
        yield running
    finally:
        for writer in running:
            writer.kill()
            writer.communicate(timeout=BOUND_S)


def read_while(running: list[subprocess.Popen[str]], path: Path) -> None:
    while any(writer.poll() is None for writer in running):
        with contextlib.suppress(errors.Conflict):  # replaced while it was read: this is not called damage
            value_of(path)


@pytest.mark.share(2)
@pytest.mark.parametrize("kind", FILES)
def test_two_savers_leave_one_whole_model(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model"
    save_model(path, 0, FILES[kind])
    with writers(path, FILES[kind]) as running:
        read_while(running, path)
        assert [writer.returncode for writer in running] == [0, 0]
    assert value_of(path) in (1 + 2 * (SAVES - 1), 2 + 2 * (SAVES - 1))
    assert not [name for name in os.listdir(path) if name.startswith(".")]


@pytest.mark.long
@pytest.mark.share(2)
@pytest.mark.parametrize("kind", FILES)
def test_two_savers_where_no_directory_was(tmp_path: Path, kind: str) -> None:
    """Whoever comes second replaces what the first has made."""
    for number in range(amount(5, 20)):
        path = tmp_path / f"model {number}"
        with writers(path, FILES[kind], saves=2) as running:
            assert [writer.wait(BOUND_S) for writer in running] == [0, 0]
        assert value_of(path) in (3, 4)


def test_the_second_who_may_not_overwrite_is_refused(tmp_path: Path) -> None:
    """Both looked before one of them had published, and their files have different names."""
    (tmp_path / "model").mkdir()
    outcomes: list[object] = []

    def save_files(count: int) -> None:
        arrays = {f"t{index}": np.full(1000, count, np.float32) for index in range(count)}
        try:
            outcomes.append(save(arrays, tmp_path / "model", max_file_bytes=4000))
        except errors.Conflict as error:
            outcomes.append(error)

    with write_lock.held(str(tmp_path / "model")):
        threads = [threading.Thread(target=save_files, args=[count]) for count in (2, 3)]
        for thread in threads:
            thread.start()
        stages = 0
        while stages < 2:
            stages = sum(names.EXPORT_INFIX in name for name in os.listdir(tmp_path / "model"))
    for thread in threads:
        thread.join(BOUND_S)
    assert sorted(type(outcome) for outcome in outcomes if isinstance(outcome, Exception)) == [
        errors.Conflict
    ]
    assert value_of(tmp_path / "model") in (2, 3)


@pytest.mark.long
@pytest.mark.share(2)
@pytest.mark.parametrize("kind", FILES)
def test_one_of_two_savers_is_killed(tmp_path: Path, kind: str) -> None:
    """The other one goes on at once, and the model is whole after every kill."""
    chance = random.Random(kind)
    path = tmp_path / "model"
    save_model(path, 0, FILES[kind])
    for _ in range(amount(2, 20)):
        with writers(path, FILES[kind], are_killed=True) as running:
            victim, other = chance.sample(running, 2)
            for saved in victim.stdout or ():
                if saved and chance.random() < 0.2:
                    break
            victim.send_signal(signal.SIGKILL)
            read_while([victim], path)
            assert other.wait(BOUND_S) == 0
            first_of_other, first_of_victim = 1 + running.index(other), 1 + running.index(victim)
        # The other may have ended before the victim was killed, whose last model is there then.
        assert value_of(path) in {
            first_of_other + 2 * (SAVES - 1),
            *range(first_of_victim, first_of_victim + 2 * SAVES, 2),
        }


def test_whoever_holds_the_lock_for_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_lock, "WAIT_S", 0.1)
    path = tmp_path / "model"
    save_model(path, 7)
    with held_by_another(path) as holder:
        with pytest.raises(errors.Conflict, match=f"process {holder.pid} has been replacing") as caught:
            save_model(path, 8)
        assert caught.value.context["path"] == str(path)
        with pytest.raises(errors.Conflict, match="has been replacing"):
            write_checksums(path)
        assert value_of(path) == 7
    save_model(path, 8)
    assert value_of(path) == 8


HOLDER = """
import sys, time
from waystation.storage import write_lock
with write_lock.held(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


FORKING = """
import os, sys, time
from waystation.storage import write_lock
with write_lock.held(sys.argv[1]):
    child = os.fork()
    if child == 0:
        time.sleep(600)
    print("held", child, sep="\\n", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def held_by_another(path: Path, program: str = HOLDER) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of a directory until it is killed at the end."""
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            yield holder
        finally:
            holder.kill()


def test_a_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    with write_lock.held(str(tmp_path)):
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(1)
    try:
        with write_lock.held(str(tmp_path)):
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_lock_ends_with_its_process_though_a_child_of_it_goes_on(tmp_path: Path) -> None:
    with held_by_another(tmp_path, FORKING) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        holder.kill()
        holder.wait(BOUND_S)
        try:
            with write_lock.held(str(tmp_path)):
                os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


# ---- file systems that other machines may share --------------------------------------------------


def test_two_savers_on_a_shared_file_system(tmp_path: Path) -> None:
    with lossy_mount.mounted(tmp_path / "disk", "nothing") as disk:
        assert signs_of_life.is_shared(str(disk))
        path = disk / "model"
        save_model(path)
        with writers(path, FILES["several files"], saves=10) as running:
            read_while(running, path)
            assert [writer.returncode for writer in running] == [0, 0]
        assert value_of(path) in (19, 20)
        assert not [name for name in os.listdir(path) if name.startswith(".")]


def test_the_lock_of_a_dead_process_runs_out_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_lock, "WAIT_S", 0.5)
    with lossy_mount.mounted(tmp_path / "disk", "nothing") as disk:
        save_model(disk / "model", 1)
        with held_by_another(disk / "model") as holder:
            pass
        with pytest.raises(errors.Conflict, match=f"process {holder.pid} on .* within 10 minutes"):
            save_model(disk / "model", 2)
        lock = disk / "model" / names.WRITER
        monkeypatch.setattr(signs_of_life, "has_run_out", lambda path: path.endswith(names.WRITER))
        save_model(disk / "model", 3)
        assert value_of(disk / "model") == 3
        assert not lock.exists()
        lock.write_text("")  # of a process that was killed before it wrote its record
        save_model(disk / "model", 4)
        (disk / "model" / names.WRITER_REMOVAL).write_text("")
        lock.write_text("")
        with pytest.raises(errors.Conflict, match=f"once you have removed '.*{names.WRITER_REMOVAL}'"):
            save_model(disk / "model", 5)
        assert value_of(disk / "model") == 4


def test_the_lock_of_the_next_owner_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that others took for dead does not remove what is no more its own."""
    monkeypatch.setattr(signs_of_life, "is_shared", lambda path: True)
    lock = tmp_path / names.WRITER
    with write_lock.held(str(tmp_path)):
        lock.write_text(json.dumps({"attempt": "that of another"}))
    assert lock.exists()


# ---- checksums -----------------------------------------------------------------------------------


@pytest.mark.share(2)
@pytest.mark.parametrize("kind", FILES)
def test_checksums_of_an_earlier_model_are_not_those_of_the_next(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model"
    for value in range(4):
        save_model(path, value, FILES[kind])
        assert value_of(path) == value
        write_checksums(path)
        assert value_of(path) == value
        assert verify_files(path) == []


@pytest.mark.share(2)
@pytest.mark.parametrize("kind", FILES)
def test_sums_beside_saves(tmp_path: Path, kind: str) -> None:
    """Whatever was summed when, no load takes a whole model for a damaged one."""
    path = tmp_path / "model"
    save_model(path, 0, FILES[kind])
    with writers(path, FILES[kind]) as running:
        while any(writer.poll() is None for writer in running):
            with contextlib.suppress(errors.Conflict, errors.NotFound):
                write_checksums(path)
            with contextlib.suppress(errors.Conflict):
                value_of(path)
    value_of(path)


def test_sums_of_two_processes_are_both_kept(tmp_path: Path) -> None:
    for name in ("a", "b"):
        waystation.safetensors.save({name: np.ones(9)}, tmp_path / f"{name}.safetensors")
    code = "import sys\nfrom waystation.safetensors import write_checksums\n"
    code += "for _ in range(20): write_checksums(sys.argv[1])"
    summing = [
        subprocess.Popen([python(), "-c", code, str(tmp_path / f"{name}.safetensors")]) for name in ("a", "b")
    ]
    assert [process.wait(BOUND_S) for process in summing] == [0, 0]
    for name in ("a", "b"):
        assert verify_files(tmp_path / f"{name}.safetensors") == []


@pytest.mark.parametrize("is_there", [True, False], ids=["over a model", "new"])
def test_a_save_removes_what_killed_ones_have_left(tmp_path: Path, is_there: bool) -> None:
    path = tmp_path / "models" / "model"
    path.parent.mkdir()
    if is_there:
        save({"a": np.zeros(3)}, path)
    parent = path if is_there else path.parent
    code = (
        "import os, signal, sys; from waystation.safetensors.destination import Destination\n"
        "with Destination(sys.argv[1], None, overwrite=True).staged():\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", code, str(path)]
    assert subprocess.run(command, check=False, timeout=300).returncode == -signal.SIGKILL
    assert list(parent.glob(".model.waystation-export-*"))
    with Destination(str(path), None, overwrite=True).staged() as running:
        save({"a": np.ones(3)}, path, overwrite=True)
        assert [str(left) for left in parent.glob(".model.waystation-export-*")] == [running]
    assert not list(parent.glob(".*"))
