"""What every layout promises in every storage, by every tier: the conformance suite of checkpoints.

Each test runs in each cell, whose name says which it is. Where a cell cannot be, the refusal is what is
tested. The default run has a share of the walks and of the slow cells; `make test-long` has all.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.cells import (
    CELLS,
    REFUSED,
    STORAGES,
    WORKING,
    Cell,
    Place,
    killed_at,
    opened,
    value_of,
)
from tests.support import disks, s3, system_calls
from tests.support.long import IS_LONG, amount

import waystation
from waystation import errors
from waystation.checkpoint.collect import find_leftovers, remove_leftovers
from waystation.layouts.native import in_store
from waystation.layouts.orbax import in_store as orbax_in_store
from waystation.storage import store_leases

# As if whatever was written had been written long ago.
AT_ONCE = -10.0


def cells(*tiers: str, storages: tuple[str, ...] = STORAGES) -> Any:
    """The parameters of a test: the cells of some tiers. By default one layout of Orbax stands for both, one
    file system for both, and one store for all, beyond the round trip."""
    found = [cell for cell in WORKING if cell.tier in tiers and cell.storage in storages]
    if not IS_LONG:
        found = [cell for cell in found if cell.layout != "orbax-zarr" and cell.storage in ("disk", "s3")]
    return pytest.mark.parametrize("cell", found, ids=str)


@pytest.fixture
def place(cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with opened(cell, tmp_path, monkeypatch.setenv) as made:
        yield made


def collect(place: Place) -> None:
    """Removes what is left over, as if it were old."""
    with pytest.MonkeyPatch.context() as patched:
        for module in (store_leases, in_store, orbax_in_store):
            patched.setattr(module, "EXPIRES_S", AT_ONCE)
        with contextlib.suppress(errors.NotFound):
            remove_leftovers(find_leftovers(place.root, older_than_s=0), older_than_s=0)


def require_nothing_left(place: Place) -> None:
    """Without steps there is nothing, but for what a sequence says of itself."""
    assert [name for name in place.files() if name.partition("/")[0].isdigit()] == []


def test_each_cell_has_one_name() -> None:
    assert len({str(cell) for cell in CELLS}) == len(CELLS) == 48


@pytest.mark.parametrize("cell", REFUSED, ids=str)
def test_what_cannot_be_is_refused(cell: Cell, place: Place) -> None:
    assert cell.refusal is not None
    with pytest.raises(errors.Unsupported, match=cell.refusal):
        place.save(1, 1)
    assert place.steps() == []


@pytest.mark.parametrize("cell", WORKING, ids=str)
@pytest.mark.share(4)
def test_what_is_saved_is_loaded_replaced_and_deleted(cell: Cell, place: Place) -> None:
    place.save(1, 1)
    place.save(2, 2)
    assert place.values() == {1: 1, 2: 2}
    assert [place.damages(step) for step in (1, 2)] == [[], []]
    if cell.replaces:
        place.save(1, 3, overwrite=True)
        assert place.values() == {1: 3, 2: 2}
    else:
        with pytest.raises(errors.Unsupported, match="delete it first"):
            place.save(1, 3, overwrite=True)
        assert place.values() == {1: 1, 2: 2}
    place.delete(1)
    assert place.values() == {2: 2}


@pytest.mark.long
@cells("call", "run")
@pytest.mark.share(2)
def test_deletions_in_any_order_leave_the_others_and_nothing_else(cell: Cell, place: Place) -> None:
    orders = list(itertools.permutations((1, 2, 3)))
    for order in orders if IS_LONG else orders[3:4]:
        for step in (1, 2, 3):
            place.save(step, step)
        left = {1, 2, 3}
        for step in order:
            place.delete(step)
            left.discard(step)
            assert place.values() == {each: each for each in left}
        require_nothing_left(place)


@pytest.mark.long
@cells("call", "run", "remote")
@pytest.mark.share(4)
def test_killed_before_any_step_a_save_is_whole_or_invisible(cell: Cell, place: Place) -> None:
    if not cell.is_in_store and not system_calls.SUPPORTED:
        pytest.skip("the tracer knows the system calls of x86-64 Linux only")
    place.save(1, 1)
    for number in itertools.count(1) if IS_LONG else [20]:
        was_killed = killed_at(place, number, 2, 2)
        assert place.values() in ({1: 1}, {1: 1, 2: 2})
        collect(place)
        if 2 not in place.steps():
            place.save(2, 2)
        assert place.values() == {1: 1, 2: 2}
        place.delete(2)
        if not was_killed:
            break


@pytest.mark.long
@cells("call", "run")
@pytest.mark.share(4)
def test_of_two_writers_of_one_step_one_wins(cell: Cell, place: Place) -> None:
    barrier = threading.Barrier(2)

    def write(step: int, value: int) -> int | None:
        barrier.wait()
        try:
            place.save(step, value)
        except errors.Conflict:
            return None
        return value

    rounds = amount(3)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for step in range(rounds):
            ends = [pool.submit(contextvars.copy_context().run, write, step, value) for value in (1, 2)]
            winners = [end.result() for end in ends if end.result() is not None]
            assert len(winners) == 1
            assert place.load(step) == winners[0]
            assert place.damages(step) == []
    assert not [name for name in place.files() if ".waystation-tmp" in name]
    for step in range(rounds):
        place.delete(step)
    require_nothing_left(place)


@pytest.mark.long
@cells("call", "run", "remote")
@pytest.mark.share(2)
def test_damage_is_told(cell: Cell, place: Place) -> None:
    place.save(1, 1)
    sizes = place.files(1)
    largest = max(sizes, key=lambda name: sizes[name])
    place.flip(largest)
    with pytest.raises(errors.WaystationError) as caught:
        place.load(1)
    assert isinstance(caught.value, errors.Corrupt), caught.value
    assert place.damages(1) != []
    place.lose(largest)
    with pytest.raises(errors.Corrupt):
        place.load(1)


@contextlib.contextmanager
def answering(place: Place, decision: str) -> Iterator[None]:
    """Within the block the store answers writes in this way."""
    assert place.bucket is not None

    def decide(number: int) -> str:
        method, _ = between.requests[number - 1]
        return decision if method in ("PUT", "POST") else s3.PASS

    with s3.proxy(place.bucket.endpoint, decide) as between:
        place.endpoint = between.endpoint
        try:
            yield
        finally:
            place.endpoint = None


def read_only(place: Place) -> contextlib.AbstractContextManager[object]:
    """Within the block nothing may be written."""
    return disks.read_only(Path(place.root)) if place.bucket is None else answering(place, s3.FORBID)


@pytest.mark.long
@cells("call", "run")
def test_who_may_only_read_is_told_and_reads(cell: Cell, place: Place) -> None:
    place.save(1, 1)
    before = place.files()
    with read_only(place):
        with pytest.raises(errors.PermissionDenied):
            place.save(2, 2)
        assert value_of(waystation.load(place.path(1))) == 1
    assert place.files() == before
    assert place.values() == {1: 1}


@cells("call", "run", storages=("s3", "gs"))
@pytest.mark.share(2)
def test_a_store_over_its_quota_is_told_and_keeps_what_it_has(cell: Cell, place: Place) -> None:
    place.save(1, 1)
    with answering(place, s3.FULL), pytest.raises(errors.DiskFull):
        place.save(2, 2)
    collect(place)
    assert place.values() == {1: 1}


@pytest.mark.parametrize(
    "cell", [cell for cell in WORKING if cell.storage == "tmpfs" and cell.tier in ("call", "run")], ids=str
)
def test_a_full_file_system_is_told_and_keeps_what_it_has(cell: Cell, tmp_path: Path) -> None:
    with disks.mounted(tmp_path / "small", "size=800k") as small:
        place = Place(cell, small / "run", tmp_path / "here", None, None)
        place.save(1, 1)
        place.save(2, 2)
        with pytest.raises(errors.DiskFull):
            place.save(3, 3)
        assert place.values() == {1: 1, 2: 2}
        assert all(place.damages(step) == [] for step in place.steps())
