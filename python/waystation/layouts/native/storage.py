"""How the arrays of a native checkpoint are cut."""

from __future__ import annotations

from waystation.frameworks.storage import StorageMetadata
from waystation.layouts.native.tables import REGULAR, RUNS, Tables
from waystation.layouts.native.tree_file import TreeFile


def storage_metadata(tree: TreeFile, tables: Tables, number: int) -> StorageMetadata:
    """How one array is cut."""
    stored = tree.arrays[number]
    chunk_shape = None
    if int(tables.arrays[number]["kind"]) in (REGULAR, RUNS):  # the others have chunks of several shapes
        chunk_shape = tables.chunk_shape(number)[: len(stored.shape)]
    return StorageMetadata.of(stored.shape, chunk_shape, stored.sharding)
