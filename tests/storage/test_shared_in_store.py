"""Checkpoints in a store that share data objects: what is equal is not written again, and whatever is
removed, in whatever order and beside whatever else, the others load and nothing is left for ever."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.support import s3
from tests.support.long import IS_LONG, amount
from tests.support.s3 import Bucket, killed_at

import waystation
from waystation import errors
from waystation.checkpoint.collect import find_leftovers, remove_leftovers
from waystation.checkpoint.compare import compare
from waystation.checkpoint.copy import Copying
from waystation.checkpoint.export import export
from waystation.layouts.native import in_store
from waystation.storage import store_leases
from waystation.storage.bandwidth import Bandwidth
from waystation.training import Checkpointer, Remote, preservation_policies, save_decision_policies
from waystation.training.mirror import mirror
from waystation.transfers.handle import Progress

# As if whatever was written had been written long ago.
AT_ONCE = -10.0


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket; the environment says how it is reached."""
    made = s3.bucket()
    for name, value in s3.settings(made.endpoint).items():
        monkeypatch.setenv(name.upper(), value)
    return made


def random(nbytes: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 255, nbytes, dtype=np.uint8)


FROZEN = {f"w{number}": random(90_000 * number, number) for number in range(1, 4)}
FROZEN_BYTES, TRAINED_BYTES = 540_000, 18_000


def state_of(step: int) -> dict[str, Any]:
    """A frozen base, and adapters that change with every step."""
    trained = {f"w{number}": random(3000 * number, 1000 * step + number) for number in range(1, 4)}
    return {"base": FROZEN, "lora": trained, "step": step}


def step_of(state: dict[str, Any]) -> int:
    """The step of a state, all of which has to be of that step."""
    step: int = state["step"]
    expected = state_of(step)
    for part in ("base", "lora"):
        assert all(np.array_equal(state[part][name], array) for name, array in expected[part].items())
    return step


def save(
    path: str,
    step: int,
    unchanged_from: str | None = None,
    *,
    overwrite: bool = False,
    context: waystation.Context | None = None,
) -> int:
    """Saves a step; returns the bytes that this has written."""
    seen: list[waystation.SaveStatistics] = []
    context = context or waystation.Context()
    context.array.saving.on_statistics = seen.append
    with context:
        waystation.save(path, state_of(step), overwrite=overwrite, unchanged_from=unchanged_from)
    return seen[0].bytes_written


def run_of(place: Bucket, count: int, run: str = "run") -> list[str]:
    """The paths of so many checkpoints, each of which shares files with the one before it."""
    paths = [f"{place.location}/{run}/{step}" for step in range(1, count + 1)]
    for step, path in enumerate(paths, 1):
        save(path, step, paths[step - 2] if step > 1 else None)
    return paths


def require_that_nothing_lingers(place: Bucket, run: str, paths: dict[int, str]) -> None:
    """Deletes what is left of a run; then nothing is."""
    for path in paths.values():
        waystation.delete(path)
    collect_all(place, run)
    assert [name for name in place.names() if name.startswith(f"{run}/")] == []


def require_whole(paths: dict[int, str]) -> None:
    """Checkpoints are whole, by their checksums and by their values."""
    for step, path in paths.items():
        verified = waystation.verify(path)
        assert not verified.damages, (path, verified.damages)
        assert not verified.strays, (path, verified.strays)
        assert step_of(waystation.load(path)) == step


def collect_all(place: Bucket, run: str = "run") -> None:
    """Removes what is left over, as if it were old."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store_leases, "EXPIRES_S", AT_ONCE)
        patched.setattr(in_store, "EXPIRES_S", AT_ONCE)
        for _ in range(3):  # what refers to others goes first
            if any(name.startswith(f"{run}/") for name in place.names()):
                found = find_leftovers(f"{place.location}/{run}", older_than_s=0)
                remove_leftovers(found, older_than_s=0)


def tensors_in(place: Bucket) -> list[str]:
    return [name for name in place.names() if name.endswith(".safetensors")]


# ---- what is shared ----------------------------------------------------------------------------


def test_what_has_not_changed_is_one_object(place: Bucket, tmp_path: Path) -> None:
    one, two, three = (f"{place.location}/run/{step}" for step in (1, 2, 3))
    written = [save(one, 1), save(two, 2, one), save(three, 3, two)]
    assert written[0] > FROZEN_BYTES
    assert all(TRAINED_BYTES <= each <= 1.1 * TRAINED_BYTES + 8192 for each in written[1:])
    assert [name.split("/")[1] for name in tensors_in(place)] == ["1", "2", "3"], "one object each"
    require_whole({1: one, 2: two, 3: three})
    for name in tensors_in(place):  # in any program
        stored = load_file(place.folder / name)
        assert all(np.array_equal(stored.get(f"base.{key}", own), own) for key, own in FROZEN.items())
    waystation.delete(one)
    waystation.delete(two)
    require_whole({3: three})
    left = tensors_in(place)
    assert [name.split("/")[1] for name in left] == ["1", "3"], "the adapters of step 2 have gone"
    waystation.delete(three)
    assert place.names() == []


def test_other_commands_see_one_checkpoint(place: Bucket, tmp_path: Path) -> None:
    one, two = run_of(place, 2)
    fresh = f"{place.location}/fresh"
    save(fresh, 2)
    assert compare(two, fresh).differences == []
    differing = {each.key_path for each in compare(one, two).differences}
    assert differing == {f"['lora']['w{number}']" for number in range(1, 4)} | {"['step']"}
    assert step_of(waystation.load(two, waystation.metadata(two))) == 2
    export(two, tmp_path / "exported")
    tensors = load_file(next((tmp_path / "exported").glob("*.safetensors")))
    assert np.array_equal(tensors["lora.w3"], state_of(2)["lora"]["w3"])
    context = waystation.Context()
    context.array.loading.verify = False
    with context:
        assert step_of(waystation.load(two)) == 2


def test_a_copy_has_all_its_files(place: Bucket, tmp_path: Path) -> None:
    one, two = run_of(place, 2)
    for target in (os.fspath(tmp_path / "two"), f"{place.location}/other/two"):
        waystation.copy(two, target)
        verified = waystation.verify(target)
        assert (verified.damages, verified.strays) == ([], [])
    done = mirror(f"{place.location}/run", tmp_path / "mirrored")
    assert sorted(done.copied) == ["1", "2"]
    assert sorted(mirror(f"{place.location}/run", tmp_path / "mirrored").equal) == ["1", "2"]
    waystation.delete(one)
    waystation.delete(two)
    for whole in (tmp_path / "two", f"{place.location}/other/two", tmp_path / "mirrored" / "2"):
        assert step_of(waystation.load(whole)) == 2


def test_another_run_shares_nothing(place: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, elsewhere = f"{place.location}/run/1", f"{place.location}/another/2"
    save(one, 1)
    assert save(elsewhere, 2, one) > FROZEN_BYTES
    assert "lies elsewhere" in caplog.text
    save(os.fspath(tmp_path / "1"), 1)
    assert save(f"{place.location}/run/2", 2, os.fspath(tmp_path / "1")) > FROZEN_BYTES
    assert save(os.fspath(tmp_path / "2"), 2, one) > FROZEN_BYTES
    assert not any("reference" in name for name in place.names())


def test_an_object_that_is_missing_is_written_again(place: Bucket) -> None:
    one, two = f"{place.location}/run/1", f"{place.location}/run/2"
    save(one, 1)
    (name,) = tensors_in(place)
    (place.folder / name).unlink()
    assert save(two, 2, one) > FROZEN_BYTES
    require_whole({2: two})
    assert not any("reference" in name for name in place.names())


def test_what_was_copied_out_by_other_means_is_refused(place: Bucket, tmp_path: Path) -> None:
    run_of(place, 2)
    os.rename(place.folder / "run" / "2", tmp_path / "2")
    with pytest.raises(errors.Unsupported, match="waystation cp"):
        waystation.load(tmp_path / "2")


def test_an_owner_that_has_gone_is_damage(place: Bucket) -> None:
    _, two = run_of(place, 2)
    (record,) = (place.folder / "run" / "2").glob("state-*/record.json")
    body = json.loads(record.read_bytes())["record"]
    assert [each["checkpoint"] for each in body["places"]] == ["1"]
    os.rename(place.folder / "run" / "1", place.folder / "run" / "gone")
    with pytest.raises(errors.Corrupt, match="missing"):
        waystation.load(two)


# ---- removals ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("count", [3, *([4] if IS_LONG else [])])
def test_any_order_of_deletions_leaves_the_others(place: Bucket, count: int) -> None:
    orders = list(itertools.permutations(range(1, count + 1)))
    for number, order in enumerate(orders if IS_LONG else orders[1::2]):
        paths = dict(enumerate(run_of(place, count, run=str(number)), 1))
        for step in order:
            waystation.delete(paths.pop(step))
            if IS_LONG or len(paths) == 1:
                require_whole(paths)
        assert [name for name in place.names() if name.startswith(f"{number}/")] == [], order


def test_overwrites_leave_what_others_refer_to(place: Bucket) -> None:
    one, two, three = run_of(place, 3)
    save(one, 4, overwrite=True)
    save(two, 5, three, overwrite=True)
    require_whole({4: one, 5: two, 3: three})
    for step in range(6, 9):  # each shares with the version that it replaces
        assert save(two, step, two, overwrite=True) < FROZEN_BYTES
        require_whole({4: one, step: two, 3: three})
    waystation.delete(three)
    waystation.delete(two)
    require_whole({4: one})
    assert len(tensors_in(place)) == 1
    waystation.delete(one)
    assert place.names() == []


def test_a_path_is_used_again_while_others_refer_to_what_was_there(place: Bucket) -> None:
    one, two = run_of(place, 2)
    waystation.delete(one)
    assert not waystation.is_checkpoint(one)
    save(one, 7, two)
    require_whole({7: one, 2: two})
    waystation.delete(two)
    require_whole({7: one})
    waystation.delete(one)
    assert place.names() == []


def test_one_of_two_checkpointables_goes(place: Bucket) -> None:
    one, two = f"{place.location}/run/1", f"{place.location}/run/2"
    waystation.save_checkpointables(one, {"a": state_of(1), "b": state_of(1)})
    waystation.save_checkpointables(two, {"a": state_of(2), "b": state_of(2)}, unchanged_from=one)
    waystation.delete(one)
    waystation.delete(two, checkpointable_name="a")
    assert {name.split("/")[2][0] for name in tensors_in(place)} == {"b"}
    assert step_of(waystation.load(two, checkpointable_name="b")) == 2
    waystation.delete(two)
    assert place.names() == []


def test_what_is_referred_to_is_no_leftover(place: Bucket) -> None:
    one, two = run_of(place, 2)
    waystation.delete(one)
    before = place.names()
    collect_all(place)
    save(one + "0", 9)
    waystation.delete(one + "0")
    assert place.names() == before
    require_whole({2: two})
    # A reference whose referrer was removed by other means is left over, and so is what it protected.
    for name in place.names():
        if name.startswith("run/2/"):
            (place.folder / name).unlink()
    collect_all(place)
    assert place.names() == []


# ---- beside a save, and kills ------------------------------------------------------------------


@contextlib.contextmanager
def at_request(
    place: Bucket, number: int, act: Callable[[], None]
) -> Iterator[tuple[list[int], waystation.Context]]:
    """Requests with the options that this yields go through a proxy, and before one of them something else
    happens, as a whole. The list has how many there have been."""
    count = [0]

    def on_request(request: int) -> str:
        count[0] = request
        if request == number:
            act()
        return s3.PASS

    with s3.proxy(place.endpoint, on_request) as between:
        yield count, s3.context(between.endpoint)


WALK, KILLS = (1, 1) if IS_LONG else (25, 30)


@pytest.mark.long
@pytest.mark.parametrize("deleted", [(2,), (1, 2), (2, 1)] if IS_LONG else [(1, 2)], ids=str)
def test_a_deletion_before_any_request_of_a_save(place: Bucket, deleted: tuple[int, ...]) -> None:
    for number in itertools.count(1 if IS_LONG else 9, WALK):
        run = f"run{number}"
        paths = dict(enumerate(run_of(place, 2, run), 1))
        third = f"{place.location}/{run}/3"

        def act(paths: dict[int, str] = paths) -> None:
            for step in deleted:
                waystation.delete(paths.pop(step))

        with at_request(place, number, act) as (count, context):
            try:
                save(third, 3, paths[2], context=context)
                paths[3] = third
            except errors.CheckpointNotFound:
                assert number < 4, "it had begun"
        require_whole(paths)
        was_last = number > count[0]
        require_that_nothing_lingers(place, run, paths)
        if was_last:
            break


@pytest.mark.long
@pytest.mark.parametrize("deleted", [1, 2])
@pytest.mark.share(2)
def test_a_save_before_any_request_of_a_deletion_that_then_goes_on(place: Bucket, deleted: int) -> None:
    for number in itertools.count(1 if IS_LONG else 9, WALK):
        run = f"run{number}"
        paths = dict(enumerate(run_of(place, 2, run), 1))
        third, going = f"{place.location}/{run}/3", paths.pop(deleted)

        def act(run: str = run, third: str = third) -> None:
            with contextlib.suppress(errors.CheckpointNotFound):
                save(third, 3, f"{place.location}/{run}/2")

        with at_request(place, number, act) as (count, context), context:
            waystation.delete(going)
        if number > count[0]:
            break
        if waystation.is_checkpoint(third):
            paths[3] = third
        require_whole(paths)
        require_that_nothing_lingers(place, run, paths)


def save_at(endpoint: str, path: str, step: int, earlier: str, overwrite: bool) -> None:
    save(path, step, earlier, overwrite=overwrite, context=s3.context(endpoint))


def delete_at(endpoint: str, path: str) -> None:
    with s3.context(endpoint):
        waystation.delete(path)


@pytest.mark.long
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.share(2)
def test_a_save_is_killed_before_any_request(place: Bucket, overwrite: bool) -> None:
    for number in itertools.count(1 if IS_LONG else 22, KILLS):
        run = f"run{number}"
        paths = dict(enumerate(run_of(place, 2, run), 1))
        target = paths[2] if overwrite else f"{place.location}/{run}/3"
        was_killed = killed_at(place, number, save_at, target, 3, paths[2], overwrite)
        if waystation.is_checkpoint(target):
            paths[step_of(waystation.load(target))] = target
            if overwrite and 3 in paths:
                del paths[2]
        require_whole(paths)
        waystation.delete(paths.pop(1))
        require_whole(paths)
        collect_all(place, run)
        require_whole(paths)
        require_that_nothing_lingers(place, run, paths)
        if not was_killed:
            break


@pytest.mark.long
@pytest.mark.parametrize("deleted", [1, 2, 3] if IS_LONG else [1, 3])
@pytest.mark.share(2)
def test_a_deletion_is_killed_before_any_request(place: Bucket, deleted: int) -> None:
    for number in itertools.count(1 if IS_LONG else 22, KILLS):
        run = f"run{number}"
        paths = dict(enumerate(run_of(place, 3, run), 1))
        was_killed = killed_at(place, number, delete_at, paths[deleted])
        paths = {step: path for step, path in paths.items() if waystation.is_checkpoint(path)}
        assert {1, 2, 3} - {deleted} <= paths.keys()
        require_whole(paths)
        collect_all(place, run)
        require_whole(paths)
        require_that_nothing_lingers(place, run, paths)
        if not was_killed:
            break


# ---- copies of a run that shares files on a disk -----------------------------------------------


def local_run(directory: Path, count: int) -> list[Path]:
    """So many checkpoints on a disk, each of which shares files with the one before it."""
    paths = [directory / str(step) for step in range(1, count + 1)]
    for step, path in enumerate(paths, 1):
        save(str(path), step, str(paths[step - 2]) if step > 1 else None)
    return paths


def upload(source: Path, target: str, beside: str | None, context: waystation.Context | None = None) -> int:
    """Copies as a remote tier does; returns the bytes that were sent."""
    with context or waystation.Context(), Bandwidth(None) as bandwidth:
        copying = Copying(bandwidth, Progress(), lambda _done, _total: None)
        done = copying.run(os.fspath(source), target, overwrite=False, beside=beside)
    return done.nbytes - done.shared_bytes - done.found_bytes


def upload_at(endpoint: str, source: Path, target: str, beside: str) -> None:
    upload(source, target, beside, s3.context(endpoint))


def test_a_remote_gets_once_what_is_unchanged(place: Bucket, tmp_path: Path) -> None:
    def opened(**given: Any) -> Checkpointer:
        policy = save_decision_policies.FixedIntervalPolicy(1)
        remote = Remote(f"{place.location}/run", keep=preservation_policies.LatestN(2))
        return Checkpointer(tmp_path / "run", remote=remote, save_decision_policy=policy, **given)

    sent = [0]
    with opened(reuse_unchanged=True) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(step, state_of(step), metrics={"score": step})
            checkpointer.wait()
            assert checkpointer.remote_statistics is not None
            sent.append(checkpointer.remote_statistics.uploaded_bytes)
    assert sent[1] > FROZEN_BYTES
    assert all(after - before < 2 * TRAINED_BYTES for before, after in itertools.pairwise(sent[1:]))
    paths = {step: f"{place.location}/run/{step}" for step in (3, 4)}
    require_whole(paths)
    for step, path in paths.items():
        assert not compare(tmp_path / "run" / str(step), path).differences
    assert [name.split("/")[1] for name in tensors_in(place)] == ["1", "3", "4"]
    assert load_file(place.folder / tensors_in(place)[0]).keys() >= {f"base.{name}" for name in FROZEN}
    for given in ({"reuse_unchanged": True}, {}):  # they are the same as those of the disk
        with opened(**given) as checkpointer:
            checkpointer.wait()
            assert checkpointer.remote_statistics is not None
            assert checkpointer.remote_statistics.uploads == 0
    shutil.rmtree(tmp_path / "run")
    with opened(reuse_unchanged=True) as checkpointer:
        assert step_of(checkpointer.load()) == 4
        checkpointer.delete(4)
        assert step_of(checkpointer.load()) == 3
        checkpointer.delete(3)
    assert tensors_in(place) == []


def test_what_differs_is_not_shared_by_a_copy(place: Bucket, tmp_path: Path) -> None:
    paths = local_run(tmp_path / "run", 2)
    save(str(tmp_path / "other"), 7)
    one, two, other = (f"{place.location}/run/{name}" for name in ("1", "2", "7"))
    assert upload(tmp_path / "other", other, None) > FROZEN_BYTES
    assert upload(paths[0], one, other) > FROZEN_BYTES
    for name in tensors_in(place):
        if name.startswith("run/1/"):
            (place.folder / name).unlink()
    assert upload(paths[1], two, one) > FROZEN_BYTES, "what has gone is sent again"
    require_whole({7: other, 2: two})


@pytest.mark.long
@pytest.mark.parametrize("deleted", [1, 2])
@pytest.mark.share(2)
def test_a_deletion_before_any_request_of_an_upload(place: Bucket, tmp_path: Path, deleted: int) -> None:
    local = local_run(tmp_path, 3)
    for number in itertools.count(1 if IS_LONG else 9, WALK):
        run = f"run{number}"
        paths = {step: f"{place.location}/{run}/{step}" for step in (1, 2)}
        upload(local[0], paths[1], None)
        upload(local[1], paths[2], paths[1])
        third = f"{place.location}/{run}/3"

        def act(path: str = paths.pop(deleted)) -> None:
            waystation.delete(path)

        with at_request(place, number, act) as (count, context):
            upload(local[2], third, f"{place.location}/{run}/2", context)
        was_last = number > count[0]
        if was_last:
            act()
        paths[3] = third
        require_whole(paths)
        require_that_nothing_lingers(place, run, paths)
        if was_last:
            break


@pytest.mark.long
def test_an_upload_is_killed_before_any_request(place: Bucket, tmp_path: Path) -> None:
    local = local_run(tmp_path, 2)
    for number in itertools.count(1 if IS_LONG else 14, KILLS):
        run = f"run{number}"
        paths = {step: f"{place.location}/{run}/{step}" for step in (1, 2)}
        upload(local[0], paths[1], None)
        was_killed = killed_at(place, number, upload_at, local[1], paths[2], paths[1])
        if not waystation.is_checkpoint(paths[2]):
            upload(local[1], paths[2], paths[1])
        require_whole({2: paths[2]})
        waystation.delete(paths.pop(1))
        collect_all(place, run)
        require_whole(paths)
        require_that_nothing_lingers(place, run, paths)
        if not was_killed:
            break


def test_a_saver_that_was_taken_for_dead_commits_nothing(
    place: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_leases, "FRESH_S", -1.0)  # as if long had passed since it was renewed
    paths = run_of(place, 2)
    done: list[str] = []

    def on_request(number: int) -> str:
        method, name = between.requests[number - 1]
        if method == "PUT" and name.endswith("record.json") and not done:
            done.append(name)
            with monkeypatch.context() as patched:
                patched.setattr(store_leases, "EXPIRES_S", AT_ONCE)
                for path in paths:
                    waystation.delete(path)
        return s3.PASS

    with (
        s3.proxy(place.endpoint, on_request) as between,
        pytest.raises(errors.Conflict, match="sign of life"),
    ):
        save(f"{place.location}/run/3", 3, paths[1], context=s3.context(between.endpoint))
    collect_all(place)
    assert place.names() == []


class Crowd:
    """Threads that save steps which share with whatever is there, and delete whatever is there.

    Attributes:
        kept: What has been saved and not deleted, by step.
    """

    def __init__(self, run: str) -> None:
        self.kept = {0: f"{run}/0"}
        self._run = run
        self._rng = np.random.default_rng(0)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        save(self.kept[0], 0)

    def _any(self) -> int:
        steps = sorted(self.kept)
        return steps[int(self._rng.integers(len(steps)))]

    def save(self, count: int) -> None:
        for _ in range(count):
            with self._lock:
                step, earlier = next(self._numbers), self.kept[self._any()]
            path = f"{self._run}/{step}"
            with contextlib.suppress(errors.CheckpointNotFound):  # before it began
                save(path, step, earlier)
                with self._lock:
                    self.kept[step] = path

    def delete(self, count: int) -> None:
        for _ in range(count):
            with self._lock:
                path = self.kept.pop(self._any()) if len(self.kept) > 1 else None
            if path is not None:
                waystation.delete(path)


@pytest.mark.long
def test_savers_and_deleters_at_once(place: Bucket) -> None:
    crowd = Crowd(f"{place.location}/run")
    calls = 3 * [(crowd.save, amount(4))] + 2 * [(crowd.delete, amount(5))]
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(contextvars.copy_context().run, *call) for call in calls]:
            done.result()
    require_whole(crowd.kept)
    for path in crowd.kept.values():
        waystation.delete(path)
    collect_all(place)
    assert place.names() == []
