"""What a program asks of the controller, and what it is answered, as integers of packs (`packing`). No I/O.

A pack to the controller has any number of calls, in the order in which they were made; one to a program has
answers, in any order. `*` and `+` mean what they mean in `host_messages`.

    call: a number for the answer, or -1 if none is wanted; then one of
        RUN, (fingerprint, slices, cost, priority)*, arguments, results
        PUT, handle, slice, sharding*, array+
        FREE, handles
        OTHER, (method, arguments)+
    answer: its number, what has been answered+
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from waystation._errors import Corrupt
from waystation.runtime.control.packing import Pack, Packer

NO_ANSWER = -1
_RUN, _PUT, _FREE, _OTHER = range(4)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a program.

    Attributes:
        method: Its name.
        arguments: In order.
        answer: A number of the program's for the answer; -1 if it wants none.
    """

    method: str
    arguments: tuple[Any, ...]
    answer: int = NO_ANSWER


def pack_calls(calls: Sequence[Call], packer: Packer) -> bytes:
    """Calls, in one pack."""
    integers = packer.integers
    for call in calls:
        integers.append(call.answer)
        if call.method == "run":
            fingerprint, slices, arguments, results, cost_seconds, priority = call.arguments
            integers.extend((_RUN, packer.known((fingerprint, slices, cost_seconds, priority))))
            packer.numbers(arguments)
            packer.numbers(results)
        elif call.method == "put":
            handle, array, slice_number, sharding = call.arguments
            integers.extend((_PUT, handle, slice_number, packer.known(sharding), packer.object(array)))
        elif call.method == "free":
            integers.append(_FREE)
            packer.numbers(call.arguments[0])
        else:
            integers.extend((_OTHER, packer.object((call.method, call.arguments))))
    return packer.take()


def unpack_calls(pack: Pack) -> Iterator[Call]:
    """Calls.

    Raises:
        Corrupt: They are none.
    """
    while not pack.is_over:
        answer, kind = pack.integer(), pack.integer()
        if kind == _RUN:
            fingerprint, slices, cost_seconds, priority = pack.known()
            places = fingerprint, slices, pack.numbers(), pack.numbers()
            yield Call("run", (*places, cost_seconds, priority), answer)
        elif kind == _PUT:
            handle, slice_number, sharding = pack.integer(), pack.integer(), pack.known()
            yield Call("put", (handle, pack.object(), slice_number, sharding), answer)
        elif kind == _FREE:
            yield Call("free", (pack.numbers(),), answer)
        elif kind == _OTHER:
            method, arguments = pack.object()
            yield Call(method, arguments, answer)
        else:
            raise Corrupt(f"a program asks for something of kind {kind}, and there is none")


def pack_answer(number: int, answer: Any, packer: Packer) -> bytes:
    """An answer."""
    packer.integers.extend((number, packer.object(answer)))
    return packer.take()


def unpack_answers(pack: Pack) -> Iterator[tuple[int, Any]]:
    """Answers, with their numbers."""
    while not pack.is_over:
        yield pack.integer(), pack.object()
