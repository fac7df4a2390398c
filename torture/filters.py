"""Filters of system calls (seccomp) for the calling process: what the kernel asks about, and what it refuses.

A filter holds for the thread that installs it, for what that starts later, and cannot be taken off: the bench
installs them in children of its own. x86-64 only.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Collection, Mapping, Sequence

_LOAD_WORD, _JUMP_IF_EQUAL, _JUMP_IF_ANY, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ASK, _FAIL_WITH = 0x7FFF0000, 0x7FC00000, 0x00050000
_ARCHITECTURE = 0xC000003E
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_SECCOMP, _SET_FILTER = 317, 1
# A listener is made; signals that do not kill leave a call alone that has been told of.
_NEW_LISTENER, _WAIT_KILLABLE = 8, 32
_NO_NEW_PRIVILEGES = 38

_Instruction = tuple[int, int, int, int]


def ask_about(numbers: Collection[int], refused: Mapping[int, int]) -> int:
    """Has the kernel ask about calls, and refuse others with an error; returns the descriptor where it
    asks."""
    actions = dict.fromkeys(numbers, _ASK) | {number: _FAIL_WITH | code for number, code in refused.items()}
    return _install(_by_number(actions), _NEW_LISTENER | _WAIT_KILLABLE)


def refuse(refused: Mapping[int, int]) -> None:
    """From now on calls fail, each with an error."""
    _install(_by_number({number: _FAIL_WITH | code for number, code in refused.items()}), 0)


def refuse_flags(number: int, argument: int, flags: int, code: int) -> None:
    """From now on a call fails if one of its arguments has any of some flags."""
    _install(
        [
            (_LOAD_WORD, 0, 0, _NUMBER_AT),
            (_JUMP_IF_EQUAL, 0, 3, number),
            (_LOAD_WORD, 0, 0, _ARGUMENTS_AT + 8 * argument),
            (_JUMP_IF_ANY, 0, 1, flags),
            (_RETURN, 0, 0, _FAIL_WITH | code),
            (_RETURN, 0, 0, _ALLOW),
        ],
        0,
    )


def _by_number(actions: Mapping[int, int]) -> list[_Instruction]:
    chosen: list[_Instruction] = [(_LOAD_WORD, 0, 0, _NUMBER_AT)]
    for number, action in actions.items():
        # A comparison that does not hold skips the return that follows on it.
        chosen += [(_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, action)]
    return [*chosen, (_RETURN, 0, 0, _ALLOW)]


def _install(instructions: Sequence[_Instruction], flags: int) -> int:
    right_machine = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_IF_EQUAL, 1, 0, _ARCHITECTURE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    whole = [*right_machine, *instructions]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in whole))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(whole), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    done: int = libc.syscall(_SECCOMP, _SET_FILTER, ctypes.c_ulong(flags), program)
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done
