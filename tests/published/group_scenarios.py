"""What the processes of a torch program do in the tests of loads in groups."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from tests.support import s3
from tests.support.peaks import give_back_free_memory, status
from tests.support.programs import Place, raised

import waystation
from waystation import _native
from waystation.grid import volume
from waystation.safetensors import Divided, Joined, Only, load_in_group
from waystation.safetensors.arriving import Arriving
from waystation.safetensors.open_files import OpenFiles
from waystation.transfers.statistics import LoadStatistics


def bytes_of(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor, as it goes from process to process."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), data.numpy().tobytes()


def load(place: Place, model: Path | str, options: dict[str, Any]) -> Any:
    """Loads a model; returns the tensors in order, or the error."""
    torch.set_num_threads(1)
    place.connect()
    try:
        found = load_in_group(model, group=torch.distributed.group.WORLD, **options)
    except Exception as error:
        return raised(error)
    return [(name, bytes_of(tensor)) for name, tensor in found.items()]


def load_from_store(place: Place, endpoint: str, location: str, options: dict[str, Any]) -> Any:
    """The same of a model in an object store."""
    with s3.context(endpoint):
        return load(place, location, options)


def load_through_cache(
    place: Place, endpoint: str, location: str, cache: str, options: dict[str, Any]
) -> Any:
    """The same through a cache."""
    context = s3.context(endpoint)
    context.storage.cache_directory = cache
    with context:
        return load(place, location, options)


def read(place: Place, model: Any, options: dict[str, Any]) -> tuple[int, int, dict[int, int]]:
    """Loads a model; returns the bytes that this process has asked the system for, those that it holds, and
    those that its plans read of each device."""
    torch.set_num_threads(1)
    place.connect()
    throttle = str(place.directory / f"throttle-{place.index}")
    _native.create_throttle(throttle)  # counts, without a limit
    by_device: dict[int, int] = {}
    with counting_reads(by_device):
        context = waystation.Context()
        context.engine.throttle_path = throttle
        with context:
            found = load_in_group(model, group=torch.distributed.group.WORLD, **options)
    held = sum(tensor.nbytes for tensor in found.values())
    return _native.throttle_usage(throttle)["bytes"], held, by_device


def told(place: Place, model: Path, options: dict[str, Any]) -> tuple[list[LoadStatistics], int]:
    """Loads a model; returns the statistics, and the bytes that this process holds."""
    torch.set_num_threads(1)
    place.connect()
    seen: list[LoadStatistics] = []
    context = waystation.Context()
    context.array.loading.on_statistics = seen.append
    with context:
        found = load_in_group(model, group=torch.distributed.group.WORLD, **options)
    return seen, sum(tensor.nbytes for tensor in found.values())


def read_copies(place: Place, models: list[Path], options: dict[str, Any]) -> tuple[int, int, dict[int, int]]:
    """The same of a program in which each process has the model in a place of its own."""
    return read(place, models[place.index], options)


def read_cold(place: Place, model: Path, options: dict[str, Any]) -> int:
    """Loads a model twice; returns how much of it this process made the disk read the second time, when
    nothing of it was cached."""
    torch.set_num_threads(1)
    place.connect()
    load_in_group(model, group=torch.distributed.group.WORLD, **options)
    torch.distributed.barrier()
    if place.index == 0:
        for file in model.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    torch.distributed.barrier()
    before = _bytes_read_from_disk()
    load_in_group(model, group=torch.distributed.group.WORLD, **options)
    return _bytes_read_from_disk() - before


def _bytes_read_from_disk() -> int:
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["read_bytes"])


@contextmanager
def counting_reads(by_device: dict[int, int]) -> Iterator[None]:
    """Counts what is asked of the files of each device."""
    start_placed = OpenFiles.start_placed

    def counted(self: OpenFiles, tensors: Any, boxes: Any, *arguments: Any, **options: Any) -> Arriving:
        for number, _ in tensors:
            device = self.device_of(number)
            nbytes = self.tensors[number][4] - self.tensors[number][3]
            by_device[device] = by_device.get(device, 0) + nbytes
        for number, box, *_ in boxes:
            device = self.device_of(number)
            item_bytes = self.tensors[number][4] - self.tensors[number][3]
            item_bytes //= max(1, math.prod(self.array(number).shape))
            by_device[device] = by_device.get(device, 0) + volume(box) * item_bytes
        return start_placed(self, tensors, boxes, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenFiles, "start_placed", counted)
        yield


def peak(place: Place, model: Path, options: dict[str, Any]) -> tuple[int, int]:
    """Loads a model twice; returns the bytes of the tensors, and the host memory that the second time took
    beyond them."""
    torch.set_num_threads(1)
    place.connect()

    def once() -> int:
        found = load_in_group(model, group=torch.distributed.group.WORLD, **options)
        return sum(tensor.nbytes for tensor in found.values())

    once()
    give_back_free_memory()
    before = status("VmRSS")
    torch.distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    held = once()
    return held, status("VmHWM") - before - held


def different(place: Place, models: list[Path], options: dict[str, Any] | None = None) -> Any:
    """What each process sees when they are given different models."""
    return load(place, models[place.index], options or {})


def fails(name: str) -> bool:
    """A function that raises."""
    raise KeyError("of the program")


def different_options(place: Place, model: Path, options: list[dict[str, Any]]) -> Any:
    """What each process sees when they are given different arguments."""
    return load(place, model, options[place.index])


def broken(place: Place, model: Path, file: str, options: dict[str, Any]) -> Any:
    """What each process sees when a file that one of them has to read is cut after the headers were read."""
    place.connect()
    opened = waystation.safetensors.open(model, framework="torch")
    torch.distributed.barrier()
    if place.index == 0:
        os.truncate(model / file, (model / file).stat().st_size - 1)
    torch.distributed.barrier()
    try:
        load_in_group(opened, group=torch.distributed.group.WORLD, **options)
    except Exception as error:
        return raised(error)
    return None


def killed(place: Place, model: Path, victim: int, where: str, options: dict[str, Any]) -> None:
    """Reports what each process sees when one is killed as it reads its own, or as it sends."""
    from waystation.frameworks.torch_groups import TorchGroup

    place.connect()
    if place.index == victim:
        owner, name = (OpenFiles, "start_placed") if where == "reading" else (TorchGroup, "broadcast_joined")
        setattr(owner, name, lambda *arguments, **keywords: os.kill(os.getpid(), signal.SIGKILL))
    try:
        load_in_group(model, group=torch.distributed.group.WORLD, **options)
    except Exception as error:
        place.report(raised(error))
    place.receive()  # a process that has ended looks like one that was killed


def interrupted(place: Place, model: Path, victim: int, options: dict[str, Any]) -> tuple[Any, Any]:
    """What each process sees when one is interrupted as it reads its own, and when all load again."""

    def interrupt(*arguments: Any, **keywords: Any) -> Any:
        raise KeyboardInterrupt

    place.connect()
    with pytest.MonkeyPatch.context() as patch:
        if place.index == victim:
            patch.setattr(OpenFiles, "start_placed", interrupt)
        try:
            load_in_group(model, group=torch.distributed.group.WORLD, **options)
            first = None
        except KeyboardInterrupt:
            first = "interrupted"
        except Exception as error:
            first = raised(error)
    again = load_in_group(model, group=torch.distributed.group.WORLD, **options)
    torch.distributed.barrier()
    return first, {name: bytes_of(tensor) for name, tensor in again.items()}


def interrupted_sending(place: Place, model: Path, victim: int) -> tuple[Any, Any, Any]:
    """What each process sees when one is interrupted as it sends, when all load again, and when they do so
    in another group."""
    from waystation.frameworks import torch_groups

    def interrupt(*arguments: Any, **keywords: Any) -> Any:
        raise KeyboardInterrupt

    def attempt() -> Any:
        try:
            load_in_group(model, group=torch.distributed.group.WORLD, send=True)
        except KeyboardInterrupt:
            return "interrupted"
        except Exception as error:
            return raised(error)

    place.connect()
    another = torch.distributed.new_group()
    with pytest.MonkeyPatch.context() as patch:
        if place.index == victim:
            patch.setattr(torch_groups.TorchGroup, "broadcast", interrupt)
        first = attempt()
    again = attempt()
    found = load_in_group(model, group=another, send=True)
    torch.distributed.barrier(another)
    return first, again, {name: bytes_of(tensor) for name, tensor in found.items()}


def beside_fastsafetensors(
    place: Place, directory: Path, joins: dict[str, Joined], placement: dict[str, Any]
) -> Any:
    """What fastsafetensors makes of a model, and what `load_in_group` does."""
    from fastsafetensors import SafeTensorsFileLoader

    torch.set_num_threads(1)
    place.connect()
    group = torch.distributed.group.WORLD
    paths = sorted(str(path) for path in directory.glob("*.safetensors"))
    loader = SafeTensorsFileLoader(group, "cpu", nogds=True, framework="pytorch")
    loader.add_filenames({rank: paths[rank :: place.count] for rank in range(place.count)})
    buffer = loader.copy_files_to_device()
    expected: dict[str, Any] = {}
    joined = {name for own in joins.values() for name in own.names}
    for name, own in joins.items():
        expected[name] = buffer.get_multi_cols(list(own.names), own.axis).get_raw()
    for name in list(buffer.key_to_rank_lidx):
        where = placement.get(name)
        if name in joined:
            continue
        if isinstance(where, Only):
            expected[name] = buffer.push_tensor(name, where.rank)
        elif isinstance(where, Divided):
            expected[name] = buffer.get_sharded(name, where.axis)
        else:
            expected[name] = buffer.get_tensor(name)
    found = load_in_group(directory, group=group, placement=placement, join=joins)
    return (
        {name: bytes_of(tensor) for name, tensor in expected.items() if tensor is not None},
        {name: bytes_of(tensor) for name, tensor in found.items()},
    )
