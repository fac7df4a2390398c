"""The whole demo, with few steps, in a process of its own, as `waystation demo` would run it.

In `make test` its model and batches are smaller, and its training programs are forked where JAX is imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.long import IS_LONG, only_long
from tests.support.warm_python import python

from waystation.errors import Conflict
from waystation_demo import DemoFailed, run
from waystation_demo.programs import Programs, TrainingRun
from waystation_demo.proof import LOSS_TOLERANCE, relative_differences

PROGRAM = """
import sys
from pathlib import Path
from rich.console import Console
from types import SimpleNamespace
from waystation_demo import programs, run
own = programs.Programs._run
def run_small(self, name, arguments, follow):
    if arguments[:2] != ["-m", "waystation_demo.train"]:
        return own(self, name, arguments, follow)
    programs.sys = SimpleNamespace(executable=sys.argv[2])
    try:
        return own(self, name, ["-m", "tests.demo.small_training", *arguments[2:]], follow)
    finally:
        programs.sys = sys
if len(sys.argv) > 2:
    programs.Programs._run = run_small
run(Path(sys.argv[1]), quick=True, console=Console(width=200))
assert "jax" not in sys.modules and "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of one demo, and what it printed."""
    output = tmp_path_factory.mktemp("demo") / "output"
    command = [sys.executable, "-c", PROGRAM, str(output), *([] if IS_LONG else [python()])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return output, done.stdout


@pytest.fixture(scope="module")
def report(told: tuple[Path, str]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((told[0] / "waystation-demo.json").read_text())
    return content


def _run_named(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(run for run in report["runs"] if run["name"] == name)


def test_training_was_killed_and_went_on_to_the_last_step(report: dict[str, Any]) -> None:
    assert _run_named(report, "interrupted")["exit_code"] == -9
    resumed_from = int(report["resumed_from"].removeprefix("step_"))
    for name in ("resumed", "resumed-elsewhere"):
        steps = [int(step) for step in _run_named(report, name)["losses"]]
        assert steps == list(range(resumed_from + 1, 21))


def test_losses_in_the_report_bear_the_claims_out(report: dict[str, Any]) -> None:
    reference = _run_named(report, "reference")["losses"]
    for name in ("interrupted", "resumed"):
        losses = _run_named(report, name)["losses"]
        assert losses == {step: reference[step] for step in losses}
    assert report["worst_relative_difference"] <= report["tolerance"]


def test_every_claim_is_printed(told: tuple[Path, str], report: dict[str, Any]) -> None:
    assert len(report["claims"]) >= 9
    for claim in report["claims"]:
        assert claim in told[1]


def test_checkpoints_were_read_by_other_packages(report: dict[str, Any]) -> None:
    assert report["read_by"][0] == "safetensors"


def test_plot_is_a_png(told: tuple[Path, str], report: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    assert report["plot"] == str(told[0] / "loss.png")
    assert Path(report["plot"]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@only_long
def test_tolerance_tells_other_data_from_other_rounding(
    told: tuple[Path, str], report: dict[str, Any]
) -> None:
    checkpoint = told[0] / "interrupted" / report["resumed_from"]
    wrong = _train_with_seed(checkpoint, 1)
    reference = TrainingRun("reference", "2x4")
    reference.losses = {int(step): loss for step, loss in _run_named(report, "reference")["losses"].items()}
    assert min(relative_differences(wrong, reference).values()) > 10 * LOSS_TOLERANCE


def _train_with_seed(checkpoint: Path, seed: int) -> TrainingRun:
    command = [python(), "-m", "waystation_demo.train", "--resume", str(checkpoint), "--seed", str(seed)]
    command += ["--mesh", "1x1", "--steps", "20", "--save-every", "0"]
    command += ["--checkpoints", str(checkpoint.parent / "unused")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    run = TrainingRun("wrong", "1x1")
    for line in done.stdout.splitlines():
        run.note(json.loads(line))
    return run


def test_failing_program_shows_its_own_error(tmp_path: Path) -> None:
    run_of_nothing = TrainingRun("reference", "2by4")
    with pytest.raises(DemoFailed, match=r"exit code 1(?s:.)*invalid literal for int") as caught:
        Programs(tmp_path, 20).train(run_of_nothing, tmp_path, 0, on_loss=lambda step, loss: None)
    assert caught.value.context["path"] == str(tmp_path / "reference.log")


def test_program_that_hangs_is_killed(tmp_path: Path) -> None:
    (tmp_path / "step_1" / "state").mkdir(parents=True)
    pipe = tmp_path / "step_1" / "state" / "p00000-000.safetensors"
    os.mkfifo(pipe)  # to open it is to wait for a writer, who never comes
    with pytest.raises(DemoFailed, match="'read-elsewhere' was killed, as it had reported nothing") as caught:
        Programs(tmp_path, 20, silence_limit_s=5).read_elsewhere(tmp_path / "step_1")
    assert caught.value.context["path"] == str(tmp_path / "read-elsewhere.log")
    with pytest.raises(OSError, match="No such device or address"):  # nobody reads
        os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)


def test_program_that_closes_its_output_and_hangs_is_killed(tmp_path: Path) -> None:
    programs = Programs(tmp_path, 20, silence_limit_s=1)
    hangs = "import os, signal; print('a line', flush=True); os.close(1); signal.pause()"
    lines: list[str] = []
    with pytest.raises(DemoFailed, match="reported nothing for 1 s"):
        programs._run("hangs", ["-c", hangs], lambda line, _: lines.append(line))
    assert lines in (["a line"], [])  # a slow machine may not have come that far


def test_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "thesis.txt"
    precious.write_text("years of work")
    with pytest.raises(Conflict, match="name another"):
        run(tmp_path, quick=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
