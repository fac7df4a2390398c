"""What programs do with Orbax's v1 that may be refused: cases, each run with genuine Orbax and with ours.

A case is a function of a library (a module with the names of Orbax's v1) and of an empty directory. What it
returns, or the type of what it raises, is its outcome. Names are unique, and say what is done with what.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import os
import pathlib
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

Case = Callable[[Any, Path], Any]
CASES: dict[str, Case] = {}


def _add(name: str, case: Case) -> None:
    assert name not in CASES, name
    CASES[name] = case


def state() -> dict[str, Any]:
    """A state of a few kinds of leaves."""
    return {
        "a": jnp.arange(6, dtype=jnp.float32).reshape(2, 3),
        "b": {"n": np.arange(4, dtype=np.int32), "f": 1.5},
        "step": 3,
        "name": "run",
    }


def saved(library: Any, path: Path) -> Path:
    """A checkpoint of that state."""
    library.save(path, state())
    return path


def both(library: Any, path: Path) -> Path:
    """A checkpoint of two states and a JSON value."""
    library.save_checkpointables(
        path, {"params": {"w": jnp.ones((2, 2))}, "opt": {"m": np.zeros(3, np.float32)}, "config": {"lr": 1}}
    )
    return path


# ---- names -------------------------------------------------------------------------------------------

NAMES: dict[str, Any] = {
    name: name
    for name in (
        *("state", "a", "metrics", "AUTO", "_x", "pytree", "default", "a b", "é", "-", "a.b", "a:b", "~"),
        *("_CHECKPOINT_METADATA", "checkpoint.json", "_sharding", "descriptor", "array_metadatas", "d"),
        *("ocdbt.process_0", "manifest.ocdbt", "x.orbax-checkpoint-tmp", "orbax.checkpoint", "_METADATA"),
        *("_CHECKPOINT_DELETION", "a.orbax-checkpoint-tmp-1", ".hidden", "a\nb", "state.waystation", "%s"),
    )
} | {
    "empty text": "",
    "with slash": "a/b",
    "parent": "..",
    "itself": ".",
    "up": "../x",
    "absolute": "/dev/null/x",  # Orbax saves there, beside the checkpoint: so one where nothing can be
    "trailing slash": "a/",
    "too long": "x" * 300,
    "with zero": "a\0b",
    "number": 3,
    "bytes": b"x",
    "tuple": ("a",),
}


def _add_names() -> None:
    for label, name in NAMES.items():

        def save_named(library: Any, path: Path, name: Any = name) -> Any:
            library.save(path / "c", {"x": np.ones(2)}, checkpointable_name=name)
            return library.load(path / "c", checkpointable_name=name)

        def save_named_load_default(library: Any, path: Path, name: Any = name) -> Any:
            library.save(path / "c", {"x": np.ones(2)}, checkpointable_name=name)
            return library.load(path / "c")

        def save_several(library: Any, path: Path, name: Any = name) -> Any:
            library.save_checkpointables(path / "c", {name: {"x": np.ones(2)}, "other": {"y": np.ones(1)}})
            return library.load_checkpointables(path / "c")

        def load_named(library: Any, path: Path, name: Any = name) -> Any:
            return library.load(saved(library, path / "c"), checkpointable_name=name)

        def load_several(library: Any, path: Path, name: Any = name) -> Any:
            return library.load_checkpointables(saved(library, path / "c"), {name: None})

        def metadata_named(library: Any, path: Path, name: Any = name) -> Any:
            found = library.metadata(saved(library, path / "c"), checkpointable_name=name)
            return sorted(found.metadata)

        def delete_named(library: Any, path: Path, name: Any = name) -> Any:
            library.delete(saved(library, path / "c"), checkpointable_name=name)

        _add(f"save and load by name: {label}", save_named)
        _add(f"save by name, load by default: {label}", save_named_load_default)
        _add(f"save several: {label}", save_several)
        _add(f"load by name what is not there: {label}", load_named)
        _add(f"load several that are not there: {label}", load_several)
        _add(f"metadata by name: {label}", metadata_named)
        _add(f"delete by name: {label}", delete_named)


_add_names()


# ---- what is saved -----------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Plain:
    x: Any


class Pair(tuple[Any, ...]):
    pass


Named = collections.namedtuple("Named", ["x", "y"])


def _cycle() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


STATES: dict[str, Callable[[], Any]] = {
    "array itself": lambda: jnp.ones(3),
    "NumPy array itself": lambda: np.ones(3),
    "number itself": lambda: 3,
    "text itself": lambda: "text",
    "None itself": lambda: None,
    "empty dict": dict,
    "empty list": list,
    "empty tuple": lambda: (),
    "nested empty dict": lambda: {"a": {}},
    "nested empty list": lambda: {"a": []},
    "nested empty beside": lambda: {"a": {}, "b": np.ones(2)},
    "None leaf": lambda: {"a": None, "b": np.ones(2)},
    "None leaf only": lambda: {"a": None},
    "bool": lambda: {"a": True},
    "int": lambda: {"a": 3},
    "negative int": lambda: {"a": -3},
    "int of 64 bits": lambda: {"a": 2**40},
    "int of 65 bits": lambda: {"a": 2**65},
    "float": lambda: {"a": 1.5},
    "infinite float": lambda: {"a": float("inf")},
    "complex number": lambda: {"a": 1j},
    "text": lambda: {"a": "text"},
    "empty text": lambda: {"a": ""},
    "text with zero": lambda: {"a": "a\0b"},
    "surrogate": lambda: {"a": "\ud800"},
    "bytes": lambda: {"a": b"bytes"},
    "bytearray": lambda: {"a": bytearray(b"bytes")},
    "memoryview": lambda: {"a": memoryview(b"bytes")},
    "set": lambda: {"a": {1, 2}},
    "frozenset": lambda: {"a": frozenset({1, 2})},
    "range": lambda: {"a": range(3)},
    "generator": lambda: {"a": (value for value in [1])},
    "function": lambda: {"a": len},
    "lambda": lambda: {"a": lambda: 1},
    "class": lambda: {"a": int},
    "module": lambda: {"a": os},
    "object": lambda: {"a": object()},
    "enum": lambda: {"a": Color.RED},
    "path": lambda: {"a": pathlib.PurePosixPath("x")},
    "Decimal": lambda: {"a": decimal.Decimal(1)},
    "Fraction": lambda: {"a": fractions.Fraction(1, 2)},
    "datetime": lambda: {"a": datetime.datetime(2020, 1, 1)},
    "ellipsis": lambda: {"a": ...},
    "NotImplemented": lambda: {"a": NotImplemented},
    "dtype": lambda: {"a": np.dtype("float32")},
    "exception": lambda: {"a": ValueError("x")},
    "namespace": lambda: {"a": types.SimpleNamespace(x=1)},
    "unregistered dataclass": lambda: {"a": Plain(np.ones(2))},
    "abstract leaf": lambda: {"a": jax.ShapeDtypeStruct((2,), np.float32)},
    "named tuple": lambda: Named(np.ones(2), np.ones(3)),
    "tuple": lambda: (np.ones(2), np.ones(3)),
    "list": lambda: [np.ones(2), np.ones(3)],
    "subclass of tuple": lambda: {"a": Pair((1, 2))},
    "ordered dict": lambda: collections.OrderedDict(b=np.ones(2), a=np.ones(3)),
    "defaultdict": lambda: collections.defaultdict(int, a=np.ones(3)),
    "deque": lambda: {"a": collections.deque([1, 2])},
    "Counter": lambda: {"a": collections.Counter("aab")},
    "mapping proxy": lambda: {"a": types.MappingProxyType({"x": 1})},
    "cycle": _cycle,
    "int keys": lambda: {1: np.ones(2), 2: np.ones(3)},
    "float keys": lambda: {1.5: np.ones(2)},
    "None key": lambda: {None: np.ones(2)},
    "bool keys": lambda: {True: np.ones(2)},
    "tuple keys": lambda: {(1, 2): np.ones(2)},
    "bytes keys": lambda: {b"a": np.ones(2)},
    "mixed keys": lambda: {"a": np.ones(2), 1: np.ones(3)},
    "clashing keys": lambda: {"1": np.ones(2), 1: np.ones(3)},
    "empty key": lambda: {"": np.ones(2)},
    "key with dot": lambda: {"a.b": np.ones(2)},
    "clashing dots": lambda: {"a.b": np.ones(2), "a": {"b": np.ones(3)}},
    "key with slash": lambda: {"a/b": np.ones(2)},
    "key is parent": lambda: {"..": np.ones(2)},
    "key is itself": lambda: {".": np.ones(2)},
    "key with zero": lambda: {"a\0b": np.ones(2)},
    "long key": lambda: {"k" * 400: np.ones(2)},
    "key with line break": lambda: {"a\nb": np.ones(2)},
    "surrogate key": lambda: {"\ud800": np.ones(2)},
    "enum key": lambda: {Color.RED: np.ones(2)},
    "empty array": lambda: {"a": np.zeros((0, 3), np.float32)},
    "empty JAX array": lambda: {"a": jnp.zeros((0, 3))},
    "array of no dimension": lambda: {"a": np.array(1.5)},
    "JAX array of no dimension": lambda: {"a": jnp.array(1.5)},
    "key array": lambda: {"a": jax.random.key(0)},
    "raw key": lambda: {"a": jax.random.PRNGKey(0)},
    "deleted array": lambda: {"a": _deleted()},
    "transposed array": lambda: {"a": np.arange(6).reshape(2, 3).T},
    "strided array": lambda: {"a": np.arange(10)[::2]},
    "big-endian array": lambda: {"a": np.arange(3, dtype=">i4")},
    "masked array": lambda: {"a": np.ma.masked_array([1, 2], [True, False])},
    "matrix": lambda: {"a": np.ones(3).view(np.ndarray)},
    "object array": lambda: {"a": np.array([1, "x"], object)},
    "array of text": lambda: {"a": np.array(["x", "yy"])},
    "array of bytes": lambda: {"a": np.array([b"x", b"yy"])},
    "datetime array": lambda: {"a": np.array(["2020-01-01"], "datetime64[D]")},
    "timedelta array": lambda: {"a": np.array([1], "timedelta64[s]")},
    "structured array": lambda: {"a": np.zeros(2, [("x", "f4"), ("y", "i4")])},
    "void array": lambda: {"a": np.zeros(2, "V4")},
    "longdouble array": lambda: {"a": np.ones(2, np.longdouble)},
    "record array": lambda: {"a": np.rec.array([(1, 2.0)], dtype=[("x", "i4"), ("y", "f8")])},
    "fixed-width text scalar": lambda: {"a": np.str_("x")},
    "NumPy bytes scalar": lambda: {"a": np.bytes_(b"x")},
    "NumPy bool": lambda: {"a": np.bool_(True)},
    "NumPy float32": lambda: {"a": np.float32(1.5)},
    "NumPy int8": lambda: {"a": np.int8(3)},
    "NumPy datetime": lambda: {"a": np.datetime64("2020-01-01")},
    "JAX bfloat16 scalar": lambda: {"a": jnp.bfloat16(1.5)},
    "array of one leaf in both": lambda: {"a": (array := np.ones(2)), "b": array},
    **{
        f"array of {dtype}": lambda dtype=dtype: {"a": np.ones(3).astype(dtype)}
        for dtype in (
            *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        )
    },
    **{
        f"JAX array of {name}": lambda name=name: {"a": jnp.ones(3, getattr(jnp, name))}
        for name in (
            *("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "float4_e2m1fn", "complex64"),
            *("bool_", "uint32", "float16", "int2", "float8_e8m0fnu"),
        )
    },
}


def _deleted() -> jax.Array:
    array = jnp.ones(3) + 1
    array.delete()
    return array


# What is saved in every way that there is.
EVERY_WAY = {"array itself", "None itself", "empty dict", "None leaf", "object", "text", "list", "function"}


def _add_states() -> None:
    for label, make in STATES.items():

        def one(library: Any, path: Path, make: Callable[[], Any] = make) -> Any:
            library.save(path / "c", make())
            return library.load(path / "c")

        def in_background(library: Any, path: Path, make: Callable[[], Any] = make) -> Any:
            library.save_async(path / "c", make()).result()
            return library.load(path / "c")

        def named(library: Any, path: Path, make: Callable[[], Any] = make) -> Any:
            library.save_checkpointables(path / "c", {"it": make()})
            return library.load_checkpointables(path / "c")["it"]

        def stepped(library: Any, path: Path, make: Callable[[], Any] = make) -> Any:
            with library.training.Checkpointer(path / "run") as checkpointer:
                checkpointer.save(1, make())
                return checkpointer.load(1)

        _add(f"save: {label}", one)
        if label in EVERY_WAY:
            _add(f"save_async: {label}", in_background)
            _add(f"save_checkpointables: {label}", named)
            _add(f"Checkpointer.save: {label}", stepped)


_add_states()

# ---- what is at a path -------------------------------------------------------------------------------


def _dangling(path: Path) -> Path:
    (path / "link").symlink_to(path / "gone")
    return path / "link"


def _file(path: Path) -> Path:
    (path / "file").write_text("no checkpoint")
    return path / "file"


def _directory(path: Path) -> Path:
    (path / "directory").mkdir()
    return path / "directory"


def _junk(path: Path) -> Path:
    (path / "junk" / "state").mkdir(parents=True)
    (path / "junk" / "state" / "x").write_text("x")
    return path / "junk"


def _link(library: Any, path: Path) -> Path:
    (path / "link").symlink_to(saved(library, path / "c"))
    return path / "link"


def _unfinished(path: Path) -> Path:
    (path / "c.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    return path / "c.orbax-checkpoint-tmp"


def _without(library: Any, path: Path, *names: str) -> Path:
    """A checkpoint without some of the directories of its checkpointables."""
    both(library, path / "c")
    for name in names:
        (found,) = (path / "c").glob(f"{name}*")
        shutil.rmtree(found)
    return path / "c"


def _emptied(library: Any, path: Path, name: str) -> Path:
    both(library, path / "c")
    (found,) = (path / "c").glob(f"{name}*")
    shutil.rmtree(found)
    found.mkdir()
    return path / "c"


PLACES: dict[str, Callable[[Any, Path], Any]] = {
    "nothing": lambda library, path: path / "gone",
    "nothing in nothing": lambda library, path: path / "gone" / "gone",
    "file": lambda library, path: _file(path),
    "below a file": lambda library, path: _file(path) / "c",
    "empty directory": lambda library, path: _directory(path),
    "junk": lambda library, path: _junk(path),
    "unfinished": lambda library, path: _unfinished(path),
    "dangling link": lambda library, path: _dangling(path),
    "link": _link,
    "checkpoint": lambda library, path: saved(library, path / "c"),
    "text": lambda library, path: str(saved(library, path / "c")),
    "trailing slash": lambda library, path: f"{saved(library, path / 'c')}/",
    "parent": lambda library, path: saved(library, path / "c").parent,
    "inside": lambda library, path: next(saved(library, path / "c").glob("state*")),
    "with dots": lambda library, path: saved(library, path / "c") / ".." / "c",
    "None": lambda library, path: None,
    "number": lambda library, path: 3,
    "bytes": lambda library, path: os.fsencode(saved(library, path / "c")),
    "empty": lambda library, path: "",
    "with zero": lambda library, path: "a\0b",
    "too long": lambda library, path: path / ("x" * 300),
    "checkpoint of several": lambda library, path: both(library, path / "c"),
    "without one": lambda library, path: _without(library, path, "opt"),
    "without the first": lambda library, path: _without(library, path, "config"),
    "without two": lambda library, path: _without(library, path, "opt", "config"),
    "without all": lambda library, path: _without(library, path, "opt", "config", "params"),
    "with an empty one": lambda library, path: _emptied(library, path, "opt"),
}


def _metadata(found: Any) -> Any:
    return found.metadata


LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "load": lambda library, path: library.load(path),
    "load by no name": lambda library, path: library.load(path, checkpointable_name=None),
    "load params": lambda library, path: library.load(path, checkpointable_name="params"),
    "load opt": lambda library, path: library.load(path, checkpointable_name="opt"),
    "load abstractly": lambda library, path: library.load(path, {"a": np.ones((2, 3), np.float32)}),
    "load several": lambda library, path: library.load_checkpointables(path),
    "load no several": lambda library, path: library.load_checkpointables(path, {}),
    "load params of several": lambda library, path: library.load_checkpointables(path, {"params": None}),
    "load opt of several": lambda library, path: library.load_checkpointables(path, {"opt": None}),
    "load both of several": lambda library, path: library.load_checkpointables(
        path, {"opt": None, "params": None}
    ),
    "metadata": lambda library, path: sorted(library.metadata(path).metadata),
    "metadata of params": lambda library, path: sorted(
        library.metadata(path, checkpointable_name="params").metadata
    ),
    "metadata of opt": lambda library, path: sorted(
        library.metadata(path, checkpointable_name="opt").metadata
    ),
    "metadata of several": lambda library, path: sorted(
        name for name, value in library.checkpointables_metadata(path).metadata.items()
    ),
    "is_orbax_checkpoint": lambda library, path: library.is_orbax_checkpoint(path),
    "delete": lambda library, path: library.delete(path),
    "delete if there": lambda library, path: library.delete(path, missing_ok=True),
    "delete opt": lambda library, path: library.delete(path, checkpointable_name="opt"),
    "delete params": lambda library, path: library.delete(path, checkpointable_name="params"),
    "delete params, look": lambda library, path: (
        library.delete(path, checkpointable_name="params"),
        library.load_checkpointables(path),
    )[1],
    "save": lambda library, path: library.save(path, state()),
    "save over": lambda library, path: (library.save(path, {"x": np.ones(2)}, overwrite=True),)[0],
    "save over, load": lambda library, path: (
        library.save(path, {"x": np.ones(2)}, overwrite=True),
        library.load(path),
    )[1],
    "save inside": lambda library, path: library.save(Path(path) / "inner", {"x": np.ones(2)}),
    "save several": lambda library, path: library.save_checkpointables(path, {"a": {"x": np.ones(2)}}),
    "save in parts": lambda library, path: library.partial.save(path, {"x": np.ones(2)}),
    "finish parts": lambda library, path: library.partial.finalize(path),
    "Checkpointer": lambda library, path: [
        checkpoint.step for checkpoint in library.training.Checkpointer(path).checkpoints
    ],
}


def _add_places() -> None:
    for place, where in PLACES.items():
        for look, do in LOOKS.items():
            if look == "save inside" and place in ("None", "number", "bytes"):
                continue

            def case(
                library: Any,
                path: Path,
                where: Callable[[Any, Path], Any] = where,
                do: Callable[[Any, Any], Any] = do,
            ) -> Any:
                return do(library, where(library, path))

            _add(f"{look}, at: {place}", case)


_add_places()

# ---- what is wanted ----------------------------------------------------------------------------------


def _wanted(**changes: Any) -> dict[str, Any]:
    return state() | changes


class Opaque:
    pass


ABSTRACTS: dict[str, Callable[[], Any]] = {
    "the same": state,
    "less": lambda: {"a": state()["a"]},
    "less inside": lambda: _wanted(b={"n": np.zeros(4, np.int32)}),
    "more": lambda: _wanted(z=np.ones(1)),
    "more inside": lambda: _wanted(b={"n": np.zeros(4, np.int32), "f": 0.5, "z": 1}),
    "renamed": lambda: {"A" if key == "a" else key: value for key, value in state().items()},
    "nothing": dict,
    "list": lambda: [1, 2],
    "leaf": lambda: np.ones(3),
    "text": lambda: "text",
    "number": lambda: 3,
    "leaf for a dict": lambda: _wanted(b=np.ones(3)),
    "dict for a leaf": lambda: _wanted(a={"x": np.ones(3)}),
    "list for a dict": lambda: _wanted(b=[np.zeros(4, np.int32), 0.5]),
    "None for an array": lambda: _wanted(a=None),
    "None for a dict": lambda: _wanted(b=None),
    "None for a number": lambda: _wanted(step=None),
    "larger shape": lambda: _wanted(a=jnp.zeros((4, 3))),
    "smaller shape": lambda: _wanted(a=jnp.zeros((1, 3))),
    "other rank": lambda: _wanted(a=jnp.zeros(6)),
    "larger NumPy shape": lambda: _wanted(b={"n": np.zeros(8, np.int32), "f": 0.5}),
    "no dimension": lambda: _wanted(a=jnp.zeros(())),
    "other dtype": lambda: _wanted(a=jnp.zeros((2, 3), jnp.bfloat16)),
    "int for float": lambda: _wanted(a=jnp.zeros((2, 3), jnp.int32)),
    "complex for float": lambda: _wanted(a=jnp.zeros((2, 3), jnp.complex64)),
    "NumPy for JAX": lambda: _wanted(a=np.zeros((2, 3), np.float32)),
    "JAX for NumPy": lambda: _wanted(b={"n": jnp.zeros(4, jnp.int32), "f": 0.5}),
    "struct": lambda: _wanted(a=jax.ShapeDtypeStruct((2, 3), np.float32)),
    "struct with sharding": lambda: _wanted(
        a=jax.ShapeDtypeStruct((2, 3), np.float32, sharding=SingleDeviceSharding(jax.devices()[0]))
    ),
    "struct for a number": lambda: _wanted(step=jax.ShapeDtypeStruct((), np.int32)),
    "array for a number": lambda: _wanted(step=np.zeros((), np.int32)),
    "number for an array": lambda: _wanted(a=1.0),
    "number for text": lambda: _wanted(name=3),
    "text for a number": lambda: _wanted(step="three"),
    "float for int": lambda: _wanted(step=0.5),
    "int for float number": lambda: _wanted(b={"n": np.zeros(4, np.int32), "f": 1}),
    "bool for int": lambda: _wanted(step=True),
    "type int": lambda: _wanted(step=int),
    "type float": lambda: _wanted(step=float),
    "type text": lambda: _wanted(name=str),
    "type bool": lambda: _wanted(step=bool),
    "type NumPy array": lambda: _wanted(a=np.ndarray),
    "type NumPy number": lambda: _wanted(step=np.int64),
    "type NumPy number for an array": lambda: _wanted(a=np.float32),
    "type JAX array": lambda: _wanted(a=jax.Array),
    "other type": lambda: _wanted(a=dict),
    "NumPy number": lambda: _wanted(step=np.int32(0)),
    "object": lambda: _wanted(a=Opaque()),
    "object for a number": lambda: _wanted(step=Opaque()),
    "function": lambda: _wanted(a=len),
    "set": lambda: _wanted(a={1}),
    "bytes": lambda: _wanted(name=b"x"),
    "tuple": lambda: _wanted(a=(1, 2)),
    "empty dict for a dict": lambda: _wanted(b={}),
    "placeholder for an array": lambda: _wanted(a=...),
    "placeholder for a number": lambda: _wanted(step=...),
    "placeholder for text": lambda: _wanted(name=...),
    "only placeholders": lambda: {"a": ..., "b": {"n": ..., "f": ...}, "step": ..., "name": ...},
    "key for an array": lambda: _wanted(a=jax.random.key(0)),
    "ordered": lambda: collections.OrderedDict(state()),
    "defaultdict": lambda: collections.defaultdict(int, state()),
}


def _context(library: Any, **settings: Any) -> Any:
    context = library.Context()
    for name, value in settings.items():
        group = context
        *parents, last = name.split("__")
        for parent in parents:
            group = getattr(group, parent)
        setattr(group, last, value)
    return context


# What is loaded in every way that there is.
LOADED_EVERY_WAY = {"the same", "less", "more", "list", "larger shape", "object", "NumPy for JAX"}


def _add_abstracts() -> None:
    settings: dict[str, dict[str, Any]] = {
        "": {},
        " partly": {"pytree__loading__partial_load": True},
        " padded": {"array__loading__enable_padding_and_truncation": True},
    }
    for label, make in ABSTRACTS.items():
        for suffix, options in settings.items():

            def plain(
                library: Any,
                path: Path,
                make: Callable[[], Any] = make,
                options: dict[str, Any] = options,
            ) -> Any:
                saved(library, path / "c")
                with _context(library, **options):
                    return library.load(path / "c", make())

            _add(f"load{suffix} as: {label}", plain)

        def named(library: Any, path: Path, make: Callable[[], Any] = make) -> Any:
            saved(library, path / "c")
            return library.load_checkpointables(path / "c", {"state": make()})["state"]

        def stepped(library: Any, path: Path, make: Callable[[], Any] = make) -> Any:
            with library.training.Checkpointer(path / "run") as checkpointer:
                checkpointer.save(1, state())
                return checkpointer.load(1, make())

        if label in LOADED_EVERY_WAY:
            _add(f"load_checkpointables as: {label}", named)
            _add(f"Checkpointer.load as: {label}", stepped)


_add_abstracts()


# ---- several -----------------------------------------------------------------------------------------

SEVERAL: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "empty dict": dict,
    "list": lambda: ["params"],
    "text": lambda: "params",
    "number": lambda: 3,
    "None among them": lambda: {"a": None},
    "None beside": lambda: {"a": None, "b": {"x": np.ones(2)}},
    "unsupported": lambda: {"a": Opaque()},
    "unsupported beside": lambda: {"a": Opaque(), "b": {"x": np.ones(2)}},
    "JSON": lambda: {"a": {"x": 1, "y": "text"}},
    "JSON list": lambda: {"a": [1, 2]},
    "text leaf": lambda: {"a": "text"},
    "function": lambda: {"a": len},
    "number leaf": lambda: {"a": 3},
    "array leaf": lambda: {"a": np.ones(3)},
}

WANTED_OF_SEVERAL: dict[str, Callable[[], Any]] = {
    "list": lambda: ["params"],
    "text": lambda: "params",
    "number": lambda: 3,
    "unknown": lambda: {"gone": None},
    "known and unknown": lambda: {"params": None, "gone": None},
    "other kind": lambda: {"params": Opaque()},
    "state for JSON": lambda: {"config": {"lr": 3}},
    "array for JSON": lambda: {"config": {"lr": np.ones(3)}},
    "function for a state": lambda: {"params": len},
    "number for a state": lambda: {"params": 3},
    "text for a state": lambda: {"params": "text"},
    "wrong tree": lambda: {"params": {"v": np.ones((2, 2))}},
    "wrong shape": lambda: {"params": {"w": jnp.ones((3, 2))}},
}


def _add_several() -> None:
    for label, make in SEVERAL.items():

        def save(library: Any, path: Path, make: Callable[[], Any] = make) -> Any:
            library.save_checkpointables(path / "c", make())
            return library.load_checkpointables(path / "c")

        def stepped(library: Any, path: Path, make: Callable[[], Any] = make) -> Any:
            with library.training.Checkpointer(path / "run") as checkpointer:
                checkpointer.save_checkpointables(1, make())
                return checkpointer.load_checkpointables(1)

        _add(f"save_checkpointables of: {label}", save)
        _add(f"Checkpointer.save_checkpointables of: {label}", stepped)
    for label, make in WANTED_OF_SEVERAL.items():

        def load(library: Any, path: Path, make: Callable[[], Any] = make) -> Any:
            return library.load_checkpointables(both(library, path / "c"), make())

        _add(f"load_checkpointables of several as: {label}", load)


_add_several()

# ---- metadata of users -------------------------------------------------------------------------------

CUSTOM: dict[str, Any] = {
    "None": None,
    "dict": {"a": 1, "b": [1, None, "x"]},
    "empty dict": {},
    "text": "text",
    "number": 3,
    "list": [1, 2],
    "set": {1},
    "array": np.ones(2),
    "array inside": {"a": np.ones(2)},
    "NumPy number inside": {"a": np.float32(1)},
    "NaN": {"a": float("nan")},
    "int keys": {1: 2},
    "tuple keys": {(1, 2): 2},
    "tuple": {"a": (1, 2)},
    "bytes": {"a": b"x"},
    "object": {"a": Opaque()},
    "surrogate": {"a": "\ud800"},
    "large int": {"a": 2**70},
}


def _add_custom() -> None:
    for label, value in CUSTOM.items():

        def one(library: Any, path: Path, value: Any = value) -> Any:
            library.save(path / "c", {"x": np.ones(2)}, custom_metadata=value)
            return library.metadata(path / "c").custom_metadata

        def stepped(library: Any, path: Path, value: Any = value) -> Any:
            with library.training.Checkpointer(path / "run") as checkpointer:
                checkpointer.save(1, {"x": np.ones(2)}, custom_metadata=value)
                return checkpointer.metadata(1).custom_metadata

        def of_root(library: Any, path: Path, value: Any = value) -> Any:
            with library.training.Checkpointer(path / "run", custom_metadata=value) as checkpointer:
                return checkpointer.root_metadata().custom_metadata

        def metrics(library: Any, path: Path, value: Any = value) -> Any:
            with library.training.Checkpointer(path / "run") as checkpointer:
                checkpointer.save(1, {"x": np.ones(2)}, metrics=value)
                return checkpointer.metadata(1).metrics

        _add(f"custom_metadata: {label}", one)
        _add(f"custom_metadata of a step: {label}", stepped)
        _add(f"custom_metadata of a root: {label}", of_root)
        _add(f"metrics: {label}", metrics)


_add_custom()

# ---- steps -------------------------------------------------------------------------------------------

STEPS: dict[str, Any] = {
    "0": 0,
    "1": 1,
    "2": 2,
    "large": 2**40,
    "negative": -1,
    "None": None,
    "float": 1.0,
    "text": "1",
    "bool": True,
    "NumPy": np.int32(1),
    "JAX": 1,
    "list": [1],
    "word": "x",
}

USES: dict[str, Callable[[Any, Any], Any]] = {
    "save": lambda checkpointer, step: checkpointer.save(step, {"x": np.ones(2)}),
    "save over": lambda checkpointer, step: checkpointer.save(step, {"x": np.ones(2)}, overwrite=True),
    "save forced": lambda checkpointer, step: checkpointer.save(step, {"x": np.ones(2)}, force=True),
    "save_async": lambda checkpointer, step: (
        None if (response := checkpointer.save_async(step, {"x": np.ones(2)})) is None else response.result()
    ),
    "save_checkpointables": lambda checkpointer, step: checkpointer.save_checkpointables(
        step, {"s": {"x": np.ones(2)}}
    ),
    "load": lambda checkpointer, step: checkpointer.load(step),
    "load_checkpointables": lambda checkpointer, step: checkpointer.load_checkpointables(step),
    "load by name": lambda checkpointer, step: checkpointer.load(step, checkpointable_name="gone"),
    "load gone": lambda checkpointer, step: checkpointer.load_checkpointables(step, {"gone": None}),
    "metadata": lambda checkpointer, step: checkpointer.metadata(step).step,
    "checkpointables_metadata": lambda checkpointer, step: sorted(
        checkpointer.checkpointables_metadata(step).metadata
    ),
    "delete": lambda checkpointer, step: checkpointer.delete(step),
    "delete if there": lambda checkpointer, step: checkpointer.delete(step, missing_ok=True),
    "delete gone": lambda checkpointer, step: checkpointer.delete(step, checkpointable_name="gone"),
    "should_save": lambda checkpointer, step: checkpointer.should_save(step),
}


def _full(checkpointer: Any) -> Any:
    checkpointer.save(1, state())
    return checkpointer


def _add_steps() -> None:
    for use, do in USES.items():
        for label, step in STEPS.items():

            def full(library: Any, path: Path, do: Any = do, step: Any = step) -> Any:
                with library.training.Checkpointer(path / "run") as checkpointer:
                    return do(_full(checkpointer), step)

            _add(f"Checkpointer.{use}, step {label}", full)
        for label, step in (("1", 1), ("None", None)):

            def empty(library: Any, path: Path, do: Any = do, step: Any = step) -> Any:
                with library.training.Checkpointer(path / "run") as checkpointer:
                    return do(checkpointer, step)

            def closed(library: Any, path: Path, do: Any = do, step: Any = step) -> Any:
                with library.training.Checkpointer(path / "run") as checkpointer:
                    _full(checkpointer)
                return do(checkpointer, step)

            _add(f"empty Checkpointer.{use}, step {label}", empty)
            _add(f"closed Checkpointer.{use}, step {label}", closed)

        def removed(library: Any, path: Path, do: Any = do) -> Any:
            with library.training.Checkpointer(path / "run") as checkpointer:
                _full(checkpointer)
                shutil.rmtree(path / "run" / "1")
                return do(checkpointer, 1)

        _add(f"Checkpointer.{use}, step removed", removed)


_add_steps()


# ---- parts -------------------------------------------------------------------------------------------


def _parts(library: Any, path: Path, *parts: Any) -> Path:
    for part in parts:
        library.partial.save(path / "c", part)
    return path / "c"


def _after(*actions: Callable[[Any, Path], Any]) -> Case:
    def case(library: Any, path: Path) -> Any:
        return [action(library, path) for action in actions][-1]

    return case


def _part(value: Callable[[], Any]) -> Callable[[Any, Path], Any]:
    return lambda library, path: library.partial.save(path / "c", value())


def _finalize(library: Any, path: Path) -> Any:
    return library.partial.finalize(path / "c")


def _load(library: Any, path: Path) -> Any:
    return library.load(path / "c")


def _listing(library: Any, path: Path) -> Any:
    return sorted(entry.name for entry in path.iterdir())


def _a() -> Any:
    return {"a": np.ones(2)}


def _b() -> Any:
    return {"b": {"c": np.ones(3)}}


_add("parts: two", _after(_part(_a), _part(_b), _finalize, _load))
_add("parts: one, not finished, load", _after(_part(_a), _load))
_add(
    "parts: one, not finished, is checkpoint",
    _after(_part(_a), lambda library, path: library.is_orbax_checkpoint(path / "c")),
)
_add("parts: listing while unfinished", _after(_part(_a), _listing))
_add("parts: listing when finished", _after(_part(_a), _finalize, _listing))
_add("parts: finish nothing", _finalize)
_add("parts: finish twice", _after(_part(_a), _finalize, _finalize))
_add("parts: save after finish", _after(_part(_a), _finalize, _part(_b)))
_add("parts: the same leaf twice", _after(_part(_a), _part(_a), _finalize, _load))
_add("parts: the same leaf, other shape", _after(_part(_a), _part(lambda: {"a": np.ones(5)})))
_add("parts: leaf, then dict", _after(_part(_a), _part(lambda: {"a": {"b": np.ones(2)}}), _finalize, _load))
_add("parts: dict, then leaf", _after(_part(_b), _part(lambda: {"b": np.ones(2)}), _finalize, _load))
_add("parts: list after dict", _after(_part(_a), _part(lambda: [np.ones(2)]), _finalize, _load))
_add("parts: empty", _after(_part(dict), _finalize, _load))
_add("parts: leaf itself", _after(_part(lambda: np.ones(2)), _finalize, _load))
_add("parts: unsupported leaf", _after(_part(lambda: {"a": object()})))
_add("parts: None", _after(_part(lambda: None)))
_add("parts: None leaf", _after(_part(lambda: {"a": None, "b": np.ones(2)}), _finalize, _load))
_add("parts: over a checkpoint", _after(lambda library, path: saved(library, path / "c"), _part(_a)))
_add("parts: finish over a checkpoint", _after(lambda library, path: saved(library, path / "c"), _finalize))
_add("parts: over a file", _after(lambda library, path: (path / "c").write_text("x"), _part(_a)))
_add("parts: over a directory", _after(lambda library, path: (path / "c").mkdir(), _part(_a)))
_add(
    "parts: checkpoint appears",
    _after(_part(_a), lambda library, path: saved(library, path / "c"), _finalize, _load),
)
_add(
    "parts: save while unfinished, then load",
    _after(_part(_a), lambda library, path: saved(library, path / "c"), _load),
)
_add("parts: delete while unfinished", _after(_part(_a), lambda library, path: library.delete(path / "c")))
_add(
    "parts: asynchronous",
    _after(
        lambda library, path: library.partial.save_async(path / "c", _a()).result(),
        lambda library, path: (
            library.partial.finalize_async(path / "c").result()
            if hasattr(library.partial, "finalize_async")
            else library.partial.finalize(path / "c")
        ),
        _load,
    ),
)
_add(
    "parts: custom metadata",
    _after(
        lambda library, path: library.partial.save(path / "c", _a(), custom_metadata={"x": 1}),
        _finalize,
        lambda library, path: library.metadata(path / "c").custom_metadata,
    ),
)
_add(
    "parts: metadata while unfinished",
    _after(_part(_a), lambda library, path: sorted(library.metadata(path / "c").metadata)),
)
_add(
    "parts: steps see unfinished ones",
    _after(
        lambda library, path: library.partial.save(path / "1", _a()),
        lambda library, path: [c.step for c in library.training.Checkpointer(path).checkpoints],
    ),
)


# ---- saves over others -------------------------------------------------------------------------------


def _twice(library: Any, path: Path) -> Any:
    saved(library, path / "c")
    saved(library, path / "c")


_add("save twice", _twice)
_add(
    "save over nothing",
    lambda library, path: (library.save(path / "c", _a(), overwrite=True), library.load(path / "c"))[1],
)
_add(
    "save in nothing",
    lambda library, path: (library.save(path / "x" / "y" / "c", _a()), library.load(path / "x" / "y" / "c"))[
        1
    ],
)
_add(
    "save_async twice",
    lambda library, path: (saved(library, path / "c"), library.save_async(path / "c", _a()).result())[1],
)
_add("load_async of nothing", lambda library, path: library.load_async(path / "gone").result())
