"""Load-and-broadcast: one process reads for others, bit by bit, and nobody hangs when it fails."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.distributed import broadcast_jax, broadcast_torch
from tests.distributed.broadcast_jax import Layout
from tests.support.programs import Raised, running

from waystation import errors
from waystation._options.array_loading import LoadAndBroadcastOptions
from waystation.checkpoint import broadcast
from waystation.checkpoint.broadcast import _pieces, _Stream, layers
from waystation.frameworks.jax_broadcast import _joined

# ---- JAX ---------------------------------------------------------------------------------------

LAYOUTS: dict[str, Layout] = {
    "a replica in each process": [[(0, 0), (0, 1)], [(1, 0), (1, 1)]],
    "both replicas in both processes": [[(0, 0), (1, 1)], [(1, 0), (0, 1)]],
    "replicas within processes": [[(0, 0), (1, 0)], [(0, 1), (1, 1)]],
    "replicas across three processes": [[(0, 0), (0, 1)], [(1, 1), (2, 0)], [(1, 0), (2, 1)]],
}
BROADCAST = {"load_and_broadcast": True}
# The second along the axis reads.
SECOND = {
    **BROADCAST,
    "load_and_broadcast_options": LoadAndBroadcastOptions(replica_axis_index="replica", primary_replica_id=1),
}
JAX_OPTIONS: list[dict[str, Any]] = [
    {"load_and_broadcast": False},
    BROADCAST,  # and what was saved
    BROADCAST,
    {},
    {**BROADCAST, "replica_axis": "replica"},
    {**BROADCAST, "replica_axis": "replica", "broadcast_concurrent_bytes": 1},
    {**BROADCAST, "replica_axis": 0},
    SECOND,
]


@pytest.fixture(scope="module", params=LAYOUTS)
def jax_found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Layout, list[dict[str, Any]]]:
    """What each process has loaded with each of the options."""
    layout = LAYOUTS[request.param]
    count = 1 + max(process for line in layout for process, _ in line)
    directory = tmp_path_factory.mktemp("jax")
    with running(
        broadcast_jax.loads, layout, JAX_OPTIONS, count=count, framework="jax", directory=directory
    ) as programs:
        values = programs.values()
    assert not [value for value in values if isinstance(value, Raised)], values
    return layout, values


def needed_by(layout: Layout, process: int) -> int:
    """Bytes that a process needs, each box once."""
    places = [
        (replica, model)
        for replica, line in enumerate(layout)
        for model, (own, _) in enumerate(line)
        if own == process
    ]
    models = {model for _, model in places}
    total = 0
    for case, spec in broadcast_jax.all_cases().values():
        names = {name for part in spec for name in (part if isinstance(part, tuple) else (part,))}
        parts = {"replica", "model"} & names
        if parts == {"replica", "model"}:
            share = len(places) / (len(layout) * 2)
        elif parts == {"replica"}:
            share = len({replica for replica, _ in places}) / len(layout)
        else:
            share = len(models) / 2 if parts else 1
        total += round(case.values().nbytes * share)
    return total + 3 * 2 * 4  # the keys


def own_bytes(layout: Layout, process: int) -> int:
    """Bytes that a process needs of arrays without replicas over `replica`."""
    own = {name: case for name, case in broadcast_jax.all_cases().items() if name.startswith("own")}
    places = [replica for replica, line in enumerate(layout) for other, _ in line if other == process]
    return round(
        own["own"][0].values().nbytes * len(places) / (2 * len(layout))
        + own["own by replica"][0].values().nbytes * len(set(places)) / len(layout)
    )


@pytest.mark.share(6)
def test_every_bit_arrives(jax_found: tuple[Layout, list[dict[str, Any]]]) -> None:
    for process in jax_found[1]:
        assert [found["wrong"] for found in process["found"]] == [[]] * len(JAX_OPTIONS)


@pytest.mark.share(2)
def test_what_is_not_read_is_received(jax_found: tuple[Layout, list[dict[str, Any]]]) -> None:
    layout, values = jax_found
    for index, process in enumerate(values):
        for options, found in zip(JAX_OPTIONS, process["found"], strict=True):
            assert found["bytes_needed"] == needed_by(layout, index), options
            if not options.get("load_and_broadcast"):
                assert found["bytes_received"] == 0


def _read_itself(found: dict[str, Any]) -> int:
    """Bytes that a process needed and nobody sent."""
    needed: int = found["bytes_needed"] - found["bytes_received"]
    return needed


@pytest.mark.share(4)
def test_every_byte_is_read_by_one_process(jax_found: tuple[Layout, list[dict[str, Any]]]) -> None:
    layout, values = jax_found
    total = sum(case.values().nbytes for case, _ in broadcast_jax.all_cases().values()) + 3 * 2 * 4
    for number, options in enumerate(JAX_OPTIONS):
        read = sum(_read_itself(process["found"][number]) for process in values)
        if options == BROADCAST:
            assert read == total
        assert read >= total
        if options.get("load_and_broadcast") and layout is LAYOUTS["a replica in each process"]:
            other = 0 if options is SECOND else 1
            assert _read_itself(values[other]["found"][number]) == own_bytes(layout, other)


def test_an_axis_that_no_mesh_has(jax_found: tuple[Layout, list[dict[str, Any]]]) -> None:
    for process in jax_found[1]:
        for asked, name in (("axis", "'nowhere'"), ("number of axis", "7")):
            assert process[asked].type == "InvalidInput"
            assert f"has the axis {name}" in process[asked].message
            assert "('replica', 'model')" in process[asked].message


def test_a_replica_that_is_not_there(jax_found: tuple[Layout, list[dict[str, Any]]]) -> None:
    for process in jax_found[1]:
        assert process["replica"].type == process["replica without axis"].type == "InvalidInput"
        assert "primary_replica_id is 7" in process["replica"].message
        assert "replica_axis_index" in process["replica without axis"].message


def test_many_small_arrays_go_in_few_collectives(tmp_path: Path) -> None:
    layout = LAYOUTS["a replica in each process"]
    with running(broadcast_jax.many, layout, 3000, count=2, framework="jax", directory=tmp_path) as programs:
        found = programs.values()
    for own in found:
        assert own["wrong"] == []
        assert own["collectives"] <= 2
    assert found[0]["bytes_received"] == 0
    assert found[1]["bytes_read"] == 0


def test_damage_that_the_reader_finds_is_everybodys_error(tmp_path: Path) -> None:
    layout = LAYOUTS["a replica in each process"]
    with running(broadcast_jax.fails, layout, count=2, framework="jax", directory=tmp_path) as programs:
        found = programs.values()
    assert [error.type for error in found] == ["Corrupt", "Corrupt"]
    assert found[1].context["checkpoint"] == str(tmp_path / "checkpoint")
    assert found[1].context["process"] == 0


# ---- torch -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch_found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four processes has seen."""
    directory = tmp_path_factory.mktemp("torch")
    with running(broadcast_torch.loads, count=4, framework="torch", directory=directory) as programs:
        values = programs.values()
    assert not [value for value in values if isinstance(value, Raised)], values
    return values


BY_BROADCAST = ("broadcast", "as saved", "small pieces", "background by force")


def test_every_bit_of_a_tensor_arrives(torch_found: list[dict[str, Any]]) -> None:
    for process in torch_found:
        told = {name: found for name, found in process.items() if isinstance(found, dict)}
        ways = {name: found["wrong"] for name, found in told.items() if "wrong" in found}
        assert len(ways) == 11
        assert not any(ways.values()), ways
        assert process["cast"]["same"]
        assert process["wider"]["same"]


def test_one_process_reads_what_several_need(torch_found: list[dict[str, Any]]) -> None:
    everyone = [process["everyone"]["bytes_needed"] for process in torch_found]
    for name in BY_BROADCAST:
        for index, process in enumerate(torch_found):
            found = process[name]
            assert found["bytes_needed"] == everyone[index], name
        received = [process[name]["bytes_received"] for process in torch_found]
        assert received[0] == 0, name
        assert min(received[1:]) > 1_000_000, name
        # What pairs share is read by the first of each.
        assert received[3] > received[1] > 0, name


def test_everybody_reads_what_is_not_worth_it(torch_found: list[dict[str, Any]]) -> None:
    for process in torch_found:
        for name in ("everyone", "small by itself", "background"):
            assert process[name] == process["everyone"] | {"wrong": []}, name
        assert process["everyone"]["bytes_received"] == 0
        assert process["mapped by itself"]["bytes_received"] == 0


def test_broadcasts_of_what_is_changed_bounded_or_mapped(torch_found: list[dict[str, Any]]) -> None:
    received = [process["broadcast"]["bytes_received"] for process in torch_found]
    for index, process in enumerate(torch_found):
        assert process["mapped by force"]["bytes_received"] == received[index]
        assert process["little memory"]["bytes_received"] == received[index]
        larger = 0 if index == 0 else 3 * 1_000_003
        assert process["cast"]["bytes_received"] == received[index] + larger
        assert process["wider"]["bytes_received"] == received[index] + (7 if index else 0)


def test_processes_without_a_group_in_the_mesh(torch_found: list[dict[str, Any]]) -> None:
    received = [process["part"]["bytes_received"] for process in torch_found]
    assert received == [0, 0, 16 * 18 * 4, 15 * 18 * 4]


def test_processes_that_ask_for_other_things(torch_found: list[dict[str, Any]]) -> None:
    for index, process in enumerate(torch_found):
        assert process["other dtype by itself"] == ("torch.int16" if index == 1 else "torch.uint8")
        refused = process["other dtype by force"]
        assert refused.type == "InvalidInput"
        assert "processes 0 and 1 ask for different arrays" in refused.message
        assert process["other wish"].type == "InvalidInput"
        assert "None in process 0 and True in process 1" in process["other wish"].message


def test_damage_is_everybodys_error(torch_found: list[dict[str, Any]]) -> None:
    found = [process["damage"] for process in torch_found]
    assert all(isinstance(error, Raised) and error.type == "Corrupt" for error in found), found
    assert len({error.message for error in found}) == 1


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.share(2)
def test_a_death_in_a_collective_is_an_error_of_the_others(tmp_path: Path, count: int) -> None:
    with running(broadcast_torch.dies, count=count, framework="torch", directory=tmp_path) as programs:
        errors = [programs.report(index) for index in range(count - 1)]
        for index in range(count - 1):
            programs.send(index, None)
        ended = programs.end()
    for error in errors:
        assert (error.type, error.context["process"]) == ("Unavailable", count - 1), error
    assert ended[-1].exit_code == -9


@pytest.mark.share(6)
@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize("slow", ["storage", "network", "nothing"])
def test_a_load_goes_the_faster_way(tmp_path: Path, slow: str, count: int) -> None:
    with running(
        broadcast_torch.tries, slow, count, count=3, framework="torch", directory=tmp_path
    ) as programs:
        values = programs.values()
    for index, found in enumerate(values):
        assert found["wrong"] == []
        assert found["bytes_needed"] == 8 << 20
        assert found["bytes_received"] == (8 << 20 if slow == "storage" and index else 0)


# ---- decisions ---------------------------------------------------------------------------------

groups = st.lists(
    st.lists(st.integers(0, 11), min_size=2, max_size=5, unique=True).map(tuple), max_size=12, unique=True
)


@given(groups, st.randoms())
def test_layers_are_disjoint_groups_of_one_size(found: list[tuple[int, ...]], order: random.Random) -> None:
    made = layers(found)
    assert sorted(group for layer in made for group in layer) == sorted(found)
    for layer in made:
        members = [process for group in layer for process in group]
        assert len(members) == len(set(members))
        assert len({len(group) for group in layer}) == 1
    order.shuffle(found)
    assert layers(found) == made


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=8))
def test_lines_of_devices_become_disjoint_groups(lines: list[list[int]]) -> None:
    made = _joined(lines)
    members = [process for group in made for process in group]
    assert len(members) == len(set(members))
    assert set(members) == {process for line in lines for process in line}
    for line in lines:
        (own,) = [group for group in made if line[0] in group]
        assert set(line) <= set(own)
        assert any(own[0] == other[0] for other in lines)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=9), st.data())
def test_parts_of_a_stream(sizes: list[int], data: st.DataObject) -> None:
    whole = np.arange(sum(sizes), dtype=np.uint8)
    stream = _Stream(np.split(whole, np.cumsum(sizes)[:-1]))
    begin = data.draw(st.integers(0, 70))
    end = data.draw(st.integers(begin, 80))
    parts = list(stream.parts(begin, end))
    assert all(part.size for part in parts)
    assert b"".join(part.tobytes() for part in parts) == whole[begin:end].tobytes()
    assert all(np.shares_memory(part, whole) for part in parts)


@given(st.integers(1, 5000), st.sampled_from([16, 64, 1024]))
def test_pieces_follow_one_another_in_two_sizes(length: int, piece_bytes: int) -> None:
    pieces = list(_pieces(length, piece_bytes))
    assert [begin for begin, _ in pieces] == [0, *np.cumsum([nbytes for _, nbytes in pieces])[:-1]]
    assert {nbytes for _, nbytes in pieces} <= {piece_bytes, piece_bytes // 16}
    assert 0 <= sum(nbytes for _, nbytes in pieces) - length < piece_bytes // 16
    assert sum(nbytes < piece_bytes for _, nbytes in pieces) <= 16


def proposal(wish: bool | None, digest: str = "a", received_bytes: int = 1 << 30) -> bytes:
    return broadcast._Proposal(wish, digest, received_bytes).encode()


@pytest.mark.parametrize(
    ("parts", "decision"),
    [
        ([proposal(None)] * 4, broadcast.TRY),
        ([proposal(True)] * 4, broadcast.BROADCAST),
        ([proposal(False)] * 4, broadcast.EVERYONE),
        ([proposal(True, received_bytes=0)] * 4, broadcast.EVERYONE),
        ([proposal(None, received_bytes=4 * broadcast.LEAST_RECEIVED_BYTES - 1)] * 4, broadcast.EVERYONE),
        ([proposal(None), proposal(False)], broadcast.EVERYONE),
        ([proposal(None), proposal(None, "b")], broadcast.EVERYONE),
    ],
)
def test_decisions(parts: list[bytes], decision: bytes) -> None:
    assert broadcast.decide(parts) == decision


@pytest.mark.parametrize("other", [proposal(False), proposal(None), proposal(True, "b")])
def test_processes_that_are_not_agreed_do_not_broadcast(other: bytes) -> None:
    for parts in ([proposal(True), other], [other, proposal(True)]):
        with pytest.raises(errors.InvalidInput, match="process"):
            broadcast.decide(parts)
