"""Sequences of checkpoints in an object store: what differs from a disk, and processes that are killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import programs, s3
from tests.support.leases import require_never_both
from tests.support.long import IS_LONG, only_long
from tests.support.places import names_in, on_this_machine
from tests.support.programs import running
from tests.training import sequences, store_programs
from tests.training.store_programs import EVERY_STEP, keeper, state

import waystation
from waystation import errors, storage
from waystation.checkpoint.verify import verify
from waystation.layouts.native import in_store
from waystation.memory import MemoryTier
from waystation.path import Location
from waystation.storage import leases, signs_of_life, store_leases
from waystation.storage.store_leases import StoreLeases
from waystation.training import Checkpointer, preservation_policies
from waystation.training.errors import DamagedCheckpointWarning

# What takes whoever may be alive for dead.
AT_ONCE = -10.0


@pytest.fixture
def bucket() -> s3.Bucket:
    return s3.bucket()


@pytest.fixture
def root(bucket: s3.Bucket) -> Any:
    """The location of a sequence, within options that say how its store is reached."""
    with bucket.context():
        yield Location(f"{bucket.location}/run")


def steps_of(checkpointer: Checkpointer) -> list[int]:
    return [info.step for info in checkpointer.checkpoints]


def of_step(bucket: s3.Bucket, step: int) -> list[str]:
    """The names of the objects beneath a step."""
    return [name for name in bucket.names() if name.startswith(f"run/{step}/")]


def require_whole(checkpointer: Checkpointer) -> list[int]:
    for info in checkpointer.checkpoints:
        loaded = checkpointer.load(info.step)
        assert loaded["step"] == info.step
        assert (loaded["a"] == info.step).all()
    return steps_of(checkpointer)


# ---- one program -------------------------------------------------------------------------------


def test_what_is_not_kept_leaves_no_object(bucket: s3.Bucket, root: Location) -> None:
    best = preservation_policies.BestN(get_metric_fn=lambda found: found["score"], n=1)
    policy = preservation_policies.AnyPreservationPolicy([preservation_policies.LatestN(2), best])
    with Checkpointer(root, save_decision_policy=EVERY_STEP, preservation_policy=policy) as checkpointer:
        for step, score in enumerate([1, 9, 2, 3, 4]):
            checkpointer.save_async(step, state(step), metrics={"score": score})
    with Checkpointer(root) as again:
        assert require_whole(again) == [1, 3, 4]
        assert [info.metrics["score"] for info in again.checkpoints] == [9, 3, 4]
    assert names_in(root) == ["1", "3", "4"]
    for step in (1, 3, 4):
        assert {name.split("/")[2].partition("-")[0] for name in of_step(bucket, step)} == {
            "checkpoint.json",
            "metrics",
            "state",
        }
    assert all(waystation.verify(root / str(step)).strays == [] for step in (1, 3, 4))


def test_the_paths_are_locations(root: Location) -> None:
    with Checkpointer(str(root)) as checkpointer:
        checkpointer.save(5, state(5), metrics={"score": float("nan")})
        assert checkpointer.directory == checkpointer.root_metadata().directory == root
        assert checkpointer.latest is not None
        assert checkpointer.latest.path == checkpointer.metadata().path == root / "5"
        assert waystation.load(checkpointer.latest.path)["step"] == 5
        assert repr(checkpointer) == f"<Checkpointer: '{root}'>"


def test_the_options_of_the_checkpointer_say_how_the_store_is_reached(bucket: s3.Bucket) -> None:
    """In whatever thread, and without a block around the call."""
    with Checkpointer(f"{bucket.location}/run", context=bucket.context(), custom_metadata={"a": 1}) as own:
        own.save_async(0, state(0), metrics={"score": 1}).result()  # type: ignore[union-attr]
        assert own.load_async().result()["step"] == 0
        assert own.metadata(0).metrics == {"score": 1}
        assert own.root_metadata().custom_metadata == {"a": 1}
        own.reload()
        assert own.delete_async(0).result()


def test_a_run_is_opened_by_a_request_for_each_step_and_metrics_are_read_once_asked_for(
    bucket: s3.Bucket,
) -> None:
    steps, root = range(6), f"{bucket.location}/run"
    with Checkpointer(root, context=bucket.context(), save_decision_policy=EVERY_STEP) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step), metrics={"score": step})
    with s3.proxy(bucket.endpoint) as between:
        # Whoever asks for metrics is in no context.
        own = Checkpointer(root, context=bucket.context(between.endpoint))
        assert len(between.requests) == 1 + len(steps)
        assert steps_of(own) == [*steps]
        assert own.latest is not None
        assert own.latest.commit_timestamp_nsecs
        asked = len(between.requests)
        assert own.latest.metrics == {"score": 5}
        assert len(between.requests) - asked == 2
        assert [info.metrics["score"] for info in own.checkpoints] == [*steps]
        assert len(between.requests) - asked == 2 * len(steps)
        assert own.checkpoints[0] == own.checkpoints[0]
        assert "'score': 3" in repr(own.checkpoints[3])
        own.close()
        assert len(between.requests) - asked == 2 * len(steps)


def test_metrics_that_are_damaged_or_gone_are_told_once_they_are_asked_for(
    bucket: s3.Bucket, root: Location
) -> None:
    with Checkpointer(root, save_decision_policy=EVERY_STEP) as checkpointer:
        for step in range(4):
            checkpointer.save(step, state(step), metrics={"score": step})
    for file in on_this_machine(root / "3").glob("metrics*/files/metrics"):
        file.write_bytes(b"{}")
    best = preservation_policies.BestN(get_metric_fn=lambda found: found["score"], n=2)
    with Checkpointer(root, preservation_policy=best, save_decision_policy=EVERY_STEP) as checkpointer:
        with pytest.raises(errors.Corrupt):
            checkpointer.checkpoints[3].metrics  # noqa: B018  # it is read
        waystation.delete(root / "0")
        assert checkpointer.checkpoints[0].metrics is None
        checkpointer.save(4, state(4), metrics={"score": 4})
        assert steps_of(checkpointer) == [0, 2, 4]  # of 0 nothing is known
        assert [info.step for info in checkpointer.damaged] == [3]


def test_what_lies_beside_a_step_stays(bucket: s3.Bucket, root: Location, recwarn: Any) -> None:
    notes = on_this_machine(root / "3") / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("somebody's own")
    with pytest.raises(errors.Conflict, match="not a checkpoint and not empty"):
        waystation.save(root / "3", state(3))
    with Checkpointer(root, save_decision_policy=EVERY_STEP) as checkpointer:
        assert steps_of(checkpointer) == []
        checkpointer.save(3, state(3))
        assert require_whole(checkpointer) == [3]
        checkpointer.save(3, state(3), overwrite=True)
        checkpointer.delete(3)
    assert of_step(bucket, 3) == ["run/3/notes.txt"]
    assert not [warning for warning in recwarn if "no checkpoint" in str(warning.message)]


def test_what_no_store_has_is_refused(bucket: s3.Bucket, root: Location, tmp_path: Path) -> None:
    with pytest.raises(errors.Unsupported, match="leave out memory="):
        Checkpointer(root, memory=MemoryTier(directory=tmp_path))
    alone = bucket.context()
    alone.multiprocessing.primary_host = None
    with alone, pytest.raises(errors.Unsupported, match="set primary_host"):
        Checkpointer(root)
    assert bucket.names() == []


def test_a_bucket_that_is_missing_is_told_of_at_once(root: Location) -> None:
    with pytest.raises(errors.NotFound, match="there is no bucket 's3://no-such-bucket'"):
        Checkpointer("s3://no-such-bucket/run")


def test_opening_takes_few_requests_for_each_step(bucket: s3.Bucket, root: Location) -> None:
    count = 100
    with Checkpointer(root) as checkpointer:
        checkpointer.save(0, state(0), metrics={"score": 1})
    for step in range(1, count):  # a copy has the record of the original, which suffices here
        shutil.copytree(on_this_machine(root / "0"), on_this_machine(root / str(step)))
    for lightweight in (True, False):
        with (
            s3.proxy(bucket.endpoint) as between,
            s3.context(between.endpoint),
            Checkpointer(root, lightweight_initialize=lightweight) as checkpointer,
        ):
            assert steps_of(checkpointer) == list(range(count))
            assert len(between.requests) == 1 + count
            if not lightweight:
                assert all(info.metrics == {"score": 1} for info in checkpointer.checkpoints)
                assert len(between.requests) == 1 + count * 3


# ---- readers and collectors --------------------------------------------------------------------


def test_of_many_steps_some_of_which_are_not_whole_all_others_are_found(
    bucket: s3.Bucket, root: Location
) -> None:
    """Records are read many at a time, and one that is missing or damaged is told from the others."""
    with keeper(root, n=1) as checkpointer:
        checkpointer.save(0, state(0), metrics={"score": 0})
    folder = bucket.folder / "run"
    for step in range(1, 40):
        shutil.copytree(folder / "0", folder / str(step))
    (folder / "7" / "checkpoint.json").unlink()
    (folder / "9" / "checkpoint.json").write_bytes(b"{}")
    wanted = [step for step in range(40) if step not in (7, 9)]
    for is_light in (False, True):
        with s3.proxy(bucket.endpoint) as between, s3.context(between.endpoint):
            with (
                contextlib.nullcontext() if is_light else pytest.warns(DamagedCheckpointWarning),
                Checkpointer(root, lightweight_initialize=is_light) as run,
            ):
                found = [info.step for info in run.checkpoints]
            assert [step for step in found if step != 9] == wanted
            assert is_light or all(info.metrics == {"score": 0} for info in run.checkpoints)
        assert len(between.requests) < 40 * (2 if is_light else 5)


def test_of_a_reader_and_a_collector_one_gives_way(bucket: s3.Bucket, root: Location) -> None:
    found = StoreLeases(str(root))
    with found.hold("1") as may_read, found.condemned("1") as may_go, found.condemned("2") as other_may_go:
        assert (may_read, may_go, other_may_go) == (True, False, True)
    with found.condemned("1") as may_go, found.hold("1") as may_read, found.hold("10") as other:
        assert (may_go, may_read, other) == (True, False, True)
    assert bucket.names() == []


def test_readers_and_collectors_never_both_go_on(bucket: s3.Bucket, root: Location) -> None:
    require_never_both(StoreLeases(str(root)), rounds=30)
    assert bucket.names() == []


class SlowReader:
    """A checkpointable whose load the test holds up."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()

    async def save(self, directory: Any) -> Any:
        async def write() -> None:
            ((await directory.await_creation()) / "file").write_text("x")

        return write()

    async def load(self, directory: Path) -> Any:
        async def read() -> None:
            self.began.set()
            assert self.may_end.wait(programs.HANG_S)
            assert (directory / "file").read_text() == "x"

        return read()


def test_a_step_that_is_being_loaded_stays(bucket: s3.Bucket, root: Location) -> None:
    reader = SlowReader()
    with keeper(root) as checkpointer:
        checkpointer.save_checkpointables(0, {"slow": reader})
        loading = checkpointer.load_checkpointables_async(0, {"slow": reader})
        assert reader.began.wait(programs.HANG_S)
        checkpointer.save(1, state(1))
        assert steps_of(checkpointer) == [0, 1]
        (mark,) = [name for name in names_in(root / "0") if leases.is_mark(name)]
        assert mark.startswith(leases.LEASE)
        assert waystation.verify(root / "0").strays == []
        reader.may_end.set()
        loading.result()
        checkpointer.save(2, state(2))
        assert steps_of(checkpointer) == [2]
    assert names_in(root) == ["2"]


def test_what_is_deleted_while_it_is_read_counts_as_gone(bucket: s3.Bucket, root: Location) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(0, state(0))
        with StoreLeases(str(root)).hold("0"):
            assert checkpointer.delete(0)
            assert len(of_step(bucket, 0)) == 1, "the mark"
            with pytest.raises(errors.StepNotFoundError):
                checkpointer.delete(0)
            assert not waystation.delete(root / "0", missing_ok=True)
            with pytest.raises(errors.CheckpointNotFound):
                waystation.load(root / "0")
            checkpointer.save(0, state(0))
        assert require_whole(checkpointer) == [0]


def test_a_step_that_is_condemned_is_passed_over(root: Location) -> None:
    """Also while its collector does not come to removing it, as it may have been killed."""
    with Checkpointer(root, save_decision_policy=EVERY_STEP) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
        with StoreLeases(str(root)).condemned("2"):
            assert checkpointer.load()["step"] == 1
        checkpointer.reload()
        assert checkpointer.load()["step"] == 2


def test_who_may_only_read_reads_without_a_lease(bucket: s3.Bucket, root: Location) -> None:
    with keeper(root) as checkpointer:
        checkpointer.save(0, state(0))

        def forbid(number: int) -> str:
            method, _ = between.requests[number - 1]
            return s3.PASS if method in ("GET", "HEAD") else s3.FORBID

        with (
            s3.proxy(bucket.endpoint, forbid) as between,
            s3.context(between.endpoint),
            Checkpointer(root) as reader,
        ):
            assert require_whole(reader) == [0]
            with pytest.raises(errors.PermissionDenied):
                reader.save(1, state(1))
            with contextlib.ExitStack() as until_removed:
                with bucket.context():
                    until_removed.enter_context(StoreLeases(str(root)).condemned("0"))
                with pytest.raises(errors.StepNotFoundError):
                    reader.load(0)
        checkpointer.save(1, state(1))
        assert steps_of(checkpointer) == [1]


def test_a_removal_that_was_refused_is_tried_again_at_the_next_save(
    bucket: s3.Bucket, root: Location, caplog: pytest.LogCaptureFixture
) -> None:
    may_remove = False

    def forbid(number: int) -> str:
        method, path = between.requests[number - 1]
        is_removal = "/run/0/" in path and method not in ("GET", "HEAD")
        return s3.FORBID if is_removal and not may_remove else s3.PASS

    with keeper(root) as checkpointer:
        checkpointer.save(0, state(0))
    with (
        s3.proxy(bucket.endpoint, forbid) as between,
        s3.context(between.endpoint),
        keeper(root) as checkpointer,
    ):
        for step in (1, 2):
            checkpointer.save(step, state(step))
        assert caplog.text.count("/run/0' could not be removed") == 1
        assert steps_of(checkpointer) == [2]
        assert "0" in names_in(root)
        may_remove = True
        checkpointer.save(3, state(3))
    assert names_in(root) == ["3"]
    assert of_step(bucket, 0) == []


@pytest.mark.parametrize("in_background", [False, True])
def test_a_step_whose_removal_was_refused_is_saved_again(
    bucket: s3.Bucket, root: Location, in_background: bool
) -> None:
    """The program does not list it any more. One that another program has saved since is refused."""

    def forbid(number: int) -> str:
        method, path = between.requests[number - 1]
        is_removal = method == "DELETE" or (method == "POST" and "delete" in path)
        is_commit = "/run/0/checkpoint.json" in path and method == "PUT"
        return s3.FORBID if (is_removal or is_commit) and is_forbidden else s3.PASS

    def save(checkpointer: Checkpointer, step: int, value: int) -> None:
        if in_background:
            response = checkpointer.save_async(step, state(value), force=True)
            assert response is not None
            response.result()
        else:
            checkpointer.save(step, state(value), force=True)

    is_forbidden = True
    with keeper(root) as checkpointer:
        checkpointer.save(0, state(0))
    with (
        s3.proxy(bucket.endpoint, forbid) as between,
        s3.context(between.endpoint),
        keeper(root) as checkpointer,
    ):
        save(checkpointer, 1, 1)
        assert steps_of(checkpointer) == [1]
        assert "0" in names_in(root)
        is_forbidden = False
        save(checkpointer, 0, 7)
        assert checkpointer.load(0)["step"] == 7
        is_forbidden = True
        save(checkpointer, 2, 2)
        assert steps_of(checkpointer) == [2]
        waystation.save(root / "9", state(9))
        with pytest.raises(errors.StepAlreadyExistsError, match="call reload") as caught:
            save(checkpointer, 9, 1)
        assert (caught.value.context["step"], caught.value.context["path"]) == (9, str(root / "9"))
        assert waystation.load(root / "9")["step"] == 9
        is_forbidden = False
        waystation.save(root / "0", state(8), overwrite=True)
        with pytest.raises(errors.StepAlreadyExistsError):
            save(checkpointer, 0, 1)
        assert waystation.load(root / "0")["step"] == 8


def test_a_removal_that_was_refused_leaves_alone_what_another_program_saves_there(
    bucket: s3.Bucket, root: Location
) -> None:
    """In a layout of Orbax's, where a removal compares no versions."""
    may_remove = True

    def forbid(number: int) -> str:
        method, path = between.requests[number - 1]
        is_of_step = "/run/0/" in path or (method == "POST" and "delete" in path)
        return s3.FORBID if is_of_step and method not in ("GET", "HEAD") and not may_remove else s3.PASS

    with s3.proxy(bucket.endpoint, forbid) as between:
        context = s3.context(between.endpoint)
        context.array.saving.use_ocdbt = False
        with context, keeper(root) as checkpointer:
            checkpointer.save(0, state(0))
            may_remove = False
            for step in (1, 2):
                checkpointer.save(step, state(step))
            assert "0" in names_in(root)
            may_remove = True
            waystation.delete(root / "0")
            waystation.save(root / "0", state(7))
            for step in (3, 4):
                checkpointer.save(step, state(step))
            assert sorted(names_in(root)) == ["0", "4"]
            assert waystation.load(root / "0")["step"] == 7


def test_a_reader_that_is_killed_holds_a_step_until_its_lease_has_run_out(
    bucket: s3.Bucket, root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = programs.context.Event()
    with keeper(root) as checkpointer:
        checkpointer.save(0, state(0))
        reader = programs.context.Process(
            target=store_programs.read_until_killed, args=(bucket.endpoint, str(root), ready), daemon=True
        )
        reader.start()
        assert ready.wait(programs.HANG_S)
        checkpointer.save(1, state(1))
        assert steps_of(checkpointer) == [0, 1]
        reader.kill()
        reader.join(programs.HANG_S)
        checkpointer.save(2, state(2))
        assert steps_of(checkpointer) == [0, 2], "nothing tells yet that it is dead"
        monkeypatch.setattr(store_leases, "EXPIRES_S", AT_ONCE)
        checkpointer.save(3, state(3))
        assert steps_of(checkpointer) == [3]
    assert names_in(root) == ["3"]


# ---- programs that are killed ------------------------------------------------------------------


def killed_at(bucket: s3.Bucket, root: Location, step: int, number: int) -> bool:
    """Has another process save a step, and kills it as it makes a request; False if there are not so many."""
    started = threading.Event()

    def kill(request: int) -> str:
        assert started.wait(programs.HANG_S)
        if request < number:
            return s3.PASS
        if request == number:
            os.kill(process.pid or 0, signal.SIGKILL)
        return s3.REFUSE  # also what it had sent before it was killed

    with s3.proxy(bucket.endpoint, kill) as between:
        process = programs.context.Process(
            target=store_programs.save_step, args=(between.endpoint, str(root), step), daemon=True
        )
        process.start()
        started.set()
        process.join(programs.HANG_S)
        assert process.exitcode in (0, -signal.SIGKILL)
        return process.exitcode != 0


@pytest.mark.long
def test_killed_before_any_request_a_program_resumes(
    bucket: s3.Bucket, root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    for number in itertools.count(1, 1 if IS_LONG else 13):
        own = root / str(number)
        with keeper(own, n=2) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, state(step), metrics={"score": step})
        was_killed = killed_at(bucket, own, 3, number)
        with keeper(own, n=2) as resumed:
            assert resumed.damaged == []
            outcomes.append(steps_of(resumed))
            assert resumed.load()["step"] == outcomes[-1][-1]
            # What a collector had condemned when it was killed is read, and replaced, at once.
            for step in require_whole(resumed):
                waystation.save(own / str(step), state(step), overwrite=True)
            resumed.reload()
            assert require_whole(resumed) == outcomes[-1]
            resumed.save(4, state(4), metrics={"score": 4})
            assert steps_of(resumed)[-1] == 4, "what may be alive is in nobody's way"
            with monkeypatch.context() as patched:
                patched.setattr(store_leases, "EXPIRES_S", AT_ONCE)
                resumed.save(5, state(5), metrics={"score": 5})
            assert require_whole(resumed) == [4, 5]
        assert names_in(own) == ["4", "5"], "the collection has removed the rest"
        if not was_killed:
            break
    assert outcomes == sorted(outcomes)
    assert [1, 2] in outcomes
    assert outcomes[-1] == [2, 3]


def test_what_a_killed_program_has_left_is_cleaned_up_if_asked_for(
    bucket: s3.Bucket, root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state(1))
    numbers = itertools.count(10, 5)  # each that is killed gives the next one more to look at
    while not any(name.endswith(".safetensors") for name in of_step(bucket, 2)):
        assert killed_at(bucket, root, 2, next(numbers))
    assert not waystation.is_checkpoint(root / "2")
    assert waystation.is_checkpoint(root / "1")
    left = of_step(bucket, 2)
    Checkpointer(root, cleanup_tmp_directories=True).close()
    assert of_step(bucket, 2) == left, "its process may be alive"
    monkeypatch.setattr(store_leases, "EXPIRES_S", AT_ONCE)
    Checkpointer(root).close()
    assert of_step(bucket, 2) == left
    with Checkpointer(root, cleanup_tmp_directories=True) as checkpointer:
        assert require_whole(checkpointer) == [1]
    assert of_step(bucket, 2) == []


# ---- several processes -------------------------------------------------------------------------


def test_processes_decide_save_collect_and_load_as_one(
    bucket: s3.Bucket, root: Location, tmp_path: Path
) -> None:
    with running(
        sequences.save_and_collect_in_store,
        bucket.endpoint,
        root,
        count=2,
        framework="jax",
        directory=tmp_path,
    ) as processes:
        first, second = processes.values()
    assert first == second
    assert first["steps"] == first["again"] == [3, 9, 12]
    assert (first["loaded"], first["in the background"]) == (12, 3)
    assert first["metrics"] == [{"score": 0}, {"score": -6}, {"score": -9}]
    assert names_in(root) == ["12", "3", "9"]
    assert all(waystation.verify(root / step).strays == [] for step in names_in(root))


def test_each_process_has_files_of_handlers_of_its_own(
    bucket: s3.Bucket, root: Location, tmp_path: Path
) -> None:
    with running(
        sequences.handlers_in_store, bucket.endpoint, root, count=2, framework="jax", directory=tmp_path
    ) as processes:
        first, second = processes.values()
    assert first == second == {"own": ["of 0", "of 1", "same"], "conflict": "HandlerFailed"}
    assert names_in(root) == ["0"]
    assert sorted(name.rpartition("/")[2] for name in of_step(bucket, 0) if "/files/" in name) == [
        "common",
        "p0",
        "p1",
    ]


def test_a_run_that_was_copied_from_a_disk_is_gone_on_with(
    bucket: s3.Bucket, root: Location, tmp_path: Path
) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step), metrics={"loss": 1 / step})
    shutil.copytree(tmp_path / "run", s3.folder_of(str(root)))
    with Checkpointer(root) as checkpointer:
        assert [info.step for info in checkpointer.checkpoints] == [1, 2]
        assert checkpointer.metadata(2).metrics == {"loss": 0.5}
        assert require_whole(checkpointer) == [1, 2]
        checkpointer.save(3, state(3), metrics={"loss": 0.1})
        assert require_whole(checkpointer) == [1, 2, 3]
    assert not verify(root / "2").damages


# ---- collectors beside writers -----------------------------------------------------------------


def test_a_save_over_what_is_being_collected_waits_and_takes_its_place(root: Location) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state(1))
        until_removed = contextlib.ExitStack()
        assert until_removed.enter_context(StoreLeases(str(root)).condemned("1"))
        saving = waystation.save_async(root / "1", state(1), overwrite=True, custom_metadata={"is": "new"})
        with pytest.raises(TimeoutError):
            saving.result(timeout=1.0)
        in_store.withdraw(str(root / "1"))
        saving.result()
        until_removed.close()
    assert waystation.metadata(root / "1").custom_metadata == {"is": "new"}
    assert waystation.load(root / "1")["step"] == 1


def test_a_step_whose_collector_was_killed_is_read_and_replaced_at_once(
    bucket: s3.Bucket, root: Location
) -> None:
    ready = programs.context.Event()
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state(1))
        collector = programs.context.Process(
            target=store_programs.condemn_until_killed, args=(bucket.endpoint, str(root), ready), daemon=True
        )
        collector.start()
        assert ready.wait(programs.HANG_S)
        with pytest.raises(errors.StepNotFoundError):
            checkpointer.load(1)
        os.kill(collector.pid or 0, signal.SIGKILL)
        collector.join(programs.HANG_S)
        begun_s = time.monotonic()
        waystation.save(root / "1", state(1), overwrite=True)
        assert time.monotonic() - begun_s < in_store._COLLECTED_WITHIN_S
        checkpointer.reload()
        assert require_whole(checkpointer) == [1]
    assert not [name for name in names_in(root / "1") if leases.is_mark(name)]


def test_a_mark_that_another_machine_has_put_stays(
    bucket: s3.Bucket, root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process cannot be seen from here, so its lease alone tells."""
    monkeypatch.setattr(in_store, "_COLLECTED_WITHIN_S", 0.2)
    waystation.save(root / "1", state(1))
    mark = f"{leases.CONDEMNED}0123456789ab-1-1-01234567"
    content = b'{"ends_with_process": true}'
    storage.of(str(root)).write_files([(os.path.join(str(root), "1", mark, "owner.json"), content)])
    with pytest.raises(errors.Conflict, match="is removing the checkpoint"):
        waystation.save(root / "1", state(2), overwrite=True)
    monkeypatch.setattr(store_leases, "EXPIRES_S", AT_ONCE)
    waystation.save(root / "1", state(2), overwrite=True)
    assert waystation.load(root / "1")["step"] == 2


def test_a_save_over_what_is_never_collected_is_refused(
    bucket: s3.Bucket, root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_store, "_COLLECTED_WITHIN_S", 0.2)
    waystation.save(root / "1", state(1))
    with StoreLeases(str(root)).condemned("1") as may_go:
        assert may_go
        before = len(bucket.names())
        with pytest.raises(errors.Conflict, match="is removing the checkpoint"):
            waystation.save(root / "1", state(2), overwrite=True)
        assert len(bucket.names()) == before
    assert waystation.load(root / "1")["step"] == 1


def test_leases_in_one_store_are_renewed_by_one_thread(
    bucket: s3.Bucket, root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signs_of_life, "HEARTBEAT_S", 0.2)
    held = StoreLeases(str(root))
    with contextlib.ExitStack() as stack:
        for number in range(40):
            assert stack.enter_context(held.hold(str(number)))
        threads = [thread for thread in threading.enumerate() if thread.name == "waystation: leases"]
        assert len(threads) <= 2, "one, and that of files on disks"
        first = {name: (bucket.folder / name).read_bytes() for name in bucket.names()}
        assert len(first) == 40
        deadline = time.monotonic() + programs.HANG_S
        while any((bucket.folder / name).read_bytes() == content for name, content in first.items()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert bucket.names() == []


@pytest.mark.long
@only_long
def test_many_steps_are_collected_side_by_side(bucket: s3.Bucket, root: Location) -> None:
    """One after the other they would take a minute and more."""
    count = 40
    waystation.save(root / "0", state(0))
    for step in range(1, count):
        shutil.copytree(on_this_machine(root / "0"), on_this_machine(root / str(step)))
    with s3.proxy(bucket.endpoint, lambda _: s3.SLOW) as between, s3.context(between.endpoint):
        begun = time.monotonic()
        with keeper(root) as checkpointer:
            checkpointer.save(count, state(count))
            assert steps_of(checkpointer) == [count]
        assert time.monotonic() - begun < 40
    assert names_in(root) == [str(count)]


def test_unchanged_arrays_are_shared_with_the_newest_step(bucket: s3.Bucket, root: Location) -> None:
    frozen = np.random.default_rng(0).standard_normal(50_000)
    seen: list[waystation.SaveStatistics] = []
    context = bucket.context()
    context.array.saving.on_statistics = seen.append
    with context, keeper(root, n=2, reuse_unchanged=True) as checkpointer:
        for step in range(5):
            response = checkpointer.save_async(
                step, {"frozen": frozen, "trained": np.full(1000, step), "step": step}, force=True
            )
            assert response is not None
            if step % 2:
                response.result()
        checkpointer.wait()
        assert [each.bytes_shared for each in seen] == [0] + 4 * [frozen.nbytes]
        assert steps_of(checkpointer) == [3, 4]
    with keeper(root, n=2) as resumed:
        for step in (3, 4):
            loaded = resumed.load(step)
            assert np.array_equal(loaded["frozen"], frozen)
            assert loaded["step"] == step
        for step in (5, 6):
            resumed.save(step, {"step": step}, force=True)
    assert names_in(root) == ["5", "6"], "what they shared goes with the last of them"
