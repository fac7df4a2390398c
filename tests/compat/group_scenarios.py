"""What the processes of a group do in the tests: the same with fastsafetensors and with ours, in turn.

Each function runs in every process and returns what it saw there, or what both made of it, to be compared.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from tests.support.programs import Place, raised

from waystation.compat import fastsafetensors as own
from waystation.frameworks import torch_groups


def genuine() -> ModuleType:
    """fastsafetensors; imported in the processes, whose server has no need of it."""
    import fastsafetensors

    return fastsafetensors


def digest(value: Any) -> Any:
    """What tells tensors from others, and goes from process to process."""
    if isinstance(value, torch.Tensor):
        data = value.contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), data.numpy().tobytes()
    if hasattr(value, "get_raw"):
        return "wrapped", value.dtype.value, value.device.as_str(), digest(value.get_raw())
    if isinstance(value, dict):
        return {key: digest(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [digest(own) for own in value]
    return value


def both(place: Place, scenario: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """What a scenario returns with fastsafetensors, and with ours."""
    torch.set_num_threads(1)
    place.connect()
    group = torch.distributed.group.WORLD
    found = [digest(scenario(module, group, *arguments)) for module in (genuine(), own)]
    place.disconnect()
    return found[0], found[1]


def loaded(module: Any, group: Any, files: dict[int, list[str]], **options: Any) -> Any:
    """A loader, and the buffer that it made of files."""
    loader = module.SafeTensorsFileLoader(group, "cpu", nogds=True, framework="pytorch", **options)
    loader.add_filenames(files)
    return loader, loader.copy_files_to_device()


def files_of(directory: Path, count: int) -> dict[int, list[str]]:
    """The files in a directory, dealt out to processes."""
    paths = sorted(str(path) for path in directory.glob("*.safetensors"))
    return {rank: paths[rank::count] for rank in range(count)}


def tensors(place: Place, directory: Path) -> tuple[Any, Any]:
    """Every tensor, whole."""

    def scenario(module: Any, group: Any) -> Any:
        loader, buffer = loaded(module, group, files_of(directory, place.count))
        names = list(buffer.key_to_rank_lidx)
        found = {name: buffer.get_tensor(name) for name in names}
        said = [(buffer.key_to_rank_lidx[name], loader.get_shape(name)) for name in names]
        buffer.close()
        loader.close()
        return names, found, said

    return both(place, scenario)


def blocks(place: Place, directory: Path, axes: dict[str, int]) -> tuple[Any, Any]:
    """A block of each tensor, by the axis that is divided, in several ways."""

    def scenario(module: Any, group: Any) -> Any:
        found: list[Any] = []
        for disable_cache in (True, False):
            loader, buffer = loaded(
                module, group, files_of(directory, place.count), disable_cache=disable_cache
            )
            wrapped = {name: buffer.get_sharded_wrapped(name, axis) for name, axis in axes.items()}
            found.append(wrapped)
            if not disable_cache:
                found.append({name: buffer.get_sharded(name, axis) for name, axis in axes.items()})
            buffer.close()
            loader.close()
        _, buffer = loaded(module, group, files_of(directory, place.count))
        found.append(buffer.as_dict(axes))
        buffer.close()
        return found

    return both(place, scenario)


def joined(place: Place, directory: Path, groups: list[list[str]]) -> tuple[Any, Any]:
    """Blocks of several tensors, joined; those of one file, and those of two."""

    def scenario(module: Any, group: Any) -> Any:
        _, buffer = loaded(module, group, files_of(directory, place.count))
        found = [buffer.get_multi_cols(names, 0) for names in groups]
        buffer.close()
        return found

    return both(place, scenario)


def pushed(place: Place, directory: Path, names: list[str]) -> tuple[Any, Any]:
    """Each tensor in one process after the other."""

    def scenario(module: Any, group: Any) -> Any:
        _, buffer = loaded(module, group, files_of(directory, place.count))
        found = [
            buffer.push_tensor(name, destination) for name in names for destination in range(place.count)
        ]
        buffer.close()
        return found

    return both(place, scenario)


def streamed(place: Place, directory: Path, ways: dict[str, dict[str, Any]]) -> tuple[Any, Any]:
    """All tensors from the iterator, in its order, in several ways."""
    paths = sorted(str(path) for path in directory.glob("*.safetensors"))

    def scenario(module: Any, group: Any) -> Any:
        found = {}
        for way, options in ways.items():
            loader = module.ParallelLoader(
                group, paths, use_tqdm_on_load=False, nogds=True, device="cpu", **options
            )
            found[way] = list(loader.iterate_weights())
            loader.close()
        return found

    return both(place, scenario)


def vllm_weights(module: Any, paths: list[str], group: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """How an inference server iterates over the weights of a model."""
    device = torch.device("cpu")
    rows = [paths[start : start + group.size()] for start in range(0, len(paths), group.size())]
    for row in rows:
        loader = module.SafeTensorsFileLoader(group, device)
        loader.add_filenames({rank: [path] for rank, path in enumerate(row)})
        try:
            buffer = loader.copy_files_to_device()
            try:
                for name in list(buffer.key_to_rank_lidx.keys()):
                    yield name, buffer.get_tensor(name)
            finally:
                buffer.close()
        finally:
            loader.close()


def served(place: Place, directory: Path) -> tuple[Any, Any]:
    """The weights as an inference server gets them."""
    paths = sorted(str(path) for path in directory.glob("*.safetensors"))
    return both(place, lambda module, group: list(vllm_weights(module, paths, group)))


def uneven(place: Place, directory: Path, name: str, axis: int) -> Any:
    """A block of a tensor that does not divide evenly, which fastsafetensors does not send over gloo."""
    place.connect()
    _, buffer = loaded(own, torch.distributed.group.WORLD, files_of(directory, place.count))
    found = digest(buffer.get_sharded(name, axis))
    buffer.close()
    return found


def left_early(place: Place, nbytes: int) -> Any:
    """What each process gets from one that waits for the last, once process 0 has left with the store."""
    place.connect()
    group = torch_groups.of_group(torch.distributed.group.WORLD)
    own_part = torch.zeros(nbytes, dtype=torch.uint8)
    parts = [torch.full((nbytes,), rank + 1, dtype=torch.uint8) for rank in range(place.count)]
    if place.index == place.count - 1:
        time.sleep(3)  # longer than a collective may take before deaths are looked for
    group.scatter(parts if place.index == 1 else [], own_part, 1, nbytes)
    return bool((own_part == place.index + 1).all())


def damaged(place: Place, directory: Path) -> Any:
    """What each process sees when one of them cannot read its file."""
    place.connect()
    loader = own.SafeTensorsFileLoader(torch.distributed.group.WORLD, "cpu")
    files = files_of(directory, place.count)
    loader.add_filenames(files)
    torch.distributed.barrier()
    if place.index == place.count - 1:
        path = Path(files[place.index][0])
        path.write_bytes(path.read_bytes()[:-1])
    try:
        loader.copy_files_to_device()
    except Exception as error:
        return raised(error)
    return None


def killed(place: Place, directory: Path) -> None:
    """Reports what each process sees when one of them is killed after all have read their files."""
    place.connect()
    _, buffer = loaded(own, torch.distributed.group.WORLD, files_of(directory, place.count))
    if place.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for name in buffer.key_to_rank_lidx:
            buffer.get_tensor(name)
    except Exception as error:
        place.report(raised(error))
    place.receive()  # a process that has ended looks like one that was killed


def asked_twice(place: Place, directory: Path) -> Any:
    """What each process sees when a tensor is asked for whose file was let go of."""
    place.connect()
    _, buffer = loaded(own, torch.distributed.group.WORLD, files_of(directory, place.count))
    names = list(buffer.key_to_rank_lidx)
    for name in names:
        buffer.get_tensor(name)
    try:
        buffer.get_tensor(names[0])
    except Exception as error:
        return raised(error)
    return None
