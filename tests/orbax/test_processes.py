"""Programs of several real processes: genuine Orbax saves, ours load, with other numbers of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.orbax import oracle, process_scenarios
from tests.support.programs import running

FORMATS = {
    "default": {},
    "files": {"use_ocdbt": False},
    "plain": {"use_ocdbt": False, "use_compression": False},
    "plain-chunks": {"use_ocdbt": False, "use_compression": False, "chunk_bytes": 200},
}


@pytest.mark.share(6)
@pytest.mark.parametrize("options", FORMATS.values(), ids=list(FORMATS))
def test_any_number_of_processes(tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "c"
    arguments = {"count": 2, "framework": "jax", "directory": tmp_path}
    with running(process_scenarios.save, 4, path, options, **arguments) as programs:
        assert programs.values() == [None, None]
    with running(process_scenarios.load, 2, path, **arguments) as programs:
        assert programs.values() == [[], []]
    values = process_scenarios.values()
    abstract = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in values.items()}
    loaded = oracle.ours(path, abstract | {"step": int, "host": values["rows"][0], "name": str})
    for name, expected in values.items():
        np.testing.assert_array_equal(loaded[name], expected)
    assert (loaded["step"], loaded["name"]) == (7, "run")
    np.testing.assert_array_equal(loaded["host"], values["rows"][0])
