"""Two processes write one checkpoint in Orbax's layouts, each its own chunks; genuine Orbax has them all."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from tests.distributed.cases import State, states
from tests.distributed.jax_scenarios import check
from tests.orbax import oracle, write_scenarios
from tests.orbax.test_write import layouts
from tests.support.long import amount
from tests.support.programs import Programs, running

from waystation.checkpoint import verify

COUNT, DEVICES = 2, 2


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """A program of two processes, waiting for what to do."""
    directory = tmp_path_factory.mktemp("programs")
    with running(
        write_scenarios.serve, DEVICES, count=COUNT, framework="jax", directory=directory
    ) as running_programs:
        yield running_programs


def ask(programs: Programs, *asked: Any) -> None:
    """Has every process do something."""
    for index in range(COUNT):
        programs.send(index, asked)
    ended = [programs.report(index) for index in range(COUNT)]
    assert ended == [None] * COUNT, "\n".join(map(str, ended))


_numbers = itertools.count()


@pytest.mark.share(8)
@layouts
@settings(
    max_examples=amount(3, 240),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(state=states(COUNT * DEVICES, 8))
def test_orbax_loads_what_two_processes_wrote(
    programs: Programs, layout: dict[str, Any], tmp_path: Path, state: State
) -> None:
    path = tmp_path / f"checkpoint {next(_numbers)}"
    ask(programs, "save", path, state, layout)
    ask(programs, "load", path, state, layout)
    abstract = {str(number): write_scenarios.abstract_of(case) for number, case in enumerate(state.cases)}
    loaded = oracle.load(path, {**abstract, "step": 0, "host": np.zeros(10, int), "name": ""})
    for number, case in enumerate(state.cases):
        check(case, loaded[str(number)], case.loaded)
    assert (loaded["step"], loaded["name"]) == (state.step, "p0")
    assert loaded["host"].tolist() == list(range(10))
    found = verify(path)
    assert (found.damages, found.strays) == ([], [])
    shutil.rmtree(path)


@pytest.mark.share(3)
@layouts
def test_uneven_parts_of_torch(layout: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    path = tmp_path / "checkpoints" / "torch"
    with running(
        write_scenarios.save_with_torch, path, layout, count=2, framework="torch", directory=tmp_path
    ) as ended:
        assert ended.values() == [None, None]
    write_scenarios.check_tensors(oracle.load(path))
