"""`@program`: many calls become one program, which is traced once for each kind of arguments.

A traced function is ordinary Python that runs once: control flow happens while it is traced, and what it
calls becomes the nodes of one graph. Then a call of it is one message, whatever it does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from waystation._errors import InvalidInput
from waystation.runtime.client.client import TRACE, Client
from waystation.runtime.client.current import current_client
from waystation.runtime.client.functions import host_array, host_kind
from waystation.runtime.client.joining import Installed
from waystation.runtime.ir import Program
from waystation.runtime.tracing import Array, HostValue, Reference, Trace
from waystation.runtime.tracing.recordings import TracedArgument, donated


@dataclass(frozen=True, slots=True)
class _Traced:
    """A program, and how arguments of one kind and its results belong to it."""

    client: Client
    installed: Installed
    slices: tuple[int, ...]
    arguments: tuple[TracedArgument, ...]
    donated: dict[int, str]  # leaf -> the call that has it
    outputs: tuple[tuple[str, Any], ...]
    kinds: tuple[tuple[Any, Any], ...]  # of each result: kind and slice
    tree: Any


class ProgramFunction:
    """A function whose calls are programs; made by `program`.

    Attributes:
        name: Its name, for people.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
        join_chains: bool = True,
    ) -> None:
        self.name: str = name or str(getattr(function, "__name__", type(function).__name__))
        self._function = function
        self._join_chains = join_chains
        self._static = frozenset((static_argnums,) if isinstance(static_argnums, int) else static_argnums)
        self._static_names = {static_argnames} if isinstance(static_argnames, str) else set(static_argnames)
        self._traced: dict[Any, _Traced] = {}
        functools.update_wrapper(self, function)

    def __repr__(self) -> str:
        return f"<program {self.name!r}, traced {len(self._traced)} times>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it; returns at once. Within another program it becomes a part of that.

        Raises:
            TracedValueRead: It reads the elements of a value while it is traced.
            InvalidInput: An argument is nothing that it takes.
        """
        if TRACE.get() is not None:
            return self._function(*args, **kwargs)
        traced, leaves = self._find(args, kwargs)
        with traced.client.lock:
            return self._run(traced, leaves)

    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """The program for such arguments, prepared: with reshards and frees. Runs nothing."""
        return self._find(args, kwargs)[0].installed.program

    @property
    def programs(self) -> tuple[Program, ...]:
        """All programs that it has been traced to."""
        return tuple(traced.installed.program for traced in self._traced.values())

    def _find(self, args: Any, kwargs: Any) -> tuple[_Traced, list[Any]]:
        dynamic = [value for at, value in enumerate(args) if at not in self._static]
        named = {key: value for key, value in kwargs.items() if key not in self._static_names}
        leaves, tree = jax.tree.flatten((dynamic, named))
        owners = [leaf.slice.client for leaf in leaves if isinstance(leaf, Array)]  # type: ignore[attr-defined]
        client = owners[0] if owners else current_client()
        if any(owner is not client for owner in owners):
            raise InvalidInput(f"program '{self.name}' was given arrays of different clients; use one")
        static = tuple((at, args[at]) for at in sorted(self._static) if at < len(args))
        static_named = tuple(sorted((key, kwargs[key]) for key in self._static_names & kwargs.keys()))
        kinds = tuple(self._kind(leaf) for leaf in leaves)
        place = (id(client), tree, kinds, static, static_named, len(args))
        with client.lock:
            client.flush()
            if place not in self._traced:
                self._traced[place] = self._trace(client, args, kwargs, leaves, tree)
            return self._traced[place], leaves

    def _kind(self, leaf: Any) -> Any:
        if isinstance(leaf, Array):
            return leaf.kind, leaf.slice.number
        return host_kind(leaf, self.name)

    def _trace(self, client: Client, args: Any, kwargs: Any, leaves: list[Any], tree: Any) -> _Traced:
        trace = client.trace(self.name)
        stand_ins = [
            trace.argument(at, leaf)
            if isinstance(leaf, Array)
            else HostValue(trace, at, host_kind(leaf, self.name))
            for at, leaf in enumerate(leaves)
        ]
        values, named = jax.tree.unflatten(tree, stand_ins)
        whole, dynamic = list(args), iter(values)
        for at in range(len(args)):
            if at not in self._static:
                whole[at] = next(dynamic)
        rest = {key: value for key, value in kwargs.items() if key in self._static_names}
        token = TRACE.set(trace)
        try:
            made = self._function(*whole, **named, **rest)
        finally:
            TRACE.reset(token)
        outputs, results = self._outputs(trace, jax.tree.leaves(made))
        numbers = tuple(array.number for array in results)
        installed = client.install(trace.recorder, numbers, join_chains=self._join_chains)
        return _Traced(
            client,
            installed,
            tuple(trace.recorder.slices),
            tuple(trace.arguments),
            dict(trace.donated_leaves),
            tuple(outputs),
            tuple((array.kind, array.slice) for array in results),
            jax.tree.structure(made),
        )

    def _outputs(self, trace: Trace, leaves: list[Any]) -> tuple[list[tuple[str, Any]], list[Array]]:
        """What each leaf of the result is: an argument, a result of the program, or a constant."""
        outputs: list[tuple[str, Any]] = []
        results: list[Array] = []
        places: dict[int, int] = {}
        for leaf in leaves:
            argument = trace.leaf_of(leaf)
            if argument is not None:
                outputs.append(("argument", argument))
            elif isinstance(leaf, Array) and leaf.recording is trace:
                if leaf.number not in places:
                    places[leaf.number] = len(results)
                    results.append(leaf)
                outputs.append(("result", places[leaf.number]))
            else:
                outputs.append(("constant", leaf))
        return outputs, results

    def _run(self, traced: _Traced, leaves: list[Any]) -> Any:
        client = traced.client
        references: list[Reference] = []
        for argument in traced.arguments:
            if argument.leaf is None:
                assert argument.constant is not None
                references.append(argument.constant)
                continue
            leaf = leaves[argument.leaf]
            if not isinstance(leaf, Array):
                leaf = client.put_laid(host_array(leaf), argument.how, argument.on)
            references.append(leaf.usable("used", client))
        made = client.run(traced.installed, traced.slices, references, len(traced.kinds))
        for at, label in traced.donated.items():
            if isinstance(leaves[at], Array):
                leaves[at].usable("donated").ended = donated(label)
        arrays = [
            Array(client, kind, on, reference=reference)
            for reference, (kind, on) in zip(made, traced.kinds, strict=True)
        ]
        sources = {"argument": leaves, "result": arrays}
        found = [
            content if source == "constant" else sources[source][content]
            for source, content in traced.outputs
        ]
        return jax.tree.unflatten(traced.tree, found)


def program(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Makes a function's calls programs; a decorator, with or without options.

    Args:
        function: A function that calls functions on slices.
        **options: `name`, `static_argnums` and `static_argnames`, as for functions; `join_chains`, which is
            true unless the calls of a program that runs often are to stay computations of their own (chains
            of small ones are otherwise compiled as one in the background).
    """
    if function is None:
        return functools.partial(program, **options)
    return ProgramFunction(function, **options)
