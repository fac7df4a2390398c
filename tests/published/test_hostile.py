"""Files that lie: each is refused by one error that names the file, before anything that it asks for.

The corpus is what loaders of the field were found to accept or to fall over: lengths that lie, overlaps,
holes, bytes that two readers would understand differently. Where the package `safetensors` accepts a file of
it, that is said; nothing that it refuses is accepted here.
"""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import example, given
from hypothesis import strategies as st
from tests.published.models import entry, raw_file

import waystation.safetensors
from waystation import errors

U8 = entry("U8", [4], 0, 4)
ENTRY = json.dumps(U8)


def described(tensors: dict[str, Any], data_bytes: int) -> bytes:
    return raw_file(json.dumps(tensors), data_bytes)


def with_entry(data_bytes: int = 4, **fields: Any) -> bytes:
    return described({"w": U8 | fields}, data_bytes)


# The content, and whether the package accepts it.
CORPUS: dict[str, tuple[bytes, bool]] = {
    "no byte": (b"", False),
    "half a length": (b"\x02\0\0", False),
    "a length of nothing": (bytes(8), False),
    "a length beyond the file": ((100).to_bytes(8, "little") + b"{}", False),
    "a length beyond the format": ((1 << 40).to_bytes(8, "little") + b"{}", False),
    "the greatest length": (b"\xff" * 8 + b"{}", False),
    "a length that ends inside": ((1).to_bytes(8, "little") + b"{}", False),
    "no JSON": (raw_file("weights"), False),
    "no UTF-8": (raw_file(b"\xff\xfe"), False),
    "a list": (raw_file("[]"), False),
    "a number": (raw_file("3"), False),
    "two objects": (raw_file("{}{}"), False),
    "no end": (raw_file('{"w":'), False),
    "200,000 open lists": (raw_file("[" * 200_000), False),
    "200,000 open objects": (raw_file('{"w":' * 200_000), False),
    "bytes appended": (with_entry(5), False),
    "data cut off": (with_entry(3), False),
    "a zip appended": (with_entry(4) + b"PK\x03\x04", False),
    "a hole": (with_entry(8, data_offsets=[4, 8]), False),
    "an end before the begin": (with_entry(4, data_offsets=[4, 0]), False),
    "offsets of 2**64": (with_entry(4, data_offsets=[0, 1 << 64]), False),
    "a negative offset": (with_entry(4, data_offsets=[-4, 0]), False),
    "fractions as offsets": (with_entry(4, data_offsets=[0.0, 4.0]), False),
    "three offsets": (with_entry(4, data_offsets=[0, 4, 4]), False),
    "one offset": (with_entry(4, data_offsets=[4]), False),
    "no offsets": (described({"w": {"dtype": "U8", "shape": [4]}}, 4), False),
    "a shape of another size": (with_entry(4, shape=[5]), False),
    "a shape that overflows": (with_entry(4, shape=[1 << 32, 1 << 32]), False),
    "a shape whose bits overflow": (with_entry(4, dtype="F64", shape=[1 << 61]), False),
    "a negative extent": (with_entry(4, shape=[-4]), False),
    "a shape that is a number": (with_entry(4, shape=4), False),
    "half a byte": (described({"w": entry("F4", [3], 0, 2)}, 2), False),
    "an unknown dtype": (with_entry(4, dtype="F128"), False),
    "a dtype in lower case": (with_entry(4, dtype="u8"), False),
    "an entry that is null": (described({"w": None}, 0), False),
    "an unknown field": (with_entry(4, codec="zstd"), True),
    "a field twice": (raw_file(f'{{"w":{{"dtype":"I8",{ENTRY[1:]}}}', 4), False),
    "a name twice": (raw_file(f'{{"w":{ENTRY},"w":{ENTRY}}}', 4), True),
    "a name twice in two spellings": (raw_file(f'{{"w":{ENTRY},"\\u0077":{ENTRY}}}', 4), True),
    "a NUL in a name": (raw_file(f'{{"w\\u0000":{ENTRY}}}', 4), True),
    "half a character": (raw_file(f'{{"\\ud800":{ENTRY}}}', 4), False),
    "metadata of numbers": (raw_file('{"__metadata__":{"k":1}}'), False),
    "metadata of objects": (raw_file('{"__metadata__":{"k":{}}}'), False),
    "metadata twice": (raw_file('{"__metadata__":{},"__metadata__":{}}'), False),
    "two tensors over each other": (described({"v": U8, "w": entry("U8", [4], 2, 6)}, 6), False),
    "two tensors in one place": (described({"v": U8, "w": U8}, 4), False),
    "an overlap bomb": (described({str(number): U8 for number in range(10_000)}, 4), False),
}


def oracle_accepts(path: Path) -> bool:
    try:
        with safetensors.safe_open(path, "np"):
            return True
    except (safetensors.SafetensorError, OSError):
        return False


@pytest.mark.parametrize("case", CORPUS)
def test_the_corpus_is_refused(tmp_path: Path, case: str) -> None:
    content, is_accepted = CORPUS[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert oracle_accepts(path) is is_accepted
    with pytest.raises(errors.Corrupt) as caught:
        waystation.safetensors.open(path)
    assert caught.value.context["path"] == str(path)
    with pytest.raises(errors.Corrupt):
        waystation.safetensors.load(tmp_path, framework="numpy")


NAMED = ["data cut off", "a shape of another size", "an unknown dtype", "an unknown field", "a hole"]


@pytest.mark.parametrize("case", [case for case in NAMED if case != "data cut off"])
def test_the_error_names_the_tensor(tmp_path: Path, case: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(CORPUS[case][0])
    with pytest.raises(errors.Corrupt, match="tensor: w") as caught:
        waystation.safetensors.open(path)
    assert caught.value.context["tensor"] == "w"


def test_names_with_separators_are_names(tmp_path: Path) -> None:
    """They are never made into paths of files."""
    names = ["", ".", "a/b", "../../etc/passwd", "a\\b", "a\nb", "a.b", "é", "\U0001f600"]
    tensors = {name: entry("U8", [1], place, place + 1) for place, name in enumerate(names)}
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw_file(json.dumps(tensors)) + bytes(range(len(names))))
    loaded = waystation.safetensors.load(path, framework="numpy")
    assert {name: array.tolist() for name, array in loaded.items()} == {
        name: [place] for place, name in enumerate(names)
    }


def test_nothing_is_allocated_for_what_a_header_claims(tmp_path: Path) -> None:
    """A file of a few bytes that claims a terabyte, under a limit that holds half a gigabyte more."""
    path = tmp_path / "model.safetensors"
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for content in (
        (99_999_999).to_bytes(8, "little") + b"{}",
        with_entry(4, shape=[1 << 40], data_offsets=[0, 1 << 40]),
        with_entry(4, shape=[1 << 40, 0], data_offsets=[0, 0]),
    ):
        path.write_bytes(content)
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), limits[1]))
        try:
            with pytest.raises(errors.Corrupt):
                waystation.safetensors.open(path)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)


VALID = json.dumps({"__metadata__": {"k": "v"}, "v": entry("F16", [2, 1], 0, 4), "w": entry("U8", [3], 4, 7)})


@given(
    place=st.integers(0, len(VALID) + 7 + 8),
    length=st.integers(0, 12),
    inserted=st.binary(max_size=12) | st.sampled_from([b'"', b"{", b"}", b",", b"0", b"\\u0000", b"1e3"]),
)
@example(place=0, length=0, inserted=b"")
def test_changed_files_are_refused_or_what_the_package_reads(
    tmp_path_factory: pytest.TempPathFactory, place: int, length: int, inserted: bytes
) -> None:
    """Whatever is accepted, the package accepts, and reads the same."""
    content = raw_file(VALID) + bytes(range(7))
    content = content[:place] + inserted + content[place + length :]
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(content)
    try:
        loaded = waystation.safetensors.load(path, framework="numpy")
    except errors.Corrupt:
        return
    with safetensors.safe_open(path, "np") as oracle:
        assert set(oracle.keys()) == loaded.keys()
        for name, array in loaded.items():
            theirs = oracle.get_tensor(name)
            assert (array.shape, array.dtype, array.tobytes()) == (
                theirs.shape,
                theirs.dtype,
                theirs.tobytes(),
            )
