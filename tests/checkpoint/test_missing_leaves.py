"""`pytree.loading.keep_missing`: what the checkpoint lacks comes back as given, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from orbax.checkpoint import v1 as oracle

import waystation
from waystation import errors


def _kept(path: Path, abstract: Any, **options: Any) -> Any:
    context = waystation.Context()
    context.pytree.loading.keep_missing = True
    for name, value in options.items():
        group = context.array.loading if name == "in_place" else context.pytree.loading
        setattr(group, name, value)
    with context:
        return waystation.load(path, abstract)


@pytest.mark.parametrize("layout", [None, True])
def test_new_leaves_are_the_very_ones_that_were_given(tmp_path: Path, layout: bool | None) -> None:
    path = tmp_path / "c"
    context = waystation.Context()
    context.array.saving.use_ocdbt = layout
    with context:
        waystation.save(path, {"w": np.arange(4.0), "old": {"m": np.ones(2)}})
    new = {"numpy": np.full(3, 7.0), "jax": jax.numpy.ones(2), "torch": torch.ones(5), "count": 4}
    described = jax.ShapeDtypeStruct((9,), "float32")
    given = {
        "w": np.zeros(4),
        "old": {"m": np.zeros(2), "v": described},
        "new": new,
        "none": None,
        "empty": {},
    }
    given["empty"] = {}
    loaded = _kept(path, given)
    np.testing.assert_array_equal(loaded["w"], np.arange(4.0))
    np.testing.assert_array_equal(loaded["old"]["m"], np.ones(2))
    assert loaded["old"]["v"] is described
    assert all(loaded["new"][name] is leaf for name, leaf in new.items())
    assert (loaded["none"], loaded["empty"]) == (None, {})


def test_parts_are_kept_as_orbax_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "c"
    oracle.save(path, {"a": np.arange(4.0), "b": np.ones(2)})
    abstract = {"a": np.zeros(4), "new": jax.ShapeDtypeStruct((2,), "float32")}
    context = oracle.Context()
    context.pytree.loading.partial_load = True
    with context:
        theirs = oracle.load(path, abstract)
    ours = _kept(path, abstract, partial_load=True)
    assert ours.keys() == theirs.keys()
    assert ours["new"] is theirs["new"] is abstract["new"]
    np.testing.assert_array_equal(ours["a"], theirs["a"])


def test_what_the_checkpoint_has_more_is_an_error_all_the_same(tmp_path: Path) -> None:
    waystation.save(tmp_path / "c", {"a": np.ones(2), "b": np.ones(2)})
    with pytest.raises(errors.StructureMismatch, match="only in the checkpoint"):
        _kept(tmp_path / "c", {"a": np.zeros(2), "new": np.zeros(1)})


@pytest.mark.parametrize(
    "wanted", [{"a": np.zeros(2)}, {"a": None}, {"a": {"b": {"c": np.zeros(2)}}}, {"a": {"b": None}}], ids=str
)
@pytest.mark.parametrize("partial_load", [False, True])
def test_other_things_in_the_same_place_are_no_missing_leaves(
    tmp_path: Path, wanted: Any, partial_load: bool
) -> None:
    waystation.save(tmp_path / "c", {"a": {"b": np.ones(2)}})
    with pytest.raises(errors.StructureMismatch):
        _kept(tmp_path / "c", wanted, partial_load=partial_load)


def test_other_shapes_are_an_error_all_the_same(tmp_path: Path) -> None:
    waystation.save(tmp_path / "c", {"a": np.ones(2)})
    with pytest.raises(errors.StructureMismatch, match="shape"):
        _kept(tmp_path / "c", {"a": np.zeros(3), "new": np.zeros(1)})


def test_tensors_in_place_stay_as_they_are(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    waystation.save(tmp_path / "c", {"weight": torch.full((2, 3), 2.0)})
    bias = model.bias.detach().clone()
    _kept(tmp_path / "c", dict(model.state_dict()), in_place=True)
    assert model.weight.eq(2).all()
    assert torch.equal(model.bias, bias)


def test_a_load_of_a_step_and_one_in_the_background_keep_them(tmp_path: Path) -> None:
    new = np.ones(3)
    context = waystation.Context()
    context.pytree.loading.keep_missing = True
    with waystation.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"a": np.ones(2)})
        checkpointer.wait()
        with context:
            loaded = checkpointer.load(1, {"a": np.zeros(2), "new": new})
    assert loaded["new"] is new
    with context:
        response = waystation.load_async(tmp_path / "run" / "1", {"a": np.zeros(2), "new": new})
    assert response.result()["new"] is new


def test_an_error_says_how_to_keep_them(tmp_path: Path) -> None:
    waystation.save(tmp_path / "c", {"a": np.ones(2)})
    with pytest.raises(errors.StructureMismatch, match="keep_missing"):
        waystation.load(tmp_path / "c", {"a": np.zeros(2), "new": np.zeros(1)})
