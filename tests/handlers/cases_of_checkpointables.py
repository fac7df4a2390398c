"""What saving, loading and deleting do, with the handlers that are there from the start."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tests.handlers.cases import case, plain, state
from tests.handlers.examples import Counter, Iterator

# ---- loading -----------------------------------------------------------------------------------


@case
def several_states(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state(), "optimizer": {"m": jnp.zeros(3)}})
    everything = ocp.load_checkpointables(path)
    return sorted(everything), plain(everything["model"]), plain(everything["optimizer"])


@case
def a_subset(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state(), "optimizer": {"m": jnp.zeros(3)}})
    return plain(ocp.load_checkpointables(path, {"optimizer": None}))


@case
def no_names_mean_all(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state(), "optimizer": {"m": jnp.zeros(3)}})
    return sorted(ocp.load_checkpointables(path, {}))


@case
def a_state_by_name(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state(), "zoo": {"m": jnp.zeros(3)}})
    return plain([ocp.load(path, checkpointable_name="zoo"), ocp.load(path)])


@case
def a_state_of_any_name(ocp: Any, path: Path) -> Any:
    ocp.save(path, {"m": jnp.ones(3)}, checkpointable_name="other")
    return plain([ocp.load(path), ocp.load_checkpointables(path)])


@case
def abstract_states(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state()})
    abstract = {
        "weights": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),
        "layers": {"bias": np.zeros(3, np.float32), "step": 0},
    }
    found = ocp.load_checkpointables(path, {"model": abstract})["model"]
    return plain(found), str(found["weights"].dtype), str(found["layers"]["bias"].dtype)


@case
def an_absent_name(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state()})
    return ocp.load_checkpointables(path, {"model": None, "dataset": None})


@case
def an_absent_state(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state()})
    return ocp.load(path, checkpointable_name="dataset")


@case
def an_absent_checkpoint(ocp: Any, path: Path) -> Any:
    return ocp.load_checkpointables(path)


@case
def no_dictionary_to_load(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state()})
    return ocp.load_checkpointables(path, [None])


@case
def a_reserved_name_to_load(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state()})
    return ocp.load_checkpointables(path, {"metrics": None})


# ---- saving ------------------------------------------------------------------------------------


@case
def no_dictionary(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, [state()])


@case
def nothing(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {})


@case
def no_name(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"": state()})


@case
def reserved_names(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"metrics": {"loss": 1.0}})


@case
def none(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state(), "nothing": None})


@case
def what_nobody_handles(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state(), "counter": Counter()})


@case
def something_is_there(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state()})
    ocp.save_checkpointables(path, {"model": state()})


@case
def overwriting(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state(), "old": {"x": 1}})
    ocp.save_checkpointables(path, {"model": {"x": jnp.ones(2)}}, overwrite=True)
    return plain(ocp.load_checkpointables(path))


@case
def metadata_of_the_caller(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state()}, custom_metadata={"a": [1, None]})
    return [
        found.custom_metadata for found in (ocp.checkpointables_metadata(path), ocp.metadata(path, "model"))
    ]


@case
def in_the_background(ocp: Any, path: Path) -> Any:
    iterator = Iterator(5)
    response = ocp.save_checkpointables_async(path, {"model": state(), "dataset": iterator})
    iterator.position = 6
    seen: list[Any] = []
    response.result()
    response.on_complete(seen.append)
    other = Iterator()
    ocp.load_checkpointables(path, {"dataset": other})
    return seen, other.position


# ---- deleting ----------------------------------------------------------------------------------


@case
def deleting_one(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(
        path, {"model": state(), "optimizer": {"m": jnp.zeros(3)}, "dataset": Iterator(1)}
    )
    deleted = ocp.delete(path, checkpointable_name="optimizer")
    again = ocp.delete(path, checkpointable_name="optimizer", missing_ok=True)
    left = sorted(ocp.checkpointables_metadata(path).metadata)
    dataset = Iterator()
    ocp.load_checkpointables(path, {"dataset": dataset})
    return deleted, again, left, plain(ocp.load(path)), dataset.position, (path / "optimizer").exists()


@case
def deleting_in_the_background(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state(), "optimizer": {"m": jnp.zeros(3)}})
    one = ocp.delete_async(path, checkpointable_name="model").result()
    return one, ocp.delete_async(path).result(), path.exists(), ocp.delete(path, missing_ok=True)


@case
def deleting_the_last(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state()})
    ocp.delete(path, checkpointable_name="model")


@case
def deleting_what_is_not_there(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state(), "other": {"x": 1}})
    ocp.delete(path, checkpointable_name="dataset")


@case
def deleting_without_a_checkpoint(ocp: Any, path: Path) -> Any:
    ocp.delete(path, checkpointable_name="dataset")


@case
def deleting_by_a_bad_name(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state(), "other": {"x": 1}})
    ocp.delete(path, checkpointable_name="../other")


@case
def loading_what_was_deleted(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state(), "other": {"x": 1}})
    ocp.delete(path, checkpointable_name="other")
    return ocp.load_checkpointables(path, {"other": None})


# ---- old names ---------------------------------------------------------------------------------


@case
def old_names(ocp: Any, path: Path) -> Any:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", DeprecationWarning)
        ocp.save_pytree(path, {"x": jnp.ones(2)})
        ocp.save_pytree_async(path.with_name("async"), {"x": jnp.ones(2)}).result()
        found = plain(ocp.load_pytree(path))
        ocp.pytree_metadata(path)
    told = [warning for warning in seen if warning.filename == __file__]
    return found, [warning.category for warning in told]
