"""Casts that lose more than rounding raise, also where the saved elements are in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.memory.scenarios import checkpointer_of
from tests.support.agents import Agent, memory_directory, running_agent

import waystation as ws
from waystation.errors import LossyCast


@pytest.fixture
def agent() -> Iterator[Agent]:
    with memory_directory() as directory, running_agent(directory) as agent:
        yield agent


@pytest.mark.parametrize(
    ("saved", "wanted", "lossy"),
    [
        (np.array([2.7, -1.5, 3e9, np.nan], np.float32), np.int32, [2, -1, None, None]),
        (np.array([1e30, 1.0], np.float32), np.float16, [np.inf, 1]),
        (np.array([1 + 2j], np.complex64), np.float32, [1]),
    ],
)
def test_a_lossy_cast_of_what_is_in_memory_raises(
    tmp_path: Path, agent: Agent, saved: np.ndarray, wanted: type, lossy: list[float | None]
) -> None:
    abstract = {"model": [np.zeros(saved.shape, wanted)]}
    with checkpointer_of(tmp_path, agent.directory) as checkpointer:
        checkpointer.save(1, {"model": [saved]})
        with pytest.raises(LossyCast, match="allow_lossy_casts") as raised:
            checkpointer.load(1, abstract)
        assert raised.value.context["array"] == "model.0"
        # The checkpoint is not to blame: it is loaded as it was saved, and with the option also so.
        np.testing.assert_array_equal(checkpointer.load(1)["model"][0], saved)
        context = ws.Context()
        context.array.loading.allow_lossy_casts = True
        with context:
            found = checkpointer.load(1, abstract)["model"][0]
        assert found.dtype == wanted
        for value, expected in zip(found, lossy, strict=True):
            assert expected is None or value == expected
