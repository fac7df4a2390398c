"""Files that no loader should take, and what they are."""

from __future__ import annotations

import json


def file_of(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(shape: list[int], begin: int, end: int, dtype: str = "U8") -> dict[str, object]:
    """An entry of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# Those that the safetensors package refuses.
DAMAGED = {
    "empty": b"",
    "short": b"\1\2\3",
    "length beyond the file": file_of({}, length=100),
    "length beyond all bounds": file_of({}, length=2**63),
    "no JSON": file_of(b"{oops}"),
    "a list": file_of([]),
    "hole": file_of({"a": tensor([1], 0, 1), "b": tensor([1], 2, 3)}, b"123"),
    "overlap": file_of({"a": tensor([2], 0, 2), "b": tensor([2], 1, 3)}, b"123"),
    "truncated": file_of({"a": tensor([4], 0, 4)}, b"12"),
    "more than the tensors": file_of({"a": tensor([1], 0, 1)}, b"12"),
    "size that does not fit": file_of({"a": tensor([3], 0, 2)}, b"12"),
    "extents that overflow": file_of({"a": tensor([2**40, 2**40], 0, 1)}, b"1"),
    "unknown dtype": file_of({"a": tensor([1], 0, 1, "Q7")}, b"1"),
    "metadata that are no text": file_of({"__metadata__": {"a": 1}}),
    "backward": file_of({"a": tensor([1], 1, 0)}, b"1"),
}
