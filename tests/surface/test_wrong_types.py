"""An argument of a wrong type is refused by an error that names it, what was given, and what is accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waystation
from waystation import errors, memory, safetensors
from waystation.path import step as step_names
from waystation.training import preservation_policies as preserve
from waystation.training import save_decision_policies as decide


def _context(group: str) -> Callable[[Path], Any]:
    return lambda _: waystation.Context(**{f"{group}_options": 5})


def _adaptive(**arguments: Any) -> Callable[[Path], Any]:
    return lambda _: decide.AdaptiveInterval(**{"mean_time_between_failures_s": 60.0, **arguments})


CALLS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "on_complete": ("callback must be a function, not 5", lambda at: _saving(at).on_complete(5)),  # type: ignore[arg-type]
    "on_end": ("callback must be a function, not None", lambda at: _saving(at).on_end(None)),  # type: ignore[arg-type]
    "save": (
        r"name of a checkpointable must be a string, not \[\]",
        lambda at: waystation.save(at / "other", {"a": 1}, checkpointable_name=[]),  # type: ignore[arg-type]
    ),
    "verify": (
        "on_progress must be a function, not 5",
        lambda at: waystation.verify(at / "saved", on_progress=5),  # type: ignore[arg-type]
    ),
    "save over a model": (
        "overwrite must be True or False, not 'yes'",
        lambda at: safetensors.save({"a": np.ones(2)}, at / "model", overwrite="yes"),  # type: ignore[arg-type]
    ),
    "load some of a model": (
        "select must be a pattern, a function or names, not a bytes",
        lambda at: safetensors.load(at / "model", framework="numpy", select=b"a"),
    ),
    "load a model": (
        "progress must be a function, not 5",
        lambda at: safetensors.load(at / "model", framework="numpy", progress=5),  # type: ignore[arg-type]
    ),
    "load a model together": (
        "together must be True, False or None, not 'yes'",
        lambda at: safetensors.load(at / "model", framework="numpy", together="yes"),  # type: ignore[arg-type]
    ),
    "load a model in a group": (
        "send must be True, False or None, not 1",
        lambda at: safetensors.load_in_group(at / "model", group=None, send=1),  # type: ignore[arg-type]
    ),
    "verify a model": (
        "on_progress must be a function, not 5",
        lambda at: safetensors.verify_files(at / "model", on_progress=5),  # type: ignore[arg-type]
    ),
    "sum a model": (
        "on_progress must be a function, not 5",
        lambda at: safetensors.write_checksums(at / "model", on_progress=5),  # type: ignore[arg-type]
    ),
    "spread a model": (
        "on_progress must be a function, not 5",
        lambda at: safetensors.spread(at / "model", [at / "a", at / "b"], on_progress=5),  # type: ignore[arg-type]
    ),
    "place arrays": (
        "sharding_fn must be a function, not 5",
        lambda at: safetensors.load(at / "model", framework="jax", sharding_fn=5),  # type: ignore[arg-type]
    ),
    "save a model": (
        "metadata must be a mapping of strings, or None, not 5",
        lambda at: safetensors.save({"a": np.ones(3)}, at / "new", metadata=5),  # type: ignore[arg-type]
    ),
    "array options": ("array_options must be ArrayOptions or None, not 5", _context("array")),
    "async options": ("async_options must be AsyncOptions or None, not 5", _context("async")),
    "mean time": (
        "mean_time_between_failures_s must be a number",
        _adaptive(mean_time_between_failures_s="60"),
    ),
    "overhead": ("overhead_limit must be a number or None", _adaptive(overhead_limit="0.1")),
    "weight": ("background_weight must be a number", _adaptive(background_weight=None)),
    "minimum": ("minimum_interval_s must be a number", _adaptive(minimum_interval_s="1")),
    "adaptive policy": (
        "interval must be an AdaptiveInterval, not 5",
        lambda _: decide.AdaptiveIntervalPolicy(5),  # type: ignore[arg-type]
    ),
    "steps": ("steps must be a list", lambda _: decide.SpecificStepsPolicy("12")),  # type: ignore[arg-type]
    "continuous": (
        "minimum_interval_secs must be a number of seconds from 0 on, not nan",
        lambda _: decide.ContinuousCheckpointingPolicy(float("nan")),  # type: ignore[arg-type]
    ),
    "negative": (
        "interval_secs must be a number of seconds from 0 on, not -1",
        lambda _: preserve.EveryNSeconds(-1),
    ),
    "endless": (
        "interval_secs must be a number of seconds from 0 on, not inf",
        lambda _: preserve.EveryNSeconds(float("inf")),  # type: ignore[arg-type]
    ),
    "every": (
        "interval_steps must be an integer, not '5'",
        lambda _: preserve.EveryNSteps("5"),  # type: ignore[arg-type]
    ),
    "closest": (
        "interval_steps must be an integer, not nan",
        lambda _: preserve.EveryNStepsClosest(float("nan")),  # type: ignore[arg-type]
    ),
    "prefix": (
        "step_prefix must be a string or None, not 5",
        lambda _: step_names.standard_name_format(step_prefix=5),  # type: ignore[arg-type]
    ),
    "digits": (
        "step_format_fixed_length must be an integer or None, not '8'",
        lambda _: step_names.standard_name_format(step_format_fixed_length="8"),  # type: ignore[arg-type]
    ),
    "formats": (
        "read_name_formats must be a list of name formats, not 5",
        lambda _: step_names.composite_name_format(step_names.standard_name_format(), 5),  # type: ignore[arg-type]
    ),
    "hosts": ("host_count must be an integer, not '4'", lambda _: memory.place("4", 2)),  # type: ignore[arg-type]
    "copies": ("copies must be an integer, not 1.5", lambda _: memory.place(4, 1.5)),  # type: ignore[arg-type]
    "domains": ("domains must be a list", lambda _: memory.place(4, 2, 5)),  # type: ignore[arg-type]
    "placement": (
        "placement must be a Placement",
        lambda _: memory.recovery_probability(4, 1),  # type: ignore[arg-type]
    ),
    "lost hosts": (
        "lost_hosts must be an integer, not None",
        lambda _: memory.grouped_recovery_bound(4, 2, None),  # type: ignore[arg-type]
    ),
    "lost domains": (
        "placement must be a Placement",
        lambda _: memory.domain_recovery_odds({}, 1),  # type: ignore[arg-type]
    ),
}


def _saving(at: Path) -> waystation.AsyncResponse[None]:
    response = waystation.save_async(at / "background", {"a": 1}, overwrite=True)
    response.result()
    return response


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wrong-types")
    waystation.save(directory / "saved", {"a": np.ones(3)})
    safetensors.save({"a": np.ones(3)}, directory / "model")
    return directory


@pytest.mark.parametrize("call", CALLS)
def test_an_argument_of_a_wrong_type_is_named(call: str, saved: Path) -> None:
    told, run = CALLS[call]
    with pytest.raises(errors.InvalidInput, match=told):
        run(saved)


def test_numbers_of_numpy_are_numbers() -> None:
    assert preserve.EveryNSeconds(np.int64(3)).interval_secs == 3  # type: ignore[arg-type]
    assert preserve.EveryNSteps(np.int32(3)).interval_steps == 3  # type: ignore[arg-type]
    assert memory.place(np.int64(4), np.int64(2)).copies == 2  # type: ignore[arg-type]
    assert decide.AdaptiveInterval(np.float32(60)).mean_time_between_failures_s == 60  # type: ignore[arg-type]
