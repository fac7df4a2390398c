"""Files that are written beside their places: by the addresses of what goes into them, or through a mapping.

Invariant: nothing stands at a place before the file is whole.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

from waystation import _forks, _plans, storage
from waystation._errors import from_os_error
from waystation._options.in_effect import current_options
from waystation.compat.fastsafetensors.tensors import wrapped
from waystation.layouts.native import engine_job
from waystation.storage.attempts import new_attempt_id


class Staged:
    """A file that does not have its name yet.

    Args:
        path: Where it will be.
        header: Its first bytes.
        nbytes: Its length.

    Attributes:
        path: Where it will be, absolute.
        place: Where it is.
    """

    def __init__(self, path: str, header: bytes, nbytes: int) -> None:
        self.path: str = os.path.abspath(path)
        self._owner = _forks.Owner()
        self.header = header
        self.nbytes = nbytes
        directory, name = os.path.split(self.path)
        self.place: str = os.path.join(directory, storage.names.attempt(name, new_attempt_id()))

    def publish(self) -> None:
        """Gives it its name; an earlier file of that name is gone then."""
        storage.renames(self.path).over(self.place, self.path, "write")

    def discard(self) -> None:
        """Removes it if it has no name yet; a child that was forked meanwhile leaves it to its parent."""
        if not self._owner.is_here:
            return
        storage.remove_file(self.place)


def by_addresses(files: Sequence[Staged], tensors: Sequence[Sequence[Any]], *, fsync: bool) -> None:
    """Writes files of torch tensors, in order, in one job of the engine."""
    codec_sources = []
    records = []
    for file, own in zip(files, tensors, strict=True):
        held = [wrapped(tensor).detach().contiguous().real_tensor.cpu() for tensor in own]
        codec_sources += held
        lengths = [tensor.nbytes for tensor in held]
        words = _plans.byte_segments(len(file.header), lengths, [tensor.data_ptr() for tensor in held])
        records.append((file.place, file.header, file.nbytes, words))
    engine_job.run(
        records,
        codec_sources,
        current_options(),
        (),
        lambda _: None,
        lambda: None,
        lambda: None,
        sync=fsync,
    )


@contextlib.contextmanager
def by_mapping(
    files: Sequence[Staged], spans: Sequence[Sequence[tuple[int, int]]], *, fsync: bool
) -> Iterator[list[memoryview]]:
    """Makes files, and gives the memory of spans of them, which is written back at the end."""
    with contextlib.ExitStack() as stack:
        buffers: list[memoryview] = []
        mappings = [stack.enter_context(_mapped(file)) for file in files]
        for mapping, own in zip(mappings, spans, strict=True):
            whole = memoryview(mapping)
            stack.callback(whole.release)
            for begin, end in own:
                buffers.append(whole[begin:end])
                stack.callback(buffers[-1].release)
        yield buffers
        if fsync:
            # A descriptor that is opened afterwards may not be told of a page that could not be written.
            for file, mapping in zip(files, mappings, strict=True):
                _flush(file, mapping)


def _flush(file: Staged, mapping: mmap.mmap) -> None:
    try:
        mapping.flush()
    except OSError as error:
        raise from_os_error(error, "write", file.path) from error


def _mapped(file: Staged) -> mmap.mmap:
    try:
        with open(file.place, "x+b") as opened:
            opened.write(file.header)
            opened.truncate(file.nbytes)
            opened.flush()
            return mmap.mmap(opened.fileno(), file.nbytes)
    except OSError as error:
        raise from_os_error(error, "write", file.path) from error
