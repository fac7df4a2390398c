"""What calls are recorded into: a batch of calls that wait to be sent, or a program that is being traced.

Both take operands as they come (arrays of the runtime, or of NumPy), and make arrays that stand for results.
A *batch* is sent as one program when something is read; only what can still be read is returned by it. A
*trace* is of one program, whose arguments are the caller's; arrays that it meets otherwise are constants,
which it keeps.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from waystation._errors import InvalidInput
from waystation.runtime.errors import TracedValueRead
from waystation.runtime.ir import Sharding
from waystation.runtime.tracing.arrays import Array, Owner, Reference, SliceLike
from waystation.runtime.tracing.recorder import Callee, Kind, Recorder

# Makes an array of one that is here, on a slice: how it lies, and which slice.
Put = Callable[[np.ndarray[Any, Any], Sharding, SliceLike], Array]


class Recording(Protocol):
    """Where calls are recorded."""

    @property
    def name(self) -> str:
        """The name of the program that it becomes."""
        ...

    @property
    def traces(self) -> bool:
        """Whether its arrays are values of a program that is not run yet."""
        ...

    def call(self, callee: Callee, on: SliceLike, operands: Sequence[Any]) -> list[Array]:
        """Records a call."""
        ...


class _Watched(weakref.ref[Array]):
    """An array, as long as somebody can read it, and how large it is."""

    __slots__ = ("nbytes",)

    nbytes: int


class Batch:
    """Calls that have not been sent.

    Args:
        owner: Reads its arrays.
        put: Makes arrays of those of NumPy.
    """

    name = "untraced"
    traces = False

    def __init__(self, owner: Owner, put: Put) -> None:
        self.recorder: Recorder = Recorder(self.name)
        self.arguments: list[Reference] = []
        self._owner = owner
        self._put = put
        self._numbers: dict[int, int] = {}  # of references, by handle
        self._arrays: dict[int, _Watched] = {}
        self._given_up: dict[int, str] = {}  # values that a call has taken over, and which
        self._unreadable_bytes = 0
        # Arrays may go at any time, in any thread: they are counted by whoever asks.
        self._gone: deque[weakref.ref[Array]] = deque()
        self._note_gone = self._gone.append

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing at all; a call that was refused may have left arguments."""
        return not (self.recorder.calls or self.arguments)

    @property
    def call_count(self) -> int:
        """How many calls it has."""
        return len(self.recorder.calls)

    @property
    def unreadable_bytes(self) -> int:
        """Bytes of arrays that nobody can read any more, which sending it would free."""
        while self._gone:
            watched = self._gone.popleft()
            assert isinstance(watched, _Watched)
            self._unreadable_bytes += watched.nbytes
        return self._unreadable_bytes

    def call(self, callee: Callee, on: SliceLike, operands: Sequence[Any]) -> list[Array]:
        """Records a call.

        Raises:
            TracedValueRead: An operand is of a program that is traced, or was.
            InvalidInput: An operand was donated.
        """
        numbers = []
        for at, operand in enumerate(operands):
            if type(operand) is Array and operand.recording is self and operand.number not in self._given_up:
                numbers.append(operand.number)
            else:
                numbers.append(self._operand(callee, at, operand, callee.operands[at], on))
        if callee.donated:
            self._give_up(callee, numbers)
        made = []
        for number, kind in zip(self.recorder.call(callee, numbers), callee.results, strict=True):
            array = Array(self._owner, kind, on, recording=self, number=number)
            self._watch(number, array)
            made.append(array)
        return made

    def _watch(self, number: int, array: Array) -> None:
        watched = self._arrays[number] = _Watched(array, self._note_gone)
        watched.nbytes = array.kind.nbytes

    def _give_up(self, callee: Callee, numbers: Sequence[int]) -> None:
        check_donations(callee, numbers)
        for at in callee.donated:
            self._given_up[numbers[at]] = callee.label
            reference = self._reference_of(numbers[at])
            if reference is not None:
                reference.ended = donated(callee.label)

    def results(self) -> list[tuple[int, Array]]:
        """What can still be read, by number."""
        found = [(number, array()) for number, array in self._arrays.items()]
        return [
            (number, array)
            for number, array in found
            if array is not None and array.recording is self and number not in self._given_up
        ]

    def given_up(self) -> list[tuple[str, Array]]:
        """What can still be asked for but was donated, and the call that has it."""
        found = [(label, self._arrays[number]()) for number, label in self._given_up.items()]
        return [(label, array) for label, array in found if array is not None and array.recording is self]

    def _operand(self, callee: Callee, at: int, operand: Any, how: Sharding, on: SliceLike) -> int:
        array = operand if isinstance(operand, Array) else self._put(np.asarray(operand), how, on)
        number = array.number
        if array.recording is not self:
            reference = array.usable("used", self._owner)
            known = self._numbers.get(reference.handle)
            if known is not None:
                number = known
            else:
                label = f"{callee.label}.{at}"
                number = self.recorder.argument(label, array.kind, array.slice.number, array.slice.shape)
                self._numbers[reference.handle] = number
                self._watch(number, array)
                self.arguments.append(reference)
        if number in self._given_up:
            raise donated(self._given_up[number])
        return number

    def _reference_of(self, number: int) -> Reference | None:
        for argument, reference in zip(self.recorder.arguments, self.arguments, strict=True):
            if argument.number == number:
                return reference
        return None


@dataclass(slots=True)
class TracedArgument:
    """An argument of a program that is traced.

    Attributes:
        leaf: Its place among the leaves of the caller's arguments; None for a constant.
        constant: What a constant is.
        how: How it lies.
        on: On which slice.
    """

    leaf: int | None
    constant: Reference | None
    how: Sharding
    on: SliceLike


class HostValue:
    """An argument of NumPy, while a program is traced: it goes to where it is first used.

    Args:
        trace: The trace.
        leaf: Its place among the leaves of the caller's arguments.
        kind: Its shape and dtype, as JAX takes it.
    """

    def __init__(self, trace: Trace, leaf: int, kind: Any) -> None:
        self.trace = trace
        self.leaf = leaf
        self.kind = kind
        self.shape: tuple[int, ...] = kind.shape
        self.dtype: Any = kind.dtype

    def _refusal(self) -> TracedValueRead:
        return TracedValueRead(
            f"an argument of program '{self.trace.name}' cannot be read while the program is traced; make it "
            "static (static_argnums), or what depends on it a computation",
            program=self.trace.name,
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise self._refusal()

    def __bool__(self) -> bool:
        raise self._refusal()

    def __int__(self) -> int:
        raise self._refusal()

    def __float__(self) -> float:
        raise self._refusal()

    def __index__(self) -> int:
        raise self._refusal()

    def __iter__(self) -> Iterator[Any]:
        raise self._refusal()

    def __repr__(self) -> str:
        return f"<traced {self.kind}>"


class Trace:
    """One program that is being traced.

    Args:
        name: Its name.
        owner: Reads arrays.
        put: Makes arrays of those of NumPy.
    """

    traces = True

    def __init__(self, name: str, owner: Owner, put: Put) -> None:
        self.name = name
        self.recorder: Recorder = Recorder(name)
        self.arguments: list[TracedArgument] = []
        self.donated_leaves: dict[int, str] = {}
        self._owner = owner
        self._put = put
        self._leaves: dict[int, int] = {}  # leaf -> number
        self._constants: dict[int, int] = {}  # handle -> number
        self._given_up: dict[int, str] = {}
        self._kept: list[Any] = []  # arrays of NumPy that are constants, so that their identities stay theirs
        self._put_already: dict[tuple[int, Sharding, int], Array] = {}

    def require(self, owner: Owner, label: str) -> None:
        """Refuses a call of a function of another client.

        Raises:
            InvalidInput: It is one.
        """
        if owner is not self._owner:
            raise InvalidInput(
                f"program '{self.name}' is traced for {self._owner!r}, and calls '{label}' of {owner!r}; a "
                "program is of one client: that of the arrays that it is given, or else the newest. Give it "
                "an array of the client that you mean (`put`), or close the newer one",
                program=self.name,
                computation=label,
            )

    def argument(self, leaf: int, array: Array) -> Array:
        """What stands for an array that the caller gives."""
        number = self._argument(f"argument {leaf}", leaf, None, array.kind, array.slice)
        return Array(self._owner, array.kind, array.slice, recording=self, number=number)

    def call(self, callee: Callee, on: SliceLike, operands: Sequence[Any]) -> list[Array]:
        """Records a call.

        Raises:
            TracedValueRead: An operand is of another program.
            InvalidInput: An operand was donated before, or is a constant and cannot be.
        """
        pairs = zip(operands, callee.operands, strict=True)
        numbers = [self._operand(each, how, on) for each, how in pairs]
        check_donations(callee, numbers)
        for at in callee.donated:
            self._donate(numbers[at], callee.label)
        results = zip(self.recorder.call(callee, numbers), callee.results, strict=True)
        return [Array(self._owner, kind, on, recording=self, number=number) for number, kind in results]

    def leaf_of(self, value: Any) -> int | None:
        """Which of the caller's leaves a value is, if it is one."""
        if isinstance(value, HostValue) and value.trace is self:
            return value.leaf
        if isinstance(value, Array) and value.recording is self:
            place = {argument.number: at for at, argument in enumerate(self.recorder.arguments)}
            found = place.get(value.number)
            return None if found is None else self.arguments[found].leaf
        return None

    def _argument(
        self, label: str, leaf: int | None, constant: Reference | None, kind: Kind, on: SliceLike
    ) -> int:
        number = self.recorder.argument(label, kind, on.number, on.shape)
        self.arguments.append(TracedArgument(leaf, constant, kind.sharding, on))
        return number

    def _operand(self, operand: Any, how: Sharding, on: SliceLike) -> int:
        if isinstance(operand, HostValue):
            if operand.trace is not self:
                raise operand._refusal()
            if operand.leaf not in self._leaves:
                kind = Kind(operand.shape, str(operand.dtype), how)
                label = f"argument {operand.leaf}"
                self._leaves[operand.leaf] = self._argument(label, operand.leaf, None, kind, on)
            number = self._leaves[operand.leaf]
        elif isinstance(operand, Array) and operand.recording is self:
            number = operand.number
        else:
            number = self._constant(operand, how, on)
        if number in self._given_up:
            raise donated(self._given_up[number])
        return number

    def _constant(self, operand: Any, how: Sharding, on: SliceLike) -> int:
        array = operand
        if not isinstance(operand, Array):
            place = id(operand), how, on.number
            if place not in self._put_already:
                self._kept.append(operand)
                self._put_already[place] = self._put(np.asarray(operand), how, on)
            array = self._put_already[place]
        reference = array.usable("used", self._owner)
        if reference.handle not in self._constants:
            label = f"constant {len(self._constants)}"
            number = self._argument(label, None, reference, array.kind, array.slice)
            self._constants[reference.handle] = number
        return self._constants[reference.handle]

    def _donate(self, number: int, label: str) -> None:
        if number in self._constants.values():
            raise InvalidInput(
                f"program '{self.name}' cannot donate a constant to '{label}': the next call needs it; pass "
                "it as an argument of the program"
            )
        self._given_up[number] = label
        for place, argument in enumerate(self.recorder.arguments):
            leaf = self.arguments[place].leaf
            if argument.number == number and leaf is not None:
                self.donated_leaves[leaf] = label


def donated(label: str) -> InvalidInput:
    """The error of whoever uses what was donated."""
    return InvalidInput(
        f"this array was donated to '{label}', which has taken its memory over; use its result"
    )


def check_donations(callee: Callee, numbers: Sequence[int]) -> None:
    """A donated operand is given once.

    Raises:
        InvalidInput: It is not.
    """
    for at in callee.donated:
        if list(numbers).count(numbers[at]) > 1:
            raise InvalidInput(
                f"operand {at} of '{callee.label}' is donated and given a second time; donate a copy",
                computation=callee.label,
            )
