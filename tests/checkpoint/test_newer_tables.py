"""Tables with a reserved field in use, in checkpoints that are whole otherwise: refused, never misread."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waystation
from waystation import _native, errors

PAGE_BYTES = 4096
CRC_BYTES = 8


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    waystation.save(path, {"a": np.arange(1000), "b": np.ones(3)})
    return path


def fill(checkpoint: Path, table: str, section: int, offset: int) -> None:
    """Sets a 32-bit field of the first entry of a section to 1, and mends every checksum that covers it."""
    path = checkpoint / "state" / table
    content = bytearray(path.read_bytes())
    (page,) = struct.unpack_from("<Q", content, 32 + 24 * section)
    begin = page * PAGE_BYTES
    struct.pack_into("<I", content, begin + offset, 1)
    payload = bytes(content[begin : begin + PAGE_BYTES - CRC_BYTES])
    checksum = _native.crc64(payload + struct.pack("<Q", page))
    struct.pack_into("<Q", content, begin + PAGE_BYTES - CRC_BYTES, checksum)
    path.write_bytes(content)

    own_path, whole_path = checkpoint / "state" / "record.json", checkpoint / "checkpoint.json"
    own, whole = (json.loads(record.read_bytes())["record"] for record in (own_path, whole_path))
    own["tables"][table] = digest(path)
    seal(own_path, own)
    whole["checkpointables"]["state"]["record"] = digest(own_path)
    seal(whole_path, whole)


def digest(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"bytes": len(content), "crc64": f"{_native.crc64(content):016x}"}


def seal(path: Path, body: Any) -> None:
    path.write_bytes(_native.seal_json(json.dumps(body).encode()))


@pytest.mark.parametrize(
    ("table", "section", "offset", "told"),
    [
        ("files.bin", 0, 12, "flags of a data file"),
        ("files.bin", 0, 48, "a strong hash of a data file"),
        ("chunks.bin", 0, 12, "a reserved field of an array"),
        ("chunks.bin", 1, 4, "the codec of a chunk"),
    ],
    ids=["flags", "hash", "array", "codec"],
)
def test_what_only_a_newer_release_understands_is_unsupported(
    saved: Path, table: str, section: int, offset: int, told: str
) -> None:
    fill(saved, table, section, offset)
    for call in (waystation.load, waystation.metadata):
        with pytest.raises(errors.Unsupported, match=f"{told}: unknown to this release") as caught:
            call(saved)
        assert caught.value.context["path"] == str(saved / "state" / table)


def test_a_file_in_a_place_that_the_record_does_not_list_is_damage(saved: Path) -> None:
    fill(saved, "files.bin", 0, 8)
    with pytest.raises(errors.Corrupt, match="place 1 of the 0") as caught:
        waystation.load(saved)
    assert caught.value.context["path"] == str(saved / "state" / "files.bin")
