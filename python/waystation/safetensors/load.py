"""`load` and `load_async`: the arrays of a published model, all of them or some.

First everything is decided (`request.py`). Then one job of the engine reads all arrays that stay in the
memory that they are read to; what goes elsewhere, or is cast, goes in groups of bounded memory. Arrays are
made in batches.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from waystation._arguments import require_function
from waystation._errors import Conflict, Corrupt, NotFound
from waystation._options.in_effect import current_options
from waystation.coordination import Session, collective
from waystation.layouts.opened import ReadStatistics
from waystation.safetensors import nesting, same_model
from waystation.safetensors.choices import DType, Rename, Select
from waystation.safetensors.handle import Tensors
from waystation.safetensors.jax_collective import exchanged_bytes, open_session, reshard
from waystation.safetensors.making import Framework, Made, calling_arrays_tensors, codec_of
from waystation.safetensors.open_files import OpenFiles
from waystation.safetensors.request import Placing, Request, decide, failures_of, options_of
from waystation.safetensors.sources import Files
from waystation.transfers.filling import Filling
from waystation.transfers.handle import AsyncResponse, Progress
from waystation.transfers.statistics import LoadStatistics, failures_published, tell

_PROGRESS_INTERVAL_S = 0.1
_MOST_ATTEMPTS = 50  # while a model is replaced

Decide = Callable[[], tuple[Request, Session]]


def load(
    files: Files | Tensors,
    *,
    framework: Framework,
    device: Any = None,
    sharding: Any = None,
    sharding_fn: Callable[[str, Any], Any] | None = None,
    dtype: DType = None,
    select: Select | None = None,
    rename: Rename | None = None,
    memory_limit: int | None = None,
    verify: bool | None = None,
    mmap: bool = False,
    nested: bool | str = False,
    progress: Callable[[int, int], object] | None = None,
    together: bool | None = None,
    gpu_direct: bool | None = None,
) -> dict[str, Any]:
    """Loads a published model.

    Args:
        files: A file, several files, an index (`model.safetensors.index.json`), or a directory that holds
            one of these, which may be one of a cache of Hugging Face; or what `open` returned. Each is a
            path, a location (`s3://bucket/model/`) or the URL of a file (`https://…`).
        framework: What comes back: `"jax"`, `"torch"` or `"numpy"` arrays.
        device: Where arrays go: a device of the framework or its name. By default the CPU for torch, and for
            JAX its default device.
        sharding: A `jax.sharding.Sharding` for all arrays. Each process reads only what its devices need.
        sharding_fn: Called with the name of each array and a `jax.ShapeDtypeStruct` of it; returns its
            sharding, or None for the default device.
        dtype: What arrays are cast to: a dtype for all tensors of its kind (floating point, integer, …),
            where floats of less than 16 bits stay what they are; a mapping from dtypes to dtypes; or a
            function of name and dtype that returns a dtype, or None to leave that array alone.
        select: Load only some tensors: a regular expression that is searched in their names, a function of a
            name, or the names.
        rename: Names of arrays by names of tensors (others stay), or a function of a name.
        memory_limit: Most bytes of host memory beyond the arrays: what is on its way to other devices or
            dtypes, and the engine's own. By default the option `memory.read_concurrent_bytes`, or 256 MiB.
        verify: Check the checksum of every block that is read: those that `write_checksums` has written
            beside the files. None does so where there are some; by default the option `array.loading.verify`.
        mmap: Alias the mapped files where alignment and dtype allow it, instead of reading. The files must
            then never change while an array lives; shrinking one ends the program with SIGBUS. Files of this
            system only.
        nested: Return a tree of dicts by the parts of names, which a dot separates, or the given text.
        progress: Called about ten times a second with the bytes that have been read, and those to read.
        together: Whether the processes of the program load this together: all make this call, each gets its
            part, and what fails in one is raised by all. None: those of JAX do whose devices `sharding` is
            over, and with `sharding_fn` all of them; other loads are this process's alone. Processes that
            have opened different files, such as copies of a model on several hosts, compare their headers,
            and samples of up to 256 tensors.
        gpu_direct: Read files straight to the memory of an NVIDIA GPU (GPUDirect Storage) where cuFile can do
            that; what it cannot goes through host memory, and the log says why. What is verified always does,
            and what the page cache holds. By default the option `engine.gpu_direct`, which is False.

    Returns:
        The arrays by name, in the order of the files and of the data in them.

    Raises:
        NotFound: There is nothing there; TensorNotFound, if it is a tensor.
        InvalidInput: Something cannot be had as wanted; names the tensor where it is about one.
        Corrupt: A file is damaged, missing, or not what its index says; names file and tensor.
        Conflict: A file changed while it was read. The load of a path by one process begins again instead, if
            there still is a model.
        Unavailable: A process that loads with this one has died, or has not come within the deadline
            (`multiprocessing.deadline_s`).
        Unsupported: The framework has no such dtype, or is not installed.
    """
    decided = functools.partial(
        _decide,
        files,
        framework,
        Placing(device=device, sharding=sharding, sharding_fn=sharding_fn),
        dtype=dtype,
        select=select,
        rename=rename,
        memory_limit=memory_limit,
        verify=verify,
        mmap=mmap,
        nested=nested,
        together=together,
        gpu_direct=gpu_direct,
        may_reshard=True,
    )
    if progress is not None:
        require_function("progress", progress)
    request, session, again = _begun(files, decided)
    if progress is None:
        return _load_what_is_there(request, session, Progress(), again)
    return _watched(_started(request, session, again), progress)


def load_async(
    files: Files | Tensors,
    *,
    framework: Framework,
    device: Any = None,
    sharding: Any = None,
    sharding_fn: Callable[[str, Any], Any] | None = None,
    dtype: DType = None,
    select: Select | None = None,
    rename: Rename | None = None,
    memory_limit: int | None = None,
    verify: bool | None = None,
    mmap: bool = False,
    nested: bool | str = False,
    together: bool | None = None,
    gpu_direct: bool | None = None,
) -> AsyncResponse[dict[str, Any]]:
    """Loads a published model in the background; takes what `load` takes.

    What is wrong with the call or the headers is raised at once, the rest by the handle.
    """
    decided = functools.partial(
        _decide,
        files,
        framework,
        Placing(device=device, sharding=sharding, sharding_fn=sharding_fn),
        dtype=dtype,
        select=select,
        rename=rename,
        memory_limit=memory_limit,
        verify=verify,
        mmap=mmap,
        nested=nested,
        together=together,
        gpu_direct=gpu_direct,
        may_reshard=False,  # devices would be used at any time
    )
    return _started(*_begun(files, decided))


def _begun(files: Files | Tensors, decided: Decide) -> tuple[Request, Session, Decide | None]:
    """What is loaded, and how to decide that again once the files have changed, if a path says which."""
    with failures_of(files):
        request, session = decided()
    return request, session, decided if isinstance(files, str | os.PathLike) else None


def _decide(
    files: Files | Tensors,
    framework: Framework,
    placing: Placing,
    *,
    dtype: DType,
    select: Select | None,
    rename: Rename | None,
    memory_limit: int | None,
    verify: bool | None,
    mmap: bool,
    nested: bool | str,
    together: bool | None,
    gpu_direct: bool | None,
    may_reshard: bool,
) -> tuple[Request, Session]:
    """What is loaded, decided with the processes that load it as well."""
    begun_s = time.monotonic()
    session = open_session(
        codec_of(framework),
        current_options(),
        sharding=placing.sharding,
        has_function=placing.sharding_fn is not None,
        together=together,
    )
    try:
        request, are_same = collective.attempt(
            session,
            lambda: decide(
                files,
                framework,
                placing,
                dtype=dtype,
                select=select,
                rename=rename,
                options=options_of(memory_limit, verify, gpu_direct),
                mmap=mmap,
                nested=nested,
                may_reshard=may_reshard and session.process_count > 1,
                alternate=session.process_count == 1,  # each process may have them on other disks
                begun_s=begun_s,
            ),
            Request.described,
            _require_same,
        )
        if not are_same:
            own = request.wanted
            tensors = {own.names[leaf]: own.numbers[leaf] for leaf in request.shared()}
            same_model.require_same(session, request.opened, tensors)
    except BaseException:
        session.close()
        raise
    return request, session


def _require_same(parts: Sequence[bytes]) -> bytes:
    """Whether all have opened the same files, once all have decided the same."""
    said = [json.loads(part) for part in parts]
    decided = [digest.encode() for digest, _ in said]
    collective.require_same(decided, remedy=" for arrays that they share, or together=False")
    return b"same" if len({mark for _, mark in said}) == 1 else b""


def _started(request: Request, session: Session, again: Decide | None) -> AsyncResponse[dict[str, Any]]:
    what = f"loading '{request.opened.headers[0].path}'"
    try:
        return AsyncResponse(what, lambda progress: _load_what_is_there(request, session, progress, again))
    except BaseException:
        session.close()
        raise


def _watched(
    response: AsyncResponse[dict[str, Any]], progress: Callable[[int, int], object]
) -> dict[str, Any]:
    try:
        is_over = False
        while not is_over:
            is_over = response.wait(_PROGRESS_INTERVAL_S)
            progress(*response.progress())
    except BaseException:
        response.cancel()
        raise
    return response.result()


def _load_what_is_there(
    request: Request, session: Session, progress: Progress, again: Decide | None
) -> dict[str, Any]:
    """Loads; where files changed meanwhile, it begins again with what is there now.

    A change is an error where no model is there any more, and where several processes load together.
    """
    begun_s = request.begun_s
    with failures_published("load", request.opened.path, begun_s):
        for _ in range(_MOST_ATTEMPTS):
            try:
                loaded = _load(request, session, progress)
                break
            except Conflict as error:
                if again is None or session.process_count > 1:
                    raise
                try:
                    request, session = again()
                except (NotFound, Corrupt):
                    raise error from None  # which says how the files changed
        else:
            loaded = _load(request, session, progress)
    report(request, loaded.read, begun_s, loaded.bytes_received)
    return loaded.arrays


class _Loaded(NamedTuple):
    """What a load has come to.

    Attributes:
        arrays: By name, or as a tree.
        read: What was read for that.
        bytes_received: What other processes sent.
    """

    arrays: dict[str, Any]
    read: ReadStatistics
    bytes_received: int


def _load(request: Request, session: Session, progress: Progress) -> _Loaded:
    # The session is closed here from the first: what fails before a round is told to the others by that.
    with contextlib.closing(session):
        made = Made(request.opened, len(request.incoming))
        batches = [(request.codec, request.incoming)]
        filling = Filling(request.opened, request.options, progress, request.mappings, batches)
        more_bytes, received_bytes = exchanged_bytes(request.incoming, request.resharded)

        def read() -> None:
            with calling_arrays_tensors(request.opened):
                filling.finish(made)

        collective.attempt(session, read)
        if request.resharded:
            collective.attempt(
                session, lambda: reshard(request.codec, made.arrays, request.resharded), carries=True
            )
    filling.reading.statistics.bytes_needed += more_bytes
    arrays = dict(zip(request.wanted.names, made.arrays, strict=True))
    if request.opened.is_on_several_devices:  # where they alternate
        in_order = sorted(zip(request.wanted.numbers, request.wanted.names, strict=True))
        arrays = {name: arrays[name] for _, name in in_order}
    if request.separator is not None:
        arrays = nesting.nest(arrays, request.separator)
    return _Loaded(arrays, filling.reading.statistics, received_bytes)


def report(request: Request, read: ReadStatistics, begun_s: float, bytes_received: int = 0) -> None:
    """Tells of a load that has ended, which was called at a time by the monotonic clock."""
    statistics = statistics_of(request.opened, read, time.monotonic() - begun_s, bytes_received)
    tell([statistics], request.options.array.loading.on_statistics, "array.loading.on_statistics")


def statistics_of(
    opened: OpenFiles, read: ReadStatistics, duration_s: float, bytes_received: int = 0
) -> LoadStatistics:
    """What a load of published files tells."""
    return LoadStatistics(
        opened.path,
        read.bytes_needed,
        read.bytes_read,
        duration_s,
        bytes_received,
        first_touch_s=read.first_touch_s,
        cached_bytes=read.cached_bytes,
        repeated_requests=read.repeated_requests,
    )
