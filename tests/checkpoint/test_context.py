"""Options: two names of one thing, checks, what is in effect where, and what cannot be honoured."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import waystation
from waystation import errors
from waystation._options import MemoryOptions, StorageOptions
from waystation._options.in_effect import current_options


def test_both_names_of_an_option_are_one_value() -> None:
    context = waystation.Context()
    storage = context.array.saving.storage_options
    storage.chunk_byte_size, storage.shard_axes = 16, (1,)
    assert (storage.chunk_bytes, storage.chunk_axes) == (16, (1,))
    storage.chunk_bytes = storage.chunk_axes = None
    assert (storage.chunk_byte_size, storage.shard_axes) == (None, None)

    loading = context.array.loading
    loading.use_load_and_broadcast = True
    loading.load_and_broadcast_options.replica_axis_index = 1
    loading.broadcast_concurrent_bytes = 5
    assert (loading.load_and_broadcast, loading.replica_axis) == (True, 1)
    assert loading.load_and_broadcast_options.broadcast_memory_limit_bytes == 5

    context.memory.deepcopy_host_arrays = False
    assert context.memory.caller_keeps
    context.memory.caller_keeps = False
    assert context.memory.deepcopy_host_arrays


def test_constructors_take_both_names() -> None:
    assert StorageOptions(chunk_byte_size=5, shard_axes=(0,)) == StorageOptions(
        chunk_bytes=5, chunk_axes=(0,)
    )
    assert MemoryOptions(deepcopy_host_arrays=False).caller_keeps
    assert MemoryOptions(caller_keeps=True).caller_keeps


def test_a_wrong_value_is_refused_by_either_name() -> None:
    storage = waystation.StorageOptions()
    for name in ("chunk_bytes", "chunk_byte_size"):
        with pytest.raises(errors.InvalidInput, match="positive integer"):
            setattr(storage, name, -1)
    with pytest.raises(errors.InvalidInput, match=r"deepcopy_host_arrays|True or False"):
        waystation.Context().memory.deepcopy_host_arrays = "no"  # type: ignore[assignment]


def test_the_groups_have_the_older_names_too() -> None:
    context = waystation.Context()
    assert context.array_options is context.array
    assert context.memory_options is context.memory
    assert context.async_options is context.asynchronous
    assert context.pytree_options is context.pytree


def test_a_dtype_is_kept_by_its_name_whatever_stood_for_it() -> None:
    storage = waystation.StorageOptions(dtype=np.float32)
    assert storage.dtype == "float32"
    storage.dtype = ml_dtypes.bfloat16
    assert storage.dtype == "bfloat16"
    with pytest.raises(errors.InvalidInput, match="dtype"):
        storage.dtype = object()


def test_groups_given_to_the_constructor_are_copied() -> None:
    memory = MemoryOptions(snapshot_bytes=7)
    context = waystation.Context(memory_options=memory, checkpoint_layout="auto")
    memory.snapshot_bytes = 8
    assert context.memory.snapshot_bytes == 7
    assert context.checkpoint_layout.value == "auto"
    assert waystation.Context(context).memory.snapshot_bytes == 7


def test_a_group_can_only_be_replaced_by_one_of_its_kind() -> None:
    saving = waystation.Context().array.saving
    saving.storage_options = StorageOptions(chunk_bytes=3)
    with pytest.raises(errors.InvalidInput, match="of the type StorageOptions"):
        saving.storage_options = MemoryOptions()  # type: ignore[assignment]


def test_a_context_in_use_refuses_changes_and_takes_them_again_later() -> None:
    context = waystation.Context()
    changes: list[Callable[[], None]] = [
        lambda: setattr(context.memory, "snapshot_bytes", 1),
        lambda: setattr(context.memory, "deepcopy_host_arrays", False),
        lambda: setattr(context, "checkpoint_layout", "auto"),
    ]
    with context, context:
        pass
    with context:
        with context:
            pass
        for change in changes:
            with pytest.raises(RuntimeError, match="while its context is in use"):
                change()
        waystation.Context(context).memory.snapshot_bytes = 1
    for change in changes:
        change()
    assert context.memory.snapshot_bytes == 1


def test_contexts_nest_and_a_new_one_begins_with_the_defaults() -> None:
    outer = waystation.Context()
    outer.memory.snapshot_bytes = 1
    with outer:
        with waystation.Context():
            assert current_options().memory.snapshot_bytes is None
        inner = waystation.Context(outer)
        inner.memory.caller_keeps = True
        with inner:
            assert (current_options().memory.snapshot_bytes, current_options().memory.caller_keeps) == (
                1,
                True,
            )
        assert not current_options().memory.caller_keeps
    assert current_options().memory.snapshot_bytes is None


def test_one_context_in_two_threads_at_once() -> None:
    context = waystation.Context()
    context.memory.snapshot_bytes = 1
    inside, leave = threading.Barrier(2), threading.Event()
    seen: list[int | None] = []

    def work() -> None:
        with context:
            inside.wait(20)
            assert leave.wait(20)
            seen.append(current_options().memory.snapshot_bytes)
        seen.append(current_options().memory.snapshot_bytes)

    thread = threading.Thread(target=work)
    thread.start()
    with context:
        inside.wait(20)
    with pytest.raises(errors.ContextInUse):
        context.memory.snapshot_bytes = 2  # the other thread is in its block
    leave.set()
    thread.join()
    context.memory.snapshot_bytes = 2
    assert seen == [1, None]


UNHONOURED: dict[str, tuple[Callable[[waystation.Context], Any], str, Any]] = {
    "metadata store": (lambda context: context.array.saving, "array_metadata_store", object()),
}


@pytest.mark.parametrize("case", UNHONOURED)
def test_what_cannot_be_honoured_is_refused_at_once(case: str) -> None:
    group_of, name, value = UNHONOURED[case]
    group = group_of(waystation.Context())
    before = getattr(group, name)
    with pytest.raises(errors.Unsupported) as caught:
        setattr(group, name, value)
    assert isinstance(caught.value, NotImplementedError)
    assert getattr(group, name) is before


def test_all_bounds_on_the_memory_of_a_save_count() -> None:
    memory = MemoryOptions()
    assert memory.write_limit_bytes() is None
    memory.transfer_concurrent_bytes = 9 << 20
    assert memory.write_limit_bytes() == 9 << 20
    memory.write_concurrent_bytes = 5 << 20
    assert memory.write_limit_bytes() == 5 << 20
    memory.write_concurrent_bytes = None
    memory.regulator_options = MemoryOptions.RegulatorOptions(
        max_memory_limit_gib=4, profiler=object(), min_memory_limit_gib=2
    )
    assert memory.write_limit_bytes() == 2 << 30
    memory.expected_surge_bytes = 1 << 30
    assert memory.write_limit_bytes() == 1 << 30
    memory.expected_surge_bytes = 1 << 40
    assert memory.write_limit_bytes() == 1 << 20


def test_the_text_of_a_context_shows_what_differs_from_the_defaults() -> None:
    context = waystation.Context()
    assert repr(context) == "<Context: the defaults>"
    context.array.loading.mmap = True
    context.array.saving.use_ocdbt = True
    assert repr(context) == "<Context: array.loading.mmap=True, array.saving.use_ocdbt=True>"
    with context:
        assert repr(context).endswith("array.saving.use_ocdbt=True; in use>")


@pytest.mark.parametrize("given", [{}, waystation.Context, "native"])
def test_what_is_no_context_is_refused(given: Any) -> None:
    with pytest.raises(errors.WrongType, match=r"a context must be a waystation\.Context or None, not "):
        waystation.Context(given)
