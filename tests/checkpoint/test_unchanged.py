"""Saves that share data files with an earlier checkpoint: what is equal is not written, and all is right."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file
from tests.support import disks
from tests.support.long import amount, only_long

import waystation
from waystation import errors
from waystation.checkpoint.compare import compare
from waystation.checkpoint.export import export
from waystation.layouts.native import commit, names, tables
from waystation.layouts.native.read import OpenCheckpointable, open_checkpointable

BLOCK = tables.BLOCK_BYTES


@contextmanager
def telling(**options: Any) -> Iterator[list[waystation.SaveStatistics]]:
    """Options in effect, and what saves within the block tell."""
    seen: list[waystation.SaveStatistics] = []
    context = waystation.Context()
    context.array.saving.on_statistics = seen.append
    for name, value in options.items():
        group, _, option = name.partition("__")
        setattr(getattr(context, group), option, value)
    with context:
        yield seen


def random(nbytes: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 255, nbytes, dtype=np.uint8)


def frozen_and_trained(step: int) -> dict[str, Any]:
    """A frozen base of 4 MiB in arrays of many sizes, and adapters that change with every step."""
    frozen = {f"w{number}": random(90_000 * number, number) for number in range(1, 10)}
    trained = {f"w{number}": random(3000 * number, 1000 * step + number) for number in range(1, 10)}
    return {"base": frozen, "lora": trained, "step": step}


def opened(path: Path, name: str = "state") -> OpenCheckpointable:
    return open_checkpointable(str(path), commit.read_record(str(path)), name)


def data_files(path: Path, name: str = "state") -> dict[str, os.stat_result]:
    return {file.name: file.stat() for file in sorted((path / name).glob("*.safetensors"))}


def shared_files(path: Path, name: str = "state") -> list[str]:
    return [file for file, found in data_files(path, name).items() if found.st_nlink > 1]


def require_equal(found: Any, expected: Any) -> None:
    """Compares states bit by bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            require_equal(found[key], value)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    elif hasattr(expected, "dtype"):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()
    else:
        assert found == expected


def require_whole(path: Path, expected: Any) -> None:
    """A checkpoint is whole, by its checksums and by its values."""
    verified = waystation.verify(path)
    assert not verified.damages
    assert not verified.strays
    require_equal(waystation.load(path), expected)


# ---- what is shared ----------------------------------------------------------------------------


def test_a_second_save_writes_what_has_changed(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    with telling() as seen:
        waystation.save(one, frozen_and_trained(1))
        waystation.save(two, frozen_and_trained(2), unchanged_from=one)
        waystation.save(three, frozen_and_trained(3), unchanged_from=two)
    frozen, trained = (
        sum(leaf.nbytes for leaf in frozen_and_trained(1)[key].values()) for key in ("base", "lora")
    )
    assert [(each.bytes_shared, each.bytes_written < 1.1 * trained + 8192) for each in seen] == [
        (0, False),
        (frozen, True),
        (frozen, True),
    ]
    for step, path in enumerate((one, two, three), 1):
        require_whole(path, frozen_and_trained(step))
        assert shared_files(path) == ["p00000-000.safetensors"]
    assert len(data_files(three)) == 2
    waystation.delete(one)
    waystation.delete(two)
    require_whole(three, frozen_and_trained(3))
    assert shared_files(three) == []


def test_every_data_file_opens_in_safetensors(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    waystation.save(one, frozen_and_trained(1))
    waystation.save(two, frozen_and_trained(2), unchanged_from=one)
    stored = {file: load_file(two / "state" / file) for file in data_files(two)}
    state = frozen_and_trained(2)
    assert np.array_equal(stored["p00000-000.safetensors"]["base.w3"], state["base"]["w3"])
    assert np.array_equal(stored["p00000-001.safetensors"]["lora.w3"], state["lora"]["w3"])
    # The adapter of step 1 is in the first file still, so an index would have other tools load that.
    assert names.INDEX in os.listdir(one / "state")
    assert names.INDEX not in os.listdir(two / "state")
    waystation.save(tmp_path / "same", frozen_and_trained(1), unchanged_from=one)
    assert names.INDEX in os.listdir(tmp_path / "same" / "state")


def test_other_commands_see_what_is_live(tmp_path: Path) -> None:
    one, two, fresh = (tmp_path / name for name in ("one", "two", "fresh"))
    waystation.save(one, frozen_and_trained(1))
    waystation.save(two, frozen_and_trained(2), unchanged_from=one)
    waystation.save(fresh, frozen_and_trained(2))
    assert compare(two, fresh).differences == []
    differing = {difference.key_path for difference in compare(one, two).differences}
    assert differing == {f"['lora']['w{number}']" for number in range(1, 10)} | {"['step']"}
    export(two, tmp_path / "exported")
    tensors = load_file(next((tmp_path / "exported").glob("*.safetensors")))
    assert np.array_equal(tensors["lora.w5"], frozen_and_trained(2)["lora"]["w5"])
    require_equal(waystation.load(two, waystation.metadata(two)), frozen_and_trained(2))
    # Without an index, the stale tensors beside the new ones are told, not taken.
    with pytest.raises(errors.WaystationError, match=r"lora\.w"):
        waystation.safetensors.load(two / "state", framework="numpy")


def test_equal_arrays_part_from_those_that_change(tmp_path: Path) -> None:
    """A file of which less than half is frozen is not shared; but the next save shares the frozen part."""
    frozen, trained = random(400_000, 1), {step: random(600_000, step) for step in (2, 3, 4)}
    waystation.save(tmp_path / "2", {"a": frozen, "b": trained[2]})
    with telling() as seen:
        for step in (3, 4):
            state = {"a": frozen, "b": trained[step]}
            waystation.save(tmp_path / str(step), state, unchanged_from=tmp_path / str(step - 1))
            require_whole(tmp_path / str(step), state)
    assert [each.bytes_shared for each in seen] == [0, frozen.nbytes]


@pytest.mark.long
@only_long
def test_dead_weight_does_not_grow(tmp_path: Path) -> None:
    """Over many saves, each of which changes other arrays, dead bytes stay fewer than live ones."""
    values = {f"w{number:02}": random(30_000, number) for number in range(40)}
    live = sum(value.nbytes for value in values.values())
    path = tmp_path / "0"
    waystation.save(path, values)
    for step in range(1, 60):
        for number in range(step % 3):
            name = f"w{(7 * step + number) % 40:02}"
            values[name] = random(30_000, 100 * step + number)
        path, before = tmp_path / str(step), path
        waystation.save(path, values, unchanged_from=before)
        waystation.delete(before)
        files = data_files(path)
        assert sum(found.st_size for found in files.values()) < 2.1 * live + 8192 * len(files)
        assert len(files) < 25
    require_whole(path, values)


SHAPES = st.sampled_from(
    [(0,), (1,), (7, 3), (4096,), (BLOCK // 2,), (BLOCK,), (BLOCK + 5,), (3 * BLOCK,), ()]
)


@settings(max_examples=amount(2, 300))
@given(data=st.data())
def test_whatever_changes_between_saves(data: Any) -> None:
    """States whose arrays change, come, go, and get other shapes and dtypes load as they were saved. Whatever
    is deleted, the others stay whole."""
    with disks.in_memory() as root:
        _change_and_save(data, root)


def _change_and_save(data: Any, root: Path) -> None:
    seeds = iter(range(10_000))

    def array() -> np.ndarray[Any, Any]:
        shape, dtype = data.draw(SHAPES), data.draw(st.sampled_from(["u1", "<f4", "<i2"]))
        count = max(1, int(np.prod(shape)))
        return np.resize(random(min(count, 5000), next(seeds)).astype(dtype), shape)

    state = {f"a{number}": array() for number in range(data.draw(st.integers(0, 12)))}
    states = [dict(state)]
    context = waystation.Context()
    context.file.file_bytes_target = data.draw(st.sampled_from([BLOCK, 4 * BLOCK, 1 << 30]))
    context.array.saving.storage_options.chunk_bytes = data.draw(st.sampled_from([None, BLOCK // 3]))
    with context:
        waystation.save(root / "0", state)
        for step in range(1, data.draw(st.integers(2, 4))):
            for name in data.draw(
                st.sets(st.sampled_from([f"a{number}" for number in range(14)]), max_size=4)
            ):
                change = data.draw(st.sampled_from(["drop", "new", "last byte", "first byte"]))
                if change == "new" or name not in state:
                    state[name] = array()
                elif change == "drop":
                    del state[name]
                elif state[name].nbytes:
                    changed = state[name].copy()
                    changed.reshape(-1).view(np.uint8)[0 if change == "first byte" else -1] ^= 255
                    state[name] = changed
            waystation.save(root / str(step), state, unchanged_from=root / str(step - 1))
            states.append(dict(state))
    left = list(range(len(states)))
    for step in left:
        require_whole(root / str(step), states[step])
    for step in data.draw(st.permutations(left))[:-1]:
        waystation.delete(root / str(step))
        left.remove(step)
        require_whole(root / str(left[0]), states[left[0]])


def test_bytes_decide(tmp_path: Path) -> None:
    """NaNs of other bits and zeros of another sign are changes; NaNs of the same bits are none."""
    nans = np.full(100_000, np.nan, np.float32)
    payload = nans.copy()
    payload.view(np.uint32)[77_777] |= 5
    zeros, negative = np.zeros(100_000), np.zeros(100_000)
    negative[99_999] = -0.0
    state = {"nans": nans, "payload": nans, "zeros": zeros, "negative": zeros, "more": np.tile(zeros, 2)}
    waystation.save(tmp_path / "one", state)
    state |= {"payload": payload, "negative": negative}
    with telling() as seen:
        waystation.save(tmp_path / "two", state, unchanged_from=tmp_path / "one")
    require_whole(tmp_path / "two", state)
    assert seen[0].bytes_shared == nans.nbytes + 3 * zeros.nbytes


def test_other_dtypes_and_shapes_of_equal_bytes_are_written(tmp_path: Path) -> None:
    values = np.arange(200_000, dtype=np.int32)
    waystation.save(tmp_path / "one", {"a": values, "b": values, "c": values})
    state = {"a": values.view(np.uint32), "b": values.reshape(2, -1), "c": values}
    with telling() as seen:
        waystation.save(tmp_path / "two", state, unchanged_from=tmp_path / "one")
    require_whole(tmp_path / "two", state)
    assert seen[0].bytes_shared == 0  # a third of the file alone


def test_arrays_that_swap_their_names_are_written(tmp_path: Path) -> None:
    one, two = random(500_000, 1), random(500_000, 2)
    waystation.save(tmp_path / "one", {"a": one, "b": two})
    waystation.save(tmp_path / "two", {"a": two, "b": one}, unchanged_from=tmp_path / "one")
    require_whole(tmp_path / "two", {"a": two, "b": one})


def test_the_checkpoint_that_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    waystation.save(path, frozen_and_trained(1))
    for step in (2, 3):
        with telling() as seen:
            waystation.save(path, frozen_and_trained(step), overwrite=True, unchanged_from=path)
        assert seen[0].bytes_shared > 4_000_000
        require_whole(path, frozen_and_trained(step))
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


# ---- kinds of arrays ---------------------------------------------------------------------------


def test_sharded_arrays_and_chunks(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))

    def state(step: int) -> dict[str, Any]:
        frozen = jax.device_put(jnp.arange(512.0 * 1024).reshape(512, 1024), sharding)
        columns = jax.device_put(frozen, NamedSharding(mesh, PartitionSpec(None, "x")))
        return {
            "frozen": frozen,
            "columns": columns,
            "trained": jnp.full((8, 1024), float(step)),
            "half": jnp.ones(1000, jnp.bfloat16),
        }

    for chunk_bytes in (None, 100_000):
        root = tmp_path / str(chunk_bytes)
        seen: list[waystation.SaveStatistics] = []
        context = waystation.Context()
        context.array.saving.storage_options.chunk_bytes = chunk_bytes
        context.array.saving.on_statistics = seen.append
        with context:
            waystation.save(root / "1", state(1))
            waystation.save(root / "2", state(2), unchanged_from=root / "1")
        assert seen[1].bytes_shared == 2 * 512 * 1024 * 4 + 2000
        require_whole(root / "2", state(2))
        other = NamedSharding(mesh, PartitionSpec(None, "x"))
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state(2))
        abstract["frozen"] = jax.ShapeDtypeStruct((512, 1024), jnp.float32, sharding=other)
        require_equal(waystation.load(root / "2", abstract)["frozen"], state(2)["frozen"])


def test_another_cut_of_equal_arrays_is_written(tmp_path: Path) -> None:
    values = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    waystation.save(tmp_path / "one", {"a": values})
    context = waystation.Context()
    context.array.saving.storage_options.chunk_bytes = 100_000
    with context:
        waystation.save(tmp_path / "two", {"a": values}, unchanged_from=tmp_path / "one")
    require_whole(tmp_path / "two", {"a": values})
    assert shared_files(tmp_path / "two") == []
    waystation.save(tmp_path / "three", {"a": values}, unchanged_from=tmp_path / "two")
    require_whole(tmp_path / "three", {"a": values})


def test_tensors_of_torch(tmp_path: Path) -> None:
    frozen = torch.arange(1 << 19, dtype=torch.float32).reshape(512, 1024)

    def state(step: int) -> dict[str, Any]:
        return {
            "frozen": frozen,
            "transposed": frozen.t(),
            "strided": frozen[::2, ::3],
            "half": frozen.to(torch.bfloat16),
            "trained": torch.full((1000,), float(step)),
        }

    waystation.save(tmp_path / "one", state(1))
    with telling() as seen:
        waystation.save(tmp_path / "two", state(2), unchanged_from=tmp_path / "one")
    assert seen[0].bytes_written < 16_384
    require_whole(tmp_path / "two", state(2))


def test_casts_are_compared_as_they_are_stored(tmp_path: Path) -> None:
    context = waystation.Context()
    context.array.saving.storage_options.dtype = np.float16
    values = np.arange(200_000, dtype=np.float32) % 1000
    with context:
        waystation.save(tmp_path / "one", {"a": values})
        waystation.save(tmp_path / "two", {"a": values}, unchanged_from=tmp_path / "one")
    assert shared_files(tmp_path / "two") == ["p00000-000.safetensors"]
    require_whole(tmp_path / "two", {"a": values.astype(np.float16)})


def test_several_checkpointables(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"

    def checkpointables(step: int) -> dict[str, Any]:
        adapter = {"w": random(50_000, step)}
        return {"base": {"w": random(2_000_000, 7)}, "adapter": adapter, "position": {"at": step}}

    waystation.save_checkpointables(one, checkpointables(1) | {"gone": {"w": random(9, 9)}})
    waystation.save_checkpointables(
        two, checkpointables(2) | {"new": {"w": random(9, 9)}}, unchanged_from=one
    )
    assert shared_files(two, "base") == ["p00000-000.safetensors"]
    assert shared_files(two, "adapter") == []
    for name, expected in checkpointables(2).items():
        require_equal(waystation.load(two, checkpointable_name=name), expected)
    assert not waystation.verify(two).damages
    waystation.delete(two, checkpointable_name="base")
    require_equal(waystation.load(one, checkpointable_name="base"), checkpointables(1)["base"])


# ---- in the background -------------------------------------------------------------------------


@pytest.mark.parametrize("snapshot_bytes", [None, 0, 1_000_000])
def test_later_changes_do_not_reach_a_save_in_the_background(
    tmp_path: Path, snapshot_bytes: int | None
) -> None:
    waystation.save(tmp_path / "0", frozen_and_trained(0))
    for step in (1, 2, 3):
        state = frozen_and_trained(step)
        with telling(memory__snapshot_bytes=snapshot_bytes):
            before = tmp_path / str(step - 1)
            response = waystation.save_async(tmp_path / str(step), state, unchanged_from=before)
        for leaves in (state["base"], state["lora"]):
            for leaf in leaves.values():
                leaf[:] = 0
        response.result()
        require_whole(tmp_path / str(step), frozen_and_trained(step))
        assert shared_files(tmp_path / str(step)) == ["p00000-000.safetensors"]


def test_a_cancelled_save_leaves_the_earlier_one_alone(tmp_path: Path) -> None:
    waystation.save(tmp_path / "one", frozen_and_trained(1))
    response = waystation.save_async(tmp_path / "two", frozen_and_trained(2), unchanged_from=tmp_path / "one")
    response.cancel()
    response.exception()
    require_whole(tmp_path / "one", frozen_and_trained(1))
    assert {entry.name for entry in tmp_path.iterdir()} <= {"one", "two"}


def test_saves_beside_each_other_and_beside_a_deletion(tmp_path: Path) -> None:
    waystation.save(tmp_path / "base", frozen_and_trained(0))
    for round_number in range(5):
        source = tmp_path / f"source{round_number}"
        shutil.copytree(tmp_path / "base", source, copy_function=shutil.copy2)
        responses = [
            waystation.save_async(
                tmp_path / f"{round_number}-{step}", frozen_and_trained(step), unchanged_from=source
            )
            for step in (1, 2, 3)
        ]
        deleting = threading.Thread(target=waystation.delete, args=(source,))
        deleting.start()
        for step, response in enumerate(responses, 1):
            response.result()
            require_whole(tmp_path / f"{round_number}-{step}", frozen_and_trained(step))
        deleting.join()


def test_readers_of_the_earlier_checkpoint_go_on(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    waystation.save(one, frozen_and_trained(1))
    with waystation.safetensors.open(one / "state" / "p00000-000.safetensors", framework="numpy") as tensors:
        expected = {name: tensors.tensor(name) for name in tensors}
        waystation.save(two, frozen_and_trained(2), unchanged_from=one)
        assert shared_files(two) != []
        for name, values in expected.items():
            np.testing.assert_array_equal(tensors.tensor(name), values)
        waystation.delete(two)
        for name, values in expected.items():
            np.testing.assert_array_equal(tensors.tensor(name), values)


# ---- what cannot be shared ---------------------------------------------------------------------


def spoil(path: Path, offset: int, *, keep_times: bool = False) -> None:
    found = path.stat()
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    if keep_times:
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize(
    "damage",
    ["missing", "shorter", "longer", "written to", "header", "files.bin", "record.json", "checkpoint.json"],
)
def test_what_is_damaged_is_written_again(tmp_path: Path, damage: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    waystation.save(one, frozen_and_trained(1))
    file = one / "state" / "p00000-000.safetensors"
    if damage == "missing":
        file.unlink()
    elif damage == "shorter":
        os.truncate(file, file.stat().st_size - 1)
    elif damage == "longer":
        os.truncate(file, file.stat().st_size + 1)
    elif damage == "written to":
        spoil(file, 2_000_000)
    elif damage == "header":  # which is in a block that is read, whatever the times say
        spoil(file, 100, keep_times=True)
    else:
        spoil(one / damage if damage == "checkpoint.json" else one / "state" / damage, 50)
    state = frozen_and_trained(2)
    with telling() as seen:
        waystation.save(two, state, unchanged_from=one)
    assert seen[0].bytes_shared == 0
    assert seen[0].bytes_written > 4_000_000
    require_whole(two, state)
    assert shared_files(two) == []


def test_a_checkpoint_on_another_file_system(tmp_path: Path) -> None:
    with disks.mounted(tmp_path / "other", "size=20m") as other:
        waystation.save(other / "one", frozen_and_trained(1))
        waystation.save(tmp_path / "two", frozen_and_trained(2), unchanged_from=other / "one")
    require_whole(tmp_path / "two", frozen_and_trained(2))


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    state = frozen_and_trained(1)
    for save in (waystation.save, waystation.save_async):
        with pytest.raises(errors.CheckpointNotFound):
            save(tmp_path / "two", state, unchanged_from=tmp_path / "one")
    assert list(tmp_path.iterdir()) == []
    context = waystation.Context()
    context.array.saving.use_ocdbt = True
    with context:
        waystation.save(tmp_path / "orbax", {"a": np.ones(3)})
        with pytest.raises(errors.Unsupported, match="unchanged_from"):
            waystation.save(tmp_path / "two", state, unchanged_from=tmp_path / "orbax")
    with pytest.raises(errors.Unsupported, match="Orbax's layout"):
        waystation.save(tmp_path / "two", state, unchanged_from=tmp_path / "orbax")
    with pytest.raises(errors.WrongType):
        waystation.save(tmp_path / "two", state, unchanged_from=7)  # type: ignore[arg-type]
    assert [entry.name for entry in tmp_path.iterdir()] == ["orbax"]
