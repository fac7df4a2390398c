"""Programs as text and as bytes, there and back; and what is no program."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.ir.strategies import placements, programs

from waystation.errors import Corrupt, InvalidInput
from waystation.runtime.errors import InvalidProgram
from waystation.runtime.ir import decode, encode, fingerprint, lower, parse, prepare, show
from waystation.runtime.ir.verify import verify


@given(programs())
def test_text_is_read_back(program) -> None:
    verify(program)
    text = show(program)
    assert parse(text) == program
    assert parse(" ".join(text.split("\n"))) == program
    prepared = prepare(program)
    assert parse(show(prepared)) == prepared


@given(st.data())
def test_bytes_are_read_back(data: st.DataObject) -> None:
    program = data.draw(programs())
    assert decode(encode(program)) == program
    low = lower(prepare(program), data.draw(placements(program)))
    assert decode(encode(low)) == low
    for part in low.hosts:
        assert decode(encode(part)) == part
    assert fingerprint(program) == fingerprint(parse(show(program)))


@given(program=programs(), data=st.data())
def test_damaged_bytes_are_refused_or_are_other_programs(program, data: st.DataObject) -> None:
    whole = bytearray(encode(program))
    for cut in (data.draw(st.integers(0, len(whole) - 1)), len(whole) - 1):
        with pytest.raises(Corrupt, match="damaged near"):
            decode(bytes(whole[:cut]))
    with pytest.raises(Corrupt, match="go on after its end"):
        decode(bytes(whole) + b"T")
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(Corrupt):
        decode(bytes(whole))


@given(program=programs(), data=st.data())
def test_changed_text_is_refused_or_is_another_program(program, data: st.DataObject) -> None:
    text = show(program)
    place = data.draw(st.integers(0, len(text) - 1))
    changed = text[:place] + data.draw(st.text(max_size=2)) + text[place + 1 :]
    with contextlib.suppress(InvalidInput):
        parse(changed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 of the program has 'the end' where 'program' was expected"),
        ('program "x"', "where '{' was expected"),
        ('program "x" {\n  slice 3', "line 2 of the program has '3' where '@' was expected"),
        ('program "x" {\n  %0 = nothing', "'nothing' where a node was expected"),
        ('program "x" {\n  %0 = arg "v" : f[] @0 #9\n}', "where a use of sharding #9, once it is declared,"),
        ('program "x" {\n  arg "v"\n}', "where a node of one result was expected"),
        ('program "x" {\n  result ()\n}\n!', "has '!' where a token was expected"),
        ('program "x" {\n  result ()\n}\nprogram', "has 'program' where the end was expected"),
        ('program "\\q" {', "where a string was expected"),
    ],
)
def test_what_is_no_program_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InvalidProgram) as caught:
        parse(text)
    assert message in str(caught.value)
