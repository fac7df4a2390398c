"""Makes a checkpoint of one framework into a checkpoint of another, and casts on the way if asked to.

    python examples/convert.py run/step_00001000 converted --to jax --dtype bfloat16

The structure stays; only the kind of the arrays changes. It works by asking a load for other arrays: what
`waystation.metadata` returns is a description of the state, and each array in it may be replaced by a
description of the array that is wanted instead.

The arrays of a JAX checkpoint may be sharded over devices that are not here: they are read all the same. PRNG
keys exist in JAX only, so elsewhere they become their words (uint32).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import waystation
from waystation.frameworks import AbstractNumpy
from waystation.tree import flatten, unflatten


def abstract_jax(shape: tuple[int, ...], dtype: str) -> Any:
    import jax

    return jax.ShapeDtypeStruct(shape, dtype)


def abstract_torch(shape: tuple[int, ...], dtype: str) -> Any:
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def abstract_numpy(shape: tuple[int, ...], dtype: str) -> Any:
    return AbstractNumpy(shape, dtype)


ABSTRACT_ARRAYS: dict[str, Callable[[tuple[int, ...], str], Any]] = {
    "jax": abstract_jax,
    "torch": abstract_torch,
    "numpy": abstract_numpy,
}


def wanted_leaf(leaf: Any, framework: str, floats: str | None) -> Any:
    """What to ask for in place of a leaf of the metadata."""
    if not hasattr(leaf, "dtype"):
        return leaf  # numbers, strings and bytes are the same everywhere
    shape, name = tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")
    if name == "None" or name.startswith("key<"):
        return leaf if framework == "jax" else AbstractNumpy(shape)
    if floats is not None and name.removeprefix("b").startswith("float"):
        name = floats
    return ABSTRACT_ARRAYS[framework](shape, name)


def convert(
    source: str | Path, destination: str | Path, framework: str, floats: str | None, *, overwrite: bool
) -> int:
    """Returns how many leaves the state has."""
    found = waystation.metadata(source)
    leaves, structure = flatten(found.metadata)
    wanted = unflatten(structure, [wanted_leaf(leaf, framework, floats) for leaf in leaves])
    state = waystation.load(source, wanted)
    waystation.save(destination, state, overwrite=overwrite, custom_metadata=found.custom_metadata)
    return len(leaves)


def main() -> None:
    parser = argparse.ArgumentParser(description="Converts a checkpoint from one framework to another.")
    parser.add_argument("source", help="the checkpoint")
    parser.add_argument("destination", help="the checkpoint to make")
    parser.add_argument("--to", choices=ABSTRACT_ARRAYS, required=True, dest="framework")
    parser.add_argument("--dtype", help="cast all floating-point arrays to this dtype, such as bfloat16")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint at the destination")
    arguments = parser.parse_args()
    try:
        count = convert(
            arguments.source,
            arguments.destination,
            arguments.framework,
            arguments.dtype,
            overwrite=arguments.overwrite,
        )
    except waystation.errors.WaystationError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(f"{arguments.destination}: {count} leaves, arrays are {arguments.framework} now")


if __name__ == "__main__":
    main()
