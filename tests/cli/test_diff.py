"""`waystation diff`: structure and values, bit by bit or within a tolerance."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import waystation

Save = Any


@pytest.fixture
def save(tmp_path: Path):
    def call(name: str, state: Any, **options: Any) -> Path:
        waystation.save(tmp_path / name, state, **options)
        return tmp_path / name

    return call


def state(**changes: Any) -> dict[str, Any]:
    base = {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.array([0.0, np.nan, np.inf]),
        "ids": np.array([1, 2, 2**63 - 1]),
        "steps": [1, 2.5, None],
        "name": "run",
    }
    return base | changes


def test_the_whole_output(save: Save, script) -> None:
    a = save("a", state(old=1))
    changed = np.arange(12, dtype=np.float32).reshape(3, 4)
    changed[1, 2] += 0.5
    b = save(
        "b",
        state(
            w=changed,
            b=np.array([-0.0, np.nan, np.nan]),
            ids=np.array([1, 2, -(2**63)]),
            steps=(1, 3, None),
            name=np.zeros(2),
            new={"x": np.zeros(1), "y": []},
        ),
    )
    outcome = script("diff", a, b)
    assert (outcome.out, outcome.err, outcome.code) == (
        "A: [DIR]/a\n"
        "B: [DIR]/b\n"
        "['old']: only in A\n"
        "['new']['x']: only in B\n"
        "['new']['y']: only in B\n"
        "['steps']: container list in A, tuple in B\n"
        "['w']: 1 of 12 elements differ; by up to 0.5 (relative 0.0769); "
        "first at [1, 2]: 6.0 in A, 6.5 in B\n"
        "['b']: 2 of 3 elements differ; 1 NaN in one only; first at [0]: 0.0 in A, -0.0 in B\n"
        "['ids']: 1 of 3 elements differ; by up to 1.84e+19 (relative 2); "
        "first at [2]: 9223372036854775807 in A, -9223372036854775808 in B\n"
        "['steps'][1]: a Python float in A, a Python int in B\n"
        "['name']: a Python str in A, an array in B\n"
        "9 differences (6 leaves, 96 B of arrays compared)\n",
        "",
        1,
    )


def test_identical(save: Save, script) -> None:
    outcome = script("diff", save("a", state()), save("b", state(), custom_metadata={"run": 1}))
    assert (outcome.out, outcome.code) == ("identical (6 leaves, 96 B of arrays compared)\n", 0)


def test_frameworks_and_shardings_make_no_difference(save: Save, run) -> None:
    import jax.numpy as jnp

    values = np.arange(6, dtype=np.float32)
    paths = [
        save("numpy", {"x": values}),
        save("torch", {"x": torch.arange(6, dtype=torch.float32)}),
        save("jax", {"x": jnp.arange(6, dtype=jnp.float32)}),
    ]
    for path in paths[1:]:
        assert run("diff", paths[0], path).code == 0


def test_tolerances(save: Save, run) -> None:
    a = save("a", {"x": np.array([1.0, 100.0, np.nan, np.inf]), "n": 1.0, "i": 10**30})
    b = save("b", {"x": np.array([1.01, 101.0, np.nan, np.inf]), "n": 1.001, "i": 10**30})
    assert run("diff", a, b).code == 1
    within = run("diff", a, b, "--rtol", "0.01")
    assert within.out == "equal within the tolerance (3 leaves, 32 B of arrays compared)\n"
    assert within.code == 0
    assert run("diff", a, b, "--atol", "1").code == 0
    outcome = run("diff", a, b, "--atol", "0.1")
    assert outcome.out.splitlines()[2].startswith(
        "['x']: 1 of 4 elements differ; by up to 1 (relative 0.0099)"
    )
    assert "['n']" not in outcome.out


def test_bits_count_without_a_tolerance(save: Save, run) -> None:
    a, b = save("a", {"x": np.array([0.0, 1.0])}), save("b", {"x": np.array([-0.0, 1.0])})
    outcome = run("diff", a, b)
    assert outcome.code == 1
    assert (
        "1 of 2 elements differ; only in the signs of zeros or the bits of NaNs; first at [0]" in outcome.out
    )
    assert run("diff", a, b, "--atol", "1e-300").code == 0


def test_no_tolerance_reaches_infinity_or_nan(save: Save, run) -> None:
    a = save("a", {"x": np.array([np.inf, np.nan, -np.inf])})
    b = save("b", {"x": np.array([1.0, 1.0, np.inf])})
    document = run("diff", a, b, "--rtol", "10", "--atol", "1e300", "--json").document
    (difference,) = document["differences"]
    assert difference["values"]["differing"] == 3
    assert difference["values"]["unequal_nans"] == 1
    assert difference["values"]["max_absolute"] == "inf"


def test_dtypes_differ_and_values_are_compared_as_numbers(save: Save, run) -> None:
    values = np.array([1.0, 2.0, 3.140625], np.float32)
    a = save("a", {"same": values, "other": values + np.float32(0.001), "s": np.array(["x"])})
    b = save(
        "b",
        {
            "same": values.astype(ml_dtypes.bfloat16),
            "other": values.astype(ml_dtypes.bfloat16),
            "s": values[:1],
        },
    )
    lines = run("diff", a, b).out.splitlines()
    assert lines[2] == "['same']: dtype float32 in A, bfloat16 in B"
    assert lines[3].startswith(
        "['other']: dtype float32 in A, bfloat16 in B; 3 of 3 elements differ; by up to 0.001"
    )
    assert lines[4] == "['s']: dtype numpy:<U1 in A, float32 in B"


def test_elements_that_are_no_numbers(save: Save, run) -> None:
    import jax

    a = save("a", {"s": np.array(["ab", "cd"]), "key": jax.random.key(1), "text": "x" * 70_000})
    b = save("b", {"s": np.array(["ab", "ce"]), "key": jax.random.key(2), "text": "y" * 70_000})
    lines = run("diff", a, b).out.splitlines()
    assert lines[2] == "['s']: 1 of 2 elements differ; first at [1]: cd in A, ce in B"
    assert lines[3] == "['key']: 1 of 1 element differ; first at []: [0, 1] in A, [0, 2] in B"
    assert lines[4].startswith("['text']: 70,000 of 70,000 elements differ")


@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float8_e8m0fnu"]
)
def test_narrow_numbers(dtype: str, save: Save, run) -> None:
    one = np.array([1, 2, 4], dtype)
    two = np.array([1, 2, 1], dtype)
    (difference,) = run("diff", save("a", {"x": one}), save("b", {"x": two}), "--json").document[
        "differences"
    ]
    assert (difference["values"]["max_absolute"], difference["values"]["first_index"]) == (3.0, [2])


def test_structure_only_reads_no_data(save: Save, run, damage) -> None:
    a, b = save("a", state()), save("b", state(w=np.ones((3, 4), np.float32)))
    damage(a / "state" / "p00000-000.safetensors", 4100)
    outcome = run("diff", a, b, "--structure-only")
    assert (outcome.out, outcome.code) == ("the same structure (6 leaves compared)\n", 0)
    whole = run("diff", a, b)
    assert whole.code == 2
    assert "checksum" in whole.err


def test_containers_of_the_same_names(save: Save, run) -> None:
    a = save("a", {"x": {"k": 1, "l": [2]}})
    assert run("diff", a, save("b", {"x": OrderedDict(k=1, l=[2])})).code == 1
    assert run("diff", a, save("c", {"x": {"l": [2], "k": 1}})).code == 0  # the order of a dict means nothing


def test_checkpointables(save: Save, run) -> None:
    a, b = save("a", {"x": 1}, checkpointable_name="ours"), save("b", {"x": 1}, checkpointable_name="theirs")
    outcome = run("diff", a, b)
    assert outcome.out.splitlines()[2:] == [
        "ours: only in A",
        "theirs: only in B",
        "2 differences (0 leaves, 0 B of arrays compared)",
    ]
    assert outcome.code == 1


def test_what_cannot_be_compared(save: Save, tmp_path: Path, run) -> None:
    assert run("diff", save("a", {"x": 1}), tmp_path / "absent").code == 2
    assert run("diff", tmp_path / "a", tmp_path / "a", "--rtol", "nan").code == 2
