"""The low form does what the high form says, wherever slices are and in whatever order hosts get ahead."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.ir.interpreter import LowRun, arguments, run_high
from tests.runtime.ir.strategies import placements, programs, shardings

from waystation.errors import InvalidInput
from waystation.runtime.devices import DeviceId
from waystation.runtime.errors import InvalidProgram
from waystation.runtime.ir import (
    Arg,
    Compute,
    Form,
    Program,
    Recv,
    Reshard,
    Result,
    Send,
    Sharding,
    SliceShape,
    Value,
    encode,
    fingerprint,
    islands_of,
    lower,
    parse,
    place,
    prepare,
    refine_shapes,
    replicated,
    show,
    static_subgraphs,
    verify,
)
from waystation.runtime.resources import Placement


@given(data=st.data(), seed=st.integers(0, 1 << 32))
def test_hosts_compute_what_the_program_says(data: st.DataObject, seed: int) -> None:
    program = prepare(data.draw(programs()))
    low = lower(program, data.draw(placements(program)))
    run = LowRun(low, arguments(program))
    run.run(random.Random(seed))
    expected = run_high(program)
    for number, array in zip(program.nodes[-1].operands, expected, strict=True):
        np.testing.assert_array_equal(run.gather(number), array)
    kept = {node.result.number for node in program.nodes if isinstance(node, Arg) and not node.donated}
    left = {number for (number, _), shard in run.shards.items() if shard.size}
    assert left <= kept | set(program.nodes[-1].operands)
    assert not run.flying


@given(data=st.data())
def test_a_reshard_moves_only_what_is_not_there(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.just(12), max_size=3)))
    counts = data.draw(st.tuples(*[st.sampled_from([1, 2, 3, 4, 6, 12])] * 2))
    source, target = (data.draw(shardings(count, len(shape))) for count in counts)
    program = Program(
        "move",
        (SliceShape(0, (counts[0],)), SliceShape(1, (counts[1],))),
        (
            Arg("x", Value(0, shape, "int64", 0, source)),
            Reshard(0, Value(1, shape, "int64", 1, target)),
            Result((1,)),
        ),
    )
    devices = [DeviceId(f"host{at // 3}", at % 3) for at in range(24)]
    found = {at: Placement(1, "i", tuple(data.draw(st.permutations(devices))[: counts[at]])) for at in (0, 1)}
    low = lower(prepare(program), found)
    run = LowRun(low, arguments(program))
    run.run(random.Random(0))
    np.testing.assert_array_equal(run.gather(1), run_high(program)[0])
    # A host is sent what its shards have and it does not hold, each element once.
    for part in low.hosts:
        wanted, held = (
            {
                element
                for device, box in run.boxes(number)
                if device.host == part.host
                for element in np.ndindex(*shape)
                if all(b <= at < b + e for at, b, e in zip(element, *box, strict=True))
            }
            for number in (1, 0)
        )
        received = [step.box for step in part.instructions if isinstance(step, Recv)]
        assert sum(int(np.prod(box[1], dtype=int)) for box in received) == len(wanted - held)


@given(data=st.data())
def test_subgraphs_run_one_after_the_other(data: st.DataObject) -> None:
    program = prepare(data.draw(programs()))
    subgraphs = static_subgraphs(program)
    assert sorted(node for part in subgraphs for node in part.nodes) == list(range(len(program.nodes)))
    order = [program.nodes[node] for part in subgraphs for node in part.nodes]
    verify(Program(program.name, program.slices, tuple(order)), Form.FREED)
    dynamic_of = {
        value.number: part.number
        for part in subgraphs
        for node in part.nodes
        for value in program.nodes[node].results
        if getattr(program.nodes[node], "dynamic", False)
    }
    for part in subgraphs:
        for node in part.nodes:
            assert all(dynamic_of.get(number, -1) < part.number for number in program.nodes[node].operands)
    found = data.draw(placements(program))
    arrays = arguments(program)
    run = None
    for part in subgraphs:
        low = lower(program, found, part.nodes)
        if run is None:
            run = LowRun(low, arrays)
        else:
            run.steps = {host.host: host.instructions for host in low.hosts}
            run.at = dict.fromkeys(run.steps, 0)
        run.run(random.Random(0))
    assert run is not None
    for number, array in zip(program.nodes[-1].operands, run_high(program), strict=True):
        np.testing.assert_array_equal(run.gather(number), array)


def chain(devices: int, length: int = 2) -> Program:
    """Arg → Compute → … → Result over two slices in turn, with a reshard between them."""
    sharded = Sharding((("data", devices),), (("data",),))
    values = [Value(at, (8192, 16), "float32", at % 2, sharded) for at in range(length + 1)]
    nodes = [
        Compute("step", f"f{at}", at % 2, (at - 1,), (sharded,), (values[at],)) for at in range(1, length + 1)
    ]
    slices = SliceShape(0, (devices,)), SliceShape(1, (devices,))
    return Program("chain", slices, (Arg("x", values[0]), *nodes, Result((length,))))


def placements_of(devices: int, epoch: int = 1) -> dict[int, Placement]:
    return {
        number: Placement(
            epoch, island, tuple(DeviceId(f"{island}{at // 4}", at % 4) for at in range(devices))
        )
        for number, island in enumerate("ab")
    }


def test_a_program_is_as_large_for_2048_shards_as_for_4() -> None:
    few, many = chain(4), chain(2048)
    assert [node.kind for node in many.nodes] == ["arg", "compute", "compute", "result"]
    assert len(encode(few)) == len(encode(many))
    assert len(encode(prepare(few))) == len(encode(prepare(many)))
    assert re.sub(r"\d+", "n", show(prepare(few))) == re.sub(r"\d+", "n", show(prepare(many)))
    messages = []
    for program, devices in ((few, 4), (many, 2048)):
        placed = place(prepare(program), placements_of(devices))
        subgraphs = static_subgraphs(placed.program)
        messages.append([islands_of(placed, part.nodes) for part in subgraphs])
    assert messages == [[("a", "b")]] * 2


def test_each_shard_of_2048_goes_where_it_belongs() -> None:
    low = lower(prepare(chain(2048)), placements_of(2048))
    assert len(low.hosts) == 1024
    assert low.on("nobody").instructions == ()
    assert low.on("b7") in low.hosts
    for part in low.hosts:
        sends = [step for step in part.instructions if isinstance(step, Send)]
        assert len(sends) == 4 if part.host.startswith("b") else sends
        assert len(part.instructions) <= 12


def test_a_remap_changes_only_the_low_form() -> None:
    program = prepare(chain(4))
    before = fingerprint(program)
    first = lower(program, placements_of(4))
    moved = placements_of(4)
    moved[1] = Placement(2, "c", tuple(DeviceId("c0", at) for at in range(4)))
    second = lower(program, moved)
    assert fingerprint(program) == before
    assert fingerprint(first) != fingerprint(second) == fingerprint(lower(program, moved))
    assert {part.host for part in second.hosts} == {"a0", "c0"}


def test_a_slice_needs_a_placement_of_its_size() -> None:
    program = prepare(chain(4))
    with pytest.raises(InvalidProgram, match="4 devices for slice @0, its placement has 8"):
        lower(program, placements_of(8))
    with pytest.raises(InvalidProgram, match="slice @1, its placement has 0"):
        lower(program, {0: placements_of(4)[0]})


def test_replicas_share_the_sending() -> None:
    program = Program(
        "spread",
        (SliceShape(0, (4,)), SliceShape(1, (8,))),
        (
            Arg("x", Value(0, (8,), "int8", 0, replicated(4))),
            Reshard(0, Value(1, (8,), "int8", 1, Sharding((("d", 8),), (("d",),)))),
            Result((1,)),
        ),
    )
    low = lower(
        prepare(program),
        {
            0: Placement(1, "a", tuple(DeviceId(f"a{at}", 0) for at in range(4))),
            1: Placement(1, "b", tuple(DeviceId(f"b{at}", 0) for at in range(8))),
        },
    )
    sends = {part.host: len(part.instructions) for part in low.hosts if part.host.startswith("a")}
    assert set(sends.values()) == {2}


def test_shapes_that_were_bounds_become_known() -> None:
    program = prepare(
        parse(
            """program "route" {
              slice @0 [2]
              slice @1 [4]
              sharding #0 = [x=2] (x)
              sharding #1 = [x=4] (x)
              %0 = arg "tokens" : int8[64] @0 #0
              %1 = compute "choose" "c" @0 (%0 #0) dynamic : int8[64] @0 #0
              %2 = compute "use" "u" @1 (%1 #1) : int8[64] @1 #1
              result (%2)
            }"""
        )
    )
    first, second = static_subgraphs(program)
    assert [program.nodes[node].kind for node in first.nodes] == ["arg", "compute"]
    found = {
        0: Placement(1, "i", tuple(DeviceId("a", at) for at in range(2))),
        1: Placement(1, "i", tuple(DeviceId("b", at) for at in range(4))),
    }
    low = lower(refine_shapes(program, {1: (8,)}), found, second.nodes)
    assert [step.box[1] for step in low.on("a").instructions if isinstance(step, Send)] == [(2,)] * 4
    for shapes, message in (
        ({1: (65,)}, r"node 1 \(compute 'choose'\) has made %1 of shape \(65,\), its bound is \(64,\)"),
        ({1: ()}, "its bound is"),
        ({2: (8,)}, "makes %2 of a shape that does not depend on data"),
    ):
        with pytest.raises(InvalidProgram, match=message):
            refine_shapes(program, shapes)


@pytest.mark.parametrize(
    ("axes", "spec", "message"),
    [
        ((("x", 2), ("x", 2)), (), "different names"),
        ((("x", 0),), (), "sizes of 1 or more"),
        ((("x y", 2),), (), "letters, digits"),
        ((("x", 2),), (("y",),), "must name axes of the mesh"),
        ((("x", 2),), (("x",), ("x",)), "each once at most"),
    ],
)
def test_shardings_are_checked(axes: tuple, spec: tuple, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Sharding(axes, spec)
