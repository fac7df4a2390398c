"""Every rule of the high form, broken once; the error names the node."""

from __future__ import annotations

import pytest

from waystation.runtime.errors import InvalidProgram
from waystation.runtime.ir import Form, Program, SliceShape, parse, prepare, verify

HEAD = """program "p" {
  slice @0 [2]
  slice @1 [4]
  sharding #0 = [x=2] (x)
  sharding #1 = [x=2] ()
  sharding #2 = [x=4] (x)
  %0 = arg "kept" : float32[8] @0 #0
  %1 = arg "given" donated : float32[8] @0 #0
"""


def program(*lines: str) -> Program:
    return parse("\n".join([HEAD, *lines, "}"]))


@pytest.mark.parametrize(
    ("lines", "message", "node"),
    [
        (['host_call "h" "h" @0 (%9 #0)', "result ()"], "uses %9, which no node before it defines", 2),
        (['%1 = compute "f" "f" @0 () : int8[] @0 #1', "result ()"], "defines %1 a second time", 2),
        (
            ['%2 = compute "f" "f" @0 () : floaty[] @0 #1', "result ()"],
            "cannot make %2: arrays of dtype 'floaty'",
            2,
        ),
        (['%2 = compute "f" "f" @0 () : int8[] @5 #1', "result ()"], "cannot make %2 on @5", 2),
        (
            ['%2 = compute "f" "f" @5 () : int8[] @5 #1', "result ()"],
            "slice @5, which the program does not",
            2,
        ),
        (
            ['%2 = compute "f" "f" @0 () : int8[4] @0 #2', "result ()"],
            "mesh of 4 devices on slice @0 of 2",
            2,
        ),
        (
            ['%2 = compute "f" "f" @0 () : int8[5] @0 #0', "result ()"],
            "shards %2 wrongly: an array of shape",
            2,
        ),
        (['%2 = compute "f" "f" @0 () : int8[] @0 #0', "result ()"], "has 1 parts, the array 0 axes", 2),
        (['compute "f" "f" @1 (%0 #0)', "result ()"], "mesh of 2 devices on slice @1 of 4", 2),
        (['compute "f" "f" @0 (%1 #0) donates (1)', "result ()"], "donates operand 1 of 1", 2),
        (['compute "f" "f" @0 (%1 #0, %1 #0) donates (0)', "result ()"], "which it uses a second time", 2),
        (
            ['compute "f" "f" @0 (%1 #0) donates (0)', "result (%1)"],
            "uses %1 after it was given up by program 'p', node 2 (compute 'f')",
            3,
        ),
        (["free (%0)", "result ()"], "frees %0, an argument that the caller keeps", 2),
        (["free (%1, %1)", "result ()"], "uses %1 after it was given up", 2),
        (["%2 = reshard %0 : float32[4] @0 #0", "result ()"], "makes of float32(8,) a float32(4,)", 2),
        (["result ()", "result ()"], "is followed by other nodes", 2),
    ],
)
def test_a_broken_rule_is_told_with_its_node(lines: list[str], message: str, node: int) -> None:
    with pytest.raises(InvalidProgram) as caught:
        verify(program(*lines))
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"program 'p', node {node} (")
    assert caught.value.context == {"program": "p", "node": node}


@pytest.mark.parametrize(
    ("form", "lines", "message"),
    [
        (Form.RESHARDED, ['compute "f" "f" @1 (%0 #2)', "result ()"], "%0 on slice @1 in another sharding"),
        (Form.RESHARDED, ['compute "f" "f" @0 (%0 #1)', "result ()"], "a reshard is missing"),
        (Form.FREED, ["result ()"], "leaves %1 behind: it is neither freed nor returned"),
        (Form.FREED, ['compute "f" "f" @0 (%0 #0) donates (0)', "result (%1)"], "that the caller keeps"),
    ],
)
def test_later_forms_have_more_rules(form: Form, lines: list[str], message: str) -> None:
    found = program(*lines)
    verify(found)
    verify(found, Form(form - 1))
    with pytest.raises(InvalidProgram, match=message):
        verify(found, form)


def test_a_program_ends_with_its_result_and_declares_slices_once() -> None:
    with pytest.raises(InvalidProgram, match="must end with its result"):
        verify(program())
    found = program("result (%1)")
    with pytest.raises(InvalidProgram, match="declares a slice twice"):
        verify(Program("p", (*found.slices, SliceShape(0, (2,))), found.nodes))


def test_prepare_refuses_what_verify_does() -> None:
    with pytest.raises(InvalidProgram, match="node 2"):
        prepare(program('compute "f" "f" @0 (%1 #0) donates (0)', "free (%1)", "result (%9)"))
