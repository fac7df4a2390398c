"""Chains of small computations become one: the same values, of the same functions, in fewer calls."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.ir.strategies import programs

from waystation.errors import Corrupt
from waystation.runtime.ir import (
    Arg,
    Compute,
    HostCall,
    Program,
    Reshard,
    Result,
    Sharding,
    SliceShape,
    Value,
    can_be_joined,
    join_chains,
    prepare,
    verify,
)
from waystation.runtime.ir.chains import Chain, ChainCall, decode_chain, is_chain
from waystation.runtime.ir.passes.chains import MOST_CALLS, SMALL_ARRAY_BYTES

ROWS = Sharding((("rows", 4),), (("rows",),))
WHOLE = Sharding((("rows", 4),))


def key_of(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()


def value(number: int, slice_number: int = 0, sharding: Sharding = ROWS) -> Value:
    return Value(number, (4,), "float32", slice_number, sharding)


def call(made: int, *operands: int, on: int = 0, how: Sharding = ROWS, donated: tuple[int, ...] = ()) -> Any:
    shardings = (how,) * len(operands)
    return Compute(f"call {made}", f"f{made}", on, operands, shardings, (value(made, on),), donated)


def program(*nodes: Any) -> Program:
    return Program("p", (SliceShape(0, (4,)), SliceShape(1, (4,))), nodes)


def code_of(program: Program) -> dict[str, bytes]:
    """Code that says nothing, for all functions."""
    return {node.function: b"code of " + node.function.encode() for node in program.nodes if is_call(node)}


def is_call(node: object) -> bool:
    return isinstance(node, Compute)


def meaning(program: Program, code: dict[str, bytes], counts: dict[str, int]) -> list[Any]:
    """What a program returns, as terms: which function of what."""
    values: dict[int, Any] = {}

    def apply(function: str, operands: list[Any]) -> list[Any]:
        if not is_chain(code.get(function, b"")):
            return [(function, at, tuple(operands)) for at in range(counts[function])]
        chain, parts = decode_chain(code[function])
        assert [code[key] for key in chain.functions] == list(parts)
        assert len(operands) == chain.operand_count
        found = list(operands)
        for each in chain.calls:
            found += apply(chain.functions[each.function], [found[number] for number in each.operands])
        return [found[number] for number in chain.results]

    for node in program.nodes:
        operands = [values[number] for number in node.operands]
        if isinstance(node, Compute | HostCall):
            made = apply(node.function, operands)
        elif isinstance(node, Reshard):
            made = [("reshard", operands[0])]
        else:
            made = [("argument", each.number) for each in node.results]
        values.update(zip([each.number for each in node.results], made, strict=True))
    return [values[number] for number in program.nodes[-1].operands]


@given(programs(), st.data())
def test_a_joined_program_means_the_same(found: Program, data: st.DataObject) -> None:
    nodes = tuple(
        replace(node, function=f"f{at}") if isinstance(node, Compute | HostCall) else node
        for at, node in enumerate(found.nodes)
    )
    traced = replace(found, nodes=nodes)
    counts = {node.function: len(node.results) for node in nodes if isinstance(node, Compute | HostCall)}
    code = {key: part for key, part in code_of(traced).items() if data.draw(st.integers(0, 3))}
    joined = join_chains(traced, code, key_of)
    verify(joined.program)
    prepare(joined.program)
    assert bool(joined.functions) == can_be_joined(traced, code)
    known = {**code, **{key: part for key, (_, part) in joined.functions.items()}}
    assert meaning(joined.program, known, counts) == meaning(traced, code, counts)


def test_calls_that_hand_values_on_as_they_lie_are_joined() -> None:
    arg = Arg("x", value(0))
    traced = program(arg, call(1, 0), call(2, 1, 0), call(3, 2), Result((1, 3)))
    joined = join_chains(traced, code_of(traced), key_of)
    ((key, (label, encoded)),) = joined.functions.items()
    assert joined.program.nodes == (
        arg,
        Compute("call 1, call 2, call 3 (chain of 3)", key, 0, (0,), (ROWS,), (value(1), value(3))),
        Result((1, 3)),
    )
    assert key == key_of(encoded)
    calls = (ChainCall(0, (0,)), ChainCall(1, (1, 0)), ChainCall(2, (2,)))
    chain, parts = decode_chain(encoded)
    assert chain == Chain(label, ("f1", "f2", "f3"), 1, calls, (1, 3))
    assert parts == (b"code of f1", b"code of f2", b"code of f3")


@pytest.mark.parametrize(
    "nodes",
    [
        (call(1, 0), Result((1,))),
        (call(1, 0), call(2, 1, how=WHOLE), Result((2,))),
        (call(1, 0), call(2, 1, donated=(0,)), Result((2,))),
        (call(1, 0), call(2, 1, on=1), Result((2,))),
        (call(1, 0), Reshard(1, value(2, sharding=WHOLE)), call(3, 2, how=WHOLE), Result((3,))),
        (call(1, 0), replace(call(2, 1), dynamic=True), Result((2,))),
    ],
    ids=["one call", "another sharding", "donated", "another slice", "a reshard between", "dynamic"],
)
def test_others_stay_as_they_are(nodes: tuple[Any, ...]) -> None:
    traced = program(Arg("x", value(0)), *nodes)
    assert join_chains(traced, code_of(traced), key_of).program == traced
    assert not can_be_joined(traced, code_of(traced))


def test_large_arrays_are_not_joined() -> None:
    def sized(made: int, *operands: int, size: int) -> Any:
        result = Value(made, (size,), "float32", 0, ROWS)
        return replace(call(made, *operands), results=(result,))

    for size, is_joined in ((SMALL_ARRAY_BYTES, True), (SMALL_ARRAY_BYTES + 4, False)):
        arg = Arg("x", Value(0, (size,), "float32", 0, ROWS))
        traced = program(arg, sized(1, 0, size=size), sized(2, 1, size=size), Result((2,)))
        assert can_be_joined(traced, code_of(traced)) is is_joined


def test_large_functions_are_not_joined_and_chains_have_a_length() -> None:
    count = 2 * MOST_CALLS + 1
    traced = program(Arg("x", value(0)), *(call(at + 1, at) for at in range(count)), Result((count,)))
    assert not can_be_joined(traced, {})
    joined = join_chains(traced, code_of(traced), key_of).program
    assert [node.kind for node in joined.nodes] == ["arg", "compute", "compute", "compute", "result"]


def test_damaged_bytes_are_refused() -> None:
    chain = Chain("label", ("f",), 1, (ChainCall(0, (0,)),), (1,))
    encoded = chain.encoded({"f": b"code"})
    assert decode_chain(encoded) == (chain, (b"code",))
    for damaged in (encoded[:-1], encoded + b"x", encoded[:20], encoded.replace(b"operands", b"operends")):
        with pytest.raises(Corrupt, match="damaged"):
            decode_chain(damaged)
