"""Programs that run again and again get faster: chains of small computations in them are compiled as one.

That is done in the background, by a thread for each such program: the program runs as it is until all hosts
have compiled the other, and then that one runs in its stead, with the same arguments and results. What cannot
be joined, or not be compiled, goes on as it is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from waystation._errors import WaystationError
from waystation.runtime.client.backend import Backend
from waystation.runtime.ir import Program, can_be_joined, join_chains, prepare
from waystation.runtime.messages import key_of

# So often a program has run when it is joined: compiling takes longer than many dispatches.
JOINED_AFTER_RUNS = 8
# Code of functions that count as small, in bytes as JAX exports it.
SMALL_CODE_BYTES = 8192


@dataclass(slots=True, eq=False)
class Installed:
    """A program that the backend knows.

    Attributes:
        program: It, prepared.
        fingerprint: What is run in its name: it, or what has the same results sooner.
        traced: It as it was traced, if it has chains to be joined; until then.
        runs: How often it has run, as long as that counts.
    """

    program: Program
    fingerprint: str
    traced: Program | None = None
    runs: int = 0


class Joining:
    """The small functions of a client, and what it joins of them.

    Args:
        backend: Where programs run.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._code: dict[str, bytes] = {}

    def register(self, name: str, exported: bytes) -> str:
        """See `Backend`; keeps the code of small functions."""
        key = self._backend.register(name, exported)
        if len(exported) <= SMALL_CODE_BYTES:
            self._code[key] = exported
        return key

    def installed(self, traced: Program, *, join_chains: bool) -> Installed:
        """Has the backend know a program, whose chains are to be joined or not.

        Raises:
            InvalidProgram: It breaks a rule.
        """
        program = prepare(traced)
        found = Installed(program, self._backend.install(program))
        if join_chains and can_be_joined(traced, self._code):
            found.traced = traced
        return found

    def count(self, installed: Installed, slices: Sequence[int]) -> None:
        """A program runs once more."""
        installed.runs += 1
        if installed.runs >= JOINED_AFTER_RUNS:
            traced, installed.traced = installed.traced, None
            name = "waystation: joins"
            threading.Thread(
                target=self._join, args=(installed, traced, slices), name=name, daemon=True
            ).start()

    def _join(self, installed: Installed, traced: Program, slices: Sequence[int]) -> None:
        with contextlib.suppress(WaystationError):  # it goes on as it is
            joined = join_chains(traced, self._code, key_of)
            for label, code in joined.functions.values():
                self._backend.register(label, code)
            fingerprint = self._backend.install(prepare(joined.program))
            self._backend.prepare(fingerprint, slices)
            installed.fingerprint = fingerprint
