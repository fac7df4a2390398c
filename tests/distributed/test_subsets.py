"""Some of the processes of a program save, load and delete; the others make no calls, and nobody waits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.distributed import subset_scenarios
from tests.distributed.subset_scenarios import table
from tests.support.programs import running

import waystation

COUNT = 3
frameworks = pytest.mark.parametrize("framework", ["jax", "torch"])


@frameworks
@pytest.mark.share(2)
def test_some_processes_work_while_another_works_alone(tmp_path: Path, framework: str) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    with running(
        subset_scenarios.work, root, count=COUNT, framework=framework, directory=tmp_path
    ) as programs:
        alone, first, second = programs.values()
    assert first == second == alone
    assert first == {"names": ("state",), "deleted": True, "steps": [0, 1, 2]}
    for below, primary in (("pair", 1), ("alone", 0)):
        for name, seed in (("one", 5), ("ocdbt", 8), ("steps/2", 2)):
            require(waystation.load(root / below / name, abstract()), seed, primary)
        assert waystation.verify(root / below / "one").damages == []
    require(waystation.load(root / "all", abstract()), 10, 0)
    # As many files as processes have saved: the numbers in their names count these alone.
    for below, files in (("pair", 2), ("alone", 1)):
        found = sorted(path.name for path in (root / below / "one" / "state").glob("*.safetensors"))
        assert found == [f"p{number:05}-000.safetensors" for number in range(files)]


def abstract() -> dict[str, Any]:
    return {
        "rows": np.empty_like(table(0)),
        "everywhere": np.empty_like(table(0)),
        "own": np.empty(3, int),
        "step": int,
    }


def require(loaded: dict[str, Any], seed: int, primary: int) -> None:
    np.testing.assert_array_equal(loaded["rows"], table(seed))
    np.testing.assert_array_equal(loaded["everywhere"], table(seed + 1))
    assert loaded["own"].tolist() == [primary] * 3
    assert loaded["step"] == seed


def test_genuine_orbax_loads_what_some_have_saved(tmp_path: Path) -> None:
    oracle = pytest.importorskip("orbax.checkpoint.experimental.v1")
    root = tmp_path / "checkpoints"
    root.mkdir()
    with running(subset_scenarios.work, root, count=COUNT, framework="torch", directory=tmp_path) as programs:
        programs.values()
    for below, primary in (("pair", 1), ("alone", 0)):
        require(oracle.load(root / below / "ocdbt"), 8, primary)


def test_no_mesh_is_made_for_which_the_others_would_have_to_come(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    arguments: dict[str, Any] = {"count": COUNT, "framework": "torch", "directory": tmp_path}
    with running(subset_scenarios.work, root, **arguments) as programs:
        programs.values()
    with running(subset_scenarios.load_as_saved, root / "pair" / "one", **arguments) as programs:
        outside, *inside = programs.values()
    assert outside is None
    for error in inside:
        require_refused(error, r"a mesh .* can only be made by all processes .*; give an abstract state")


@frameworks
def test_calls_that_cannot_be_meant_are_refused(tmp_path: Path, framework: str) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    with running(
        subset_scenarios.refuse, root, count=COUNT, framework=framework, directory=tmp_path
    ) as programs:
        outside, *inside = programs.values()
    told = {
        "primary": r"the primary, 0, is not among multiprocessing.active_processes, which are \[1, 2\]",
        "unknown": r"process 99 is to take part, but there are only processes 0 to 2",
    }
    for seen in (outside, *inside):
        for name, pattern in told.items():
            require_refused(seen[name], pattern)
    require_refused(outside["outside"], r"this process, 0, is not among multiprocessing.active_processes")
    for seen in inside:
        require_refused(seen["spread"], r"is held by process 0 alone, and not by processes 1, 2")
        assert "spread" in seen["spread"].context["array"]
        assert seen["different"].type == "StructureMismatch"
        assert "only process 1:" in seen["different"].message
        assert "only process 2:" in seen["different"].message
        assert seen["nothing left"]


def require_refused(error: Any, pattern: str) -> None:
    assert error.type == "InvalidInput"
    assert re.search(pattern, error.message), error.message
