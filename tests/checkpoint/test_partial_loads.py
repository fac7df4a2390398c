"""Loads of parts: subsets, placeholders, selections; and that nothing is left out unless it was asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import waystation
from waystation import PLACEHOLDER, errors
from waystation.checkpoint import LoadStatistics

LAYERS = 12


class Moments(NamedTuple):
    mu: Any
    nu: Any


def layer(number: int) -> dict[str, jax.Array]:
    return {"w": jnp.full((64, 64), float(number)), "b": jnp.full(64, -float(number))}


def state(layers: int = LAYERS) -> dict[str, Any]:
    return {
        "layers": {f"layer_{number:02}": layer(number) for number in range(layers)},
        "moments": Moments(np.arange(5), [1.5, "text", None]),
        "step": 7,
    }


def abstract(layers: int = LAYERS) -> dict[str, Any]:
    arrays = jax.eval_shape(lambda: state(layers)["layers"])
    return {**state(layers), "layers": arrays}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    waystation.save(tmp_path / "checkpoint", state())
    return tmp_path / "checkpoint"


def loading(**options: Any) -> waystation.Context:
    context = waystation.Context()
    for name, value in options.items():
        setattr(context.pytree.loading, name, value)
    return context


def bytes_loaded(call: Callable[[], Any], context: waystation.Context) -> tuple[Any, int]:
    seen: list[LoadStatistics] = []
    context.array.loading.on_statistics = seen.append
    with context:
        result = call()
    (statistics,) = seen
    return result, statistics.bytes_needed


def test_a_model_of_more_layers_is_an_error_that_shows_them(path: Path) -> None:
    with pytest.raises(errors.StructureMismatch) as caught:
        waystation.load(path, abstract(layers=16))
    text = str(caught.value)
    for number in range(LAYERS, 16):
        assert f"+ ['layers']['layer_{number}']['w']: only in the abstract state" in text
    assert "layer_11" not in text
    assert "PLACEHOLDER" in text
    assert isinstance(caught.value, KeyError | ValueError)


def test_a_model_of_fewer_layers_is_an_error_until_a_subset_is_asked_for(path: Path) -> None:
    with pytest.raises(errors.StructureMismatch, match=r"layer_09.*only in the checkpoint") as caught:
        waystation.load(path, abstract(layers=8))
    assert "pytree.loading.partial_load" in str(caught.value)
    wanted = {"layers": abstract(layers=8)["layers"]}
    loaded, nbytes = bytes_loaded(lambda: waystation.load(path, wanted), loading(partial_load=True))
    assert loaded.keys() == {"layers"}
    assert sorted(loaded["layers"]) == [f"layer_{number:02}" for number in range(8)]
    assert np.array_equal(loaded["layers"]["layer_07"]["w"], layer(7)["w"])
    assert nbytes == 8 * (64 * 64 + 64) * 4


def test_a_subset_still_needs_all_that_it_asks_for(path: Path) -> None:
    with loading(partial_load=True), pytest.raises(errors.StructureMismatch, match="layer_12"):
        waystation.load(path, {"layers": abstract(layers=13)["layers"]})
    with loading(partial_load=True), pytest.raises(errors.StructureMismatch, match=r"shape \(64, 64\)"):
        waystation.load(path, {"layers": {"layer_00": {"w": jax.ShapeDtypeStruct((3, 3), "float32")}}})


def test_placeholders_stand_for_leaves_trees_and_nothing(path: Path) -> None:
    wanted = abstract(layers=13)
    wanted["layers"] |= {name: PLACEHOLDER for name in wanted["layers"] if name != "layer_05"}
    wanted["layers"]["layer_05"]["b"] = PLACEHOLDER
    wanted["moments"] = Moments(PLACEHOLDER, [1.5, PLACEHOLDER, None])
    loaded, nbytes = bytes_loaded(lambda: waystation.load(path, wanted), loading())
    assert np.array_equal(loaded["layers"].pop("layer_05")["w"], layer(5)["w"])
    assert set(map(id, loaded["layers"].values())) == {id(PLACEHOLDER)}
    assert loaded["moments"] == Moments(PLACEHOLDER, [1.5, PLACEHOLDER, None])
    assert loaded["step"] == 7
    assert nbytes == 64 * 64 * 4


def test_placeholders_alone_do_not_make_a_subset(path: Path) -> None:
    with pytest.raises(errors.StructureMismatch, match=r"\['step'\]: only in the checkpoint"):
        waystation.load(path, {"layers": PLACEHOLDER, "moments": PLACEHOLDER})


@pytest.mark.parametrize("select", [r"layer_0[01]\.w$", lambda path: path.endswith(("00.w", "01.w"))])
def test_selected_leaves_alone_are_loaded(path: Path, select: Any) -> None:
    for wanted in (None, abstract(), abstract(layers=16)):
        loaded, nbytes = bytes_loaded(
            lambda wanted=wanted: waystation.load(path, wanted), loading(select=select)
        )
        layers = loaded["layers"]
        assert np.array_equal(layers["layer_01"]["w"], layer(1)["w"])
        assert layers["layer_00"]["b"] is layers["layer_02"]["w"] is loaded["step"] is PLACEHOLDER
        assert loaded["moments"] == Moments(PLACEHOLDER, [PLACEHOLDER, PLACEHOLDER, None])
        assert nbytes == 2 * 64 * 64 * 4


def test_a_selection_in_the_background(path: Path) -> None:
    with loading(select="step"):
        loaded = waystation.load_async(path).result()
    assert loaded["step"] == 7
    assert loaded["layers"]["layer_00"]["w"] is PLACEHOLDER


@pytest.mark.parametrize("wrong", ["(", 3])
def test_a_selection_has_to_be_one(wrong: Any) -> None:
    with pytest.raises(errors.InvalidInput, match="select"):
        waystation.Context().pytree.loading.select = wrong


def test_a_placeholder_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(errors.Unsupported, match=r"\['a'\]"):
        waystation.save(tmp_path / "checkpoint", {"a": PLACEHOLDER})
    assert list(tmp_path.iterdir()) == []
