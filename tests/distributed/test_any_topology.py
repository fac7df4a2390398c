"""States saved by some processes on some devices, loaded by others: bit by bit, whatever the shardings.

The processes are real, joined by `jax.distributed`, and live as long as the module: Hypothesis sends them
one state after another. Each makes and checks its own part.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.distributed import jax_scenarios
from tests.distributed.cases import State, states
from tests.support.long import amount
from tests.support.programs import Programs, Raised, running

# Processes, and the devices of each.
TOPOLOGIES = [(1, 8), (2, 2), (3, 2), (4, 1)]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[int, int], Programs]]:
    """A program of every topology, waiting for what to do."""
    with contextlib.ExitStack() as stack:
        yield {
            (count, devices): stack.enter_context(
                running(
                    jax_scenarios.serve,
                    devices,
                    count=count,
                    framework="jax",
                    directory=tmp_path_factory.mktemp(f"{count}x{devices}"),
                )
            )
            for count, devices in TOPOLOGIES
        }


def ask(programs: Programs, count: int, action: str, path: Path, state: State) -> None:
    """Has every process of a program do something."""
    for index in range(count):
        programs.send(index, (action, path, state))
    ended = [programs.report(index) for index in range(count)]
    assert ended == [None] * count, "\n".join(str(how) for how in ended)


@pytest.mark.parametrize("saving", TOPOLOGIES, ids=lambda pair: f"{pair[0]}x{pair[1]}")
@settings(
    max_examples=amount(6, 800),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
@pytest.mark.share(4)
def test_any_topology_to_any_other(
    programs: dict[tuple[int, int], Programs],
    saving: tuple[int, int],
    tmp_path: Path,
    data: st.DataObject,
) -> None:
    loading = data.draw(st.sampled_from(TOPOLOGIES), label="loading")
    state = data.draw(states(saving[0] * saving[1], loading[0] * loading[1]), label="state")
    path = tmp_path / f"checkpoint {next(_numbers)}"
    ask(programs[saving], saving[0], "save", path, state)
    ask(programs[saving], saving[0], "load_as_saved", path, state)
    ask(programs[loading], loading[0], "load", path, state)
    shutil.rmtree(path)


_numbers = itertools.count()


@pytest.mark.parametrize(("chunk_bytes", "most"), [(1 << 20, 1.05), (0, 2.1)])
def test_a_process_reads_what_it_needs(tmp_path: Path, chunk_bytes: int, most: float) -> None:
    """Rows to columns over two processes: chunks of columns are read as needed; without them the blocks that
    are verified hold the other process's half as well, which is all that is read in vain."""
    with running(
        jax_scenarios.reshard, 2, chunk_bytes, count=2, framework="jax", directory=tmp_path
    ) as running_programs:
        told = running_programs.values()
    for process in told:
        assert not isinstance(process, Raised), process
        assert process["needed"] == 4096 * 4096 * 4 // 2
        assert process["read"] <= most * process["needed"], process
