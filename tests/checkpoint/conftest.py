"""What the tests of saving and loading share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    with disks.mounted(tmp_path / "small", "size=8m") as path:
        yield path
