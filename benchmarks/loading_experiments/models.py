"""The published models that are loaded: files as the `safetensors` package writes them, and their index.

A model is made of the layers of one of `benchmarks/states.py`, in quarters, so that one can be had that grows
with the number of processes. Files hold about as many bytes each and no tensor is in two of them, as in
published models; all tensors of two axes can be divided by one, two and four.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from benchmarks import states
from benchmarks.states import Leaf

QUARTERS = 4
FILES_PER_QUARTER = 2
INDEX = "model.safetensors.index.json"
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
_LAYERS_PER_QUARTER = 4


@dataclass(frozen=True, slots=True)
class Model:
    """Some quarters of the layers of a state.

    Attributes:
        state: See `states.STATES`; one of those that are made of layers.
        quick: Whether its small form is meant.
        quarters: How many of them.
    """

    state: str
    quick: bool
    quarters: int = QUARTERS

    @property
    def name(self) -> str:
        return f"{self.state}-{self.quarters}-quarters"

    def leaves(self) -> list[Leaf]:
        """The tensors, in the order of the layers."""
        layered = [
            leaf for leaf in states.describe(self.state, self.quick) if leaf.name.startswith("layers.")
        ]
        layers = self.quarters * _LAYERS_PER_QUARTER
        return [leaf for leaf in layered if int(leaf.name.split(".")[1]) < layers]

    @property
    def nbytes(self) -> int:
        return states.total_bytes(self.leaves())


def shares(leaves: list[Leaf], count: int) -> list[list[Leaf]]:
    """Tensors dealt out in order to as many files, of about as many bytes each."""
    total, passed = states.total_bytes(leaves), 0
    numbered: list[tuple[int, Leaf]] = []
    for leaf in leaves:
        numbered.append(((passed + leaf.nbytes // 2) * count // total, leaf))
        passed += leaf.nbytes
    return [[leaf for _, leaf in share] for _, share in groupby(numbered, key=lambda pair: pair[0])]


def write(model: Model, parent: Path) -> Path:
    """Writes the model into a directory of its own, unless it is there; returns that directory."""
    from safetensors.numpy import save_file

    directory = parent / model.name
    if (directory / INDEX).exists():
        return directory
    shutil.rmtree(directory, ignore_errors=True)  # of a session that was killed
    directory.mkdir(parents=True)
    places: dict[str, str] = {}
    files = shares(model.leaves(), FILES_PER_QUARTER * model.quarters)
    for number, share in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file({leaf.name: values(leaf) for leaf in share}, directory / name, metadata={"format": "pt"})
        places |= {leaf.name: name for leaf in share}
    index = {"metadata": {"total_size": model.nbytes}, "weight_map": places}
    (directory / INDEX).write_text(json.dumps(index))
    return directory


def files_of(directory: Path) -> list[str]:
    """The data files of a model, in order."""
    return [str(path) for path in sorted(directory.glob("*.safetensors"))]


def values(leaf: Leaf) -> npt.NDArray[Any]:
    """What a tensor holds."""
    array: npt.NDArray[Any] = states.expected(leaf).view(DTYPES[leaf.dtype]).reshape(leaf.shape)
    return array
