"""Checkpointers that copy their steps to another place in the background."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support import programs, s3
from tests.support.long import amount
from tests.support.places import on_this_machine, part_of, steps_in
from tests.training.remote_programs import (
    opened,
    save_again_and_hang,
    save_again_and_upload,
    save_again_together,
    save_and_hang,
    save_and_upload_slowly,
    save_and_wait,
    save_together,
    state,
)

import waystation
from waystation.checkpoint.compare import compare
from waystation.errors import (
    Conflict,
    Corrupt,
    InvalidInput,
    NotFound,
    StepNotFoundError,
    Unavailable,
    Unsupported,
    WrongType,
)
from waystation.storage import AnyPath, Location
from waystation.storage.leases import Leases
from waystation.training import Checkpointer, Remote, mirror, preservation_policies
from waystation.training import remote as remotes
from waystation.training.errors import DamagedCheckpointWarning, RemoteWarning
from waystation.training.place import Place
from waystation.training.step_names import standard_name_format
from waystation.training.upload_record import UploadRecord


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


def hold_uploads(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Holds the uploads of this process; returns what is set once one has begun, and what lets them go on."""
    begun, go_on = threading.Event(), threading.Event()
    run = remotes.Copying.run

    def held_up(self: Any, *arguments: Any, **given: Any) -> Any:
        begun.set()
        assert go_on.wait(programs.HANG_S)
        return run(self, *arguments, **given)

    monkeypatch.setattr(remotes.Copying, "run", held_up)
    return begun, go_on


def test_a_step_that_waits_for_its_upload_is_not_collected(
    tmp_path: Path, there: AnyPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = hold_uploads(monkeypatch)
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


def kill_during_upload(here: Path, there: AnyPath) -> None:
    """Saves steps 1 and 2, and is killed while it uploads them."""
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


@pytest.mark.share(2)
def test_a_run_whose_first_upload_was_killed_has_the_remote(tmp_path: Path, there: AnyPath) -> None:
    """From before anything is there; and whoever goes on for it, on a new disk, has it too."""
    kill_during_upload(tmp_path / "here", there)
    save_in(tmp_path / "other", {2: 20})
    with pytest.raises(Conflict, match="another sequence"):
        opened(tmp_path / "other", Remote(there))
    shutil.rmtree(tmp_path / "here")
    save_in(tmp_path / "new", {1: 7, 2: 7}, Remote(there))
    assert values_in(there) == {"1": 7, "2": 7}


@pytest.mark.share(2)
def test_an_upload_that_was_killed_goes_on_after_a_restart(tmp_path: Path, there: AnyPath) -> None:
    here = tmp_path / "here"
    kill_during_upload(here, there)
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


def save_in(directory: AnyPath, steps: Mapping[int, int], remote: Remote | None = None, **given: Any) -> None:
    """Saves steps with these values; uploads them, if there is a remote."""
    with opened(directory, remote, **given) as checkpointer:
        for step, value in steps.items():
            checkpointer.save(step, state(value), force=True)


def values_in(directory: AnyPath) -> dict[str, int]:
    return {name: waystation.load(directory / name)["step"] for name in steps_in(directory)}


def committed_in(directory: AnyPath) -> dict[str, int]:
    """The same, without what killed programs have left in the place of a step."""
    found = [name for name in steps_in(directory) if waystation.is_checkpoint(directory / name)]
    return {name: waystation.load(directory / name)["step"] for name in found}


@pytest.mark.parametrize(
    "remote", ["run", "run/", "link", "run/inside", "run/deep/inside", ".", "link/inside"]
)
def test_a_remote_that_is_the_directory_or_has_to_do_with_it_is_refused(tmp_path: Path, remote: str) -> None:
    (tmp_path / "link").symlink_to("run")
    with pytest.raises(InvalidInput, match=r"nothing to do with it"):
        opened(tmp_path / "run", Remote(f"{tmp_path}/{remote}"))
    save_in(tmp_path / "run", {1: 1, 2: 2})
    keep = preservation_policies.LatestN(1)
    with pytest.raises(InvalidInput, match=r"nothing to do with it"):
        opened(tmp_path / "run", Remote(f"{tmp_path}/{remote}", keep=keep))
    assert steps_in(tmp_path / "run") == ["1", "2"]


def test_another_sequence_is_refused_and_replaces_nothing(tmp_path: Path, there: AnyPath) -> None:
    save_in(tmp_path / "first", {1: 1, 2: 2, 3: 3}, Remote(there))
    save_in(tmp_path / "second", {2: 20, 3: 30})
    with pytest.raises(Conflict) as failure:
        opened(tmp_path / "second", Remote(there, keep=preservation_policies.LatestN(1)))
    for named in ("first", "second", os.fspath(there), "a remote of its own"):
        assert named in failure.value.message
    assert values_in(there) == {"1": 1, "2": 2, "3": 3}
    save_in(tmp_path / "first", {4: 4}, Remote(there))
    assert values_in(there) == {"1": 1, "2": 2, "3": 3, "4": 4}


def test_what_is_kept_there_goes_by_the_order_of_saves_not_of_uploads(tmp_path: Path, there: AnyPath) -> None:
    save_in(tmp_path / "here", {1: 1, 2: 2, 3: 3})
    for step in (4, 5):
        with opened(tmp_path / "here", Remote(there, keep=preservation_policies.LatestN(2))) as checkpointer:
            checkpointer.wait()
            assert steps_in(there) == [str(step - 2), str(step - 1)]
            checkpointer.save(step, state(step))
    assert steps_in(there) == ["4", "5"]


def test_of_two_sequences_that_begin_at_once_one_gets_the_remote(tmp_path: Path, there: AnyPath) -> None:
    with opened(tmp_path / "first", Remote(there)) as first:
        second = opened(tmp_path / "second", Remote(there))
        first.save(1, state(1))
        first.wait()
        second.save(1, state(10))
        with pytest.raises(Conflict, match="another sequence"):
            second.wait()
        second.save(2, state(20))
        with pytest.raises(Conflict, match="another sequence"):
            second.close()
    assert values_in(there) == {"1": 1}


@pytest.mark.parametrize("how", ["lost", "copied", "restored", "mirrored back"])
@pytest.mark.share(3)
def test_a_directory_that_was_lost_or_restored_goes_on_with_its_remote(
    tmp_path: Path, there: AnyPath, how: str
) -> None:
    here, new = tmp_path / "here", tmp_path / "new"
    save_in(here, {1: 1, 2: 2}, Remote(there))
    save_in(here, {3: 3})
    match how:
        case "copied":
            shutil.copytree(here, new)
        case "restored":
            for step in ("1", "2"):
                waystation.copy(there / step, new / step)
        case "mirrored back":
            mirror(here, tmp_path / "backup")
            waystation.delete(tmp_path / "backup" / "1")
            waystation.delete(tmp_path / "backup" / "2")
            mirror(tmp_path / "backup", new)
    shutil.rmtree(here)
    if how == "lost":  # on another machine the path is the same, as a rule
        new = here
    for step in (4, 5):  # opened twice: what was adopted stays
        save_in(new, {step: step}, Remote(there, keep=preservation_policies.LatestN(2)))
    assert values_in(there) == {"4": 4, "5": 5}


def test_an_empty_directory_goes_on_with_what_is_there(tmp_path: Path, there: AnyPath) -> None:
    """With what was mirrored there, for instance."""
    save_in(there, {1: 1, 2: 2})
    with opened(tmp_path / "here", Remote(there, keep=preservation_policies.LatestN(1))) as checkpointer:
        assert checkpointer.load()["step"] == 2
        checkpointer.save(3, state(3))
    save_in(tmp_path / "here", {4: 4}, Remote(there, keep=preservation_policies.LatestN(1)))
    assert values_in(there) == {"1": 1, "2": 2, "4": 4}


def test_what_the_sequence_has_not_uploaded_is_neither_replaced_nor_collected(
    tmp_path: Path, there: AnyPath
) -> None:
    save_in(there, {2: 20, 5: 50})
    remote = Remote(there, keep=preservation_policies.LatestN(1))
    save_in(tmp_path / "here", {1: 1})
    with opened(tmp_path / "here", remote) as checkpointer:
        for step in (3, 4):
            checkpointer.save(step, state(step), force=True)
            checkpointer.wait()
        checkpointer.save(2, state(2), force=True)
        with pytest.warns(RemoteWarning, match="step 2 is not uploaded .* left alone"):
            checkpointer.wait()
        assert tiers(checkpointer) == {**dict.fromkeys((1, 2, 3), ("directory",)), 4: ("directory", "remote")}
        assert checkpointer.load()["step"] == 4
    assert values_in(there) == {"2": 20, "4": 4, "5": 50}


def test_a_step_that_is_overwritten_during_its_upload_is_uploaded_again(
    tmp_path: Path, there: AnyPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, begun = threading.Event(), threading.Event()
    run = remotes.Copying.run

    def held_up(self: Any, *arguments: Any, **given: Any) -> Any:
        done = run(self, *arguments, **given)
        begun.set()
        assert go_on.wait(programs.HANG_S)
        return done

    monkeypatch.setattr(remotes.Copying, "run", held_up)
    with opened(tmp_path / "here", Remote(there)) as checkpointer:
        checkpointer.save(1, state(1))
        assert begun.wait(programs.HANG_S)
        checkpointer.save(1, state(5), overwrite=True, force=True)
        go_on.set()
        checkpointer.wait()
        assert values_in(there) == {"1": 5}


@pytest.mark.share(2)
def test_a_step_that_is_deleted_during_its_upload_is_not_there(tmp_path: Path, there: AnyPath) -> None:
    here = tmp_path / "here"
    with opened(here, Remote(there, bytes_per_second=1 << 20)) as checkpointer:
        checkpointer.save(1, state(1))
        until_s = time.monotonic() + programs.HANG_S
        while not list(on_this_machine(there).rglob("*.safetensors")):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert checkpointer.delete(1)
        statistics = checkpointer.remote_statistics
        assert statistics is not None
        assert statistics.waiting == ()
        assert list(on_this_machine(there).rglob("*.safetensors")) == []
        assert tiers(checkpointer) == {}
    with opened(here, Remote(there)) as checkpointer:
        assert checkpointer.latest is None


@pytest.mark.parametrize("moment", range(4))
def test_a_step_is_deleted_in_both_places_at_any_moment_of_its_upload(
    tmp_path: Path, there: AnyPath, moment: int
) -> None:
    with opened(tmp_path / "here", Remote(there)) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.save(2, state(2))
        time.sleep(0.02 * moment)
        assert checkpointer.delete(2)
        checkpointer.wait()
        assert tiers(checkpointer) == {1: ("directory", "remote")}
    assert steps_in(there) == ["1"]


def of_nobody(deadline_s: float = 1.0) -> waystation.Context:
    """Options by which no store answers."""
    context = waystation.Context()
    context.storage.deadline_s = deadline_s
    context.storage.settings = {"aws_endpoint": "http://127.0.0.1:9", "aws_allow_http": True}
    return context


def test_a_step_is_not_deleted_while_nobody_can_look_into_the_remote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = s3.bucket()
    for name, value in s3.settings(bucket.endpoint).items():
        monkeypatch.setenv(name.upper(), value)
    here, there = tmp_path / "here", Location(f"{bucket.location}/there")
    save_in(here, {1: 1, 2: 2}, Remote(there))
    with pytest.warns(RemoteWarning, match="is not known"):
        checkpointer = Checkpointer(here, remote=Remote(there), context=of_nobody())
    with pytest.raises(Unavailable):
        checkpointer.delete(2)
    with pytest.raises(Unavailable):
        checkpointer.close()
    with opened(here, Remote(there)) as checkpointer:
        assert tiers(checkpointer) == dict.fromkeys((1, 2), ("directory", "remote"))


def test_a_remote_that_does_not_answer_holds_nobody_up_who_can_go_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.settings("http://unused").items():
        monkeypatch.setenv(name.upper(), value)
    monkeypatch.setattr(remotes, "_ANSWERS_WITHIN_S", 0.3)
    save_in(tmp_path / "here", {1: 1})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        context = of_nobody(deadline_s=4.0)
        context.storage.settings = {
            "aws_endpoint": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "aws_allow_http": True,
        }
        begun_s = time.monotonic()
        with pytest.warns(RemoteWarning, match="has not answered within"):
            checkpointer = Checkpointer(
                tmp_path / "here", remote=Remote("s3://bucket/there"), context=context
            )
        assert time.monotonic() - begun_s < 3
        assert checkpointer.load()["step"] == 1
    with pytest.raises(Unavailable):
        checkpointer.close()


def test_a_failure_that_was_raised_is_not_raised_again_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, *arguments: Any, **given: Any) -> Any:
        raise Unavailable("nobody answers")

    monkeypatch.setattr(remotes.Copying, "run", fail)
    with opened(tmp_path / "here", Remote(tmp_path / "there")) as checkpointer:
        checkpointer.save(1, state(1))
        for _ in range(2):  # each tries again
            with pytest.raises(Unavailable, match="nobody answers"):
                checkpointer.wait()
    checkpointer.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RemoteWarning)  # where the upload fails before it is opened
        checkpointer = opened(tmp_path / "here", Remote(tmp_path / "there"))
    with pytest.raises(Unavailable):
        checkpointer.wait()
    checkpointer.save(2, state(2))  # of which nothing was raised
    with pytest.raises(Unavailable):
        checkpointer.close()


@pytest.mark.parametrize("use_ocdbt", [True, False])
@pytest.mark.share(2)
def test_steps_in_layouts_of_orbax_are_uploaded(tmp_path: Path, there: AnyPath, use_ocdbt: bool) -> None:
    here = tmp_path / "here"
    remote = Remote(there, keep=preservation_policies.LatestN(2))
    context = waystation.Context()
    context.array.saving.use_ocdbt = use_ocdbt
    with opened(here, remote, context=context) as checkpointer:
        for step in range(3):
            checkpointer.save(step, state(step), metrics={"score": step})
            checkpointer.wait()
        assert tiers(checkpointer) == {0: ("directory",)} | dict.fromkeys((1, 2), ("directory", "remote"))
        checkpointer.save(2, state(7), overwrite=True)
        checkpointer.wait()
        assert not compare(here / "2", there / "2").differences
    assert waystation.verify(there / "2").damages == []
    with opened(here, remote) as checkpointer:  # the native layout takes the place of a step, and follows it
        done = checkpointer.remote_statistics
        assert done is not None
        assert (done.uploads, done.failures) == (0, 0)
        checkpointer.save(2, state(8), overwrite=True)
        checkpointer.save(3, state(3))
        checkpointer.wait()
        assert checkpointer.delete(2)
    assert steps_in(there) == ["3"]
    with opened(here, remote, context=context) as checkpointer:
        checkpointer.save(3, state(9), overwrite=True)
    shutil.rmtree(here)
    with opened(here, remote) as checkpointer:
        assert checkpointer.latest is not None
        assert checkpointer.latest.tiers == ("remote",)
        assert checkpointer.load()["step"] == 9


def test_a_step_of_orbax_that_says_no_time_is_passed_over_with_one_warning(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    context = waystation.Context()
    context.array.saving.use_ocdbt = True
    for step in (1, 2):
        with context:
            waystation.save(here / str(step), state(step))
        (here / str(step) / "_CHECKPOINT_METADATA").write_text("{}")
        (here / str(step) / ".waystation-checksums").unlink()
    with (
        warnings.catch_warnings(record=True, action="always") as caught,  # opening may tell of it already
        opened(here, Remote(there)) as checkpointer,
    ):
        checkpointer.save(3, state(3))
        checkpointer.wait()
        checkpointer.save(4, state(4))
    told = [str(warning.message) for warning in caught if warning.category is RemoteWarning]
    assert ["when it was committed" in message for message in told] == [True]
    assert steps_in(there) == ["3", "4"]


def test_processes_know_the_same_after_a_wait(tmp_path: Path, there: AnyPath) -> None:
    with programs.running(
        save_and_wait, of_stores(), tmp_path / "here", there, count=2, framework="torch", directory=tmp_path
    ) as running:
        first, second = running.values()
    assert first == second == [[1, ["directory", "remote"]], [2, ["directory", "remote"]]]


def test_no_process_lists_an_earlier_version_of_a_step_that_was_saved_again(
    tmp_path: Path, there: AnyPath
) -> None:
    with programs.running(
        save_again_together,
        of_stores(),
        tmp_path / "here",
        there,
        count=2,
        framework="torch",
        directory=tmp_path,
    ) as running:
        first, second = running.values()
    assert first == second
    assert first == [[2, 3], [2, 3], [2, 3, 4]]


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


def test_two_programs_that_began_empty_replace_nothing_of_each_other(tmp_path: Path, there: AnyPath) -> None:
    first = opened(tmp_path / "first", Remote(there))
    first.save(1, state(1))
    first.wait()
    with pytest.warns(RemoteWarning, match=r"second' has no .* from '.*first' on .* the newest of step 1"):
        second = opened(tmp_path / "second", Remote(there))  # goes on with it, as if a disk was lost
    assert tiers(second) == {1: ("remote",)}
    second.save(2, state(20))
    second.wait()
    first.save(2, state(2))
    with pytest.warns(RemoteWarning, match="uploaded from another directory of this sequence"):
        first.wait()
    first.save(3, state(3))
    with pytest.raises(Conflict, match=r"second'.* has taken over the remote .* from '.*first'"):
        first.wait()
    second.save(3, state(30))
    second.wait()
    second.close()
    with pytest.warns(RemoteWarning, match="step 3 is not uploaded"):
        first.close()
    assert (saved_in(there, 2), saved_in(there, 3)) == (20, 30)

    # Started again, the first one takes the remote over, and leaves alone what differs.
    with pytest.warns(RemoteWarning, match="left alone"):
        with_fourth(tmp_path / "first", there)
    assert (saved_in(there, 2), saved_in(there, 3), saved_in(there, 4)) == (20, 30, 4)


def test_what_another_directory_has_uploaded_is_replaced_where_that_is_asked_for(
    tmp_path: Path, there: AnyPath
) -> None:
    with opened(tmp_path / "first", Remote(there)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
    with (
        pytest.warns(RemoteWarning, match="goes on with"),
        pytest.warns(RemoteWarning, match="step 1 is not"),
    ):
        with_other_versions(tmp_path / "second", there)
    assert (saved_in(there, 1), saved_in(there, 2)) == (1, 20)


def test_what_was_saved_again_is_never_loaded_in_an_earlier_version(tmp_path: Path, there: AnyPath) -> None:
    """By a run that went back to step 1 on a new disk, whose versions of 2 and 3 do not come there."""
    warnings.simplefilter("ignore", RemoteWarning)  # that they do not
    here = tmp_path / "here"
    save_in(here, {1: 1, 2: 2, 3: 3}, Remote(there))
    shutil.rmtree(here)
    with opened(here, Remote(there)) as checkpointer:
        assert checkpointer.load(1)["step"] == 1
        for step in (2, 3):
            checkpointer.save(step, state(10 * step))
        checkpointer.wait()
        there_or_here = {1: ("remote",), 2: ("directory",), 3: ("directory",)}
        assert tiers(checkpointer) == there_or_here
    for file in part_of(here / "3").glob("*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    with opened(here, Remote(there)) as checkpointer:
        assert tiers(checkpointer) == there_or_here
        with pytest.raises(Corrupt):
            checkpointer.load(3)
        with pytest.warns(DamagedCheckpointWarning, match="an older one was loaded"):
            assert checkpointer.load()["step"] == 20
        checkpointer.save(4, state(4))
        checkpointer.wait()
        waystation.delete(here / "2")  # as another program may
        checkpointer.reload()
        with pytest.raises(StepNotFoundError):
            checkpointer.load(2)
        assert checkpointer.load(1)["step"] == 1
    assert values_in(there) == {"1": 1, "2": 2, "3": 3, "4": 4}


def test_an_earlier_version_goes_where_the_newer_one_was_collected_before_its_upload(
    tmp_path: Path, there: AnyPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    save_in(here, {1: 1, 2: 2, 3: 3}, Remote(there))
    begun, go_on = hold_uploads(monkeypatch)
    with opened(here, Remote(there), n=1) as checkpointer:
        for step in (2, 3):
            checkpointer.save(step, state(10 * step), overwrite=True, force=True)
            assert begun.wait(programs.HANG_S)
        checkpointer.save(4, state(4))
        assert tiers(checkpointer) == {1: ("remote",), 4: ("directory",)}
        with pytest.raises(StepNotFoundError):
            checkpointer.load(3)
        go_on.set()
        checkpointer.wait()
    assert values_in(there) == {"1": 1, "4": 4}


def test_an_earlier_version_stays_where_the_newer_one_was_lost_and_not_collected(
    tmp_path: Path, there: AnyPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `rm -rf here/*` before an upload. What the remote has is all there is then."""
    here, run = tmp_path / "here", remotes.Copying.run
    save_in(here, {1: 1, 2: 2}, Remote(there))

    def after_the_loss(*arguments: Any, **given: Any) -> Any:
        for name in steps_in(here):
            shutil.rmtree(here / name)
        return run(*arguments, **given)

    monkeypatch.setattr(remotes.Copying, "run", after_the_loss)
    with opened(here, Remote(there)) as checkpointer:
        checkpointer.save(2, state(20), overwrite=True, force=True)
        checkpointer.wait()
    assert values_in(there) == {"1": 1, "2": 2}
    with opened(here, Remote(there)) as checkpointer:
        assert checkpointer.load()["step"] == 2


def test_a_killed_program_leaves_no_earlier_version_that_is_loaded(tmp_path: Path, there: AnyPath) -> None:
    """Steps were saved again and collected, and the program was killed before it uploaded anything."""
    here, hangs = tmp_path / "here", programs.context.Event()
    save_in(here, {1: 1, 2: 2, 3: 3}, Remote(there))
    arguments = (of_stores(), here, there, [2, 3, 4], hangs)
    process = programs.context.Process(target=save_again_and_hang, args=arguments, daemon=True)
    process.start()
    assert hangs.wait(programs.HANG_S)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(programs.HANG_S)
    assert (steps_in(here), values_in(there)) == (["4"], {"1": 1, "2": 2, "3": 3})
    with opened(here, Remote(there), n=1) as checkpointer:
        assert [info.step for info in checkpointer.checkpoints] == [1, 4]
        with pytest.raises(StepNotFoundError):
            checkpointer.load(3)
        checkpointer.wait()
        assert values_in(there) == {"1": 1, "4": 40}
        for value in (2, 20):  # of later ones nothing is written down any more
            checkpointer.save(2, state(value), overwrite=True, force=True)
            checkpointer.wait()
    shutil.rmtree(here / "4", ignore_errors=True)
    with opened(here, Remote(there)) as checkpointer:
        assert checkpointer.load(2)["step"] == 20


@pytest.mark.long
def test_a_program_that_is_killed_at_any_request_serves_nothing_old(tmp_path: Path) -> None:
    for number in range(1, 1000, amount(50, 1)):
        bucket, here = s3.bucket(), tmp_path / str(number)
        there = Location(f"{bucket.location}/there")
        with bucket.context():
            save_in(here, {1: 1, 2: 2, 3: 3}, Remote(there))
        was_killed = s3.killed_at(bucket, number, save_again_and_upload, here, there)
        if not was_killed:
            assert number > 17
            break
        are_saved = steps_in(here) == ["4"]  # all of them: else it was killed as it was opened
        with bucket.context():
            assert committed_in(there).items() <= {"1": 1, "2": 2, "3": 3, "4": 40}.items()
            with opened(here, Remote(there), n=1) as checkpointer:
                known = {info.step: checkpointer.load(info.step)["step"] for info in checkpointer.checkpoints}
            if are_saved:
                assert (known, committed_in(there)) == ({1: 1, 4: 40}, {"1": 1, "4": 40})


def test_an_earlier_version_that_is_read_goes_once_it_is_not(tmp_path: Path, there: AnyPath) -> None:
    here = tmp_path / "here"
    save_in(here, {1: 1, 2: 2}, Remote(there))
    with opened(here, Remote(there, every=3)) as checkpointer:
        reader = Place(os.fspath(there), standard_name_format(), waystation.Context())
        with reader.leases.hold("2") as may_read:
            assert may_read
            checkpointer.save(2, state(20), overwrite=True, force=True)
            checkpointer.save(3, state(3))
            checkpointer.wait()
            assert values_in(there) == {"1": 1, "2": 2, "3": 3}
        checkpointer.save(6, state(6))
    assert values_in(there) == {"1": 1, "3": 3, "6": 6}


def test_what_may_not_be_removed_there_keeps_nothing_from_being_uploaded(tmp_path: Path) -> None:
    bucket, here, may_remove = s3.bucket(), tmp_path / "here", False

    def forbid(number: int) -> str:
        method, path = between.requests[number - 1]
        is_removal = method == "DELETE" or (method == "POST" and "delete" in path)
        return s3.FORBID if is_removal and not may_remove else s3.PASS

    there = Location(f"{bucket.location}/there")
    with s3.proxy(bucket.endpoint, forbid) as between, s3.context(between.endpoint):
        save_in(here, {1: 1, 2: 2}, Remote(there))
        with opened(here, Remote(there, every=3)) as checkpointer:
            checkpointer.save(2, state(20), overwrite=True, force=True)
            for step in (3, 6):
                checkpointer.save(step, state(step))
                checkpointer.wait()
            assert tiers(checkpointer)[6] == ("directory", "remote")
            assert values_in(there) == {"1": 1, "2": 2, "3": 3, "6": 6}
            may_remove = True
            checkpointer.save(9, state(9))
            checkpointer.wait()
            assert values_in(there) == {"1": 1, "3": 3, "6": 6, "9": 9}


def test_what_another_program_uploads_after_a_removal_stays_in_the_record(
    tmp_path: Path, there: AnyPath
) -> None:
    (tmp_path / "here").mkdir()
    first, second = (UploadRecord(os.fspath(tmp_path / "here"), os.fspath(there)) for _ in range(2))
    first.begin("1", 10, [])
    first.forget(["1"])
    second.begin("1", 20, [])
    first.begin("2", 30, [])
    second.look([])
    assert [second.has("1", 10), second.has("1", 20), second.has("2", 30)] == [False, True, True]


def test_copies_with_one_id_replace_nothing_of_each_other(tmp_path: Path, there: AnyPath) -> None:
    save_in(tmp_path / "first", {1: 1}, Remote(there))
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    first, second = opened(tmp_path / "first", Remote(there)), opened(tmp_path / "second", Remote(there))
    first.save(2, state(2))
    first.wait()
    second.save(2, state(20))
    with pytest.warns(RemoteWarning, match="uploaded from another directory of this sequence"):
        second.wait()
    second.save(3, state(30))
    second.close()
    first.save(3, state(3))
    with pytest.warns(RemoteWarning, match="step 3 is not uploaded"):
        first.wait()
    first.save(4, state(4))
    with pytest.raises(Conflict, match=r"second'.* has taken over the remote .* from '.*first'"):
        first.close()
    assert values_in(there) == {"1": 1, "2": 2, "3": 30}


def test_a_copy_of_a_program_that_runs_replaces_nothing_of_it(tmp_path: Path, there: AnyPath) -> None:
    first = opened(tmp_path / "first", Remote(there))
    first.save(1, state(1))
    first.wait()
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    save_in(tmp_path / "second", {2: 20}, Remote(there))
    first.save(2, state(2))
    with pytest.warns(RemoteWarning, match="another checkpoint"):
        first.wait()
    first.save(3, state(3))
    with pytest.raises(Conflict, match="has taken over"):
        first.close()
    assert values_in(there) == {"1": 1, "2": 20}


def test_an_older_state_of_a_directory_replaces_nothing_that_came_after_it(
    tmp_path: Path, there: AnyPath
) -> None:
    here = tmp_path / "here"
    save_in(here, {1: 1}, Remote(there))
    shutil.copytree(here, tmp_path / "backup")
    save_in(here, {2: 2}, Remote(there))
    shutil.rmtree(here)
    (tmp_path / "backup").rename(here)
    with opened(here, Remote(there)) as checkpointer:
        checkpointer.save(2, state(20), force=True)
        with pytest.warns(RemoteWarning, match="step 2 is not uploaded"):
            checkpointer.wait()
        checkpointer.save(3, state(30))
        checkpointer.wait()
        assert values_in(there) == {"1": 1, "2": 2, "3": 30}
        checkpointer.save(2, state(21), force=True, overwrite=True)
    assert values_in(there) == {"1": 1, "2": 21, "3": 30}


def test_programs_of_one_directory_upload_in_turn(tmp_path: Path, there: AnyPath) -> None:
    here = tmp_path / "here"
    first, second = opened(here, Remote(there)), opened(here, Remote(there))
    for step, program in enumerate((first, second, first, second)):
        program.reload()
        program.save(step, state(step))
        program.wait()
    first.close()
    second.close()
    assert values_in(there) == {str(step): step for step in range(4)}


def test_steps_are_uploaded_whatever_the_clock_says(
    tmp_path: Path, there: AnyPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Remote(there, keep=preservation_policies.LatestN(2))
    save_in(tmp_path / "here", {1: 1, 2: 2}, remote)
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() - 3600 * 10**9)
    save_in(tmp_path / "here", {3: 3, 4: 4}, remote)
    assert values_in(there) == {"3": 3, "4": 4}


@pytest.mark.parametrize("hangs_in", ["record", "copy"])
def test_a_step_whose_program_was_killed_is_uploaded_whatever_the_clock_said(
    tmp_path: Path, there: AnyPath, hangs_in: str
) -> None:
    remote = Remote(there, keep=preservation_policies.LatestN(2))
    save_in(tmp_path / "here", {1: 1, 2: 2}, remote)
    hangs = programs.context.Event()
    arguments = (of_stores(), tmp_path / "here", there, hangs_in, hangs)
    process = programs.context.Process(target=save_and_hang, args=arguments, daemon=True)
    process.start()
    assert hangs.wait(programs.HANG_S)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(programs.HANG_S)
    assert values_in(there) == {"1": 1, "2": 2}
    save_in(tmp_path / "here", {}, remote)
    assert values_in(there) == {"2": 2, "3": 3}


def test_an_older_step_that_was_brought_back_is_no_younger_than_others(
    tmp_path: Path, there: AnyPath
) -> None:
    save_in(tmp_path / "here", {1: 1, 2: 2})
    shutil.move(tmp_path / "here" / "1", tmp_path / "kept")
    remote = Remote(there, keep=preservation_policies.LatestN(1))
    save_in(tmp_path / "here", {3: 3}, remote)
    shutil.move(tmp_path / "kept", tmp_path / "here" / "1")
    save_in(tmp_path / "here", {}, remote)
    assert values_in(there) == {"3": 3}


def test_what_comes_between_the_look_at_a_step_and_its_upload_stays(
    tmp_path: Path, there: AnyPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, run = tmp_path / "here", remotes.Copying.run

    def after_another(*arguments: Any, **given: Any) -> Any:
        waystation.save(there / "1", state(99), overwrite=True)
        return run(*arguments, **given)

    with opened(here, Remote(there)) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.wait()
        monkeypatch.setattr(remotes.Copying, "run", after_another)
        checkpointer.save(1, state(2), overwrite=True, force=True)
        with pytest.warns(RemoteWarning, match="replaced meanwhile"):
            checkpointer.wait()
    assert values_in(there) == {"1": 99}


def test_a_step_of_which_several_uploads_have_failed_takes_its_place(
    tmp_path: Path, there: AnyPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "here", Remote(there)) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.wait()
        with monkeypatch.context() as patched:

            def failing(*_: Any, **__: Any) -> Any:
                raise Unavailable("the store has gone")

            patched.setattr(remotes.Copying, "run", failing)
            for number in (2, 3, 4):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RemoteWarning)
                    checkpointer.save(1, state(number), overwrite=True, force=True)
                with pytest.raises(Unavailable):
                    checkpointer.wait()
        checkpointer.wait()
    assert values_in(there) == {"1": 4}


def test_what_was_saved_again_during_an_upload_that_was_killed_is_known(
    tmp_path: Path, there: AnyPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, run = tmp_path / "here", remotes.Copying.run

    def killed(*arguments: Any, **given: Any) -> Any:
        monkeypatch.setattr(remotes.Copying, "run", run)
        waystation.save(here / "1", state(5), overwrite=True)
        run(*arguments, **given)
        raise Unavailable("killed")

    monkeypatch.setattr(remotes.Copying, "run", killed)
    with opened(here, Remote(there, keep=preservation_policies.LatestN(1))) as checkpointer:
        checkpointer.save(1, state(1))
        for _ in range(2):
            with contextlib.suppress(Unavailable):
                checkpointer.wait()
        assert values_in(there) == {"1": 5}
        checkpointer.save(2, state(2))
    assert values_in(there) == {"2": 2}


# `reload` asks for the upload of the step. It may be told that this leaves alone what differs before `delete`
# ends it.
@pytest.mark.filterwarnings("ignore::waystation.training.errors.RemoteWarning")
def test_what_another_program_has_put_in_the_place_of_a_step_is_not_deleted(
    tmp_path: Path, there: AnyPath
) -> None:
    with opened(tmp_path / "first", Remote(there)) as first:
        first.save(1, state(1))
        first.wait()
        with opened(tmp_path / "second", Remote(there)) as second:
            second.save(1, state(10), overwrite=True)
        with pytest.raises(Conflict, match="call reload"):
            first.delete(1)
        assert tiers(first)[1] == ("directory", "remote")
        assert values_in(there) == {"1": 10}
        first.reload()
        first.delete(1)
    assert steps_in(there) == []


@pytest.mark.parametrize(
    "content",
    [
        b'{"format_version": 1, "sequence": "5',
        b"[" * 100_000,
        b'{"format_version": 1, "sequence": "", "origin": "", "steps": {"1": [1e400]}, "uploaders": {}}',
    ],
    ids=["truncated", "deep", "infinite"],
)
def test_a_damaged_record_keeps_steps_waiting(tmp_path: Path, there: AnyPath, content: bytes) -> None:
    with opened(tmp_path / "here", Remote(there)) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.wait()
        record = on_this_machine(there) / ".waystation-uploads.json"
        good = record.read_bytes()
        record.write_bytes(content)
        checkpointer.save(2, state(2))
        with pytest.raises(Corrupt, match="whose steps are uploaded"):
            checkpointer.wait()
        record.write_bytes(good)
        checkpointer.wait()
    assert values_in(there) == {"1": 1, "2": 2}


def test_what_a_policy_raises_is_told_and_the_step_is_tried_again(tmp_path: Path) -> None:
    class Policy:
        is_wrong = True

        def should_preserve(self, infos: Sequence[Any], *, context: Any) -> Sequence[bool]:
            if self.is_wrong:
                raise ZeroDivisionError("of this policy")
            return [True] * len(infos)

    there, policy = tmp_path / "there", Policy()
    with opened(tmp_path / "here", Remote(there, keep=policy)) as checkpointer:
        checkpointer.save(1, state(1))
        with pytest.warns(RemoteWarning, match="ZeroDivisionError") as told:
            save_until(lambda: bool(told.list), checkpointer)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                checkpointer.wait()
        policy.is_wrong = False
        checkpointer.wait()
    assert values_in(there) == {"1": 1}


def save_until(is_over: Callable[[], bool], checkpointer: Checkpointer) -> None:
    """Saves step 1 again and again."""
    until_s = time.monotonic() + programs.HANG_S
    while not is_over():
        assert time.monotonic() < until_s
        checkpointer.save(1, state(1), overwrite=True, force=True)


def with_other_versions(directory: Path, there: AnyPath) -> None:
    """A program saves steps 1 and 2 anew, and asks for the replacement of step 2 alone."""
    with opened(directory, Remote(there)) as checkpointer:
        checkpointer.save(1, state(10))
        checkpointer.save(2, state(20), overwrite=True)


def with_fourth(directory: Path, there: AnyPath) -> None:
    """A program goes on in a directory with step 4."""
    with opened(directory, Remote(there)) as checkpointer:
        checkpointer.save(4, state(4))


def saved_in(directory: AnyPath, step: int) -> int:
    """Which state a step has."""
    return int(waystation.load(directory / str(step))["step"])
