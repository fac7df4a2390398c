"""Table files through the native module: round trips, damage, and a byte-for-byte look at one."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation import _native
from waystation.errors import Corrupt, InvalidInput, Unsupported

PAGE_BYTES = 4096


def file_entry(process: int, file_bytes: int, first_block: int, **reserved: int) -> bytes:
    location, flags = reserved.get("location", 0), reserved.get("flags", 0)
    return struct.pack("<IIIIQQQQ16x", process, 0, location, flags, file_bytes, 4096, first_block, 0)


def chunk_table() -> list[bytes]:
    """One array of 16-bit elements of shape (4, 4) in two chunks of up to three rows."""
    arrays = struct.pack("<IIIIQQQQ", 0, 2, 16, 0, 0, 2, 0, 4)
    chunks = struct.pack("<IIQQIIQQ", 0, 0, 4096, 24, 0, 0, 4120, 8)
    return [arrays, chunks, struct.pack("<4Q", 4, 4, 3, 4)]


def with_checksums(pages: bytes) -> bytes:
    """The same pages with the checksums that their contents call for."""
    out = b""
    for number in range(len(pages) // PAGE_BYTES):
        payload = pages[number * PAGE_BYTES : (number + 1) * PAGE_BYTES - 8]
        out += payload + struct.pack("<Q", _native.crc64(payload + struct.pack("<Q", number)))
    return out


def test_there_are_three_kinds() -> None:
    assert _native.TABLE_KINDS == ("files", "chunks", "checksums")
    with pytest.raises(InvalidInput, match="no table"):
        _native.encode_table("tree", [])  # type: ignore[arg-type]


def test_tables_round_trip() -> None:
    files = file_entry(0, 4096, 0) + file_entry(7, 300_000, 1)
    assert _native.decode_table("files", _native.encode_table("files", [files]), "files.bin") == [files]
    sections = chunk_table()
    assert _native.decode_table("chunks", _native.encode_table("chunks", sections), "chunks.bin") == sections


def test_the_bytes_are_the_specified_ones() -> None:
    entry = file_entry(7, 8192, 0)
    expected = (b"WSTFILES" + struct.pack("<IIIIQQ", 1, 1, 64, 0, 1, 1)).ljust(PAGE_BYTES, b"\0")
    expected += entry.ljust(PAGE_BYTES, b"\0")
    assert _native.encode_table("files", [entry]) == with_checksums(expected)


@given(count=st.integers(0, 3000), seed=st.integers(0, 2**32))
def test_checksums_round_trip(count: int, seed: int) -> None:
    sums = np.random.default_rng(seed).integers(0, 2**64, count, np.uint64)
    table = _native.encode_table("checksums", [sums])
    assert len(table) == PAGE_BYTES * (1 + -(-count // 511))
    assert _native.decode_table("checksums", table, "checksums.bin") == [sums.tobytes()]


def test_any_flipped_bit_is_noticed() -> None:
    table = _native.encode_table("chunks", chunk_table())
    for position in range(0, len(table), 7):
        damaged = bytearray(table)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(Corrupt) as caught:
            _native.decode_table("chunks", damaged, "chunks.bin")
        assert caught.value.context["path"] == "chunks.bin"
        assert caught.value.context["page"] == str(position // PAGE_BYTES)


@pytest.mark.parametrize("length", [0, 100, PAGE_BYTES, 2 * PAGE_BYTES, 4 * PAGE_BYTES - 1])
def test_a_table_that_is_cut_off_is_corrupt(length: int) -> None:
    table = _native.encode_table("chunks", chunk_table())
    assert len(table) == 4 * PAGE_BYTES
    with pytest.raises(Corrupt):
        _native.decode_table("chunks", table[:length], "chunks.bin")


def test_one_table_is_not_another() -> None:
    with pytest.raises(Corrupt, match="not a table of files"):
        _native.decode_table("files", _native.encode_table("checksums", [b""]), "files.bin")


def test_a_newer_version_is_unsupported() -> None:
    table = bytearray(_native.encode_table("checksums", [b""]))
    table[8] = 2
    with pytest.raises(Unsupported, match="format version 2"):
        _native.decode_table("checksums", with_checksums(bytes(table)), "checksums.bin")


def test_a_reserved_field_in_use_is_unsupported() -> None:
    table = bytearray(_native.encode_table("files", [file_entry(0, 4096, 0)]))
    table[PAGE_BYTES + 12] = 1
    with pytest.raises(Unsupported, match="newer"):
        _native.decode_table("files", with_checksums(bytes(table)), "files.bin")


def test_rules_hold_before_writing_too() -> None:
    arrays, chunks, dims = chunk_table()
    with pytest.raises(InvalidInput, match="cannot have 24 bytes"):
        _native.encode_table("chunks", [arrays, chunks, struct.pack("<4Q", 4, 4, 2, 4)])
    with pytest.raises(InvalidInput, match="belong to no array"):
        _native.encode_table("chunks", [b"", chunks, dims])
    with pytest.raises(InvalidInput, match="not sorted"):
        _native.encode_table("files", [file_entry(1, 4096, 0) + file_entry(0, 4096, 1)])
    with pytest.raises(InvalidInput, match="sections of entries"):
        _native.encode_table("files", [b"\0" * 63])
