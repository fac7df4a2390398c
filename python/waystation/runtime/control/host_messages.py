"""What the controller and a host tell each other, as integers of packs (`packing`). No I/O.

A pack to a host has any number of the following, and one from a host any number of what is done.

    begin: BEGIN, number, work, program*, instructions, each of them:
        RUN, list*, arguments, results, consumed, peers*
        PUT, handle, value*, placement*, array+
        GET, handle; SPILL, handle; RESTORE, handle
        OTHER, instruction+
    release: RELEASE, handles
    abandon: ABANDON, work, whether it has ended, error+
    forget: FORGET, (lists, functions)+
    done: work, nanoseconds, -1 or (error, what was fetched, what was said)+

`*` is the number of a known object, `+` that of one of the pack; integers of which there may be any number
come after how many they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from waystation._errors import Corrupt, WaystationError
from waystation.runtime.control.packing import Pack, Packer
from waystation.runtime.messages import Done, Get, Instruction, Message, Put, Restore, Run, Spill

_BEGIN, _RELEASE, _ABANDON, _FORGET = range(4)
_RUN, _PUT, _GET, _SPILL, _RESTORE, _OTHER = range(6)
_BY_HANDLE: dict[int, type[Get] | type[Spill] | type[Restore]] = {_GET: Get, _SPILL: Spill, _RESTORE: Restore}
_KINDS: dict[type, int] = {each: kind for kind, each in _BY_HANDLE.items()}
_NOTHING = -1


@dataclass(frozen=True, slots=True)
class BeginMessage:
    """Do what a message says, when it is its turn.

    Attributes:
        number: Its place among all that this host is told in this epoch.
        message: The message.
    """

    number: int
    message: Message


@dataclass(frozen=True, slots=True)
class ReleaseBuffers:
    """Forget buffers; nothing that is still to be done uses them."""

    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AbandonWork:
    """A work has failed on another host: nothing is waited for, or kept, for it.

    Attributes:
        work: The number of the work.
        error: Why.
        has_ended: Whether no host has anything to do for it any more.
    """

    work: int
    error: WaystationError
    has_ended: bool


@dataclass(frozen=True, slots=True)
class ForgetCode:
    """Forget lists, which nothing that is still to be done uses; and functions, unless lists that have come
    meanwhile call them.

    Attributes:
        lists: What the lists are known by.
        functions: The keys of functions, and the names of host functions.
    """

    lists: tuple[str, ...]
    functions: tuple[str, ...]


Told: TypeAlias = BeginMessage | ReleaseBuffers | AbandonWork | ForgetCode


def pack_told(told: Sequence[Told], packer: Packer) -> bytes:
    """What a host is told, in one pack."""
    for each in told:
        match each:
            case BeginMessage(number, message):
                packer.integers.extend((_BEGIN, number, message.work, packer.known(message.program)))
                packer.integers.append(len(message.instructions))
                for instruction in message.instructions:
                    _pack(instruction, packer)
            case ReleaseBuffers(handles):
                packer.integers.append(_RELEASE)
                packer.numbers(handles)
            case AbandonWork(work, error, has_ended):
                packer.integers.extend((_ABANDON, work, has_ended, packer.object(error)))
            case ForgetCode(lists, functions):
                packer.integers.extend((_FORGET, packer.object((lists, functions))))
    return packer.take()


def unpack_told(pack: Pack) -> Iterator[Told]:
    """What a host is told.

    Raises:
        Corrupt: It is nothing that hosts are told.
    """
    while not pack.is_over:
        match pack.integer():
            case 0:  # begin
                number, work, program = pack.integer(), pack.integer(), pack.known()
                instructions = tuple(_unpack(pack) for _ in range(pack.integer()))
                yield BeginMessage(number, Message(work, program, instructions))
            case 1:  # release
                yield ReleaseBuffers(pack.numbers())
            case 2:  # abandon
                work, has_ended, error = pack.integer(), bool(pack.integer()), pack.object()
                yield AbandonWork(work, error, has_ended)
            case 3:  # forget
                yield ForgetCode(*pack.object())
            case kind:
                raise Corrupt(f"a host is told something of kind {kind}, and there is none")


def pack_done(done: Sequence[Done], packer: Packer) -> bytes:
    """What a host has done, in one pack."""
    for each in done:
        rest = _NOTHING
        if each.error is not None or each.fetched or each.said:
            rest = packer.object((each.error, each.fetched, each.said))
        packer.integers.extend((each.work, int(each.device_seconds * 1e9), rest))
    return packer.take()


def unpack_done(pack: Pack) -> list[Done]:
    """What a host has done."""
    found = []
    while not pack.is_over:
        work, seconds = pack.integer(), pack.integer() / 1e9
        rest = pack.optional_object()
        found.append(Done(work, seconds) if rest is None else Done(work, seconds, *rest))
    return found


def _pack(instruction: Instruction, packer: Packer) -> None:
    integers = packer.integers
    match instruction:
        case Run():
            integers.extend((_RUN, packer.known(instruction.list)))
            packer.numbers(instruction.arguments)
            packer.numbers(instruction.results)
            packer.numbers(instruction.consumed)
            integers.append(packer.known(instruction.peers))
        case Put():
            value, placement = packer.known(instruction.value), packer.known(instruction.placement)
            integers.extend((_PUT, instruction.handle, value, placement, packer.object(instruction.array)))
        case Get() | Spill() | Restore():
            integers.extend((_KINDS[type(instruction)], instruction.handle))
        case _:
            integers.extend((_OTHER, packer.object(instruction)))


def _unpack(pack: Pack) -> Instruction:
    kind = pack.integer()
    if kind == _RUN:
        return Run(pack.known(), pack.numbers(), pack.numbers(), pack.numbers(), pack.known())
    if kind == _PUT:
        handle, value, placement = pack.integer(), pack.known(), pack.known()
        return Put(handle, pack.object(), value, placement)
    if kind in _BY_HANDLE:
        return _BY_HANDLE[kind](pack.integer())
    if kind == _OTHER:
        other: Instruction = pack.object()
        return other
    raise Corrupt(f"a host is told an instruction of kind {kind}, and there is none")
