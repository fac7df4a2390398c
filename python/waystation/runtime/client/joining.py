"""Programs that run again and again get faster: chains of small computations in them are compiled as one.

That is done in the background, by a thread for each such program: the program runs as it is until all hosts
have compiled the other, and then that one runs in its stead, with the same arguments and results. What cannot
be joined, or not be compiled, goes on as it is.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from waystation._errors import WaystationError
from waystation.runtime.client.backend import Backend
from waystation.runtime.ir import Compute, Program, can_be_joined, join_chains, prepare
from waystation.runtime.messages import key_of
from waystation.runtime.tracing.releases import ForgottenProgram, Freed, Registration

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
        freed: Where to say that it is not needed any more.
        known: What the backend keeps until then.
        traced: It as it was traced, if it has chains to be joined; until then.
        runs: How often it has run, as long as that counts.
        functions: The code of the small functions that it calls, by key, as long as `traced` is there.
    """

    program: Program
    fingerprint: str
    freed: Freed
    known: list[ForgottenProgram]
    traced: Program | None = None
    runs: int = 0
    functions: dict[str, bytes] = field(default_factory=dict)

    def __del__(self) -> None:
        # Called at any time, in any thread, also within this very queue, which allows that.
        for each in self.known:
            self.freed.put(each)


class Joining:
    """The small functions of a client, and what it joins of them.

    Args:
        backend: Where programs run.
        freed: Where to say that a program or a function is not needed any more.
    """

    def __init__(self, backend: Backend, freed: Freed) -> None:
        self._backend = backend
        self._freed = freed
        self._small: weakref.WeakValueDictionary[str, Registration] = weakref.WeakValueDictionary()

    def register(self, name: str, exported: bytes) -> Registration:
        """Makes a function known, as long as what this returns is kept."""
        registration = Registration(self._backend.register(name, exported), exported, self._freed)
        if len(exported) <= SMALL_CODE_BYTES:
            self._small[registration.key] = registration
        return registration

    def installed(self, traced: Program, *, join_chains: bool) -> Installed:
        """Has the backend know a program, whose chains are to be joined or not.

        Raises:
            InvalidProgram: It breaks a rule.
        """
        program = prepare(traced)
        fingerprint = self._backend.install(program)
        found = Installed(program, fingerprint, self._freed, [ForgottenProgram(fingerprint)])
        functions = self._small_functions(traced)
        if join_chains and can_be_joined(traced, functions):
            found.traced, found.functions = traced, functions
        return found

    def _small_functions(self, program: Program) -> dict[str, bytes]:
        """The code of the small functions that a program calls."""
        keys = {node.function for node in program.nodes if isinstance(node, Compute)}
        found = {key: self._small.get(key) for key in keys}
        return {key: registration.exported for key, registration in found.items() if registration is not None}

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
            functions, installed.functions = installed.functions, {}
            joined = join_chains(traced, functions, key_of)
            # They are kept by the program, once that is installed.
            kept = [self.register(label, code) for label, code in joined.functions.values()]
            fingerprint = self._backend.install(prepare(joined.program))
            del kept
            installed.known.append(ForgottenProgram(fingerprint))
            self._backend.prepare(fingerprint, slices)
            installed.fingerprint = fingerprint
