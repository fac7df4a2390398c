"""A load whose shards are in the memory of several hosts: what is not here is brought, and let go again.

Each host has an agent of its own; what stands for the way between them is that the others are asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from tests.memory import scenarios
from tests.support.agents import Agent, memory_directory, running_agent
from tests.support.programs import running

from waystation import _native
from waystation._options.in_effect import current_options
from waystation.errors import NotFound, Unavailable
from waystation.memory.loading import VersionLoading
from waystation.memory.opened import HeldShard
from waystation.memory.versions import Version, Whole
from waystation.transfers.handle import Progress


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    with ExitStack() as stack:
        directories = [stack.enter_context(memory_directory()) for _ in range(3)]
        yield [stack.enter_context(running_agent(directory)) for directory in directories]


class Source:
    """Shards of the first agent, and those that are brought from the others.

    Attributes:
        brought: The shards that were, in this order.
        most_at_once: How many of them were held at a time.
    """

    def __init__(self, agents: list[Agent], *, has_others: bool = True, refusals: int = 0) -> None:
        self._own, *self._others = (_native.AgentClient(str(agent.directory)) for agent in agents)
        self._has_others = has_others
        self._refusals = refusals
        self.brought: list[str] = []
        self.held: set[int] = set()
        self.most_at_once = 0

    def hold(self, epoch: int, step: int, shard: str, /) -> HeldShard:
        return self._own.hold(epoch, step, shard)

    def bring(self, epoch: int, step: int, shard: str, /) -> HeldShard:
        if self._refusals:
            self._refusals -= 1
            raise Unavailable("no slot is free")
        if not self._has_others:
            raise NotFound("no host has it")
        self.brought.append(shard.split("/")[1])
        held = Brought(self, self._found_elsewhere(epoch, step, shard))
        self.held.add(id(held))
        self.most_at_once = max(self.most_at_once, len(self.held))
        return held

    def _found_elsewhere(self, epoch: int, step: int, shard: str) -> HeldShard:
        for other in self._others:
            with suppress(NotFound):
                return other.hold(epoch, step, shard)
        raise NotFound("no host has it")


class Brought:
    def __init__(self, source: Source, held: HeldShard) -> None:
        self._source, self._held = source, held

    @property
    def file(self) -> tuple[str, int, bytes]:
        return self._held.file

    @property
    def entries(self) -> list[tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int]]:
        return self._held.entries

    def release(self) -> None:
        self._source.held.discard(id(self))
        self._held.release()


@pytest.fixture
def whole(agents: list[Agent], tmp_path: Path) -> tuple[str, Whole]:
    """What two processes with two devices each have saved, one on each host."""
    arguments = tmp_path / "run", [agent.directory for agent in agents[:2]], 2
    with running(
        scenarios.save_sharded_on_hosts, *arguments, count=2, framework="jax", directory=tmp_path
    ) as programs:
        assert programs.values() == [[0, 1], [0, 1]]
    slots = _native.AgentClient(str(agents[0].directory)).inventory()
    (slot,) = [slot for slot in slots if slot.get("step") == 1]
    return slot["shard"].split("/")[0], Whole(Version(slot["epoch"], 1), 2)


WANTED = {name: np.zeros(shape, np.float32) for name, shape in scenarios.SHAPES.items()} | {"step": 0}


@pytest.mark.parametrize(
    "own", [0, 1, 2], ids=["the-primary's-is-here", "the-other's-is-here", "none-is-here"]
)
@pytest.mark.share(3)
def test_what_is_not_here_is_brought(agents: list[Agent], whole: tuple[str, Whole], own: int) -> None:
    source = Source([agents[own], *agents[:own], *agents[own + 1 :]], refusals=2)
    loaded = VersionLoading(source, *whole, ["state"], current_options()).run(WANTED, Progress())
    for name in scenarios.SHAPES:
        assert loaded[name].tobytes() == scenarios.values_of(name, 1).tobytes()
    assert loaded["step"] == 1
    assert set(source.brought) == {"0-of-2", "1-of-2"} - {f"{own}-of-2"}
    assert source.most_at_once == 1
    assert not source.held


def test_a_part_that_nobody_has_is_an_error(agents: list[Agent], whole: tuple[str, Whole]) -> None:
    source = Source(agents, has_others=False)
    with pytest.raises(Unavailable, match="in the memory of no host that can be reached") as raised:
        VersionLoading(source, *whole, ["state"], current_options()).run(WANTED, Progress())
    assert raised.value.context["array"] in scenarios.SHAPES
    for others in (agents[1::-1], agents[::-1]):
        with pytest.raises(NotFound):
            VersionLoading(Source(others, has_others=False), *whole, ["state"], current_options()).run(
                WANTED, Progress()
            )
