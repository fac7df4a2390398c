"""Takes `renameat2` with flags away from a process, as file systems do that have no such renames.

A seccomp filter answers EINVAL, which is what the kernel says for a file system without the operation. It
holds for the calling thread, for threads and children that it starts later, and cannot be taken off again:
use it in a process of its own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform

_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER_MODE = 38, 22, 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL_WITH = 0x7FFF0000, 0x00050000

# What the filter is shown: number of the call, architecture, instruction pointer, six arguments of 8 bytes.
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _FLAGS_OFFSET = 0, 4, 16 + 4 * 8

# Machine -> (audit architecture, number of renameat2); both are little-endian.
_MACHINES = {"x86_64": (0xC000003E, 316), "aarch64": (0xC00000B7, 276)}

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


def allow_only_plain_renames() -> None:
    """From now on, renames that must not replace anything, and swaps, fail with EINVAL."""
    architecture, renameat2 = _MACHINES[platform.machine()]
    # Jumps count the instructions that they skip; from the third check on, flags of 0 are a plain rename.
    instructions = [
        _Instruction(_LOAD_WORD, 0, 0, _ARCHITECTURE_OFFSET),
        _Instruction(_JUMP_IF_EQUAL, 0, 5, architecture),
        _Instruction(_LOAD_WORD, 0, 0, _NUMBER_OFFSET),
        _Instruction(_JUMP_IF_EQUAL, 0, 3, renameat2),
        _Instruction(_LOAD_WORD, 0, 0, _FLAGS_OFFSET),
        _Instruction(_JUMP_IF_EQUAL, 1, 0, 0),
        _Instruction(_RETURN, 0, 0, _FAIL_WITH | errno.EINVAL),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    ]
    program = _Program(len(instructions), (_Instruction * len(instructions))(*instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
    _check(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _check(libc.prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.addressof(program), 0, 0))


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
