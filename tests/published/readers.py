"""Every way to a published model: what is refused by one of them is refused by all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import waystation.safetensors
from waystation.cli.application import application
from waystation.compat import fastsafetensors, safetensors_flax, safetensors_numpy, safetensors_torch
from waystation.compat import safetensors as compat


def _stream(path: Path) -> dict[str, Any]:
    return dict(waystation.safetensors.stream(path, framework="numpy"))


def _tensors(path: Path) -> dict[str, Any]:
    with waystation.safetensors.open(path) as opened:
        return {name: opened.tensor(name) for name in opened}


def _safe_open(path: Path) -> dict[str, Any]:
    with compat.safe_open(path, "np") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _fast_open(path: Path) -> dict[str, Any]:
    with fastsafetensors.fastsafe_open(str(path), nogds=True, device="cpu") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _from_bytes(module: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda path: module.load(path.read_bytes())


# Those that return arrays.
LOADING: dict[str, Callable[[Path], dict[str, Any]]] = {
    "load": lambda path: waystation.safetensors.load(path, framework="numpy"),
    "load torch": lambda path: waystation.safetensors.load(path, framework="torch"),
    "load jax": lambda path: waystation.safetensors.load(path, framework="jax"),
    "load mapped": lambda path: waystation.safetensors.load(path, framework="numpy", mmap=True),
    "load_async": lambda path: waystation.safetensors.load_async(path, framework="numpy").result(),
    "load_in_group": lambda path: waystation.safetensors.load_in_group(path, group=None),
    "stream": _stream,
    "tensor": _tensors,
    "compat numpy": safetensors_numpy.load_file,
    "compat torch": safetensors_torch.load_file,
    "compat flax": safetensors_flax.load_file,
    "compat numpy, bytes": _from_bytes(safetensors_numpy),
    "compat torch, bytes": _from_bytes(safetensors_torch),
    "compat safe_open": _safe_open,
    "compat fastsafetensors": _fast_open,
}
SUMMING: dict[str, Callable[[Path], object]] = {
    "write_checksums": waystation.safetensors.write_checksums,
    "verify_files": waystation.safetensors.verify_files,
}


def refused_by_command(command: str, path: Path) -> str:
    """Has a command look at a file; returns what it says of it."""
    done = CliRunner().invoke(application, [command, str(path)], prog_name="waystation")
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)
    return done.stderr
