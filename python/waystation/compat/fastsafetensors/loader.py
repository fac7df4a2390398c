"""Loads files in the way of fastsafetensors: each process of a group reads those that it was given.

Invariants: all headers are checked before anything is read, by every process; what a process reads goes
straight to its tensors, in one job of the engine, and nothing is read of tensors that are filtered out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from waystation._errors import InvalidInput, WrongType
from waystation.compat.fastsafetensors.common import SafeTensorsMetadata, TensorFrame
from waystation.compat.fastsafetensors.file_buffer import FilesBufferOnDevice, FileShare, NoSuchTensor
from waystation.compat.fastsafetensors.st_types import DTYPE_SIZES, Device, DType, logical_name
from waystation.compat.fastsafetensors.tensors import (
    ProcessGroup,
    TensorBase,
    check_framework,
    torch_groups,
    wrapped,
)
from waystation.safetensors.handle import Tensors
from waystation.safetensors.headers import Header
from waystation.safetensors.load import load_async
from waystation.safetensors.open_files import OpenFiles
from waystation.transfers.handle import AsyncResponse


class SafeTensorsFileLoader:
    """Loads safetensors files onto a device, by one process or by several that share the reading.

    Args:
        pg: A process group of torch; a `SingleGroup` or None for this process alone.
        device: Where tensors go: a name such as `"cuda:0"`, or a `torch.device`.
        bbuf_size_kb: Taken, and not needed: the engine chooses its buffers.
        max_threads: As well: it chooses its threads.
        nogds: Whether GPUs get all bytes through host memory. Otherwise files are read straight to them where
            cuFile can do that.
        set_numa: Taken, and not needed.
        disable_cache: Whether a tensor that is asked for twice is sent twice, instead of being kept.
        debug_log: Taken, and not needed: see the logger `waystation`.
        framework: `"pytorch"`, or `"pt"`.
        use_fgds: Taken, and not needed.
        **kwargs: As well: what fastsafetensors passes on to its readers.

    Attributes:
        meta: The header of each file, and the process that reads it.
        frames: What the headers say of each tensor.
        pg: The processes.
        device: Where tensors go.
        nogds: As it was given.
    """

    @classmethod
    def process_extension_config(cls, ext_config: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The section of a configuration that is about the reader, as parameters of this class."""
        out = dict(ext_config)
        copier = out.pop("copier_type", "gds")
        out["nogds"] = copier not in ("gds", "fgds")
        out.setdefault("use_fgds", copier == "fgds")
        return out

    def __init__(
        self,
        pg: Any,
        device: Any = "cpu",
        bbuf_size_kb: int = 16 * 1024,
        max_threads: int = 16,
        nogds: bool = False,
        set_numa: bool = True,
        disable_cache: bool = True,
        debug_log: bool = False,
        framework: str = "pytorch",
        use_fgds: bool = False,
        **kwargs: Any,
    ) -> None:
        check_framework(framework)
        self.framework = framework
        self.pg: ProcessGroup = ProcessGroup(pg)
        self.device: Device = Device.from_str(str(device))
        self.disable_cache = disable_cache
        self.nogds = nogds
        self.meta: dict[str, tuple[SafeTensorsMetadata, int]] = {}
        self.frames: dict[str, TensorFrame] = {}
        self._keep: Callable[[str], bool] | None = None

    # ---- what to load --------------------------------------------------------------------------

    def add_filenames(self, filenames: Mapping[int, Sequence[str]]) -> None:
        """Adds files, by the process that is to read them; reads their headers.

        Raises:
            FileNotFoundError: There is no such file.
            Corrupt: A file is damaged.
            ValueError: There is no such process.
        """
        if not isinstance(filenames, Mapping):
            raise WrongType(f"files are given by process, {{0: [...]}}, not as a {type(filenames).__name__}")
        most = max(map(len, filenames.values()), default=0)
        for turn in range(most):  # the first file of each process, then the second
            for rank, paths in filenames.items():
                if not 0 <= rank < self.pg.size():
                    raise InvalidInput(f"there is no process {rank} in a group of {self.pg.size()}")
                if turn < len(paths):
                    self._add(paths[turn], rank)

    def _add(self, path: str, rank: int) -> None:
        metadata = SafeTensorsMetadata.from_file(path, self.framework)
        self.meta[path] = metadata, rank
        self.frames.update(metadata.tensors)

    def set_tensor_filter(self, keep_tensor: Callable[[str], bool] | None) -> None:
        """Loads only tensors that a function of their names says yes to; None loads all. Nothing is read of
        others."""
        self._keep = keep_tensor

    @property
    def tensor_filter(self) -> Callable[[str], bool] | None:
        """What was set so."""
        return self._keep

    def get_keys(self) -> list[str]:
        """The names of the tensors of all files."""
        return [name for name in self.frames if self._keep is None or self._keep(name)]

    def get_shape(self, tensor_name: str) -> list[int]:
        """The shape of a tensor, as the file has it.

        Raises:
            ValueError: There is no such tensor, or it is filtered out.
            KeyError: As well.
        """
        frame = self.frames.get(tensor_name)
        if frame is None or (self._keep is not None and not self._keep(tensor_name)):
            raise NoSuchTensor(f"there is no tensor {tensor_name!r} in the files, or it is filtered out")
        return list(frame.shape)

    # ---- loading -------------------------------------------------------------------------------

    def copy_files_to_device(
        self,
        dtype: DType = DType.AUTO,
        use_buf_register: bool = True,
        max_copy_block_size: int = 16 * 1024 * 1024 * 1024,
        allow_inflight: bool = False,
        borrowed_tensors: bool = False,
    ) -> FilesBufferOnDevice:
        """Reads the files of this process.

        Args:
            dtype: As what; must not be wider than a tensor is. By default tensors stay what they are.
            use_buf_register: Taken, and not needed.
            max_copy_block_size: As well.
            allow_inflight: Return at once, and wait when the first tensor is asked for.
            borrowed_tensors: Taken, and not needed: tensors own their memory, and are not copied for that.

        Raises:
            ValueError: A dtype is wider than a tensor's; or tensors are to be borrowed in a group.
            Corrupt: A file is damaged, or a tensor is in two files.
            Conflict: A file changed.
        """
        return self.copy_parts(None, dtype, allow_inflight=allow_inflight, borrowed_tensors=borrowed_tensors)

    def copy_parts(
        self,
        parts: Mapping[str, Sequence[str]] | None,
        dtype: DType = DType.AUTO,
        *,
        allow_inflight: bool = False,
        borrowed_tensors: bool = False,
    ) -> FilesBufferOnDevice:
        """What `copy_files_to_device` does, of some tensors of each file only."""
        if borrowed_tensors and self.pg.size() != 1:
            raise InvalidInput(f"borrowed_tensors is for one process, and the group has {self.pg.size()}")
        torch_groups().use_device(self.device.as_str())
        self._convert(dtype)
        chosen = None if parts is None else {name for names in parts.values() for name in names}
        keep = self._keep if chosen is None else chosen.__contains__
        files: dict[int, list[FileShare]] = {rank: [] for rank in range(self.pg.size())}
        own = [path for path, (_, rank) in self.meta.items() if rank == self.pg.rank()]
        headers = [self.meta[path][0].header for path in own]
        reading = _Reading(headers, self._names_in(own, keep), self.device, dtype, gpu_direct=not self.nogds)
        for path in sorted(self.meta):
            metadata, rank = self.meta[path]
            caches = not self.disable_cache
            files[rank].append(
                FileShare(metadata, rank, self.pg, self.device, reading.tensors, caches=caches)
            )
        buffer = FilesBufferOnDevice(
            files,
            self.pg,
            self.framework,
            keep_tensor=keep,
            borrowed_tensors=borrowed_tensors,
            wait=reading.wait,
            on_close=reading.cancel,
        )
        reading.start()
        if not allow_inflight:
            try:
                buffer.settle()
            except BaseException:
                buffer.close()
                raise
        return buffer

    def _convert(self, dtype: DType) -> None:
        """Notes the dtype that tensors come as; refuses wider ones."""
        if dtype is DType.AUTO:
            return
        for metadata, _ in self.meta.values():
            for name, frame in metadata.tensors.items():
                if DTYPE_SIZES[dtype] > DTYPE_SIZES[frame.dtype]:
                    raise InvalidInput(
                        f"{frame.dtype.value} cannot be loaded as the wider {dtype.value}; convert the "
                        "tensor afterwards",
                        path=metadata.src,
                        tensor=name,
                    )
                frame.dtype = dtype

    def _names_in(self, paths: Sequence[str], keep: Callable[[str], bool] | None) -> list[str]:
        names = [name for path in paths for name in self.meta[path][0].tensors]
        return names if keep is None else [name for name in names if keep(name)]

    # ---- closing -------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets the files, so that others can be added."""
        self.meta = {}
        self.frames = {}

    def close(self) -> None:
        """Forgets the files. What was loaded stays. Idempotent."""
        self.reset()


class _Reading:
    """What this process reads of its files, in the background."""

    def __init__(
        self,
        headers: Sequence[Header],
        names: Sequence[str],
        device: Device,
        dtype: DType,
        *,
        gpu_direct: bool,
    ) -> None:
        self._headers = list(headers)
        self._names = list(names)
        self._device = device
        self._dtype = dtype
        self._gpu_direct = gpu_direct
        self._response: AsyncResponse[dict[str, Any]] | None = None
        self._problem: Exception | None = None
        self._tensors: dict[str, TensorBase] = {}

    def start(self) -> None:
        """Begins to read. What goes wrong is raised by `wait`, which all processes come to."""
        if not self._names:
            return
        device = self._device.as_str()
        try:
            self._response = load_async(
                Tensors(OpenFiles(self._headers), "torch", device),
                framework="torch",
                device=device,
                select=self._names,
                dtype=None if self._dtype is DType.AUTO else self._wanted,
                gpu_direct=self._gpu_direct,
            )
        except Exception as error:
            self._problem = error

    def _wanted(self, _name: str, _stored: str) -> str:
        return logical_name(self._dtype)

    def wait(self) -> None:
        """Waits until all is read; raises what went wrong."""
        if self._problem is not None:
            raise self._problem
        if self._response is not None:
            response, self._response = self._response, None
            self._tensors = {name: wrapped(tensor) for name, tensor in response.result().items()}

    def tensors(self) -> dict[str, TensorBase]:
        """The tensors, once they are read."""
        return self._tensors

    def cancel(self) -> None:
        """Stops, and lets go of what was read."""
        if self._response is not None:
            response, self._response = self._response, None
            response.cancel()
            with contextlib.suppress(Exception):  # nobody wants it any more, however it has ended
                response.result()
        self._tensors = {}


class fastsafe_open:  # noqa: N801
    """The tensors of files, in the manner of `safe_open`.

    Args:
        filenames: A file, files, or files by the process that is to read them.
        framework: `"pt"`, or `"pytorch"`.
        pg: A process group of torch; a `SingleGroup` or None for this process alone.
        device: Where tensors go.
        nogds: As of `SafeTensorsFileLoader`.
        debug_log: Taken, and not needed.
        max_copy_block_size: As well.
        use_fgds: As well.
    """

    def __init__(
        self,
        filenames: str | Sequence[str] | Mapping[int, Sequence[str]],
        framework: str = "pt",
        pg: Any = None,
        device: Any = "cpu",
        nogds: bool = False,
        debug_log: bool = False,
        max_copy_block_size: int = 16 * 1024 * 1024 * 1024,
        use_fgds: bool = False,
    ) -> None:
        self.loader: SafeTensorsFileLoader = SafeTensorsFileLoader(
            pg, device, nogds=nogds, framework=framework
        )
        by_rank = filenames
        if not isinstance(by_rank, Mapping):
            by_rank = {0: [by_rank] if isinstance(by_rank, str) else by_rank}
        self.loader.add_filenames(by_rank)
        self.fb: FilesBufferOnDevice = self.loader.copy_files_to_device()

    def metadata(self) -> dict[str, dict[str, str] | str]:
        """The text for people of each file; an empty string where there is none."""
        return {path: metadata.metadata for path, (metadata, _) in self.loader.meta.items()}

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self.fb.key_to_rank_lidx)

    def get_tensor(self, name: str) -> Any:
        """The whole tensor, in each process."""
        return self.fb.get_tensor(name)

    def get_tensor_wrapped(self, name: str) -> TensorBase:
        """The same with its device and dtype."""
        return self.fb.get_tensor_wrapped(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.fb.close()
        self.loader.close()
