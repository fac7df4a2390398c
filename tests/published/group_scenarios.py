"""What the processes of a torch program do in the tests of loads in groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from tests.support.programs import Place, raised

import waystation
from waystation import _native
from waystation.safetensors import load_in_group


def bytes_of(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor, as it goes from process to process."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), data.numpy().tobytes()


def load(place: Place, model: Path, options: dict[str, Any]) -> Any:
    """Loads a model; returns the tensors in order, or the error."""
    torch.set_num_threads(1)
    place.connect()
    try:
        found = load_in_group(model, group=torch.distributed.group.WORLD, **options)
    except Exception as error:
        return raised(error)
    return [(name, bytes_of(tensor)) for name, tensor in found.items()]


def read(place: Place, model: Path) -> Any:
    """Loads a model; returns the bytes that this process has asked the system for, and how many it holds."""
    torch.set_num_threads(1)
    place.connect()
    throttle = str(place.directory / f"throttle-{place.index}")
    _native.create_throttle(throttle)  # counts, without a limit
    context = waystation.Context()
    context.engine.throttle_path = throttle
    with context:
        found = load_in_group(model, group=torch.distributed.group.WORLD)
    held = sum(tensor.nbytes for tensor in found.values())
    return _native.throttle_usage(throttle)["bytes"], held


def different(place: Place, models: list[Path]) -> Any:
    """What each process sees when they are given different models."""
    return load(place, models[place.index], {})


def broken(place: Place, model: Path, file: str) -> Any:
    """What each process sees when a file that one of them has to read is cut after the headers were read."""
    place.connect()
    opened = waystation.safetensors.open(model, framework="torch")
    torch.distributed.barrier()
    if place.index == 0:
        os.truncate(model / file, (model / file).stat().st_size - 1)
    torch.distributed.barrier()
    try:
        load_in_group(opened, group=torch.distributed.group.WORLD)
    except Exception as error:
        return raised(error)
    return None
