"""Headers and indexes as lists of tokens, sound ones to begin with: what the damage is done to.

A token is a word of JSON as it stands in the text, quotes included. Whatever is drawn comes from the given
source of numbers alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

_WIDTHS = {
    4: ("F4",),
    6: ("F6_E2M3", "F6_E3M2"),
    8: ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    16: ("I16", "U16", "F16", "BF16"),
    32: ("I32", "U32", "F32"),
    64: ("C64", "F64", "I64", "U64"),
}
BITS = {dtype: bits for bits, dtypes in _WIDTHS.items() for dtype in dtypes}
DTYPES = tuple(BITS)
NAMES = (
    *("w", "layers.0.weight", "a/b", "../../etc/passwd", "\u00e9", "\U0001f600", "", ".", "a\\b", "a\nb"),
    *("model.embed_tokens.weight", "x" * 200, "W", "\u202ew", "__metadata", "dtype", "shape"),
)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

_EXTENTS = (0, 1, 1, 2, 3, 4, 5, 8, 16)
_BYTES = bytes(range(256)) * 64
_MOST_BYTES = len(_BYTES) // 2


@dataclass(frozen=True, slots=True)
class Document:
    """A sound file.

    Attributes:
        tokens: Its header.
        data: What follows the header.
        names: Of its tensors.
    """

    tokens: list[str]
    data: bytes
    names: list[str]


def file_document(random: Random, prefix: str = "") -> Document:
    """A file of a few tensors, whose names begin with the prefix."""
    entries: list[list[str]] = []
    names: list[str] = []
    position = 0
    for number in range(random.choice((0, 1, 1, 2, 2, 3, 6))):
        name = prefix + random.choice(NAMES)
        if name in names:
            name += str(number)
        dtype, shape, nbytes = _tensor(random)
        names.append(name)
        entries.append(_entry(random, name, dtype, shape, (position, position + nbytes)))
        position += nbytes
    if random.random() < 0.3:
        text = json.dumps({"format": "pt", "by": random.choice(NAMES)}, ensure_ascii=random.random() < 0.5)
        entries.append(['"__metadata__"', ":", *_split(text)])
    if random.random() < 0.3:
        random.shuffle(entries)
    begin = random.randrange(256)
    return Document(_spaced(random, _object(entries)), _BYTES[begin : begin + position], names)


def index_tokens(random: Random, shards: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """The index of files with the names of their tensors."""
    entries = [[_quoted(random, name), ":", f'"{file}"'] for file, names in shards for name in names]
    weight_map = ['"weight_map"', ":", *_object(entries)]
    metadata = ['"metadata"', ":", "{", '"total_size"', ":", str(random.randrange(1 << 40)), "}"]
    members = [metadata, weight_map] if random.random() < 0.8 else [weight_map]
    if random.random() < 0.3:
        members.reverse()
    return _spaced(random, _object(members))


def _tensor(random: Random) -> tuple[str, list[int], int]:
    """A dtype, a shape that fills whole bytes of it, and how many."""
    dtype = random.choice(DTYPES)
    shape = [random.choice(_EXTENTS) for _ in range(random.choice((0, 1, 1, 2, 2, 3, 5)))]
    if BITS[dtype] < 8:
        shape.append(4)
    if math.prod(shape) * BITS[dtype] // 8 > _MOST_BYTES // 8:
        shape[0] = 0
    return dtype, shape, math.prod(shape) * BITS[dtype] // 8


def _entry(random: Random, name: str, dtype: str, shape: list[int], span: tuple[int, int]) -> list[str]:
    fields = [
        ['"dtype"', ":", f'"{dtype}"'],
        ['"shape"', ":", "[", *_separated([[str(extent)] for extent in shape]), "]"],
        ['"data_offsets"', ":", "[", str(span[0]), ",", str(span[1]), "]"],
    ]
    if random.random() < 0.3:
        random.shuffle(fields)
    return [_quoted(random, name), ":", *_object(fields)]


def _object(members: Sequence[list[str]]) -> list[str]:
    return ["{", *_separated(members), "}"]


def _separated(parts: Sequence[list[str]]) -> Iterator[str]:
    for number, part in enumerate(parts):
        if number:
            yield ","
        yield from part


def _quoted(random: Random, text: str) -> str:
    """A text of JSON, in one of its spellings."""
    chance = random.random()
    if chance < 0.1 and text:
        return '"' + "".join(f"\\u{unit:04x}" for unit in _code_units(text)) + '"'
    return json.dumps(text, ensure_ascii=chance < 0.5)


def _code_units(text: str) -> Iterator[int]:
    data = text.encode("utf-16-le")
    return (int.from_bytes(data[at : at + 2], "little") for at in range(0, len(data), 2))


def _split(text: str) -> list[str]:
    """The tokens of a flat object of texts."""
    pairs = json.loads(text, object_pairs_hook=list)
    members = [[json.dumps(key), ":", json.dumps(value)] for key, value in pairs]
    return _object(members)


def _spaced(random: Random, tokens: list[str]) -> list[str]:
    """With white space between some tokens, now and then."""
    if random.random() < 0.8:
        return tokens
    return [f"{token}{random.choice((' ', '', chr(10), '  '))}" for token in tokens]
