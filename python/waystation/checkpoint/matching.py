"""Whether a load would find what it wants: said before anything of it begins, from the metadata alone."""

from __future__ import annotations

from typing import Any

from waystation._options.in_effect import current_options
from waystation.checkpoint import opening, wanted
from waystation.checkpoint.paths import PathLike, naming_checkpoint, resolve
from waystation.checkpoint.stored import AUTO


def require_match(path: PathLike, abstract_state: Any) -> None:
    """Refuses an abstract state that `load` would refuse for its containers, leaves or shapes.

    In one process; no data file is opened.

    Raises:
        CheckpointNotFound, CheckpointableNotFound, InvalidInput, StructureMismatch, Corrupt, Unsupported: As
            `waystation.load`.
    """
    target, options = resolve(path), current_options()
    opened = opening.open_checkpoint(target, [AUTO], options)
    (stored,) = opened.stored.values()
    tree = opening.require_state(stored, target).tree
    with naming_checkpoint(target):
        decided = wanted.as_asked(tree, abstract_state, options.pytree.loading)
        extents_may_differ = options.array.loading.enable_padding_and_truncation
        wanted.check_shapes(tree, decided, extents_may_differ=extents_may_differ)
