"""Distinct numbers.

`numpy.unique` asks whether its array is masked, and for that imports `numpy.ma` when it is first called: a
good part of the time in which a process loads its first model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def distinct(values: NDArray[Any]) -> NDArray[Any]:
    """The distinct numbers of a one-dimensional array, ascending."""
    ordered = np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered
