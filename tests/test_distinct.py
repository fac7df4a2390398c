"""Distinct numbers: as `numpy.unique` has them, and without what that imports."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from waystation._distinct import Shared, distinct, distinct_objects


@given(arrays.arrays(st.sampled_from([np.int64, np.uint64, np.int32]), st.integers(0, 40)))
def test_they_are_ascending_and_each_is_there_once(values: NDArray[Any]) -> None:
    found = distinct(values)
    assert found.dtype == values.dtype
    assert found.tolist() == sorted(set(values.tolist()))


@given(st.lists(st.integers(0, 5)))
def test_objects_are_the_same_through_those_that_they_share(numbers: list[int]) -> None:
    objects = [object() for _ in range(6)]
    given_ = [objects[number] for number in numbers]
    shared = Shared(given_)
    assert list(shared) == given_ == [shared[place] for place in range(len(shared))] == shared[:]
    kinds, which = distinct_objects(shared)
    assert kinds == list(dict.fromkeys(given_))
    assert [kinds[place] for place in which.tolist()] == given_


def test_a_first_load_does_not_import_masked_arrays(tmp_path: object) -> None:
    program = """
import sys
import numpy as np
import waystation.safetensors

path = sys.argv[1] + "/model.safetensors"
waystation.safetensors.save({"a": np.arange(3), "b": np.ones(2)}, path)
loaded = waystation.safetensors.load(path, framework="numpy")
assert loaded["a"].tolist() == [0, 1, 2]
print("numpy.ma" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
