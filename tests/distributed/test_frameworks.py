"""What several JAX processes save, several torch processes load into DTensors, and the reverse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.distributed.framework_scenarios import VALUES, in_jax, in_torch
from tests.support.programs import running

import waystation


def test_from_jax_to_torch_and_back(tmp_path: Path) -> None:
    a, b, c, d = (tmp_path / name for name in "abcd")
    for function, arguments, count, framework in (
        (in_jax, (2, None, a), 2, "jax"),
        (in_torch, (a, b), 3, "torch"),
        (in_jax, (1, b, c), 4, "jax"),
        (in_torch, (c, d), 2, "torch"),
    ):
        with running(function, *arguments, count=count, framework=framework, directory=tmp_path) as programs:
            assert programs.values() == [True] * count
    saved = waystation.load(d, {name: np.empty_like(values) for name, values in VALUES.items()})
    for name, values in VALUES.items():
        assert saved[name].tobytes() == values.tobytes(), name
