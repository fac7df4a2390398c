"""Trees and checkpointables."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from waystation._options import checks
from waystation._options.base import OptionGroup


@dataclass(kw_only=True)
class PyTreeMetadataOptions(OptionGroup):
    """What the metadata of a tree record about its containers.

    Attributes:
        support_rich_types: In Orbax's layouts: record tuples and named tuples. Otherwise they are stored as
            lists and dicts. The native layout always records the types of containers.
    """

    support_rich_types: bool = False
    _checks: ClassVar = {"support_rich_types": checks.boolean}


@dataclass(kw_only=True)
class PyTreeSavingOptions(OptionGroup):
    """How trees are saved.

    Attributes:
        pytree_metadata_options: What the metadata record about containers.
    """

    pytree_metadata_options: PyTreeMetadataOptions = field(default_factory=PyTreeMetadataOptions)


def _selection(value: Any) -> str | None:
    try:
        fits = value is None or callable(value) or bool(re.compile(value))
    except (TypeError, re.error) as error:
        return f"a regular expression, a function or None ({error})"
    return None if fits else "a regular expression, a function or None"


@dataclass(kw_only=True)
class PyTreeLoadingOptions(OptionGroup):
    """How trees are loaded.

    Attributes:
        partial_load: Load the leaves of the abstract state even if the checkpoint has more. Otherwise that
            is an error. A leaf that the checkpoint lacks is an error in any case, unless it is kept.
        keep_missing: Leaves of the abstract state that the checkpoint lacks come back as they were given: a
            value that the program has initialised, or the description of an array. Where the checkpoint has
            something else in that place, such as a dict instead of an array, that is an error.
        select: Load only leaves whose key path (`params.layers.0.w`) matches a regular expression
            (`re.search`), or for which a function of the key path returns True. The others load as
            `PLACEHOLDER` and need not be in the checkpoint. None loads all.
    """

    partial_load: bool = False
    keep_missing: bool = False
    select: str | Callable[[str], bool] | None = None
    _checks: ClassVar = {
        "partial_load": checks.boolean,
        "keep_missing": checks.boolean,
        "select": _selection,
    }

    def selected(self, label: str) -> bool:
        """Whether the leaf of a key path is to be loaded."""
        if self.select is None:
            return True
        if isinstance(self.select, str):
            return re.search(self.select, label) is not None
        return bool(self.select(label))


@dataclass(kw_only=True)
class PyTreeOptions(OptionGroup):
    """Options of trees."""

    Saving = PyTreeSavingOptions
    Loading = PyTreeLoadingOptions

    saving: PyTreeSavingOptions = field(default_factory=PyTreeSavingOptions)
    loading: PyTreeLoadingOptions = field(default_factory=PyTreeLoadingOptions)


@dataclass(kw_only=True)
class CheckpointablesOptions(OptionGroup):
    """Options of checkpointables.

    Attributes:
        registry: The registry of handlers (`handlers.local_registry()`). None means the global one.
    """

    registry: Any = None
