"""Checkpointers that copy their steps to another place in the background."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from tests.support import programs, s3
from tests.support.places import on_this_machine, part_of, steps_in
from tests.training.remote_programs import opened, save_and_upload_slowly, save_together, state

import waystation
from waystation.checkpoint.compare import compare
from waystation.errors import InvalidInput, NotFound, StepNotFoundError, Unavailable, Unsupported, WrongType
from waystation.storage import AnyPath, Location
from waystation.storage.leases import Leases
from waystation.training import Checkpointer, Remote, preservation_policies
from waystation.training import remote as remotes
from waystation.training.errors import DamagedCheckpointWarning, RemoteWarning


@pytest.fixture(params=["disk", "store"])
def there(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AnyPath:
    """Where the remote is."""
    if request.param == "disk":
        return tmp_path / "there"
    bucket = s3.bucket()
    for name, value in s3.settings(bucket.endpoint).items():
        monkeypatch.setenv(name.upper(), value)
    return Location(f"{bucket.location}/there")


def of_stores() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def tiers(checkpointer: Checkpointer) -> dict[int, tuple[str, ...]]:
    return {info.step: info.tiers for info in checkpointer.checkpoints}


def test_steps_are_uploaded_and_load_from_there_once_the_directory_is_lost(
    tmp_path: Path, there: AnyPath
) -> None:
    here = tmp_path / "here"
    with opened(here, Remote(there)) as checkpointer:
        for step in range(3):
            checkpointer.save(step, state(step), metrics={"score": step})
        checkpointer.wait()
        assert tiers(checkpointer) == dict.fromkeys(range(3), ("directory", "remote"))
        done = checkpointer.remote_statistics
        assert done is not None
        assert (done.uploads, done.failures, done.waiting) == (3, 0, ())
    for step in range(3):
        assert not compare(here / str(step), there / str(step)).differences
        assert waystation.verify(there / str(step)).damages == []
    shutil.rmtree(here)
    with opened(here, Remote(there)) as checkpointer:
        assert tiers(checkpointer) == dict.fromkeys(range(3), ("remote",))
        assert checkpointer.latest is not None
        assert (checkpointer.latest.step, checkpointer.latest.metrics) == (2, {"score": 2})
        assert checkpointer.load()["step"] == 2
        assert checkpointer.load(1)["step"] == 1
        assert checkpointer.load_async(0).result()["step"] == 0
        assert checkpointer.metadata(1).path == there / "1"
        with pytest.raises(StepNotFoundError):
            checkpointer.load(7)
        checkpointer.save(3, state(3))
    assert steps_in(there) == ["0", "1", "2", "3"]


def test_a_step_that_is_damaged_here_comes_from_there(tmp_path: Path, there: AnyPath) -> None:
    here = tmp_path / "here"
    with opened(here, Remote(there)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
    for step in (1, 2):
        file = next(part_of(here / str(step)).glob("*.safetensors"))
        file.write_bytes(bytes(file.stat().st_size))
    with opened(here, Remote(there)) as checkpointer:
        with pytest.warns(DamagedCheckpointWarning, match="there/2' was loaded"):
            assert checkpointer.load()["step"] == 2
        with pytest.warns(DamagedCheckpointWarning, match="there/1' was loaded"):
            assert checkpointer.load(1)["step"] == 1
        assert tiers(checkpointer) == {1: ("remote",), 2: ("remote",)}


def test_each_place_keeps_what_its_policy_says(tmp_path: Path, there: AnyPath) -> None:
    here = tmp_path / "here"
    remote = Remote(there, every=2, keep=preservation_policies.LatestN(2))
    with opened(here, remote, n=1) as checkpointer:
        for step in range(8):
            checkpointer.save(step, state(step))
            checkpointer.wait()
        assert tiers(checkpointer) == {4: ("remote",), 6: ("remote",), 7: ("directory",)}
    assert (steps_in(here), steps_in(there)) == (["7"], ["4", "6"])


def test_a_step_that_waits_for_its_upload_is_not_collected(
    tmp_path: Path, there: AnyPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, begun = threading.Event(), threading.Event()
    run = remotes.Copying.run

    def held_up(self: Any, *arguments: Any, **given: Any) -> Any:
        begun.set()
        assert go_on.wait(programs.HANG_S)
        return run(self, *arguments, **given)

    monkeypatch.setattr(remotes.Copying, "run", held_up)
    here = tmp_path / "here"
    with opened(here, Remote(there, every=4), n=1) as checkpointer:
        for step in range(4, 8):
            checkpointer.save(step, state(step))
        assert begun.wait(programs.HANG_S)
        assert steps_in(here) == ["4", "7"]
        statistics = checkpointer.remote_statistics
        assert statistics is not None
        assert statistics.waiting == (4,)
        go_on.set()
        checkpointer.wait()
        checkpointer.save(9, state(9))
        assert steps_in(here) == ["9"]
    assert steps_in(there) == ["4"]


def test_an_upload_that_was_killed_goes_on_after_a_restart(
    tmp_path: Path, there: AnyPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    process = programs.context.Process(
        target=save_and_upload_slowly, args=(of_stores(), here, there), daemon=True
    )
    process.start()
    until_s = time.monotonic() + programs.HANG_S
    while not list(on_this_machine(there).rglob("p00000-002.safetensors")) or not (here / "2").exists():
        assert process.is_alive()
        assert time.monotonic() < until_s
        time.sleep(0.01)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    with opened(here, Remote(there)) as checkpointer:
        checkpointer.wait()
        assert tiers(checkpointer) == dict.fromkeys((1, 2), ("directory", "remote"))
        done = checkpointer.remote_statistics
    assert done is not None
    nbytes = sum(file.stat().st_size for file in here.rglob("*.safetensors"))
    assert done.uploaded_bytes < nbytes
    for step in ("1", "2"):
        assert not compare(here / step, there / step).differences


def test_an_overwritten_step_is_uploaded_again(tmp_path: Path, there: AnyPath) -> None:
    with opened(tmp_path / "here", Remote(there)) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.wait()
        checkpointer.save(1, state(5), overwrite=True, force=True)
    assert waystation.load(there / "1")["step"] == 5


def test_a_deleted_step_is_deleted_in_both_places(tmp_path: Path, there: AnyPath) -> None:
    here = tmp_path / "here"
    with opened(here, Remote(there)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
        checkpointer.wait()
        assert checkpointer.delete(1)
        assert tiers(checkpointer) == {2: ("directory", "remote")}
        shutil.rmtree(here / "2")
        checkpointer.reload()
        assert checkpointer.delete(2) in (True, False)
        assert tiers(checkpointer) == {}
    assert steps_in(there) == []


def test_failures_of_the_remote_are_warnings_and_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = [True]
    run = remotes.Copying.run

    def fail(self: Any, *arguments: Any, **given: Any) -> Any:
        if failing[0]:
            raise Unavailable("nobody answers")
        return run(self, *arguments, **given)

    monkeypatch.setattr(remotes.Copying, "run", fail)
    here, there = tmp_path / "here", tmp_path / "there"
    with opened(here, Remote(there)) as checkpointer:
        checkpointer.save(1, state(1))
        with pytest.raises(Unavailable, match="nobody answers"):
            checkpointer.wait()
        before = checkpointer.remote_statistics.failures  # type: ignore[union-attr]
        checkpointer.save(2, state(2))
        until_s = time.monotonic() + programs.HANG_S
        while checkpointer.remote_statistics.failures == before:  # type: ignore[union-attr]
            assert time.monotonic() < until_s
            time.sleep(0.01)
        with pytest.warns(RemoteWarning, match="nobody answers"):
            checkpointer.save(3, state(3))
        failing[0] = False
        checkpointer.save(4, state(4))
        checkpointer.wait()
        assert tiers(checkpointer) == dict.fromkeys((1, 2, 3, 4), ("directory", "remote"))
        statistics = checkpointer.remote_statistics
        assert statistics is not None
        assert statistics.last_failure == "nobody answers"


def test_a_remote_that_cannot_be_listed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = s3.bucket()
    for name, value in s3.settings(bucket.endpoint).items():
        monkeypatch.setenv(name.upper(), value)
    missing = Location("s3://waystation-no-such-bucket/run")
    with pytest.warns(RemoteWarning, match="is not known"):
        checkpointer = opened(tmp_path / "here", Remote(missing))
    checkpointer.save(1, state(1))
    with pytest.raises(NotFound, match="bucket"):
        checkpointer.close()
    assert steps_in(tmp_path / "here") == ["1"]
    assert not Leases(tmp_path / "here").is_held("1")


def test_what_is_in_the_place_of_a_step_there_is_told_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "there" / "2").mkdir(parents=True)
    (tmp_path / "there" / "2" / "file").write_text("somebody's")
    with opened(tmp_path / "here", Remote(tmp_path / "there")) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
        with pytest.warns(RemoteWarning, match="no save replaces it"):
            checkpointer.wait()
        assert tiers(checkpointer) == {1: ("directory", "remote"), 2: ("directory",)}
    assert os.listdir(tmp_path / "there" / "2") == ["file"]


def test_several_processes_upload_and_load_as_one(tmp_path: Path, there: AnyPath) -> None:
    with programs.running(
        save_together, of_stores(), tmp_path / "here", there, count=2, framework="torch", directory=tmp_path
    ) as running:
        assert running.values() == [[2, [("directory", "remote")] * 2]] * 2


@pytest.mark.parametrize("has_remote", [False, True])
def test_a_checkpointer_is_freed_with_its_last_reference(tmp_path: Path, has_remote: bool) -> None:
    """What a memory tier has mapped goes with it, and nothing waits for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        checkpointer = Checkpointer(
            tmp_path / "run", remote=Remote(tmp_path / "there") if has_remote else None
        )
        with checkpointer:
            checkpointer.save(1, state(1))
        seen = weakref.ref(checkpointer)
        del checkpointer
        assert seen() is None
    finally:
        gc.enable()


def test_what_can_be_no_remote_is_refused(tmp_path: Path) -> None:
    for given, error in (
        ({"every": 0}, InvalidInput),
        ({"every": "all"}, WrongType),
        ({"keep": 3}, WrongType),
        ({"bytes_per_second": 0}, InvalidInput),
    ):
        with pytest.raises(error):
            Remote(tmp_path, **given)  # type: ignore[arg-type]
    with pytest.raises(WrongType, match="Remote"):
        Checkpointer(tmp_path, remote="s3://bucket/run")  # type: ignore[arg-type]
    context = waystation.Context()
    context.multiprocessing.primary_host = None
    with pytest.raises(Unsupported, match="remote"):
        Checkpointer(tmp_path / "here", context=context, remote=Remote(tmp_path / "there"))
