"""Which codec a value or a stored array belongs to.

Invariants: a framework is imported only when a value can only be its own (its module is loaded already)
or when the program asks for it by name; the answer for a type is remembered.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any, NamedTuple

from waystation._errors import InvalidInput, Unsupported
from waystation._extras import install_command
from waystation.frameworks import numpy_arrays
from waystation.frameworks.base import Codec
from waystation.frameworks.numpy_arrays import ANY_NUMPY, AbstractNumpy, stored_scalar
from waystation.tree import KeyPath, register_fallback
from waystation.tree._nodes import Rebuild
from waystation.tree._registry import Children

__all__ = [
    "ANY_NUMPY",
    "AbstractNumpy",
    "available_codec",
    "codec_by_name",
    "codec_for",
    "codec_of_program",
    "is_jax_node",
    "keys_of_program",
    "over_all_devices",
    "stored_scalar",
]


class _Framework(NamedTuple):
    package: str
    module: str


_FRAMEWORKS = {
    "jax": _Framework("jax", "waystation.frameworks.jax_arrays"),
    "torch": _Framework("torch", "waystation.frameworks.torch_tensors"),
}
# Frameworks of stored arrays whose codec has another name.
_HELD_BY_NUMPY = frozenset({"numpy", "scalar", "python", "str", "bytes"})

_by_name: dict[str, Codec] = {"numpy": numpy_arrays.CODEC}
_by_type: dict[type, Codec | None] = dict.fromkeys((bool, int, float, complex, str, bytes, type(None)))


def codec_for(value: Any) -> Codec | None:
    """The codec that `value`, concrete or abstract, is a leaf of; None if it is no array."""
    cls = type(value)
    try:
        return _by_type[cls]
    except KeyError:
        return _by_type.setdefault(cls, _find(value))


def codec_by_name(name: str) -> Codec:
    """The codec of a framework; imports the framework.

    Raises:
        Unsupported: The framework is not installed.
        InvalidInput: There is no such framework.
    """
    found = _by_name.get(name)
    if found is not None:
        return found
    if name in _HELD_BY_NUMPY:
        return numpy_arrays.CODEC
    if name not in _FRAMEWORKS:
        known = ", ".join(["numpy", *_FRAMEWORKS])
        raise InvalidInput(f"there is no framework {name!r}; the frameworks are {known}")
    if not _installed(name):
        raise Unsupported(
            f"{name} is not installed; {install_command(name)}, or load into NumPy arrays with "
            "an abstract state of waystation.frameworks.AbstractNumpy leaves"
        )
    return _by_name.setdefault(name, importlib.import_module(_FRAMEWORKS[name].module).CODEC)


def available_codec(framework: str) -> Codec:
    """The codec that a stored array comes back by unless asked otherwise: its framework's, or NumPy's
    where that framework is not installed."""
    if framework in _FRAMEWORKS and not _installed(framework):
        return numpy_arrays.CODEC
    return codec_by_name(framework)


def codec_of_program() -> Codec:
    """The codec of arrays that no framework has saved: JAX's if the program uses JAX, else NumPy's."""
    return codec_by_name("jax") if "jax" in sys.modules else numpy_arrays.CODEC


def over_all_devices(abstract: Any) -> Any:
    """An abstract leaf, on all devices of the program where it is one of JAX that has no sharding."""
    codec = codec_for(abstract)
    if codec is None or codec.name != "jax":
        return abstract
    from waystation.frameworks import jax_shardings

    return jax_shardings.over_all_devices(abstract)


def keys_of_program(path: KeyPath) -> tuple[Any, ...]:
    """A key path as the program's own functions know it: in JAX's keys if the program uses JAX."""
    if "jax" not in sys.modules:
        return path
    from waystation.frameworks import jax_nodes

    return jax_nodes.jax_key_path(path)


def _installed(name: str) -> bool:
    package = _FRAMEWORKS[name].package
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _find(value: Any) -> Codec | None:
    if numpy_arrays.CODEC.is_leaf(value):
        return numpy_arrays.CODEC
    for name, framework in _FRAMEWORKS.items():
        if framework.package in sys.modules and codec_by_name(name).is_leaf(value):
            return codec_by_name(name)
    return None


def _open_jax_node(value: Any) -> tuple[Children, Rebuild] | None:
    """Opens what is registered as a node with JAX, if the program uses JAX at all."""
    if "jax" not in sys.modules:
        return None
    from waystation.frameworks import jax_nodes

    return jax_nodes.flatten_one_level(value)


def is_jax_node(value: Any) -> bool:
    """Whether the class of a value is registered with JAX as a node."""
    return _open_jax_node(value) is not None


register_fallback(_open_jax_node)
