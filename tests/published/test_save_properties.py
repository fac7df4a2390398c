"""What holds for any arrays: `safetensors` reads what we write, and we read what it writes, bit by bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.published import models

import waystation.safetensors
from waystation.safetensors import load, save

DTYPES = {**models.TORCH_DTYPES, "F4": torch.float4_e2m1fn_x2}
SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
NAMES = TEXTS.filter(lambda name: name != "__metadata__")
METADATA = st.dictionaries(TEXTS, TEXTS, max_size=4)


@st.composite
def tensors(draw: st.DrawFn, least: int = 1) -> dict[str, torch.Tensor]:
    """Tensors of any names, dtypes, shapes and bytes."""
    described = draw(
        st.dictionaries(NAMES, st.tuples(st.sampled_from(list(DTYPES)), SHAPES), min_size=least, max_size=8)
    )
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    return {name: tensor(random, dtype, shape) for name, (dtype, shape) in described.items()}


def tensor(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = DTYPES[name]
    if name == "F4" and not shape:
        shape = (1,)  # packed elements are counted along an axis
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    most = 2 if name == "BOOL" else 256
    data = random.integers(0, most, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return torch.from_numpy(data).view(dtype).reshape(shape)


def check(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert (found[name].dtype, found[name].shape) == (wanted.dtype, wanted.shape), name
        assert models.bits(found[name]) == models.bits(wanted), name


@given(state=tensors(), metadata=METADATA, max_file_bytes=st.integers(1, 600))
def test_the_package_reads_what_we_write(
    tmp_path_factory: pytest.TempPathFactory,
    state: dict[str, torch.Tensor],
    metadata: dict[str, str],
    max_file_bytes: int,
) -> None:
    directory = tmp_path_factory.mktemp("saved") / "model"
    files = save(state, directory, max_file_bytes=max_file_bytes, metadata=metadata)
    theirs: dict[str, torch.Tensor] = {}
    for file in files:
        if file.endswith(".safetensors"):
            own = safetensors.torch.load_file(file)
            assert own.keys().isdisjoint(theirs), "a tensor is in two files"
            theirs |= own
            with safetensors.safe_open(file, "pt") as opened:
                assert opened.metadata() == {"format": "pt", **metadata}
            sizes = [value.nbytes for value in own.values() if value.nbytes]
            assert sum(sizes) <= max_file_bytes or len(sizes) == 1
    check(theirs, state)
    check(load(directory, framework="torch"), state)
    with waystation.safetensors.open(directory) as ours:
        assert ours.metadata() == {"format": "pt", **metadata}
        assert ours.nbytes == sum(value.nbytes for value in state.values())


@given(state=tensors(least=0), metadata=st.none() | METADATA)
def test_we_read_what_the_package_writes(
    tmp_path_factory: pytest.TempPathFactory,
    state: dict[str, torch.Tensor],
    metadata: dict[str, str] | None,
) -> None:
    path = tmp_path_factory.mktemp("theirs") / "model.safetensors"
    # Of an empty dict as metadata the package writes a header that is no JSON.
    safetensors.torch.save_file(state, path, metadata or None)
    check(load(path, framework="torch"), state)
    with waystation.safetensors.open(path) as opened:
        assert opened.metadata() == (metadata or {})
        for name, wanted in state.items():
            assert models.bits(opened.slice(name)[...]) == models.bits(wanted)


@given(saves=st.lists(st.tuples(tensors(), st.integers(1, 600)), min_size=2, max_size=4))
def test_of_models_that_replace_each_other_the_last_is_read(
    tmp_path_factory: pytest.TempPathFactory, saves: list[tuple[dict[str, torch.Tensor], int]]
) -> None:
    directory = tmp_path_factory.mktemp("saved") / "model"
    for state, max_file_bytes in saves:
        files = save(state, directory, max_file_bytes=max_file_bytes, overwrite=True)
        check(load(directory, framework="torch"), state)
        assert sorted(os.listdir(directory)) == sorted(Path(file).name for file in files)
