"""Two clients in one program: each refuses what is of the other, whose numbers for arrays are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from waystation import runtime
from waystation.errors import InvalidInput

HOST = np.arange(4, dtype=np.float32)


class Side:
    """A client, a slice of it, a function there, and arrays that were made there."""

    def __init__(self, island: str, value: float) -> None:
        self.client = runtime.local({island: 2})
        self.slice = self.client.make_virtual_device_set().add_slice(devices=2)
        self.double = self.client.jit(lambda x: 2 * x, self.slice, name=f"double {island}")
        self.arrays = [self.double(HOST + value + at) for at in range(8)]
        for array in self.arrays:
            array.block_until_ready()


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    first, second = Side("left", 100), Side("right", 200)
    yield first, second
    second.client.close()
    first.client.close()


OTHER = "is of another client, <client 'local.*'>, and cannot be "


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda mine, other, at: mine.double(other), OTHER + "used by <client"),
        (
            lambda mine, other, at: runtime.program(lambda x: mine.double(other))(mine.arrays[0]),
            OTHER + "used by",
        ),
        (lambda mine, other, at: mine.client.share(other, "x"), OTHER + "shared by"),
        (lambda mine, other, at: mine.client.save(str(at / "c"), {"x": other}), OTHER + "saved by"),
        (lambda mine, other, at: mine.client.load(str(at / "c"), {"x": other}), "is of another client"),
        (
            lambda mine, other, at: mine.client.put(HOST, other.slice),
            "cannot put an array on .* another client",
        ),
    ],
)
def test_what_is_of_another_client_is_refused(
    sides: tuple[Side, Side], tmp_path: Path, use: Callable[[Side, Any, Path], Any], text: str
) -> None:
    first, second = sides
    for mine, other in ((first, second), (second, first)):
        with pytest.raises(InvalidInput, match=text):
            use(mine, other.arrays[3], tmp_path)
    for side, value in ((first, 100), (second, 200)):
        for at, array in enumerate(side.arrays):
            np.testing.assert_array_equal(side.double(array).numpy(), 4 * (HOST + value + at))


def test_a_program_is_of_the_client_of_its_functions(sides: tuple[Side, Side]) -> None:
    first, second = sides
    doubled = runtime.program(first.double)
    text = "is traced for <client .*>, and calls 'double left' of <client .*Give it an array of the client"
    with pytest.raises(InvalidInput, match=text):
        doubled(HOST)  # of the newest client
    given = first.client.put(HOST, first.slice, jax.sharding.PartitionSpec())
    np.testing.assert_array_equal(doubled(given).numpy(), 2 * HOST)
    second.client.close()
    np.testing.assert_array_equal(doubled(HOST).numpy(), 2 * HOST)


def test_only_slices_take_arrays(sides: tuple[Side, Side]) -> None:
    with pytest.raises(InvalidInput, match="an array is put on a slice"):
        sides[0].client.put(HOST, 3)  # type: ignore[arg-type]
