"""Every rule of the low form, broken once; the error names the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from waystation.runtime.devices import DeviceId
from waystation.runtime.errors import InvalidProgram
from waystation.runtime.ir import (
    Copy,
    Exec,
    HostProgram,
    Instruction,
    LowProgram,
    Recv,
    Send,
    lower,
    parse,
    prepare,
    verify_low,
)
from waystation.runtime.ir.low import Free
from waystation.runtime.resources import Placement

Steps = tuple[Instruction, ...]


def lowered() -> LowProgram:
    """Two hosts that exchange halves: each copies one part of its shard and sends the other."""
    program = parse(
        """program "swap" {
          slice @0 [2]
          sharding #0 = [x=2] (x, *)
          sharding #1 = [x=2] (*, x)
          %0 = arg "v" : int8[4, 4] @0 #0
          %1 = compute "back" "b" @0 (%0 #1) : int8[4, 4] @0 #0
          result (%1)
        }"""
    )
    return lower(prepare(program), {0: Placement(1, "i", (DeviceId("a", 0), DeviceId("b", 0)))})


def with_steps(change: Callable[[Steps], Steps], host: str = "b") -> LowProgram:
    low = lowered()
    parts = [
        HostProgram(part.host, change(part.instructions)) if part.host == host else part for part in low.hosts
    ]
    return replace(low, hosts=tuple(parts))


def without(kind: type) -> Callable[[Steps], Steps]:
    return lambda steps: tuple(step for step in steps if not isinstance(step, kind))


def each(kind: type, **changed: object) -> Callable[[Steps], Steps]:
    return lambda steps: tuple(replace(step, **changed) if isinstance(step, kind) else step for step in steps)


def test_the_program_is_what_the_changes_below_suppose() -> None:
    kinds = [type(step) for step in lowered().on("b").instructions]
    assert kinds == [Send, Copy, Recv, Exec, Free]
    verify_low(lowered())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(Send), "host 'a': instruction 2 .* waits for ever"),
        (without(Copy), "host 'b': .* uses %2 before it is there"),
        (without(Recv), "host 'b': .* uses %2 before it is there"),
        (lambda steps: (*steps[:2], steps[3], steps[2], steps[4]), "uses %2 before it is there"),
        (lambda steps: (steps[0], *steps), "sends a transfer a second time"),
        (lambda steps: (*steps[:3], *steps[2:]), "receives a transfer a second time"),
        (lambda steps: (*steps[:2], *steps[1:]), "host 'b': leaves an overlap in %2"),
        (each(Recv, box=((0, 0), (1, 1))), "differs from what host 'a' sends"),
        (each(Recv, host="c"), "differs from what host 'a' sends"),
        (each(Send, box=((0, 0), (2, 2))), "uses a box that %0.0. does not have"),
        (each(Send, value=9), "uses %9, which has no shard on this host"),
        (each(Copy, box=((2, 0), (2, 2))), "brings %2.0. what its shard does not have"),
        (each(Exec, devices=(0, 1)), "must run on all devices of slice @0 on this host"),
        (each(Exec, donated=(0,)), "uses %2 after it was given up"),
        (lambda steps: (Free((0,)), *steps), "uses %0 after it was given up"),
    ],
)
def test_a_broken_rule_is_told_with_its_host(change: Callable[[Steps], Steps], message: str) -> None:
    with pytest.raises(InvalidProgram, match=message):
        verify_low(with_steps(change))


def test_hosts_that_wait_for_each_other_are_found() -> None:
    low = lowered()
    parts = [
        HostProgram(part.host, tuple(sorted(part.instructions, key=lambda step: not isinstance(step, Recv))))
        for part in low.hosts
    ]
    with pytest.raises(InvalidProgram, match=r"host 'a': instruction 0 .* waits for ever"):
        verify_low(replace(low, hosts=tuple(parts)))


def test_what_is_sent_must_be_received() -> None:
    low = with_steps(lambda steps: (replace(steps[0], transfer=7), *steps))
    with pytest.raises(InvalidProgram, match="sends transfer 7, which no host receives"):
        verify_low(low)
