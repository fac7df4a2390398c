"""What the tests of the command line share: running it, in this process or as the console script, and a
checkpoint whose bytes are always the same."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from typer.testing import CliRunner

import waystation
from waystation.cli.application import application

SCRIPT = Path(sys.executable).parent / "waystation"


@dataclass(frozen=True)
class Outcome:
    """How a command ended. `out` and `err` are what it printed, with the directory and times replaced."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)


class Adam(NamedTuple):
    mu: Any
    nu: Any


Adam.__module__ = "example"  # files say where a class is from, and pytest makes up a place for this one

Run = Callable[..., Outcome]


def normalised(text: str, directory: Path) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # some CI systems ask every program for colours
    text = text.replace(str(directory), "[DIR]")
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "[TIME]", text)
    return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "[TIME]", text)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a command in this process."""

    def call(*arguments: object, stdin: str | None = None) -> Outcome:
        done = CliRunner().invoke(
            application, [str(part) for part in arguments], input=stdin, prog_name="waystation"
        )
        return Outcome(done.exit_code, normalised(done.stdout, tmp_path), normalised(done.stderr, tmp_path))

    return call


@pytest.fixture
def script(tmp_path: Path) -> Run:
    """Runs the installed console script, in the test's directory."""

    def call(*arguments: object) -> Outcome:
        done = subprocess.run(
            [SCRIPT, *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "100", "WAYSTATION_CACHE_DIR": str(tmp_path / ".cache")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        return Outcome(done.returncode, normalised(done.stdout, tmp_path), normalised(done.stderr, tmp_path))

    return call


def example_state() -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("data", None))
    weights = jax.device_put(jnp.arange(64 * 32, dtype=jnp.bfloat16).reshape(64, 32), sharding)
    return {
        "params": {"w": weights, "b": np.arange(5.0), "odd\n": np.ones((2, 3), ml_dtypes.int4)},
        "opt": Adam(np.arange(6, dtype=np.float32).reshape(2, 3), [np.int32(3), None, {}]),
        "step": 12,
        "name": "run",
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of what people keep, sharded in part."""
    path = tmp_path / "runs" / "step_9"
    waystation.save(path, example_state(), custom_metadata={"loss": 1.5})
    return path


def flip_bit(path: Path, offset: int) -> None:
    """Damages a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.fixture
def damage() -> Callable[[Path, int], None]:
    return flip_bit


@pytest.fixture
def dead_attempt() -> Callable[[Path], Path]:
    """Makes a process begin a save and end without finishing it; returns what it left."""

    def make(target: Path) -> Path:
        code = (
            "import os, sys; from waystation.storage.attempts import Attempt\n"
            "attempt = Attempt(sys.argv[1]); print(attempt.path)\n"
            "open(os.path.join(attempt.path, 'data'), 'wb').write(bytes(3000))"
        )
        command = [sys.executable, "-c", code, str(target)]
        return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())

    return make


@pytest.fixture
def foreign_attempt() -> Callable[[Path, float], Path]:
    """An attempt of another machine, last heard of some seconds ago."""

    def make(target: Path, age_s: float) -> Path:
        path = target.with_name(f"{target.name}.waystation-tmp-{'0' * 12}-17-4242-00c0ffee")
        path.mkdir(parents=True)
        (path / "data").write_bytes(bytes(2048))
        heard_ns = (path.stat().st_mtime_ns // 10**9 - int(age_s)) * 10**9
        os.utime(path, ns=(heard_ns, heard_ns))
        return path

    return make
