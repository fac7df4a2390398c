"""The order of steps in which the files of a model take the place of an earlier one in a directory.

Readers of a directory take `model.safetensors` if it is there, else the files that the index names, else all
files. Invariant: after every step such a reader finds the earlier model whole, or the new one whole; one step
decides. So no new file has the name of an earlier one, unless one file replaces one file; what readers go by,
which is the index or that one file, is replaced in one act, and made where there is none; earlier files go
last. Each step is durable before the next begins.

Failure sequence: killed before the deciding step, new files are left that nobody reads; after it, earlier
ones. The next save that may overwrite removes either.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from waystation import _native, storage
from waystation._errors import WaystationError
from waystation.safetensors.headers import read_headers
from waystation.safetensors.index import encode_index, read_index

_PREFERRED_STEM = "model"  # readers take its one file before any index


@dataclass(frozen=True, slots=True)
class Earlier:
    """The model that stands in a directory.

    Attributes:
        directory: Where it is.
        stem: What its files begin with.
        names: Of all files that are or may be of it, without the index.
        has_index: Whether it has an index.
        live: Those of its files that readers take; some may have other names.
    """

    directory: str
    stem: str
    names: frozenset[str]
    has_index: bool
    live: frozenset[str]

    @classmethod
    def found(cls, directory: str, stem: str, names: Sequence[str]) -> Earlier:
        """What there is, by the names of files and index that may be of it."""
        index = index_name(stem)
        files = frozenset(names) - {index}
        live, one = files, frozenset([one_name(stem)])
        named = _named(os.path.join(directory, index)) if index in names else None
        if one <= files and (stem == _PREFERRED_STEM or one in (files, named)):
            live = one
        elif named is not None:
            live = named
        return cls(directory, stem, files, index in names, live)

    @property
    def is_one_file(self) -> bool:
        """Whether it is one file, under the name that this has."""
        return self.live == {one_name(self.stem)}

    def can_become_one_file(self) -> bool:
        """Whether the one file of a new model would take the place of none among several."""
        return self.is_one_file or one_name(self.stem) not in self.live


def one_name(stem: str) -> str:
    """The name of a model that is one file."""
    return f"{stem}.safetensors"


def index_name(stem: str) -> str:
    """The name of the index of several files."""
    return f"{stem}.safetensors.index.json"


def replace(earlier: Earlier, stage: str, new_names: Sequence[str], new_index: bytes) -> None:
    """Moves durable files in, and removes the earlier ones.

    Args:
        earlier: What they replace; `can_become_one_file`, if they are one.
        stage: The directory that they are in, on the same file system.
        new_names: Their names, the same there and here.
        new_index: The content of their index.
    """
    steps = _Steps(earlier, stage)
    is_one = len(new_names) == 1
    steps.remove_unread()
    if not (is_one and earlier.is_one_file):
        steps.point_to_earlier()
    steps.move_in(new_names)
    if is_one and earlier.is_one_file:
        return
    steps.point_to(new_index)
    steps.remove_earlier()
    if is_one and earlier.live <= earlier.names:
        steps.remove_index()


class _Steps:
    """The steps; each is durable when it returns."""

    def __init__(self, earlier: Earlier, stage: str) -> None:
        self._earlier = earlier
        self._stage = stage
        self._index = index_name(earlier.stem)
        self._has_index = earlier.has_index

    def remove_unread(self) -> None:
        """Removes what no reader takes: it would be in the way."""
        has_other_index = self._earlier.is_one_file and self._has_index
        # Readers take the one file of this stem before the index; that of another only because of the index.
        if has_other_index and self._earlier.stem == _PREFERRED_STEM:
            self.remove_index()
        self._remove(self._earlier.names - self._earlier.live)
        if has_other_index and self._has_index:
            self.remove_index()

    def point_to_earlier(self) -> None:
        """Has an index name the earlier files, if readers would take new ones for some of them."""
        if self._has_index:
            return
        names = sorted(self._earlier.live)
        try:
            headers = read_headers([self._path(name) for name in names])
        except WaystationError:
            return  # damaged: there is no model that could be kept
        tensors = [[tensor[0] for tensor in header.tensors] for header in headers]
        total = sum(header.identity.nbytes - header.data_start for header in headers)
        self.point_to(encode_index(list(zip(names, tensors, strict=True)), total))

    def move_in(self, names: Sequence[str]) -> None:
        """Moves new files in."""
        for name in names:
            self._replace(name)
        self._sync()

    def point_to(self, index: bytes) -> None:
        """Puts an index in the place of the one that is there."""
        _native.write_small_files([(os.path.join(self._stage, self._index), index)])
        self._replace(self._index)
        self._sync()
        self._has_index = True

    def remove_earlier(self) -> None:
        """Removes the files that readers took; the one that they prefer to an index first."""
        one = one_name(self._earlier.stem)
        mine = self._earlier.live & self._earlier.names
        self._remove(mine & {one})
        self._remove(mine - {one})

    def remove_index(self) -> None:
        """Removes the index, of which readers have no more need."""
        self._remove({self._index})
        self._has_index = False

    def _remove(self, names: frozenset[str] | set[str]) -> None:
        for name in sorted(names):
            storage.remove_file(self._path(name))
        if names:
            self._sync()

    def _replace(self, name: str) -> None:
        storage.renames(self._stage).over(os.path.join(self._stage, name), self._path(name))

    def _path(self, name: str) -> str:
        return os.path.join(self._earlier.directory, name)

    def _sync(self) -> None:
        _native.sync_paths([self._earlier.directory])


def _named(index: str) -> frozenset[str] | None:
    """The files that an index names; None if it is damaged."""
    try:
        return frozenset(read_index(index).weight_map.values())
    except WaystationError:
        return None
