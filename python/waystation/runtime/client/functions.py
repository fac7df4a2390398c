"""Functions placed on slices: exported once for each kind of arguments, called as often as one likes.

A function is traced and exported by JAX over a mesh without devices; its bytes go to the hosts once, which
compile it in the background. A call records what is to be done, and returns arrays that stand for its
results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np

from waystation._errors import InvalidInput, Unsupported, WrongType
from waystation.runtime.client.layouts import flattened, operand_layouts, result_layouts
from waystation.runtime.client.slices import Slice
from waystation.runtime.ir import Sharding
from waystation.runtime.tracing import Array, Callee, HostValue, Kind
from waystation.runtime.tracing.arrays import named_sharding


@dataclass(frozen=True, slots=True)
class _Made:
    """A function made ready for arguments of one kind."""

    callee: Callee
    tree: Any  # the structure of its results
    is_single: bool  # whether that is one array, and nothing around it


# Of one function: kinds of arguments that it is found by at once.
_MOST_MET = 256


class PlacedFunction:
    """A function that runs on a slice; made by `Client.jit`.

    Attributes:
        name: Its name, for people.
        slice: Where it runs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        on: Slice,
        *,
        in_shardings: Any = None,
        out_shardings: Any = None,
        donate_argnums: int | Sequence[int] = (),
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
        name: str | None = None,
    ) -> None:
        if not callable(function):
            raise WrongType(f"only a function can be placed on a slice, not {function!r:.60}")
        if not isinstance(on, Slice):
            raise WrongType(f"a function is placed on a slice (add_slice), not on {on!r:.60}")
        self.name: str = name or str(getattr(function, "__name__", type(function).__name__))
        self.slice = on
        self.__wrapped__ = function
        self._in_shardings = in_shardings
        self._out_shardings = out_shardings
        self._donated = _places(donate_argnums)
        self._static = _places(static_argnums)
        self._static_names = {static_argnames} if isinstance(static_argnames, str) else set(static_argnames)
        # By the kinds of arrays that it was given, which are kept here: so their identities stay theirs.
        self._met: dict[tuple[int, ...], tuple[_Made, list[Kind]]] = {}
        self._ready_for: dict[Any, _Made] = {}
        self._made: dict[Any, _Made] = {}

    def __repr__(self) -> str:
        return f"PlacedFunction({self.name!r}, {self.slice})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Has it run; returns at once, with arrays for its results.

        Raises:
            InvalidInput: Arguments that it cannot take.
            TracedValueRead: An argument is of a program that is not traced now.
        """
        client = self.slice.client
        with client.lock:
            if client.is_closed:
                raise InvalidInput(f"'{self.name}' cannot run: its client was closed; start another one")
            made, leaves = self._find(args, kwargs)
            results = client.record(made.callee, self.slice, leaves)
        return results[0] if made.is_single else jax.tree.unflatten(made.tree, results)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Made, Sequence[Any]]:
        """It made ready for such arguments, and their leaves; quick where they are like those of an earlier
        call, and arrays of the runtime without anything around them."""
        met: tuple[int, ...] | None = None
        if not (kwargs or self._static) and all(type(each) is Array for each in args):
            met = tuple([id(each.kind) for each in args])
            found = self._met.get(met)
            if found is not None:
                return found[0], args
        leaves, tree = jax.tree.flatten(self._dynamic(args, kwargs))
        made = self._ready(args, kwargs, tree, tuple([_kind(leaf, self.name) for leaf in leaves]))
        if met is not None:
            if len(self._met) >= _MOST_MET:
                self._met.clear()
            self._met[met] = made, [each.kind for each in args]
        return made, leaves

    def _dynamic(self, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        """The arguments that are not static."""
        positional = [value for at, value in enumerate(args) if at not in self._static]
        return positional, {key: value for key, value in kwargs.items() if key not in self._static_names}

    def exported(self, *args: Any, **kwargs: Any) -> str:
        """Makes it ready for such arguments, without a call: its bytes go to the hosts, which compile it.

        Args:
            args: Arguments, or their `jax.ShapeDtypeStruct`s.
            kwargs: Likewise.

        Returns:
            The key that hosts know it by.
        """
        leaves, tree = jax.tree.flatten(self._dynamic(args, kwargs))
        kinds = tuple(_kind(leaf, self.name) for leaf in leaves)
        with self.slice.client.lock:
            return self._ready(args, kwargs, tree, kinds).callee.key

    def _ready(self, args: Any, kwargs: Any, tree: Any, kinds: tuple[_Kind, ...]) -> _Made:
        static = tuple((at, args[at]) for at in sorted(self._static) if at < len(args))
        static_named = tuple(sorted((key, kwargs[key]) for key in self._static_names & kwargs.keys()))
        place = (tree, kinds, static, static_named, len(args))
        found = self._ready_for.get(place)
        if found is None:
            dynamic = [at for at in range(len(args)) if at not in self._static]
            avals = [jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak) for kind in kinds]
            given = self._given(len(args), dynamic, tree, avals)
            operands = tuple(operand_layouts(given, [kind.kind for kind in kinds], self.slice))
            # However arguments came, those that are to lie alike need the same code.
            alike = (tree, tuple(map(str, avals)), static, static_named, len(args), operands)
            if alike not in self._made:
                self._made[alike] = self._make(args, kwargs, tree, avals, operands)
            found = self._ready_for[place] = self._made[alike]
        return found

    def _make(
        self, args: Any, kwargs: Any, tree: Any, avals: list[Any], operands: tuple[Sharding, ...]
    ) -> _Made:
        client = self.slice.client
        dynamic = [at for at in range(len(args)) if at not in self._static]
        results: list[Any] = []
        wrapped = self.__wrapped__  # and not self, which JAX would keep as long as it keeps `flat`

        def flat(*leaves: Any) -> tuple[Any, ...]:
            values, named = jax.tree.unflatten(tree, leaves)
            whole = list(args)
            for at, value in zip(dynamic, values, strict=True):
                whole[at] = value
            rest = {key: value for key, value in kwargs.items() if key in self._static_names}
            made, structure = jax.tree.flatten(wrapped(*whole, **named, **rest))
            results[:] = [structure]
            return tuple(made)

        flat.__name__ = flat.__qualname__ = self.name
        shapes = jax.eval_shape(flat, *avals)
        placed = list(zip([aval.shape for aval in avals], operands, strict=True))
        said = flattened(self._out_shardings, results[0], shapes, "out_shardings")
        outs = result_layouts(said, [each.shape for each in shapes], placed, self.slice)
        self._check(placed, "argument")
        self._check(zip([each.shape for each in shapes], outs, strict=True), "result")
        jitted = jax.jit(
            flat,
            in_shardings=tuple(map(named_sharding, operands)),
            out_shardings=tuple(map(named_sharding, outs)),
        )
        platforms = [client.backend.platform(self.slice.number)]
        exported = jax.export.export(jitted, platforms=platforms)(*avals)
        registration = client.register(self.name, bytes(exported.serialize()))
        made = tuple(
            Kind(tuple(aval.shape), str(aval.dtype), how)
            for aval, how in zip(exported.out_avals, outs, strict=True)
        )
        for kind in made:
            _ = kind.nbytes  # which is refused here, where no program can have it
        donated = self._donated_leaves(dynamic, tree, avals)
        place = self.slice.number, self.slice.shape
        callee = Callee(self.name, registration, *place, operands, made, donated)
        tree_of_results = results[0]
        is_single = tree_of_results.num_nodes == tree_of_results.num_leaves == 1
        return _Made(callee, tree_of_results, is_single)

    def _given(self, count: int, dynamic: list[int], tree: Any, avals: list[Any]) -> list[Any]:
        """What was said of each leaf of the arguments; arguments by name lie as they come."""
        given = self._in_shardings
        if isinstance(given, list | tuple):
            if not max(dynamic, default=-1) < len(given) <= count:
                raise InvalidInput(
                    f"'{self.name}' was given {count} arguments and has in_shardings for {len(given)}"
                )
            given = [given[at] for at in dynamic]
        else:
            given = [given] * len(dynamic)
        return flattened((given, None), tree, avals, "in_shardings")

    def _donated_leaves(self, dynamic: list[int], tree: Any, avals: list[Any]) -> tuple[int, ...]:
        values, _ = jax.tree.unflatten(tree, list(range(len(avals))))
        pairs = zip(dynamic, values, strict=True)
        return tuple(leaf for at, value in pairs if at in self._donated for leaf in jax.tree.leaves(value))

    def _check(self, placed: Any, what: str) -> None:
        for at, (shape, how) in enumerate(placed):
            try:
                how.shard_shape(tuple(shape))
            except InvalidInput as error:
                raise InvalidInput(f"{what} {at} of '{self.name}': {error.message}") from None


class _Kind(NamedTuple):
    """What decides which code an argument needs."""

    shape: tuple[int, ...]
    dtype: Any
    weak: bool
    kind: Kind | None


def _kind(leaf: Any, name: str) -> _Kind:
    if isinstance(leaf, Array):
        return _Kind(leaf.shape, leaf.dtype, False, leaf.kind)
    if isinstance(leaf, HostValue):
        return _Kind(leaf.shape, leaf.dtype, leaf.kind.weak, None)
    return host_kind(leaf, name)


def _described(leaf: Any) -> str:
    is_array = isinstance(leaf, np.ndarray)
    return f"an array of {leaf.dtype}" if is_array else f"a {type(leaf).__name__}"


def host_kind(leaf: Any, name: str) -> _Kind:
    """What JAX takes an argument of this process for.

    Raises:
        Unsupported: It is no array.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return _Kind(leaf.shape, leaf.dtype, bool(leaf.weak_type), None)
    try:
        aval = jax.typeof(leaf)
    except TypeError:
        raise Unsupported(
            f"'{name}' was given {_described(leaf)}, which is no array of JAX; make that argument static"
        ) from None
    if not isinstance(aval.dtype, np.dtype):
        raise Unsupported(f"'{name}' was given an array of dtype '{aval.dtype}', which programs cannot have")
    return _Kind(aval.shape, aval.dtype, bool(aval.weak_type), None)


def host_array(leaf: Any) -> np.ndarray[Any, Any]:
    """An argument of this process as JAX takes it: of the dtype that JAX gives it."""
    return np.asarray(leaf, dtype=jax.typeof(leaf).dtype)


def _places(given: int | Sequence[int]) -> frozenset[int]:
    return frozenset((given,) if isinstance(given, int) else given)
