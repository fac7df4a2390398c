"""The demo of the runtime, small: a real cluster, a host that is really killed, every claim checked."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tests.support.long import only_long
from tests.support.warm_python import python

from waystation_demo.runtime import Plan, run

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 12), reason="the runtime needs Python 3.12"),
    # Ray, two hosts and four programs that import JAX, on a machine that may have more to do.
    pytest.mark.timeout(1200),
]

# So little is not enough to learn from, nor to measure shares by.
PLAN = Plan(steps=10, save_every=3, kill_at=5, width=32, layers=1, size=256, learned=2.0, share_tolerance=1.0)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """The directory of one demo, what it printed, and what it has found."""
    output = tmp_path_factory.mktemp("demo") / "output"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("waystation_demo.runtime.programs.sys", SimpleNamespace(executable=python()))
        report = run(output, plan=PLAN, console=Console(file=printed, width=200))
    return output, printed.getvalue(), report


@pytest.mark.long
@only_long
def test_training_goes_on_from_its_last_save(told: tuple[Path, str, dict[str, Any]]) -> None:
    _, printed, report = told
    (resumed,) = report["resumed_from"]
    assert resumed >= 3
    assert f"training went on after step {resumed}" in printed
    assert "equal the undisturbed run's, bit for bit" in printed
    assert len(report["losses"]) == PLAN.steps


@pytest.mark.long
@only_long
def test_what_is_left_can_be_looked_at(told: tuple[Path, str, dict[str, Any]]) -> None:
    output, _, report = told
    assert json.loads((output / "waystation-demo.json").read_text()) == report
    assert [Path(path).name for path in report["pictures"]] == ["shares.png", "timeline.png"]
    for path in report["pictures"]:
        assert Path(path).read_bytes().startswith(b"\x89PNG")
    events = json.loads((output / "timeline.json").read_text())["traceEvents"]
    computing = {event["args"]["client"] for event in events if event.get("cat") == "compute"}
    assert computing == {"training", "rival"}
