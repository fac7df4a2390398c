"""What a caller chooses about tensors: which of them, under which names, of which dtypes.

Invariants: what is chosen exists, so that a typing error is an error; two arrays never share a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from waystation._errors import InvalidInput, TensorNotFound, WrongType
from waystation.frameworks import dtypes

Select: TypeAlias = str | re.Pattern[str] | Callable[[str], bool] | Collection[str]
Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]
DType: TypeAlias = Any  # a dtype, a mapping of dtypes, or a function of name and dtype

# Narrower floats are quantised values, which mean nothing without the scales beside them.
_LEAST_FLOAT_BYTES = 2
_BYTES: tuple[type[Any], ...] = (bytes, bytearray)  # whose elements are numbers


def selected(names: Sequence[str], select: Select | None) -> list[str]:
    """The names that are selected, in order.

    Args:
        names: All names.
        select: A regular expression that is searched in names, a function of a name, or the names themselves.

    Raises:
        InvalidInput: It is none of these, or selects nothing.
        TensorNotFound: A name is given that there is not.
    """
    if select is None:
        return list(names)
    is_selected = _test(select, names)
    found = [name for name in names if is_selected(name)]
    if not found and names and not _is_empty(select):
        raise InvalidInput(f"{select!r:.200} selects none of {len(names)} tensors; the first is {names[0]!r}")
    return found


def _is_empty(select: Select) -> bool:
    return isinstance(select, Collection) and not isinstance(select, str) and not select


def _test(select: Select, names: Sequence[str]) -> Callable[[str], bool]:
    if isinstance(select, str | re.Pattern):
        try:
            pattern = re.compile(select)
        except re.error as error:
            raise InvalidInput(f"{select!r} is not a regular expression: {error}") from error
        return lambda name: pattern.search(name) is not None
    if callable(select):
        return lambda name: bool(select(name))
    if isinstance(select, _BYTES) or not isinstance(select, Collection):
        raise WrongType(f"select must be a pattern, a function or names, not a {type(select).__name__}")
    chosen, present = set(select), set(names)
    absent = [name for name in select if name not in present]
    if absent:
        raise TensorNotFound(
            f"{len(absent)} of {len(chosen)} selected tensors are not there; the first is {absent[0]!r}"
        )
    return chosen.__contains__


def renamed(names: Sequence[str], rename: Rename | None) -> list[str]:
    """The names under which arrays come back.

    Args:
        names: Of the tensors.
        rename: New names by old ones (others stay), or a function of a name.

    Raises:
        InvalidInput: Two tensors get one name, or one gets none.
        TensorNotFound: A name that is to be replaced is not there.
    """
    if rename is None:
        return list(names)
    if isinstance(rename, Mapping):
        present = set(names)
        absent = [name for name in rename if name not in present]
        if absent:
            raise TensorNotFound(f"rename names {absent[0]!r}, and no tensor of that name is loaded")
        new = [rename.get(name, name) for name in names]
    elif callable(rename):
        new = [rename(name) for name in names]
    else:
        raise WrongType(f"rename must be a mapping or a function, not a {type(rename).__name__}")
    taken: dict[str, str] = {}
    for name, own in zip(names, new, strict=True):
        if not isinstance(own, str):
            raise InvalidInput(f"rename makes {own!r:.60} of a name; it has to make a string", tensor=name)
        other = taken.setdefault(own, name)
        if other != name:
            raise InvalidInput(f"rename gives two tensors the name {own!r}: {other!r} and this", tensor=name)
    return new


def dtype_chooser(dtype: DType) -> Callable[[str, str], str]:
    """What tells the dtype of an array from the name and the dtype of its tensor.

    Args:
        dtype: None; or a dtype, which tensors of its kind are cast to, floats of less than 16 bits excepted;
            a mapping from dtypes to dtypes; or a function of name and dtype that returns a dtype or None.

    Raises:
        InvalidInput: It is none of these.
    """
    if dtype is None:
        return lambda _name, stored: stored
    if isinstance(dtype, Mapping):
        table = {dtype_name(key): dtype_name(value) for key, value in dtype.items()}
        return lambda _name, stored: table.get(stored, stored)
    if callable(dtype) and not isinstance(dtype, type) and not hasattr(dtype, "dtype"):

        def ask(name: str, stored: str) -> str:
            chosen = dtype(name, stored)
            return stored if chosen is None else dtype_name(chosen)

        return ask
    wanted = dtypes.of_name(dtype_name(dtype))
    return lambda _name, stored: wanted.name if _is_cast(dtypes.of_name(stored), wanted) else stored


def _is_cast(stored: dtypes.LogicalDtype, wanted: dtypes.LogicalDtype) -> bool:
    """Whether a dtype that is asked of all tensors is asked of those of another dtype."""
    if stored.category != wanted.category:
        return False
    return stored.category != "float" or stored.host.itemsize >= _LEAST_FLOAT_BYTES


def dtype_name(value: Any) -> str:
    """The logical name of anything that stands for a dtype: of NumPy, JAX or torch, or a name.

    Raises:
        InvalidInput: It stands for none.
    """
    text = value if isinstance(value, str) else str(value)
    name = text.removeprefix("torch.")
    if (isinstance(value, str) or text != name) and name in dtypes.TABLE:
        return name
    try:
        return dtypes.of_numpy(np.dtype(value)).name
    except TypeError as error:  # which Unsupported is, too
        raise InvalidInput(f"{value!r:.60} is no dtype: {error}") from error
