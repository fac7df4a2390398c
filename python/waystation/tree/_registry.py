"""Which classes are nodes of a tree, how a value of one is opened, and what a stored tag may become.

A value is opened by the first that fits: the class's own registration (`register_node`, `register_leaf`);
the built-in containers, for exactly `dict`, `list`, `tuple`, `None`, `OrderedDict`, `defaultdict`; the
fallbacks (`register_fallback`), latest first; the fields of a named tuple; the fields of a dataclass, except
those whose metadata says `pytree_node=False` or `static=True`, which are static. Any other value is a leaf.

Invariants: a tag read from a file is only ever looked up among classes that this program registered or has
flattened; nothing is imported. On load without an abstract state the class is used if

- nothing static was lost: the saved value had no static data, or only the defaults of its class, and
- its children suffice: for a registered class always; for a named tuple or dataclass if the stored names
  are fields of it and every other field has a default.

Everything else becomes a `NamedNode`. Dataclasses are made without calling `__init__` or `__post_init__`,
as unpickling does: what was saved comes back as it was.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from waystation._errors import Conflict, InvalidInput, WrongType
from waystation.tree._keys import AttributeKey, ChildKey, DictKey, Key, SequenceKey, check_dict_keys
from waystation.tree._named_node import NamedNode
from waystation.tree._nodes import NONE, Node, Rebuild

Children: TypeAlias = list[tuple[Key, Any]]
Opened: TypeAlias = tuple[Node, Iterable[Any]]
Opener: TypeAlias = Callable[[Any], Opened]
Fallback: TypeAlias = Callable[[Any], tuple[Children, Rebuild] | None]


class _Registration(NamedTuple):
    cls: type
    unflatten: Callable[[Children, Any], Any]


class _Fields(NamedTuple):
    """The fields of a named tuple or dataclass."""

    names: tuple[str, ...]
    children: tuple[str, ...]
    defaults: dict[str, Callable[[], Any]]
    plain_defaults: dict[str, Any]  # those that are values, not factories


_leaf_classes: set[type] = set()  # registered as leaves
# What a type is: its opener, or None for a leaf. Types that are not in here are asked each time.
openers: dict[type, Opener | None] = dict.fromkeys((bool, int, float, complex, str, bytes, type(...)))
_fallbacks: list[Fallback] = []
_registrations: dict[str, _Registration] = {}
_seen: dict[str, type] = {}  # classes that went through flatten, by tag
_fields_by_class: dict[type, _Fields | None] = {}


# ---- registration ------------------------------------------------------------------------------


def register_node(
    cls: type,
    *,
    flatten: Callable[[Any], tuple[Children, Any]] | None = None,
    unflatten: Callable[[Children, Any], Any] | None = None,
    tag: str | None = None,
) -> None:
    """Makes values of exactly `cls` nodes. A later registration of the same class replaces an earlier one.

    Named tuples, dataclasses and what JAX knows are nodes already; for them `register_node(cls)` alone says
    that loads may give them back, before the program has saved or asked for one.

    Args:
        cls: The class. Values of its subclasses are not meant.
        flatten: Gives the children as `(key, child)` pairs, and static data (None if there is none), which
            stays in memory and is never stored. A key is a string (an attribute), a number, or one of the
            key types of `waystation.tree`.
        unflatten: Makes a value of such pairs (whose keys are of those types) and static data.
        tag: The name in files; by default `module.qualname`.

    Raises:
        InvalidInput: `cls` is one of the built-in containers, or only one function is given, or none for a
            class that nobody knows how to take apart.
        Conflict: Another class has this tag.
    """
    if not isinstance(cls, type):
        raise WrongType(f"a node must be a class, not {cls!r:.60}")
    if cls in _BUILTIN_OPENERS:
        raise InvalidInput(f"{cls.__name__} is a node already; register a subclass")
    if flatten is None or unflatten is None:
        _announce(cls, alone=all(given is None for given in (flatten, unflatten, tag)))
        return
    tag = tag or tag_of(cls)
    known = _registrations.get(tag)
    if known is not None and tag_of(known.cls) != tag_of(cls):
        raise Conflict(f"the tag {tag!r} belongs to {tag_of(known.cls)}; choose another for {tag_of(cls)}")

    def open_registered(value: Any) -> Opened:
        given: Any = flatten(value)
        try:
            pairs, static = given
            children = [(key, child) for key, child in pairs]
        except (TypeError, ValueError) as error:
            raise InvalidInput(
                f"flatten of {tag} gives (key, child) pairs and static data (None if there is none), not "
                f"{given!r:.100}"
            ) from error
        keys = _checked_keys(children)

        def rebuild(values: list[Any]) -> Any:
            return unflatten(list(zip(keys, values, strict=True)), static)

        node = Node("named", len(keys), keys, tag, static is not None, rebuild)
        return node, [child for _, child in children]

    _registrations[tag] = _Registration(cls, unflatten)
    openers[cls] = open_registered


def _announce(cls: type, *, alone: bool) -> None:
    """Lets loads give back a class that need not be told how to be taken apart."""
    if not alone:
        raise InvalidInput(f"give both flatten and unflatten for {cls.__name__}, or only the class")
    if _fields_of(cls) is None:
        raise InvalidInput(
            f"{cls.__name__} is neither a named tuple nor a dataclass: give flatten and unflatten functions"
        )
    _seen[tag_of(cls)] = cls


def register_leaf(cls: type) -> None:
    """Makes values of exactly `cls` leaves, never opened, whatever else they are."""
    if cls in _BUILTIN_OPENERS:
        raise InvalidInput(f"{cls.__name__} is a node; register a subclass")
    _leaf_classes.add(cls)
    openers[cls] = None


def is_registered(cls: type) -> bool:
    """Whether the program has registered a class as a node or a leaf."""
    return cls in _leaf_classes or openers.get(cls) is not None


def register_fallback(function: Fallback) -> Callable[[], None]:
    """Asks `function` about every value whose class is neither registered nor built in.

    Args:
        function: Returns None for what it does not know, else the children of one level with their keys,
            and what makes an equal value of other children.

    Returns:
        A function that takes the fallback away again.
    """
    _fallbacks.insert(0, function)
    _forget_array_types()

    def remove() -> None:
        _fallbacks.remove(function)

    return remove


def _forget_array_types() -> None:
    for cls in [cls for cls, opener in openers.items() if opener is None and _is_cached_array_type(cls)]:
        del openers[cls]


def _is_cached_array_type(cls: type) -> bool:
    """Whether a class is a leaf only because nobody has opened it so far."""
    return _is_array_type(cls) and cls not in _leaf_classes


def tag_of(cls: type) -> str:
    """The name of a class in files."""
    return f"{cls.__module__}.{cls.__qualname__}"


# ---- opening -----------------------------------------------------------------------------------


def open_unknown(value: Any) -> Opened | None:
    """Opens a value whose type is not in `openers`; None for a leaf."""
    cls = type(value)
    for fallback in _fallbacks:
        answer = fallback(value)
        if answer is not None:
            return _opened_by_fallback(value, *answer)
    fields = _fields_of(cls)
    if fields is not None:
        return _open_fields(value, fields)
    if _is_array_type(cls):
        openers[cls] = None  # arrays are what trees have most of
    return None


def _is_array_type(cls: type) -> bool:
    return hasattr(cls, "shape") and hasattr(cls, "dtype")


def _opened_by_fallback(value: Any, children: Children, rebuild: Rebuild) -> Opened:
    cls = type(value)
    keys = _checked_keys(children)
    tag = tag_of(cls)
    _seen[tag] = cls
    fields = _fields_of(cls)
    names = {key.name for key in keys if isinstance(key, AttributeKey)}
    has_static = fields is None or _loses_static(value, fields, names)
    return Node("named", len(keys), keys, tag, has_static, rebuild), [child for _, child in children]


def _open_fields(value: Any, fields: _Fields) -> Opened:
    cls = type(value)
    tag = tag_of(cls)
    _seen[tag] = cls
    children = [_field(value, name) for name in fields.children]
    keys = tuple(map(AttributeKey, fields.children))
    has_static = _loses_static(value, fields, fields.children)
    if issubclass(cls, tuple):
        return Node("named", len(keys), keys, tag, has_static, cls._make), children  # type: ignore[attr-defined]
    static = {name: _field(value, name) for name in fields.names if name not in fields.children}

    def rebuild(values: list[Any]) -> Any:
        return _make_dataclass(cls, static | dict(zip(fields.children, values, strict=True)))

    return Node("named", len(keys), keys, tag, has_static, rebuild), children


def _field(value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except AttributeError:
        raise InvalidInput(f"the field {name!r} of a {tag_of(type(value))} is not set; set it") from None


def _checked_keys(children: Children) -> tuple[Key, ...]:
    keys = tuple(_as_key(key) for key, _ in children)
    check_dict_keys([key.key for key in keys if isinstance(key, DictKey)])
    if len(set(keys)) != len(keys):
        raise InvalidInput("a node names two of its children alike; its flatten function must not")
    return keys


def _as_key(key: Any) -> Key:
    """A child's key; plain names and numbers stand for attributes and numbered children."""
    if isinstance(key, DictKey | SequenceKey | AttributeKey | ChildKey):
        return key
    if type(key) is str:
        return AttributeKey(key)
    if type(key) is int and key >= 0:
        return ChildKey(key)
    raise InvalidInput(
        f"{key!r} cannot name a child; use a string, a number from 0, or a key of waystation.tree"
    )


def _open_none(value: None) -> Opened:
    return NONE, ()


def _open_list(value: list[Any]) -> Opened:
    return Node("list", len(value)), value


def _open_tuple(value: tuple[Any, ...]) -> Opened:
    return Node("tuple", len(value)), value


def _open_dict(value: dict[Any, Any]) -> Opened:
    check_dict_keys(keys := tuple(value))
    return Node("dict", len(keys), keys), value.values()


def _open_ordered_dict(value: OrderedDict[Any, Any]) -> Opened:
    check_dict_keys(keys := tuple(value))
    return Node("ordered_dict", len(keys), keys), value.values()


def _open_default_dict(value: defaultdict[Any, Any]) -> Opened:
    check_dict_keys(keys := tuple(value))
    factory = value.default_factory

    def rebuild(children: list[Any]) -> Any:
        return defaultdict(factory, zip(keys, children, strict=True))

    return Node("default_dict", len(keys), keys, rebuild=rebuild), value.values()


def _open_named_node(value: NamedNode) -> Opened:
    keys = tuple(value.fields)
    return Node("named", len(keys), keys, value.tag, value.has_static), value.fields.values()


# ---- fields of named tuples and dataclasses -----------------------------------------------------


def _fields_of(cls: type) -> _Fields | None:
    if cls not in _fields_by_class:
        _fields_by_class[cls] = _find_fields(cls)
    return _fields_by_class[cls]


def _find_fields(cls: type) -> _Fields | None:
    if issubclass(cls, tuple):
        names = getattr(cls, "_fields", None)
        if not isinstance(names, tuple) or not hasattr(cls, "_make"):
            return None
        return _make_fields(names, names, dict(getattr(cls, "_field_defaults", {})), {})
    if not dataclasses.is_dataclass(cls) or not _is_plain_object(cls):
        return None
    fields = dataclasses.fields(cls)
    return _make_fields(
        tuple(field.name for field in fields),
        tuple(field.name for field in fields if not _is_static(field)),
        {field.name: field.default for field in fields if field.default is not dataclasses.MISSING},
        {
            field.name: field.default_factory
            for field in fields
            if field.default_factory is not dataclasses.MISSING
        },
    )


def _make_fields(
    names: tuple[str, ...],
    children: tuple[str, ...],
    values: dict[str, Any],
    factories: dict[str, Callable[[], Any]],
) -> _Fields:
    defaults = {name: _constant(value) for name, value in values.items()} | factories
    return _Fields(names, children, defaults, values)


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _is_static(field: dataclasses.Field[Any]) -> bool:
    return not field.metadata.get("pytree_node", True) or bool(field.metadata.get("static", False))


def _is_plain_object(cls: type) -> bool:
    try:
        object.__new__(cls)
    except TypeError:  # made by another base class (dict, Exception, …), which we could not restore
        return False
    return True


def _loses_static(value: Any, fields: _Fields, children: Iterable[str]) -> bool:
    """Whether a field that is not among the children differs from what its default would give back."""
    return any(not _is_default(value, name, fields) for name in fields.names if name not in children)


def _is_default(value: Any, name: str, fields: _Fields) -> bool:
    if name not in fields.plain_defaults:
        return False
    held, default = getattr(value, name, dataclasses.MISSING), fields.plain_defaults[name]
    if held is default:
        return True
    return type(held) is type(default) and type(held) in _COMPARABLE and bool(held == default)


def _make_dataclass(cls: type, values: dict[str, Any]) -> Any:
    made: Any = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


# ---- loading -----------------------------------------------------------------------------------


def resolve(tag: str, keys: Sequence[Key], has_static: bool) -> Rebuild | None:
    """What makes a live value of a stored named node; None if that has to be a `NamedNode`."""
    if has_static:
        return None
    registration = _registrations.get(tag)
    if registration is not None:
        unflatten = registration.unflatten
        return lambda values: unflatten(list(zip(keys, values, strict=True)), None)
    cls = _seen.get(tag)
    fields = _fields_of(cls) if cls is not None else None
    if cls is None or fields is None:
        return None
    names = [key.name for key in keys if isinstance(key, AttributeKey)]
    absent = set(fields.names).difference(names)
    if len(names) != len(keys) or not set(names) <= set(fields.names) or not absent <= fields.defaults.keys():
        return None
    return _maker(cls, fields, names, absent)


def _maker(cls: type, fields: _Fields, names: list[str], absent: set[str]) -> Rebuild:
    def rebuild(values: list[Any]) -> Any:
        by_name = dict(zip(names, values, strict=True))
        by_name |= {name: fields.defaults[name]() for name in absent}
        if issubclass(cls, tuple):
            return cls._make(by_name[name] for name in fields.names)  # type: ignore[attr-defined]
        return _make_dataclass(cls, by_name)

    return rebuild


_COMPARABLE = frozenset({bool, int, float, complex, str, bytes})
_BUILTIN_OPENERS: dict[type, Opener] = {
    type(None): _open_none,
    list: _open_list,
    tuple: _open_tuple,
    dict: _open_dict,
    OrderedDict: _open_ordered_dict,
    defaultdict: _open_default_dict,
    NamedNode: _open_named_node,
}
openers.update(_BUILTIN_OPENERS)
