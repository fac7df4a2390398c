"""How a tree is restored: which abstract state a load is asked for, and what is made of what it returns.

A load by this interface says separately what containers the result has, and what each leaf becomes. What is
stored fills in the rest; so the metadata of the tree are read first.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from waystation import storage
from waystation._errors import InvalidInput, StructureMismatch, Unsupported
from waystation._options import StorageOptions
from waystation.checkpoint.context import Context
from waystation.checkpoint.load import load_checkpointables
from waystation.checkpoint.metadata import metadata as read_metadata
from waystation.compat.orbax import args as args_lib
from waystation.compat.orbax import transform_utils
from waystation.compat.orbax.metadata import (
    ArrayMetadata,
    Metadata,
    ScalarMetadata,
    StorageMetadata,
    StringMetadata,
    TreeMetadata,
    dtype_of,
)
from waystation.compat.orbax.options import context_with
from waystation.compat.orbax.tree import is_empty_node, paths_of, str_keypath
from waystation.compat.orbax.type_handlers import ArrayRestoreArgs, RestoreArgs, SaveArgs
from waystation.frameworks import jax_version0 as jax
from waystation.layouts.orbax import names
from waystation.layouts.orbax.tree_metadata import TreeMetadata as StoredMetadata
from waystation.tree import flatten, unflatten

_LIMIT_BYTES = 4 << 30
_SCALARS = (bool, int, float, complex, str, bytes)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tree is.

    Attributes:
        path: The checkpoint.
        name: Of the checkpointable in it.
    """

    path: str
    name: str


@dataclasses.dataclass(frozen=True)
class HostArray:
    """An abstract array that asks for one of NumPy.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
    """

    shape: tuple[int, ...] | None
    dtype: Any


Named = dict[tuple[str, ...], Any]  # leaves by their paths


# ---- restoring ---------------------------------------------------------------------------------


def restore(place: Place, args: Any, *changes: Callable[[Context], None]) -> Any:
    """Restores a tree as arguments say; `changes` are options of the handler.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: The tree is not what is asked for.
    """
    if isinstance(args, args_lib.StandardRestore):
        return _Standard(place, args, changes).run()
    if not isinstance(args, args_lib.PyTreeRestore):
        args = _like(args)
    return _ByLeaves(place, args, changes).run()


def _like(args: Any) -> Any:
    """Arguments of a class of Orbax itself as ours, or of a class of the program's own."""
    cls: Any = args_lib.StandardRestore if hasattr(args, "strict") else args_lib.PyTreeRestore
    known = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: getattr(args, name) for name in known if hasattr(args, name)})


class _Loaded:
    """A load of one tree."""

    def __init__(self, place: Place, changes: Sequence[Callable[[Context], None]]) -> None:
        self._place = place
        self._changes = changes
        self._stored: Any = None

    def load(self, abstract: Any, *changes: Callable[[Context], None]) -> Any:
        place = self._place
        with context_with(*self._changes, _of_trees, *changes):
            return load_checkpointables(place.path, {place.name: abstract})[place.name]

    @property
    def stored(self) -> Any:
        """The abstract tree that is stored."""
        if self._stored is None:
            with context_with(*self._changes, _of_trees):
                self._stored = read_metadata(self._place.path, self._place.name).metadata
        return self._stored

    def stored_leaves(self) -> Named:
        """Its leaves."""
        return named(self.stored)


def names_of(path: Sequence[Any]) -> tuple[str, ...]:
    """The names along a path of this library's keys, as text."""
    return tuple(
        str(next(getattr(key, each) for each in ("key", "name", "index") if hasattr(key, each)))
        for key in path
    )


def named(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Named:
    """The leaves of a tree by the names along their paths, empty containers among them."""
    return {str_keypath(path): value for path, value in paths_of(tree, is_leaf)}


def _of_trees(context: Context) -> None:
    context.checkpointables.registry = None


def _partial(context: Context) -> None:
    context.pytree.loading.partial_load = True


def _padded(context: Context) -> None:
    context.array.loading.enable_padding_and_truncation = True


class _Standard(_Loaded):
    """Restores by an abstract tree."""

    def __init__(
        self, place: Place, args: args_lib.StandardRestore, changes: Sequence[Callable[[Context], None]]
    ) -> None:
        own = [*changes, *([] if args.strict else [_padded])]
        fallback = args.fallback_sharding
        if fallback is not None and args.item is None:
            own.append(lambda context: _set_sharding_for(context, fallback))
        super().__init__(place, own)
        self._item = args.item
        self._fallback = fallback

    def run(self) -> Any:
        item = self._item.tree if isinstance(self._item, TreeMetadata) else self._item
        if item is None:
            return self.load(None)
        pairs, structure = jax.flatten_with_path(item, is_leaf=is_empty_node)
        leaves, left_out = [], []
        needs_stored = any(_is_open(value) for _, value in pairs)
        stored = self.stored_leaves() if needs_stored else {}
        for number, (path, value) in enumerate(pairs):
            known = _found(stored, str_keypath(path))
            if value is None and known is not None and known is not _NOTHING:
                left_out.append(number)
                leaves.append(...)
            else:
                leaves.append(self._abstract(value, known))
        loaded = self.load(jax.unflatten(structure, leaves))
        if not left_out:
            return loaded
        values = [value for _, value in jax.flatten_with_path(loaded, is_leaf=is_empty_node)[0]]
        return jax.unflatten(
            structure, [None if number in left_out else value for number, value in enumerate(values)]
        )

    def _abstract(self, value: Any, known: Any) -> Any:
        if isinstance(value, ScalarMetadata):
            return known
        if isinstance(value, ArrayMetadata):
            sharding = getattr(value.sharding, "to_jax_sharding", lambda: value.sharding)()
            if sharding is None:
                return HostArray(value.shape, value.dtype)
            return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
        if isinstance(value, StringMetadata):
            return str
        if isinstance(value, jax.ShapeDtypeStruct) and value.sharding is None:
            if (
                known is not _NOTHING
                and not isinstance(known, jax.ShapeDtypeStruct)
                and hasattr(known, "dtype")
            ):
                return HostArray(tuple(value.shape), value.dtype)  # it was saved by NumPy
            sharding = getattr(known, "sharding", None) or self._fallback
            return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
        return value


def _is_open(value: Any) -> bool:
    """Whether a leaf of an abstract tree leaves something to what is stored."""
    if value is None or isinstance(value, ScalarMetadata):
        return True
    return isinstance(value, jax.ShapeDtypeStruct) and value.sharding is None


def _set_sharding_for(context: Context, fallback: Any) -> None:
    def sharding_for(_: str, described: Any) -> Any:
        return fallback if described.sharding is None else described.sharding

    context.array.loading.sharding_for = sharding_for


_NOTHING = object()


def _found(stored: Named, path: tuple[str, ...]) -> Any:
    return stored.get(path, _NOTHING)


class _ByLeaves(_Loaded):
    """Restores by containers, and by what each leaf becomes."""

    def __init__(
        self, place: Place, args: args_lib.PyTreeRestore, changes: Sequence[Callable[[Context], None]]
    ) -> None:
        super().__init__(place, changes)
        if args.legacy_transform_fn is not None:
            raise Unsupported("legacy_transform_fn must be None: use transforms")
        self._args = args

    def run(self) -> Any:
        args = self._args
        if args.transforms is not None:
            return self._transformed()
        item = args.item.tree if isinstance(args.item, TreeMetadata) else args.item
        if item is None and args.restore_args is None:
            return self.load(None)
        restore_args = self._restore_args()
        containers = self.stored if item is None else item
        pairs, structure = jax.flatten_with_path(containers, is_leaf=is_empty_node)
        stored = self.stored_leaves()
        self._require_args(pairs, restore_args, stored)
        kept = self._not_loaded(pairs, stored) if args.partial_restore else {}
        leaves = []
        for number, (path, value) in enumerate(pairs):
            name = str_keypath(path)
            if number in kept:
                leaves.append(...)
            elif value is ... or is_empty_node(value):
                leaves.append(value)
            else:
                leaves.append(_abstract_of(value, name, stored, restore_args))
        changes = [_partial] if args.partial_restore else []
        loaded = self.load(jax.unflatten(structure, leaves), *changes, *self._padding(restore_args))
        if not kept:
            return loaded
        values = [value for _, value in jax.flatten_with_path(loaded, is_leaf=is_empty_node)[0]]
        return jax.unflatten(structure, [kept.get(number, value) for number, value in enumerate(values)])

    def _not_loaded(self, pairs: Any, stored: Named) -> dict[int, Any]:
        """What of a partial restore comes of no array, by the numbers of leaves.

        None and empty containers ask for nothing of what is there. What the checkpoint lacks stays as it is.
        Where it has one of these itself, the leaf becomes that.
        """
        containers = {name[:depth] for name in stored for depth in range(len(name))}
        kept = {}
        for number, (path, value) in enumerate(pairs):
            name = str_keypath(path)
            known = _found(stored, name)
            if is_empty_node(value) or (known is _NOTHING and name not in containers):
                kept[number] = value
            elif is_empty_node(known):
                kept[number] = known
        return kept

    def _padding(self, restore_args: Named) -> list[Callable[[Context], None]]:
        """What lets arrays be cut or filled, if arguments ask for it."""
        is_lax = any(isinstance(own, ArrayRestoreArgs) and not own.strict for own in restore_args.values())
        return [_padded] if is_lax else []

    def _restore_args(self) -> Named:
        given = self._args.restore_args
        given = given.tree if isinstance(given, TreeMetadata) else given
        return {} if given is None else named(given, _is_restore_args)

    def _require_args(self, pairs: Any, restore_args: Named, stored: Named) -> None:
        if self._args.restore_args is None:
            return
        lacking = [
            name
            for path, value in pairs
            if not is_empty_node(value)
            and value is not ...
            and (name := str_keypath(path)) not in restore_args
        ]
        if lacking:
            raise StructureMismatch(
                f"restore_args has nothing at {'.'.join(lacking[0])}, where the tree has a leaf; give the "
                "same tree with RestoreArgs in the place of leaves (checkpoint_utils.construct_restore_args)"
            )

    def _transformed(self) -> Any:
        args = self._args
        if args.item is None:
            raise InvalidInput("transforms need item, the tree whose leaves are to be made")
        restore_args = self._restore_args()
        pairs, structure = jax.flatten_with_path(self.stored, is_leaf=is_empty_node)
        needed = self._needed(restore_args, self.stored_leaves())
        original = self.load(
            jax.unflatten(
                structure,
                [
                    value if is_empty_node(value) else needed.get(str_keypath(path), ...)
                    for path, value in pairs
                ],
            ),
            *self._padding(restore_args),
        )

        def call(function: Any, name: str, *arguments: Any) -> Any:
            own = restore_args.get(tuple(name.split("/")))
            of_restore = isinstance(self._transform_of(name)[1], transform_utils.RestoreTransform)
            return function(*arguments, *([own or RestoreArgs()] if of_restore else []))

        return transform_utils.transformed(
            original, args.transforms, args.item, args.transforms_default_to_original, call
        )

    def _needed(self, restore_args: Named, stored: Named) -> Named:
        """The abstract leaves of what is to be read: those that the tree is made of."""
        default = self._args.transforms_default_to_original
        needed: Named = {}
        for path, value in named(self._args.item).items():
            if is_empty_node(value) and value is not None:
                continue
            name = "/".join(path)
            match, transform = self._transform_of(name)
            if transform is not None and transform.multi_value_fn is not None:
                asked = getattr(transform, "multi_value_fn_input_args", None)
                for source, known in stored.items():
                    own = _input_args("/".join(source), asked)
                    if own is not None and not is_empty_node(known):
                        needed.setdefault(source, abstract_leaf(known, own))
            found = transform_utils.source_of(name, match, transform, default)
            source = () if found is None else tuple(found.split("/"))
            if found is not None and source in stored and not is_empty_node(stored[source]):
                needed.setdefault(source, abstract_leaf(stored[source], restore_args.get(path)))
        return needed

    def _transform_of(self, name: str) -> Any:
        return transform_utils.transformation_of(name, self._args.transforms)


def _input_args(name: str, asked: Mapping[str, Any] | None) -> Any:
    """The `RestoreArgs` of a leaf that a function needs; None if it does not need it."""
    if asked is None:
        return RestoreArgs()
    return next((own for key, own in asked.items() if re.fullmatch(key, name)), None)


def _is_restore_args(value: Any) -> bool:
    # Of the class: variables of Flax have the attributes of what they hold.
    return isinstance(value, RestoreArgs) or hasattr(type(value), "restore_type")


def _is_save_args(value: Any) -> bool:
    return isinstance(value, SaveArgs) or hasattr(type(value), "aggregate")


def _sharding_of(own: Any) -> Any:
    sharding = own.sharding
    if sharding is None and own.mesh is not None:
        return jax.named_sharding(own.mesh, own.mesh_axes)
    return sharding.to_jax_sharding() if hasattr(sharding, "to_jax_sharding") else sharding


def _abstract_of(value: Any, name: tuple[str, ...], stored: Named, restore_args: Named) -> Any:
    """What to ask for in the place of a leaf of JAX, which may be a container that JAX does not know."""
    leaves, structure = flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return abstract_leaf(_found(stored, name), restore_args.get(name))
    inner = [(*name, *names_of(path)) for path in structure.key_paths()]
    own = restore_args.get(name)
    return unflatten(
        structure, [abstract_leaf(_found(stored, each), restore_args.get(each, own)) for each in inner]
    )


def abstract_leaf(known: Any, own: Any) -> Any:
    """The abstract leaf that `RestoreArgs` ask for, of a stored one.

    Args:
        known: The stored one; something else where there is none.
        own: The arguments; None for what is stored.
    """
    if known is _NOTHING or is_empty_node(known):
        return HostArray((), np.float32)  # the load will say that it is not there, or what is
    kind = None if own is None else own.restore_type
    dtype = None if own is None else own.dtype
    if isinstance(known, str) or known is str:
        return known
    stored_shape = () if isinstance(known, _SCALARS) else tuple(known.shape)
    stored_dtype = dtype_of(known) if isinstance(known, _SCALARS) else known.dtype
    if hasattr(own, "mesh_axes"):
        shape = own.global_shape if own.global_shape is not None else stored_shape
        sharding = _sharding_of(own)
        if sharding is None:
            sharding = getattr(known, "sharding", None)
        return jax.ShapeDtypeStruct(tuple(shape), dtype or stored_dtype, sharding=sharding)
    if kind is None:
        if dtype is None:
            return known
        if isinstance(known, _SCALARS):
            return type(np.zeros((), dtype).item())
        sharding = getattr(known, "sharding", None)
        is_jax = isinstance(known, jax.ShapeDtypeStruct)
        return (
            jax.ShapeDtypeStruct(stored_shape, dtype, sharding=sharding)
            if is_jax
            else HostArray(stored_shape, dtype)
        )
    if kind is jax.Array:
        return jax.ShapeDtypeStruct(
            stored_shape, dtype or stored_dtype, sharding=getattr(known, "sharding", None)
        )
    if kind in _SCALARS:
        return kind
    if isinstance(kind, type) and issubclass(kind, np.number | np.bool):
        return kind(0)
    return HostArray(stored_shape, dtype or stored_dtype)


# ---- saving ------------------------------------------------------------------------------------

_SIMPLE = "biufcU"  # kinds of NumPy's scalars that Python has


def with_python_scalars(item: Any) -> Any:
    """A tree with Python's numbers and text for scalars of NumPy, as which Orbax restores them."""
    leaves, structure = flatten(item)
    if not any(isinstance(leaf, np.generic) for leaf in leaves):
        return item
    return unflatten(
        structure,
        [
            leaf.item() if isinstance(leaf, np.generic) and leaf.dtype.kind in _SIMPLE else leaf
            for leaf in leaves
        ],
    )


def storage_options(states: Mapping[str, tuple[Any, Any]]) -> Callable[[Context], None] | None:
    """What sets the options of leaves, of trees by name with their `SaveArgs`; None if nothing is asked."""
    chosen = {name: _Chosen(item, save_args) for name, (item, save_args) in states.items()}
    if not any(own.options for own in chosen.values()):
        return None

    def apply(context: Context) -> None:
        context.array.saving.scoped_storage_options_creator = _ByState(chosen)

    return apply


class _ByState:
    """Says how a leaf of one of several trees is stored."""

    def __init__(self, chosen: Mapping[str, _Chosen]) -> None:
        self._chosen = chosen

    def of_state(self, name: str) -> _Chosen:
        """What says it of the leaves of one of them."""
        return self._chosen[name]

    def __call__(self, key: tuple[Any, ...], value: Any) -> StorageOptions | None:
        raise AssertionError("the core asks of each tree")


class _Chosen:
    """Says how a leaf of a tree is stored. One array may be there at several places."""

    def __init__(self, item: Any, save_args: Any) -> None:
        self.options: Named = {}
        self._item = item  # so that no other object gets the identity of one
        self._paths: dict[int, list[tuple[str, ...]]] = {}
        if save_args is None:
            return
        leaves = named(item)
        for path, value in leaves.items():
            self._paths.setdefault(id(value), []).append(path)
        asked = named(save_args, _is_save_args)
        for path, own in asked.items():
            options = _storage_options_of(own)
            if options is not None and path in leaves and not isinstance(leaves[path], _SCALARS):
                self.options[path] = options

    def __call__(self, key: tuple[Any, ...], value: Any) -> StorageOptions | None:
        paths = self._paths.get(id(value), ())
        found: StorageOptions | None = self.options.get(paths[0] if len(paths) == 1 else str_keypath(key))
        return found


def _storage_options_of(own: Any) -> StorageOptions | None:
    if is_empty_node(own) or not hasattr(own, "aggregate"):
        return None
    if own.dtype is None and own.chunk_byte_size is None and not own.shard_axes:
        return None
    options = StorageOptions()
    options.dtype = own.dtype
    options.chunk_byte_size = own.chunk_byte_size
    if own.shard_axes:
        options.shard_axes = tuple(own.shard_axes)
    return options


# ---- metadata ----------------------------------------------------------------------------------


def metadata(place: Place, directory: str) -> TreeMetadata:
    """What is known of a tree; `directory` is where it is."""
    stored = _Loaded(place, ()).stored
    pairs, structure = jax.flatten_with_path(stored, is_leaf=is_empty_node)
    shown = storage.as_path(directory)
    leaves = [
        value if is_empty_node(value) else _metadata_of(".".join(str_keypath(path)), value, shown)
        for path, value in pairs
    ]
    file = os.path.join(directory, names.TREE_METADATA)
    custom, use_zarr3 = None, False
    if storage.is_there(file):
        found = StoredMetadata.decode(storage.read_file(file, limit_bytes=_LIMIT_BYTES), file)
        custom, use_zarr3 = found.custom_metadata, found.use_zarr3
    return TreeMetadata(jax.unflatten(structure, leaves), custom, use_zarr3)


def _metadata_of(name: str, value: Any, directory: Any) -> Metadata:
    if isinstance(value, str) or value is str:
        return StringMetadata(name, directory)
    if isinstance(value, _SCALARS):
        return ScalarMetadata(name, directory, (), None, dtype_of(value), None)
    sharding = getattr(value, "sharding_metadata", None)
    stored = getattr(value, "storage_metadata", None)
    found = None
    if stored is not None:
        found = StorageMetadata(tuple(stored.chunk_shape), getattr(stored, "write_shape", None))
    return ArrayMetadata(name, directory, tuple(value.shape), sharding, np.dtype(value.dtype), found)
