"""`array.saving.scoped_storage_options_creator`: the caller's function is asked while the leaves are at hand.

What it says of each leaf then stands in the place of `storage_options_for`, which the layers below ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from waystation._errors import InvalidInput
from waystation._options import Options, StorageOptions
from waystation.checkpoint.prepare import Described
from waystation.frameworks import registry
from waystation.tree import flatten, format_key_path


def with_scoped_options(
    options: Options, states: Mapping[str, Any], described: Mapping[str, Described]
) -> Options:
    """The options, with what the caller's function says of the leaves of states.

    Raises:
        InvalidInput: It returned something else than options, or `storage_options_for` is set as well.
    """
    creator = options.array.saving.scoped_storage_options_creator
    if creator is None:
        return options
    if options.array.saving.storage_options_for is not None:
        raise InvalidInput("set either scoped_storage_options_creator or storage_options_for, not both")
    chosen: dict[int, StorageOptions | None] = {}
    for name, state in states.items():
        values, structure = flatten(state)
        paths, entry = structure.key_paths(), described[name]
        for number, source in zip(entry.array_leaf_numbers, entry.sources, strict=True):
            answer: object = creator(registry.keys_of_program(paths[number]), values[number])
            if answer is not None and not isinstance(answer, StorageOptions):
                raise InvalidInput(
                    f"scoped_storage_options_creator must return StorageOptions or None, not {answer!r}",
                    array=format_key_path(paths[number]),
                )
            chosen[id(source)] = answer  # the sources outlive the options
    bound = options.thawed()
    bound.array.saving.scoped_storage_options_creator = None
    bound.array.saving.storage_options_for = lambda _, source: chosen[id(source)]
    return bound.frozen()
