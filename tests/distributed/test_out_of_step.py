"""Processes of which one calls `load` where the others call `save` are told so, and go on together."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed import call_scenarios
from tests.support.programs import running


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_load_beside_saves(framework: str, tmp_path: Path) -> None:
    with running(call_scenarios.out_of_step, count=3, framework=framework, directory=tmp_path) as programs:
        for index in range(3):
            assert programs.report(index) == "done"
        for index in range(3):
            programs.send(index, "go on")
        values = programs.values()
    for step, errors in zip((1, 2), list(zip(*values, strict=True))[:2], strict=True):
        assert {error.type for error in errors} == {"InvalidInput"}
        (message,) = {error.message for error in errors}
        assert f"processes 0, 2: save '{tmp_path}/{step}'; process 1: load '{tmp_path}/0'. Every" in message
    assert [value[2] for value in values] == [3, 3, 3]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["0", "3"]
