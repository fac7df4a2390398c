"""The programs in examples/ do what they say: they run, resume where they were, and convert."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tests.support.scripts import output_of

import waystation

EXAMPLES = Path(__file__).parents[2] / "examples"


def command(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-W", "error", str(EXAMPLES / name), *map(str, arguments)]


def devices_flag(count: int) -> str:
    return f"--xla_force_host_platform_device_count={count}"


def run(name: str, *arguments: object, devices: int = 1) -> str:
    environment = {"XLA_FLAGS": devices_flag(devices)}
    with TemporaryDirectory() as directory:
        return output_of(
            EXAMPLES / name,
            *arguments,
            directory=Path(directory),
            environment=environment,
            may_warn=False,
        )


def losses(output: str) -> dict[int, float]:
    return {
        int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", output, re.MULTILINE)
    }


def run_until_killed(name: str, directory: Path, step: int) -> str:
    """Kills the program when it has reported `step`; what it has printed until then."""
    output = ""
    with subprocess.Popen(
        command(name, directory, "--steps", 10**9, "--save-every", 1),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "XLA_FLAGS": devices_flag(1)},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output += line
            if line.startswith(f"step {step} "):
                process.send_signal(signal.SIGKILL)
                break
    return output


def newest_step(directory: Path) -> int:
    return max(int(path.name.removeprefix("step_")) for path in directory.glob("step_????????"))


@pytest.mark.parametrize("trainer", ["train_jax.py", "train_torch.py"])
@pytest.mark.share(2)
def test_a_killed_and_resumed_run_gives_the_losses_of_an_uninterrupted_one(
    trainer: str, tmp_path: Path
) -> None:
    before = losses(run_until_killed(trainer, tmp_path / "killed", 5))
    newest = newest_step(tmp_path / "killed")
    assert newest >= 3, "step 5 is reported after the save of step 3 was waited for"
    output = run(trainer, tmp_path / "killed", "--steps", 8, "--save-every", 1)
    whole = losses(run(trainer, tmp_path / "whole", "--steps", 8, "--save-every", 1))
    assert f"resuming from {tmp_path}/killed/step_{newest:08}" in output
    assert list(losses(output)) == list(range(newest + 1, 9))
    assert before | losses(output) == whole
    leftovers = [path.name for path in (tmp_path / "killed").iterdir() if "tmp" in path.name]
    assert not leftovers, "the next save of that step has removed what the kill left"


def test_jax_resumes_on_other_devices_and_keeps_the_last_checkpoints(tmp_path: Path) -> None:
    whole = losses(run("train_jax.py", tmp_path, "--steps", 6, "--save-every", 1, devices=8))
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept[-3:] == ["step_00000004", "step_00000005", "step_00000006"]
    assert len(kept) <= 4
    for name in kept[-2:]:
        waystation.delete(tmp_path / name)
    output = run("train_jax.py", tmp_path, "--steps", 6, "--save-every", 1, devices=2)
    assert f"resuming from {tmp_path / 'step_00000004'} on 2 devices" in output
    resumed = losses(output)
    assert list(resumed) == [5, 6]
    assert resumed == pytest.approx({step: whole[step] for step in resumed}, rel=1e-5)


def converter() -> SimpleNamespace:
    namespace = runpy.run_path(str(EXAMPLES / "convert.py"))
    return SimpleNamespace(**namespace)


def saved_state() -> dict[str, Any]:
    return {
        "weights": [jnp.arange(6.0).reshape(2, 3), jnp.ones(3, jnp.bfloat16)],
        "step": 7,
        "note": "x",
        "count": jnp.int32(3),
    }


@pytest.mark.parametrize(
    ("framework", "kind"), [("jax", jax.Array), ("torch", torch.Tensor), ("numpy", np.ndarray)]
)
def test_convert_keeps_structure_and_values(framework: str, kind: type, tmp_path: Path) -> None:
    state = saved_state()
    waystation.save(tmp_path / "source", state | {"key": jax.random.key(1)}, custom_metadata={"run": 1})
    converter().convert(tmp_path / "source", tmp_path / "target", framework, None, overwrite=False)
    found = waystation.load(tmp_path / "target")
    key = found.pop("key")
    words = jax.random.key_data(key) if framework == "jax" else key
    np.testing.assert_array_equal(np.asarray(words), np.asarray(jax.random.key_data(jax.random.key(1))))
    assert found.keys() == state.keys()
    assert (found["step"], found["note"]) == (7, "x")
    for ours, theirs in zip(
        [*found["weights"], found["count"]], [*state["weights"], state["count"]], strict=True
    ):
        assert isinstance(ours, kind)
        assert str(ours.dtype).removeprefix("torch.") == str(theirs.dtype)
        values = ours.float() if isinstance(ours, torch.Tensor) else ours
        np.testing.assert_array_equal(np.asarray(values, np.float32), np.asarray(theirs, np.float32))
    assert waystation.metadata(tmp_path / "target").custom_metadata == {"run": 1}


def test_convert_casts_floating_point_arrays_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waystation.save(tmp_path / "source", saved_state())
    arguments = ["source", "target", "--to", "torch", "--dtype", "float16"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["convert.py", *arguments])
    converter().main()
    assert capsys.readouterr().out == "target: 5 leaves, arrays are torch now\n"
    found = waystation.load(tmp_path / "target")
    assert [leaf.dtype for leaf in found["weights"]] == [torch.float16, torch.float16]
    assert found["count"].dtype == torch.int32


def test_convert_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        command("convert.py", tmp_path / "absent", tmp_path / "target", "--to", "numpy"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "there is no checkpoint" in done.stderr
