"""What Waystation writes in Orbax's layouts is vouched for: damage anywhere is refused, or changes nothing.

`make test` flips 15 random bits in each layout, `make test-long` 2,000.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.orbax import oracle, writing
from tests.support.long import amount

import waystation
from waystation.checkpoint import verify
from waystation.errors import Corrupt, Unsupported, WaystationError

FLIPS = amount(15, 2000)
RANDOM = np.random.default_rng(5)
STATE = {
    "w": jnp.arange(600.0, dtype=jnp.float32).reshape(20, 30),
    "large": RANDOM.standard_normal((3, 120_000)).astype(np.float32),
    "zeros": np.zeros((64, 64), np.int8),
    "b": np.arange(5),
    "text": "words",
    "key": jax.random.key(1),
    "step": 4,
}
OTHER = {"lines": ["a", "b"], "number": 7}
CUSTOM = {"loss": 0.25}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ocdbt": {"use_ocdbt": True},
    "ocdbt as it is": {"use_ocdbt": True, "use_compression": False},
    "ocdbt of zarr 2": {"use_ocdbt": True, "use_zarr3": False},
    "zarr 3": {"use_ocdbt": False},
    "zarr 3 as it is": {"use_ocdbt": False, "use_compression": False},
    "zarr 2": {"use_ocdbt": False, "use_zarr3": False},
    "zarr 2 as it is": {"use_ocdbt": False, "use_zarr3": False, "use_compression": False},
}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What Waystation has logged. Threads of genuine Orbax may log what became of earlier tests."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("waystation")]


def save(path: Path, layout: dict[str, Any]) -> Path:
    with writing.layout_of(layout, 500_000):
        waystation.save_checkpointables(path, {"state": STATE, "other": OTHER}, custom_metadata=CUSTOM)
    return path


@pytest.fixture(scope="module", params=LAYOUTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved") / "c", LAYOUTS[request.param])


@pytest.fixture(params=LAYOUTS)
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint that the test may change."""
    return save(tmp_path / "c", LAYOUTS[request.param])


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def contents_of(path: Path) -> tuple[Any, Any]:
    """Everything that programs get of a checkpoint."""
    loaded = waystation.load_checkpointables(path)
    return loaded, waystation.checkpointables_metadata(path).custom_metadata


def assert_intact(path: Path) -> None:
    loaded, custom = contents_of(path)
    oracle.assert_same(loaded["state"], STATE)
    assert (loaded["other"], custom) == (OTHER, CUSTOM)


def assert_refused_or_intact(path: Path, fault: object) -> bool:
    """Whether the fault was refused."""
    try:
        loaded, custom = contents_of(path)
    except WaystationError:
        return True
    try:
        oracle.assert_same(loaded["state"], STATE)
        assert (loaded["other"], custom) == (OTHER, CUSTOM)
    except AssertionError as error:
        raise AssertionError(f"{fault} was not refused") from error
    return False


def with_fault(file: Path, content: bytes, check: Callable[[], bool]) -> bool:
    """What `check` says while a file has other content."""
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        return check()
    finally:
        file.write_bytes(before)


def flips(path: Path) -> Iterator[tuple[Path, int, int]]:
    """In each file bits at its ends, at the edges of pages and blocks and in the middle; then anywhere."""
    generator = np.random.default_rng(11)
    files = [file for file in files_of(path) if file.stat().st_size]
    for file in files:
        nbytes = file.stat().st_size
        places = {0, 8, nbytes // 2, 4096, (256 << 10) - 1, 256 << 10, nbytes - 8, nbytes - 1}
        for at in sorted(place for place in places if 0 <= place < nbytes):
            yield file, at, int(generator.integers(8))
    for _ in range(FLIPS):
        file = files[int(generator.integers(len(files)))]
        yield file, int(generator.integers(file.stat().st_size)), int(generator.integers(8))


@pytest.mark.share(8)
def test_a_flipped_bit_is_refused_or_changes_nothing(saved: Path) -> None:
    refused = total = 0
    for file, at, bit in flips(saved):
        content = bytearray(file.read_bytes())
        content[at] ^= 1 << bit
        fault = (file.relative_to(saved), at, bit)
        total += 1
        refused += with_fault(file, content, lambda fault=fault: assert_refused_or_intact(saved, fault))
    assert refused > total // 2
    assert_intact(saved)


@pytest.mark.share(8)
def test_a_file_of_another_length_is_refused_or_changes_nothing(saved: Path) -> None:
    for file in files_of(saved):
        content = file.read_bytes()
        others = {content[:0], content[: len(content) // 2], content[:-1], content + b"\0", content * 2}
        for other in others - {content}:
            fault = (file.relative_to(saved), len(content), len(other))
            with_fault(file, other, lambda fault=fault: assert_refused_or_intact(saved, fault))
    assert_intact(saved)


def test_a_file_that_is_gone_is_refused_or_changes_nothing(saved: Path) -> None:
    for file in files_of(saved):
        hidden = file.rename(saved.parent / "hidden")
        try:
            assert_refused_or_intact(saved, file.relative_to(saved))
        finally:
            hidden.rename(file)
    assert_intact(saved)


@pytest.mark.share(4)
def test_verify_names_every_damaged_file(saved: Path) -> None:
    intact = verify(saved)
    assert (intact.damages, intact.strays) == ([], [])
    # All but the file of checksums itself and what deletions may change.
    assert intact.files == len(files_of(saved)) - 2
    for file in files_of(saved):
        content = bytearray(file.read_bytes() or b"\0")
        content[len(content) // 2] ^= 16

        def check(file: Path = file) -> bool:
            return str(file) in [damage.path for damage in verify(saved).damages]

        assert with_fault(file, content, check), file


def test_verify_names_the_arrays_of_a_damaged_block(saved: Path) -> None:
    file = max(files_of(saved), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1

    def check() -> bool:
        (damage,) = verify(saved).damages
        assert damage.path == str(file)
        assert "large" in damage.arrays
        with pytest.raises(Corrupt, match="checksum") as caught:
            waystation.load(saved)
        assert "large" in str(caught.value.context["array"])
        return True

    assert with_fault(file, content, check)


def test_files_that_change_places_are_refused(own: Path) -> None:
    by_length: dict[int, list[Path]] = {}
    for file in files_of(own / "state"):
        by_length.setdefault(file.stat().st_size, []).append(file)
    pairs = [files[:2] for files in by_length.values() if len(files) > 1]
    for one, other in pairs:
        if one.read_bytes() == other.read_bytes():
            continue
        one.rename(own.parent / "between")
        other.rename(one)
        (own.parent / "between").rename(other)
        with pytest.raises(Corrupt):
            waystation.load(own)
        return


def test_a_part_of_an_array_is_verified(own: Path) -> None:
    mesh = jax.make_mesh((3,), ("x",), devices=jax.devices()[:3])
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    abstract = {"large": jax.ShapeDtypeStruct((3, 120_000), np.float32, sharding=sharding)}
    context = waystation.Context()
    context.pytree.loading.partial_load = True
    with context:
        loaded = waystation.load(own, abstract)
    assert np.array_equal(np.asarray(loaded["large"]), STATE["large"])
    file = max(files_of(own), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-100_000] ^= 1
    file.write_bytes(content)
    with context, pytest.raises(Corrupt):
        waystation.load(own, abstract)


# ---- what is not damage ------------------------------------------------------------------------


def test_what_is_asked_for_is_honoured(own: Path) -> None:
    context = waystation.Context()
    for wanted in (True, False, None):
        context.array.loading.verify = wanted
        with context:
            oracle.assert_same(waystation.load(own), STATE)


def test_a_checkpoint_that_has_lost_the_file_is_loaded_with_a_warning(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost = own / ".waystation-checksums"
    lost.unlink()
    assert [damage.path for damage in verify(own).damages] == [str(lost)]
    with caplog.at_level("WARNING", "waystation"):
        assert_intact(own)
    assert f"'{own}' has lost its file .waystation-checksums" in caplog.text
    context = waystation.Context()
    context.array.loading.verify = True
    with context, pytest.raises(Corrupt, match="missing"):
        waystation.load(own)
    caplog.clear()
    context.array.loading.verify = False
    with context:
        assert_intact(own)
    assert not told(caplog)


def test_steps_that_have_lost_the_file_are_listed_and_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = waystation.Context()
    context.array.saving.use_ocdbt = False
    with context, waystation.training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": np.ones(3)}, metrics={"loss": 0.5})
    (tmp_path / "1" / ".waystation-checksums").unlink()
    with waystation.training.Checkpointer(tmp_path) as checkpointer:
        assert [found.metrics for found in checkpointer.checkpoints] == [{"loss": 0.5}]
        assert not told(caplog)  # a listing reads no data
        assert checkpointer.load()["x"].tolist() == [1, 1, 1]
    assert "has lost its file" in caplog.text


def test_what_orbax_writes_in_its_place_never_had_the_file(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with oracle.context():
        oracle.v1.save(own, STATE, overwrite=True)
    oracle.assert_same(waystation.load(own), STATE)
    assert not told(caplog)
    with pytest.raises(Unsupported, match="no checksums"):
        verify(own)


@pytest.mark.parametrize("by_orbax", [False, True])
def test_a_deleted_checkpointable_leaves_the_others_loadable(own: Path, *, by_orbax: bool) -> None:
    if by_orbax:
        oracle.v1.delete(own, checkpointable_name="other")
    else:
        waystation.delete(own, checkpointable_name="other")
    assert json.loads((own / "_CHECKPOINT_METADATA").read_bytes())["item_handlers"].keys() == {"state"}
    oracle.assert_same(waystation.load(own), STATE)
    found = verify(own)
    assert (found.damages, found.strays) == ([], [])


def test_a_directory_that_somebody_removed_is_damage_of_that_checkpointable(own: Path) -> None:
    shutil.rmtree(own / "other")
    oracle.assert_same(waystation.load(own), STATE)
    assert [damage.path for damage in verify(own).damages] == [str(own / "other")]


def test_a_checkpointable_that_is_loaded_by_its_own_path_is_verified(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = own / "state"
    oracle.assert_same(waystation.load(part), STATE)
    file = max(files_of(part), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    with pytest.raises(Corrupt, match="checksum"):
        with_fault(file, bytes(content), lambda: waystation.load(part))
    with pytest.raises(Unsupported, match=f"verify '{own}'"):
        verify(part)
    shutil.copytree(part, own.parent / "copy")
    oracle.assert_same(waystation.load(own.parent / "copy"), STATE)
    assert not told(caplog)
    (own / ".waystation-checksums").unlink()
    oracle.assert_same(waystation.load(part), STATE)
    assert f"'{own}' has lost its file" in caplog.text


def test_what_came_later_is_not_its_own(own: Path) -> None:
    oracle.save(own.parent / "others", {"x": np.arange(3)})
    shutil.copytree(own.parent / "others" / "state", own / "added")
    (own / "state" / "notes").write_text("mine")
    assert_same = oracle.assert_same
    assert_same(waystation.load_checkpointables(own)["added"], {"x": np.arange(3)})
    found = verify(own)
    assert found.damages == []
    assert found.strays == [str(own / "state" / "notes"), str(own / "added")]


def test_a_tree_that_orbax_has_saved_in_the_place_of_ours_is_not_ours(own: Path) -> None:
    other = {"x": np.arange(3)}
    oracle.version0.PyTreeCheckpointer().save(own / "state", other, force=True)
    oracle.assert_same(oracle.load(own), other)
    oracle.assert_same(waystation.load(own), other)
    oracle.assert_same(waystation.load(own / "state"), other)
    assert waystation.load_checkpointables(own)["other"] == OTHER
    found = verify(own)
    assert (found.damages, found.strays) == ([], [str(own / "state")])


def test_a_checkpoint_may_move(own: Path) -> None:
    moved = own.rename(own.parent / "elsewhere")
    assert_intact(moved)
    assert verify(moved).damages == []


def test_genuine_orbax_loads_it_all_the_same(own: Path) -> None:
    oracle.assert_same(oracle.load(own), waystation.load(own))


def test_metadata_that_say_something_else_are_refused(own: Path) -> None:
    file = own / "_CHECKPOINT_METADATA"
    said = json.loads(file.read_bytes())
    for name, value in (
        ("custom_metadata", {"loss": 0.5}),
        ("item_handlers", {**said["item_handlers"], "third": "x"}),
        ("item_handlers", {**said["item_handlers"], "state": "x"}),
        ("commit_timestamp_nsecs", 1),
    ):
        file.write_text(json.dumps({**said, name: value}))
        with pytest.raises(Corrupt, match="_CHECKPOINT_METADATA"):
            waystation.load(own)
    file.write_text(json.dumps(said, indent=2))
    assert_intact(own)


def test_a_newer_version_of_the_file_is_named(own: Path) -> None:
    from waystation import _native

    file = own / ".waystation-checksums"
    line, rest = file.read_bytes().split(b"\n", 1)
    record = json.loads(line)["record"] | {"version": 2}
    file.write_bytes(_native.seal_json(json.dumps(record).encode()) + rest)
    with pytest.raises(Unsupported, match="newer release"):
        waystation.load(own)
