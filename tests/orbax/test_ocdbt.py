"""OCDBT databases that TensorStore wrote, read without it; and such as nobody would write."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import tensorstore
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.long import amount

from waystation import _native
from waystation.errors import Corrupt, Unsupported, WaystationError
from waystation.layouts.orbax.ocdbt import OcdbtValues

_numbers = itertools.count()
_function_scoped = settings(
    max_examples=amount(40), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
keys = st.text(st.sampled_from("ab/.é"), min_size=1, max_size=6)
large_values = st.builds(lambda part, count: part * count, st.binary(min_size=2, max_size=6), st.just(1000))
values = st.one_of(st.binary(max_size=40), large_values)  # those of 1,024 bytes or less stand in nodes


def write(directory: Path, commits: list[dict[str, bytes]], **config: Any) -> None:
    """Writes a database, in as many commits; without values, a key is removed."""
    specification: dict[str, Any] = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{directory}/"},
        "config": {"max_inline_value_bytes": 1024, **config},
    }
    for commit in commits:
        store = tensorstore.KvStore.open(specification).result()
        with tensorstore.Transaction() as transaction:
            for key, value in commit.items():
                store.with_transaction(transaction)[key] = value


@_function_scoped
@given(
    commits=st.lists(st.dictionaries(keys, values, min_size=1, max_size=30), min_size=1, max_size=3),
    node_bytes=st.sampled_from([100, 1000, 100_000_000]),
    compression=st.sampled_from([None, {"id": "zstd"}]),
    asked=st.sets(keys, max_size=5),
)
def test_any_database(
    tmp_path: Path,
    commits: list[dict[str, bytes]],
    node_bytes: int,
    compression: dict[str, Any] | None,
    asked: set[str],
) -> None:
    directory = tmp_path / str(next(_numbers))
    write(directory, commits, max_decoded_node_bytes=node_bytes, compression=compression)
    expected = {key: value for commit in commits for key, value in commit.items()}
    wanted = [*expected, *asked]
    database = OcdbtValues(str(directory))
    assert database.read(wanted) == [expected.get(key) for key in wanted]
    for key, found in zip(wanted, database.find(wanted), strict=True):
        if found is None:
            assert key not in expected
        elif found.content is not None:
            assert found.content == expected[key]
        else:
            content = Path(found.path).read_bytes()
            assert content[found.offset : found.offset + found.nbytes] == expected[key]
            assert len(content) == found.file_bytes
    shutil.rmtree(directory)


def test_thousands_of_keys_in_a_tree_of_many_nodes(tmp_path: Path) -> None:
    expected = {f"layers.{number:05}/zarr.json": f"{number}".encode() for number in range(5000)}
    write(tmp_path, [expected], max_decoded_node_bytes=2000)
    database = OcdbtValues(str(tmp_path))
    wanted = ["layers.04321/zarr.json", "absent", "layers.00000/zarr.json", "zzz", ""]
    assert database.read(wanted) == [b"4321", None, b"0", None, None]
    assert database.read(list(expected)) == list(expected.values())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("database")
    content = {f"key {number}": bytes([number]) * 300 * number for number in range(20)}
    write(directory, [content], max_decoded_node_bytes=500)
    return directory


@settings(max_examples=amount(50, 3000), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_of_nodes_is_found(saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    """A bit that flips, or a file that is cut: an error, or it was in a value."""
    directory = shutil.copytree(saved, tmp_path / str(next(_numbers)))
    expected = OcdbtValues(str(saved)).read([f"key {number}" for number in range(20)])
    file = data.draw(st.sampled_from(sorted(path for path in directory.rglob("*") if path.is_file())))
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    file.write_bytes(content)
    with contextlib.suppress(Corrupt, Unsupported):
        found = OcdbtValues(str(directory)).read([f"key {number}" for number in range(20)])
        assert [value and len(value) for value in found] == [value and len(value) for value in expected]
    shutil.rmtree(directory)


@pytest.mark.parametrize("compression", [None, {"id": "zstd"}], ids=["as it is", "zstd"])
@pytest.mark.share(2)
def test_every_bit_of_the_manifest_and_of_nodes_is_under_a_checksum(
    tmp_path: Path, compression: dict[str, Any] | None
) -> None:
    content = {f"key {number}": bytes([number]) * 90 for number in range(20)}
    write(tmp_path, [content], max_decoded_node_bytes=500, compression=compression)
    database = OcdbtValues(str(tmp_path))
    assert database.read(list(content)) == list(content.values())
    extents = [(extent.file.path, extent.offset, extent.nbytes) for extent, _, _ in database._nodes]
    assert len(extents) > 3
    extents.append(("manifest.ocdbt", 0, (tmp_path / "manifest.ocdbt").stat().st_size))
    for name, offset, nbytes in extents:
        whole = (tmp_path / name).read_bytes()
        for at in range(offset, offset + nbytes):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << at % 8
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(Corrupt):
                OcdbtValues(str(tmp_path)).read(list(content))
        (tmp_path / name).write_bytes(whole)


# ---- databases with right checksums and wrong content ------------------------------------------


def framed(magic: int, body: bytes) -> bytes:
    head = magic.to_bytes(4, "big") + (4 + 8 + 2 + len(body) + 4).to_bytes(8, "little") + b"\0\0"
    return head + body + _native.crc32c(head + body).to_bytes(4, "little")


def manifest(file: bytes, height: int, offset: int, nbytes: int, base: int = 0) -> bytes:
    """Of one version, whose root is a part of a file; all numbers below 128."""
    config = bytes(16) + bytes([0, 100, 100, 4, 0])
    table = bytes([1, len(file), base]) + file
    version = bytes([1, 1, height, 0, offset, nbytes, 1, 1, 1]) + bytes(8) + b"\0"
    return framed(0x0CDB3A2A, config + table + version)


def put(directory: Path, manifest_bytes: bytes, node: bytes) -> OcdbtValues:
    (directory / "d").mkdir(exist_ok=True)
    (directory / "manifest.ocdbt").write_bytes(manifest_bytes)
    (directory / "d" / "n").write_bytes(node)
    return OcdbtValues(str(directory))


def interior(height: int, file: bytes, nbytes: int) -> bytes:
    """A node with one child at the start of a file."""
    table = bytes([1, len(file), 0]) + file
    entry = bytes([1, 1, 0]) + b"a" + bytes([0, 0, nbytes, 1, 1, 1])
    return framed(0x0CDB20DE, bytes([height]) + table + entry)


def test_a_node_that_refers_to_itself_ends(tmp_path: Path) -> None:
    node = interior(3, b"d/n", 40)
    node = interior(3, b"d/n", len(node))
    database = put(tmp_path, manifest(b"d/n", 3, 0, len(node)), node)
    with pytest.raises(Corrupt, match=r"height"):
        database.read(["a"])


@pytest.mark.parametrize("file", [b"../n", b"/etc/passwd", b"d/../../n", b"d//n", b"d/\0", b"\xff"])
def test_files_outside_are_not_read(tmp_path: Path, file: bytes) -> None:
    with pytest.raises(Corrupt):
        put(tmp_path, manifest(file, 0, 0, 10), b"")


@pytest.mark.parametrize("nbytes", [0, 1, 17, 127])
def test_a_root_that_is_not_there(tmp_path: Path, nbytes: int) -> None:
    database = put(tmp_path, manifest(b"d/n", 0, 100, nbytes), b"")
    if nbytes == 0:  # an empty database
        assert database.read(["a"]) == [None]
        return
    with pytest.raises(Corrupt):
        database.read(["a"])


@settings(max_examples=amount(100, 6000), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=60), node=st.binary(max_size=60))
def test_any_content_with_right_checksums(tmp_path: Path, body: bytes, node: bytes) -> None:
    framed_node = framed(0x0CDB20DE, node)
    with contextlib.suppress(WaystationError):
        put(tmp_path, framed(0x0CDB3A2A, body), framed_node).read(["a", "b"])
    with contextlib.suppress(WaystationError):
        put(tmp_path, manifest(b"d/n", node[0] if node else 0, 0, len(framed_node)), framed_node).find(["a"])
