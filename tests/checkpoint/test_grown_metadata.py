"""Metadata files that have grown are refused by their lengths, before memory is taken for them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import waystation
from waystation import errors

SPARSE_BYTES = 4 << 40
ROOM_BYTES = 4 << 30

METADATA = ["checkpoint.json", "state/record.json", "state/tree.json", "state/chunks.bin"]
METADATA += ["state/files.bin", "state/checksums.bin", "state/model.safetensors.index.json"]


@pytest.fixture
def little_room() -> Iterator[None]:
    """Memory for what this process has and not much more, so that a load that wants gigabytes is noticed."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", METADATA)
@pytest.mark.usefixtures("little_room")
def test_a_sparse_file_of_terabytes_is_corrupt(name: str, tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    waystation.save(target, {"x": np.arange(1000)})
    assert (target / name).is_file()
    # Where the file system holds no such length, the longest that it does will do.
    for nbytes in (SPARSE_BYTES, SPARSE_BYTES >> 4):
        try:
            os.truncate(target / name, nbytes)
            break
        except OSError:
            continue
    for look in (waystation.load, waystation.metadata):
        with pytest.raises(errors.Corrupt, match="may have no more than") as caught:
            look(target)
        assert caught.value.context["path"] == str(target / name)
