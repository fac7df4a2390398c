"""Filters that the kernel asks before a call (seccomp): they fail it, or stop the process for its tracer.

A filter holds for the calling thread, for threads and children that it starts later, and cannot be taken off
again: use it in a process of its own.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Collection, Sequence

_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER_MODE = 38, 22, 2
_LOAD_WORD, _JUMP_IF_EQUAL, _JUMP_IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _STOP, _FAIL_WITH = 0x7FFF0000, 0x7FF00000, 0x00050000

# What the filter is shown: number of the call, architecture, instruction pointer, six arguments of 8 bytes.
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16

# Machine -> (audit architecture, numbers of calls); both are little-endian.
_MACHINES = {
    "x86_64": (
        0xC000003E,
        {
            "renameat2": 316,
            "syncfs": 306,
            "fsync": 74,
            "newfstatat": 262,
            "statx": 332,
            "madvise": 28,
            "clone": 56,
            "preadv2": 327,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "renameat2": 276,
            "syncfs": 267,
            "fsync": 82,
            "newfstatat": 79,
            "statx": 291,
            "madvise": 233,
            "clone": 220,
            "preadv2": 286,
        },
    ),
}
# The same on all machines.
_COMMON = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "clone3": 435,
    "openat2": 437,
}

SUPPORTED = platform.system() == "Linux" and platform.machine() in _MACHINES


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("operand", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def fail(call: str, code: int, *, unless_zero: int | None = None) -> None:
    """From now on, a system call fails with an error.

    Args:
        call: Its name.
        code: The error's number.
        unless_zero: The place of an argument: where that is zero, the call is made as ever.
    """
    architecture, own = _MACHINES[platform.machine()]
    numbers = own | _COMMON
    exception = []
    if unless_zero is not None:
        exception = [
            _Instruction(_LOAD_WORD, 0, 0, _ARGUMENTS_OFFSET + 8 * unless_zero),
            _Instruction(_JUMP_IF_EQUAL, 1, 0, 0),
        ]
    # Jumps count the instructions that they skip; the last one is what all others are allowed by.
    skipped = len(exception) + 1
    _install(
        [
            _Instruction(_LOAD_WORD, 0, 0, _ARCHITECTURE_OFFSET),
            _Instruction(_JUMP_IF_EQUAL, 0, skipped + 2, architecture),
            _Instruction(_LOAD_WORD, 0, 0, _NUMBER_OFFSET),
            _Instruction(_JUMP_IF_EQUAL, 0, skipped, numbers[call]),
            *exception,
            _Instruction(_RETURN, 0, 0, _FAIL_WITH | code),
            _Instruction(_RETURN, 0, 0, _ALLOW),
        ]
    )


def stop_before(numbers: Collection[int], creating: int) -> None:
    """From now on, the process stops before these system calls, as its tracer has asked for (`TRACESECCOMP`).

    Args:
        numbers: Of the calls.
        creating: The number of one that stops only if it may create a file: `openat`.
    """
    architecture, _ = _MACHINES[platform.machine()]
    # Both ends are behind the loads, the comparisons, and the test of the flags.
    count = len(numbers)
    _install(
        [
            _Instruction(_LOAD_WORD, 0, 0, _ARCHITECTURE_OFFSET),
            _Instruction(_JUMP_IF_EQUAL, 0, count + 4, architecture),
            _Instruction(_LOAD_WORD, 0, 0, _NUMBER_OFFSET),
            *(
                _Instruction(_JUMP_IF_EQUAL, count - place + 3, 0, number)
                for place, number in enumerate(numbers)
            ),
            _Instruction(_JUMP_IF_EQUAL, 0, 2, creating),
            _Instruction(_LOAD_WORD, 0, 0, _ARGUMENTS_OFFSET + 8 * 2),
            _Instruction(_JUMP_IF_ANY_BIT, 1, 0, os.O_CREAT),
            _Instruction(_RETURN, 0, 0, _ALLOW),
            _Instruction(_RETURN, 0, 0, _STOP),
        ]
    )


def _install(instructions: Sequence[_Instruction]) -> None:
    program = _Program(len(instructions), (_Instruction * len(instructions))(*instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
    _check(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _check(libc.prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.addressof(program), 0, 0))


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
