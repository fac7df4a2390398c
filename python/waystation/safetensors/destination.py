"""Where published files come to stand, and under which names: `model.safetensors`, or several and an index.

Everything is written into a hidden directory beside its place and made durable; then it moves. A directory
that did not exist appears whole, in one act. Failure sequence: killed while writing, the hidden directory is
left and the destination is as it was; killed while several files move into a directory that has no model yet,
some of them are there without an index, which readers refuse as a part of a model. How files take the place
of earlier ones is told by `replacing.py`. One process at a time moves files into a directory (`write_lock`);
their names are chosen then, by what is there. The name of the hidden directory says which process it is of,
so that `waystation gc` can remove what a dead one left.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from waystation import _forks, _native, storage
from waystation._errors import Conflict, InvalidInput, NotFound, WaystationError, naming_directory
from waystation.safetensors import replacing
from waystation.safetensors.checksums import forget_checksums
from waystation.safetensors.index import encode_index
from waystation.safetensors.sources import checkpoint_of
from waystation.safetensors.spread_note import forget_parts
from waystation.storage import write_lock
from waystation.storage.attempts import new_attempt_id, remove_dead_exports

Format = Literal["safetensors", "npz"]

# What sets the names of new files apart from those of the earlier ones that they replace.
ALTERNATE = ".alternate"


class Entry(Protocol):
    """An array that is to be written."""

    @property
    def label(self) -> str:
        """Its name in the file."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        ...

    @property
    def item_bytes(self) -> int:
        """Bytes of one of them."""
        ...


T = TypeVar("T", bound=Entry)


@dataclass(frozen=True, slots=True)
class PlannedFile(Generic[T]):
    """A file to be written, and what is in it, in order."""

    name: str
    arrays: list[T]


class Destination:
    """Where files go, by the path that a user gave.

    Attributes:
        format: What is written.
        directory: Where the files will be.
        stem: What their names begin with.

    Raises (on creation):
        InvalidInput: The path cannot be written to, or does not fit the format.
        Conflict: Files of that name are there already.
    """

    directory: str

    def __init__(self, output: str, file_format: Format | None, *, overwrite: bool) -> None:
        absolute = storage.absolute(output)
        suffix = os.path.splitext(absolute)[1]
        self.format: Format = file_format or ("npz" if suffix == ".npz" else "safetensors")
        if self.format == "npz" and suffix != ".npz":
            raise InvalidInput(f"'{output}' does not end in .npz; NumPy would not find it", path=absolute)
        if self.format == "safetensors" and suffix == ".npz":
            raise InvalidInput(f"'{output}' ends in .npz, but safetensors is asked for", path=absolute)
        if suffix == f".{self.format}" and not storage.is_directory(absolute):
            self.directory, name = os.path.split(absolute)
            self.stem: str = os.path.splitext(name)[0]
        else:
            self.directory, self.stem = absolute, "model"
        self._given = absolute
        self._overwrite = overwrite
        self._check()

    def _check(self) -> None:
        if storage.is_there(self.directory) and not storage.is_directory(self.directory):
            raise InvalidInput(
                f"'{self.directory}' is not a directory; give one, or a name that ends in .safetensors",
                path=self.directory,
            )
        if checkpoint_of(self.directory) is not None:
            raise InvalidInput(
                f"'{self.directory}' is (in) a checkpoint; write to elsewhere", path=self.directory
            )
        present = self._present()
        if present and not self._overwrite:
            raise Conflict(
                f"'{os.path.join(self.directory, present[0])}' exists already; overwrite it (--overwrite, "
                "overwrite=True), or choose another place",
                path=self.directory,
            )

    def _present(self) -> list[str]:
        """Names of earlier files of this name, the index first."""
        if self.format == "npz":
            pattern = re.compile(re.escape(f"{self.stem}.npz"))
        else:
            part = rf"(({re.escape(ALTERNATE)}\d*)?-\d{{5}}-of-\d{{5}})?"
            index = re.escape(replacing.index_name(self.stem))
            pattern = re.compile(rf"{re.escape(self.stem)}{part}\.safetensors|{index}")
        try:
            found = [name for name in storage.list_names(self.directory) if pattern.fullmatch(name)]
        except NotFound:
            return []
        return sorted(found, key=lambda name: not name.endswith(".json"))

    def _earlier(self) -> replacing.Earlier | None:
        """The model that is replaced, if there is one."""
        if not self._overwrite or self.format == "npz":
            return None
        present = self._present()
        return replacing.Earlier.found(self.directory, self.stem, present) if present else None

    def plan(self, arrays: Sequence[T], max_file_bytes: int) -> list[PlannedFile[T]]:
        """Deals the arrays out to files, in order, each file full before the next is begun."""
        if self.format == "npz":
            return [PlannedFile(f"{self.stem}.npz", list(arrays))]
        groups: list[list[T]] = [[]]
        held = 0
        for entry in arrays:
            if groups[-1] and held + entry.nbytes > max_file_bytes:
                groups.append([])
                held = 0
            groups[-1].append(entry)
            held += entry.nbytes
        return [
            PlannedFile(name, sorted(group, key=alignment_rank))
            for name, group in zip(self._file_names(len(groups)), groups, strict=True)
        ]

    def _file_names(self, count: int) -> list[str]:
        """Names of so many files; of several none is one that readers of an earlier model look for."""
        earlier = self._earlier()
        if count == 1:
            if earlier is not None and not earlier.can_become_one_file():
                name = replacing.one_name(self.stem)
                raise Conflict(
                    f"{len(earlier.live)} files are there that are one model to a reader, {name!r} among "
                    "them, which cannot be replaced alone; remove them, or choose another place",
                    path=os.path.join(self.directory, name),
                )
            return [replacing.one_name(self.stem)]
        taken = frozenset() if earlier is None else earlier.live
        alternates = (f"{self.stem}{ALTERNATE}{number or ''}" for number in itertools.count())
        sets = (
            [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
            for stem in itertools.chain([self.stem], alternates)
        )
        return next(found for found in sets if taken.isdisjoint(found))

    @contextlib.contextmanager
    def staged(self) -> Iterator[str]:
        """Makes the hidden directory; what is in it at the end is removed, and so is what dead processes have
        left of exports of this name."""
        exists = storage.is_directory(self.directory)
        parent = self.directory if exists else os.path.dirname(self.directory)
        remove_dead_exports(parent, self.stem)
        stage = os.path.join(parent, storage.names.export_stage(self.stem, new_attempt_id()))
        with naming_directory(parent):
            storage.make_directory(stage, parents=True)
        owner = _forks.Owner()
        try:
            yield stage
        except WaystationError as error:
            path = error.context.get("path")
            if isinstance(path, str) and path.startswith(stage):  # of which the caller knows nothing
                inside = path.removeprefix(stage)
                error.context["path"] = self.directory + inside if inside else self._given
            raise
        finally:
            if owner.is_here:  # and not a child that was forked meanwhile
                storage.remove_tree(stage)

    def publish(self, stage: str, files: Sequence[PlannedFile[Any]]) -> list[str]:
        """Gives durable files their names; returns their paths, that of the index last."""
        if not storage.is_directory(self.directory):
            try:
                return self._publish_whole(stage, files)
            except Conflict:
                if not self._overwrite or not storage.is_directory(self.directory):
                    raise
            # What it says depends on the names that files get.
            storage.remove_file(os.path.join(stage, replacing.index_name(self.stem)))
        with write_lock.held(self.directory):
            return self._publish_among_others(stage, files)

    def _publish_whole(self, stage: str, files: Sequence[PlannedFile[Any]]) -> list[str]:
        """Makes the hidden directory the destination, which does not exist."""
        file_names = [file.name for file in files]
        self._write_index(stage, file_names, _index_of(files, file_names) if len(files) > 1 else b"")
        _native.sync_paths([stage])
        _rename_new(stage, self.directory)
        _native.sync_paths([os.path.dirname(self.directory)])
        return self._published(file_names)

    def _publish_among_others(self, stage: str, files: Sequence[PlannedFile[Any]]) -> list[str]:
        """Moves the files in, as no other process does at the same time. What another has put there since the
        files were planned counts as what was there before."""
        self._check()
        file_names = [file.name for file in files]
        if self.format == "safetensors":
            file_names = self._named_anew(stage, file_names)
        forget_checksums(self.directory, file_names)
        earlier = self._earlier()
        is_alone = len(files) == 1 and (earlier is None or earlier.is_one_file)
        index = b"" if is_alone else _index_of(files, file_names)
        if earlier is not None:
            _native.sync_paths([stage])
            replacing.replace(earlier, stage, file_names, index)
            forget_checksums(self.directory, sorted(earlier.names - set(self._present())))
            published = self._published(file_names)
            forget_parts(self.directory, earlier.names, list(map(os.path.basename, published)))
            return published
        self._write_index(stage, file_names, index)
        _native.sync_paths([stage])
        for path in self._published(file_names):
            self._move_in(os.path.join(stage, os.path.basename(path)), path)
        _native.sync_paths([self.directory])
        return self._published(file_names)

    def _named_anew(self, stage: str, planned: Sequence[str]) -> list[str]:
        """The names that the files get, under which they now are in the hidden directory."""
        chosen = self._file_names(len(planned))
        for before, name in zip(planned, chosen, strict=True):
            if before != name:
                _rename_new(os.path.join(stage, before), os.path.join(stage, name))
        return chosen

    def _write_index(self, stage: str, file_names: Sequence[str], index: bytes) -> None:
        """Puts the index among several files in the hidden directory."""
        if len(file_names) > 1:
            _native.write_small_files([(os.path.join(stage, replacing.index_name(self.stem)), index)])

    def _published(self, file_names: Sequence[str]) -> list[str]:
        """The paths of the files, that of the index last."""
        index = [replacing.index_name(self.stem)] if len(file_names) > 1 else []
        return [os.path.join(self.directory, name) for name in (*file_names, *index)]

    def _move_in(self, source: str, target: str) -> None:
        if not self._overwrite:
            _rename_new(source, target)
            return
        storage.renames(target).over(source, target)


def _index_of(files: Sequence[PlannedFile[Any]], file_names: Sequence[str]) -> bytes:
    """The index of files that get these names."""
    return encode_index(
        [
            (name, [entry.label for entry in file.arrays])
            for name, file in zip(file_names, files, strict=True)
        ],
        sum(entry.nbytes for file in files for entry in file.arrays),
    )


def _rename_new(source: str, target: str) -> None:
    try:
        storage.renames(target).new(source, target)
    except Conflict as error:
        raise Conflict(f"'{target}' appeared meanwhile; it was left alone", path=target) from error


def alignment_rank(entry: Entry) -> tuple[int, int]:
    """Arrays whose sizes keep the next one aligned come first, so that readers can map most of them; of the
    rest those of wide elements, so that each begins at a multiple of its own."""
    if entry.nbytes == 0:
        return 4, 0
    rank = next((rank for rank, step in enumerate((4096, 256, 64)) if entry.nbytes % step == 0), 3)
    return rank, -entry.item_bytes
