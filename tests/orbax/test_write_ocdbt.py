"""Databases that we make without TensorStore are what TensorStore takes them for."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import tensorstore
from hypothesis import given
from hypothesis import strategies as st

from waystation.layouts.orbax import write_ocdbt
from waystation.layouts.orbax.write_ocdbt import DataFile, Reference


def open_database(directory: Path) -> tensorstore.KvStore:
    """The database in a directory, by TensorStore."""
    base = f"file://{directory}/"
    return tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()


def write(directory: Path, values: dict[bytes, bytes], inline: set[bytes], node_bytes: int) -> None:
    """Writes a database whose larger values are in the files of two processes."""
    files = [write_ocdbt.new_data_file(f"ocdbt.process_{process}/") for process in range(2)]
    contents = [bytearray(b"padding"), bytearray()]
    entries: dict[bytes, write_ocdbt.Value] = {}
    for number, (key, value) in enumerate(values.items()):
        entries[key] = value
        if key not in inline:
            entries[key] = Reference(files[number % 2], len(contents[number % 2]), len(value))
            contents[number % 2] += value
    node_file = write_ocdbt.new_data_file()
    database = write_ocdbt.encode(entries, node_file, 10**18, node_bytes=node_bytes)
    (directory / "manifest.ocdbt").write_bytes(database.manifest)
    for file, content in zip([*files, node_file], [*contents, database.nodes], strict=True):
        path = directory / "".join(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@given(
    values=st.dictionaries(st.binary(max_size=40), st.binary(max_size=200), min_size=1, max_size=60),
    node_bytes=st.sampled_from([40, 200, 1 << 20]),
    data=st.data(),
)
def test_tensorstore_reads_every_value(
    values: dict[bytes, bytes], node_bytes: int, data: st.DataObject
) -> None:
    inline = data.draw(st.sets(st.sampled_from(sorted(values))))
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory), values, inline, node_bytes)
        store = open_database(Path(directory))
        assert sorted(store.list().result()) == sorted(values)
        read = {key: store.read(key).result().value for key in values}
    assert read == values


def test_many_keys_make_a_tree_of_several_levels(tmp_path: Path) -> None:
    values = {f"layer.{number:05}/c/0".encode(): str(number).encode() for number in range(3000)}
    write(tmp_path, values, set(), node_bytes=600)
    base = tensorstore.KvStore.open(f"file://{tmp_path}/").result()
    manifest = tensorstore.ocdbt.dump(base).result()
    (version,) = manifest["versions"]
    assert version["root_height"] >= 2
    assert version["root"]["statistics"]["num_keys"] == len(values)
    store = open_database(tmp_path)
    assert store.read(b"layer.02999/c/0").result().value == b"2999"
    assert store.read(b"layer.03000/c/0").result().state == "missing"
    # What is listed under a prefix is found through the levels, too.
    found = store.list(tensorstore.KvStore.KeyRange(b"layer.001", b"layer.002")).result()
    assert len(found) == 100


@pytest.mark.parametrize("damaged", [20, -1])
def test_damage_is_seen(tmp_path: Path, damaged: int) -> None:
    write(tmp_path, {b"a": b"b"}, {b"a"}, node_bytes=100)
    manifest = bytearray((tmp_path / "manifest.ocdbt").read_bytes())
    manifest[damaged] ^= 1
    (tmp_path / "manifest.ocdbt").write_bytes(manifest)
    with pytest.raises(ValueError, match="manifest"):
        open_database(tmp_path).read(b"a").result()


def test_data_files_of_one_directory_share_its_path() -> None:
    files = [DataFile("ocdbt.process_0/", f"d/{number:032x}") for number in range(100)]
    entries = {b"%03d" % number: Reference(file, 0, 1) for number, file in enumerate(files)}
    alone = write_ocdbt.encode({b"000": entries[b"000"]}, write_ocdbt.new_data_file(), 0)
    together = write_ocdbt.encode(dict(entries), write_ocdbt.new_data_file(), 0)
    assert len(together.nodes) < len(alone.nodes) + 100 * 12
