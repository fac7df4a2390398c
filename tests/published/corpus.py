"""Files that lie, as code: what loaders of the field were found to accept or to fall over.

Lengths that lie, overlaps, holes, bytes that two readers would understand differently. Of each file it is
said whether the package `safetensors` accepts it; and there are some that are odd, and sound.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.published.models import entry, raw_file

_U8 = entry("U8", [4], 0, 4)
_ENTRY = json.dumps(_U8)


def _with_offset(number: str) -> bytes:
    return raw_file(f'{{"w":{{"dtype":"U8","shape":[4],"data_offsets":[0,{number}]}}}}', 4)


def described(tensors: dict[str, Any], data_bytes: int) -> bytes:
    return raw_file(json.dumps(tensors), data_bytes)


def with_entry(data_bytes: int = 4, **fields: Any) -> bytes:
    return described({"w": _U8 | fields}, data_bytes)


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
    "a field twice": (raw_file(f'{{"w":{{"dtype":"I8",{_ENTRY[1:]}}}', 4), False),
    "a name twice": (raw_file(f'{{"w":{_ENTRY},"w":{_ENTRY}}}', 4), True),
    "a name twice in two spellings": (raw_file(f'{{"w":{_ENTRY},"\\u0077":{_ENTRY}}}', 4), True),
    "a NUL in a name": (raw_file(f'{{"w\\u0000":{_ENTRY}}}', 4), True),
    "half a character": (raw_file(f'{{"\\ud800":{_ENTRY}}}', 4), False),
    "metadata of numbers": (raw_file('{"__metadata__":{"k":1}}'), False),
    "metadata of objects": (raw_file('{"__metadata__":{"k":{}}}'), False),
    "metadata twice": (raw_file('{"__metadata__":{},"__metadata__":{}}'), False),
    "two tensors over each other": (described({"v": _U8, "w": entry("U8", [4], 2, 6)}, 6), False),
    "two tensors in one place": (described({"v": _U8, "w": _U8}, 4), False),
    "an overlap bomb": (described({str(number): _U8 for number in range(10_000)}, 4), False),
    # Numbers
    "an offset of 4e0": (_with_offset("4e0"), False),
    "an offset of 04": (_with_offset("04"), False),
    "an offset of +4": (_with_offset("+4"), False),
    "an offset of 0x4": (_with_offset("0x4"), False),
    "an offset of -0": (_with_offset("-0"), False),
    "an offset that is a text": (_with_offset('"4"'), False),
    "an offset that is true": (_with_offset("true"), False),
    "an offset of 10,000 digits": (_with_offset("1" * 10_000), False),
    "an offset without digits": (_with_offset(""), False),
    "an extent of 2**63": (with_entry(4, shape=[1 << 63]), False),
    "an extent of 2**64": (with_entry(4, shape=[1 << 64]), False),
    "extents that overflow, and no bytes": (
        described({"w": entry("U8", [1 << 32, 1 << 32, 0], 0, 0)}, 0),
        False,
    ),
    "a fraction as extent": (with_entry(4, shape=[4.0]), False),
    "a list in a shape": (with_entry(4, shape=[[4]]), False),
    "100 axes": (with_entry(1, shape=[1] * 100, data_offsets=[0, 1]), True),
    # Texts
    "a mark of the order of bytes": (raw_file("\ufeff{}"), False),
    "UTF-16": (raw_file("{}".encode("utf-16")), False),
    "an overlong NUL": (raw_file(b'{"w\xc0\x80":' + _ENTRY.encode() + b"}", 4), False),
    "half a character, not escaped": (raw_file(f'{{"\ud800":{_ENTRY}}}', 4), False),
    "two halves in the wrong order": (raw_file(f'{{"\\udc00\\ud800":{_ENTRY}}}', 4), False),
    "a raw NUL in a name": (raw_file(f'{{"w\0":{_ENTRY}}}', 4), False),
    "a raw line break in a name": (raw_file(f'{{"w\n":{_ENTRY}}}', 4), False),
    "an escape that is none": (raw_file(f'{{"\\x77":{_ENTRY}}}', 4), False),
    "an escape cut short": (raw_file(f'{{"\\u007":{_ENTRY}}}', 4), False),
    "single quotes": (raw_file(f"{{'w':{_ENTRY}}}", 4), False),
    "a comment": (raw_file(f'{{"w":{_ENTRY}}}//', 4), False),
    "a comma at the end": (raw_file(f'{{"w":{_ENTRY},}}', 4), False),
    "no comma": (raw_file(f'{{"v":{_ENTRY}"w":{_ENTRY}}}', 4), False),
    "zeros after the object": (raw_file(f'{{"w":{_ENTRY}}}\0\0', 4), False),
    "a name that is a number": (raw_file(f"{{1:{_ENTRY}}}", 4), False),
    # Entries and metadata
    "a dtype that is a number": (with_entry(4, dtype=8), False),
    "a dtype that is null": (with_entry(4, dtype=None), False),
    "a dtype with a NUL": (with_entry(4, dtype="U8\0"), False),
    "no dtype": (described({"w": {"shape": [4], "data_offsets": [0, 4]}}, 4), False),
    "no shape": (described({"w": {"dtype": "U8", "data_offsets": [0, 4]}}, 4), False),
    "an entry that is a list": (described({"w": ["U8", [4], [0, 4]]}, 4), True),
    "an entry that is an entry": (described({"w": {"w": _U8}}, 4), False),
    "200,000 lists in metadata": (raw_file('{"__metadata__":' + "[" * 200_000), False),
    "metadata that are a list": (raw_file('{"__metadata__":[]}'), False),
    "metadata that are null": (raw_file('{"__metadata__":null}'), True),
    "a key of metadata twice": (raw_file('{"__metadata__":{"k":"v","k":"w"}}'), True),
    "metadata that are a tensor": (raw_file(f'{{"__metadata__":{_ENTRY}}}', 4), False),
    # Spans
    "a hole at the end": (with_entry(8, data_offsets=[0, 4]), False),
    "a hole of no bytes": (described({"v": entry("U8", [0], 8, 8), "w": _U8}, 4), False),
    "an empty tensor inside another": (described({"v": entry("U8", [0], 2, 2), "w": _U8}, 4), False),
    "a span beyond the file": (with_entry(4, shape=[1 << 40], data_offsets=[0, 1 << 40]), False),
    "a span that wraps around": (with_entry(4, data_offsets=[(1 << 64) - 4, 4]), False),
    "data and no tensor": (raw_file("{}", 1), False),
}

# What is odd, and sound: the arrays are those bytes.
SOUND: dict[str, tuple[bytes, dict[str, bytes]]] = {
    "no tensor": (raw_file("{}"), {}),
    "white space around": (raw_file(f' \n\t\r{{ "w" : {_ENTRY} }}' + " " * 5000, 4), {"w": bytes(4)}),
    "a scalar": (described({"w": entry("F32", [], 0, 4)}, 4), {"w": bytes(4)}),
    "tensors of no bytes": (
        described({"v": entry("F32", [0, 1 << 40], 0, 0), "w": _U8, "x": entry("I8", [0], 4, 4)}, 4),
        {"v": b"", "w": bytes(4), "x": b""},
    ),
    "not in the order of the data": (
        described({"w": entry("U8", [1], 4, 5), "v": _U8}, 4) + b"\1",
        {"v": bytes(4), "w": b"\1"},
    ),
    "a truth value of 2": (described({"w": entry("BOOL", [1], 0, 1)}, 0) + b"\2", {"w": b"\2"}),
    "every escape": (
        raw_file(f'{{"\\u0077\\n\\t\\/\\\\\\ud83d\\ude00":{_ENTRY}}}', 4),
        {"w\n\t/\\\U0001f600": bytes(4)},
    ),
    "NUL in metadata": (
        raw_file(f'{{"__metadata__":{{"a\\u0000":"b\\u0000"}},"w":{_ENTRY}}}', 4),
        {"w": bytes(4)},
    ),
    "a name like that of metadata": (raw_file(f'{{"__METADATA__":{_ENTRY}}}', 4), {"__METADATA__": bytes(4)}),
}


def claims_of_much(directory: Path) -> list[Path]:
    """Files of few bytes on the disk that claim many."""
    contents = {
        "header": (99_999_999).to_bytes(8, "little") + b"{}",
        "data": with_entry(4, shape=[1 << 40], data_offsets=[0, 1 << 40]),
        "nothing": with_entry(4, shape=[1 << 40, 0], data_offsets=[0, 0]),
        "metadata": raw_file('{"__metadata__":' + "[" * (1 << 20)),
    }
    paths = []
    for name, content in contents.items():
        path = directory / f"{name}.safetensors"
        path.write_bytes(content)
        paths.append(path)
    return paths


def many_tensors(count: int) -> bytes:
    """A file of so many tensors of no bytes."""
    empty = json.dumps(entry("U8", [0], 0, 0), separators=(",", ":"))
    return raw_file("{" + ",".join([f'"{number}":{empty}' for number in range(count)]) + "}")
