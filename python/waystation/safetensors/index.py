"""The index of a model in several files, as tools of Hugging Face write and read it.

A JSON object whose `weight_map` says of each tensor which file holds it. It is text that somebody published.
Invariants of what is returned: every file is a plain name, so in the directory of the index, and no tensor is
named twice. `check` holds the index against the files, in both directions. Who replaces a model replaces the
index in one act: while an index is current, so are its files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from waystation import _native, storage
from waystation._errors import Corrupt, NotFound
from waystation.safetensors.headers import Header
from waystation.storage import disks
from waystation.storage.foreign import described_bytes

SUFFIX = ".safetensors.index.json"

_LIMIT_BYTES = 256 << 20
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Index:
    """An index.

    Attributes:
        path: Where it is.
        identity: Of its file as it was before it was read.
        weight_map: The name of the file of each tensor.
    """

    path: str
    identity: storage.Identity
    weight_map: dict[str, str]

    def files(self) -> list[str]:
        """The paths of the files, in the order of their names."""
        directory = os.path.dirname(self.path)
        return [os.path.join(directory, name) for name in sorted(set(self.weight_map.values()))]

    def is_current(self) -> bool:
        """Whether it is still there, and the same: if not, others may have taken the place of its files."""
        try:
            found = storage.status(self.path)
        except OSError:
            return False
        return found is not None and found.identity == self.identity

    def check_present(self, names: Collection[str] | None = None) -> None:
        """Raises Corrupt if one of its files is missing.

        Args:
            names: What is in its directory, as far as that is known.
        """
        absent = [
            file
            for file in self.files()
            if not (storage.status(file) is not None if names is None else os.path.basename(file) in names)
        ]
        if absent:
            shown = ", ".join(map(_told, absent[:_SHOWN]))
            more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
            raise Corrupt(
                f"{len(absent)} of {len(self.files())} files that the index names are missing: "
                f"{shown}{more}; the model was downloaded in part",
                path=absent[0],
                index_file=self.path,
            )

    def check(self, headers: Sequence[Header]) -> None:
        """Holds the index against the headers of its files.

        Raises:
            Corrupt: A file lacks a tensor that the index promises, or holds one that the index does not
                name, or says to be elsewhere.
        """
        missing = self.weight_map.keys() - {tensor for header in headers for tensor, *_ in header.tensors}
        for header in headers:
            name = os.path.basename(header.path)
            for tensor, *_ in header.tensors:
                promised = self.weight_map.get(tensor)
                if promised != name:
                    says = "does not name it" if promised is None else f"says that it is in {promised!r}"
                    raise Corrupt(
                        f"the file holds a tensor, and the index {says}; give the files themselves to do "
                        "without the index",
                        path=header.path,
                        tensor=tensor,
                        index_file=self.path,
                    )
        if missing:
            tensor = min(missing)
            name = self.weight_map[tensor]
            raise Corrupt(
                f"{len(missing)} of {len(self.weight_map)} tensors that the index names are not in "
                f"their files; the first should be in {name!r}",
                path=os.path.join(os.path.dirname(self.path), name),
                tensor=tensor,
                index_file=self.path,
            )


def _told(file: str) -> str:
    """A file that is missing, with where it should be if it is a link."""
    target = disks.link_target(file)
    return repr(os.path.basename(file)) + ("" if target is None else f" (a link to '{target}')")


def read_index(path: str) -> Index:
    """Reads an index.

    Raises:
        NotFound: There is none.
        Corrupt: It is malformed, or names a file elsewhere.
    """
    content, identity = storage.read_version(path, limit_bytes=_LIMIT_BYTES)
    try:
        return Index(path, identity, _native.parse_safetensors_index(content, path))
    except Corrupt as error:
        foreign = described_bytes(content, path)
        if foreign is None:
            raise
        raise Corrupt(f"'{path}' is not an index, but {foreign}", path=path) from error


def is_text(value: str) -> bool:
    """Whether a string holds no lone surrogates, which no file and no name of a file can hold."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_metadata(path: str) -> dict[str, Any]:
    """What an index that `read_index` accepts says of the whole model; empty if it says nothing."""
    try:
        metadata = json.loads(storage.read_file(path, limit_bytes=_LIMIT_BYTES)).get("metadata")
    except (ValueError, RecursionError, AttributeError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def encode_index(
    files: Iterable[tuple[str, Sequence[str]]],
    total_bytes: int,
    metadata: Mapping[str, Any] | None = None,
) -> bytes:
    """The content of an index.

    Args:
        files: The names of files, each with those of its tensors.
        total_bytes: Of all tensors.
        metadata: What else it says of the whole model.
    """
    entries = sorted((tensor, name) for name, tensors in files for tensor in tensors)
    content = {"metadata": {**(metadata or {}), "total_size": total_bytes}, "weight_map": dict(entries)}
    return json.dumps(content, indent=2).encode() + b"\n"


def require_no_index(path: str) -> None:
    """Raises NotFound, which says what to give, where the model of a name is in files with an index."""
    index = f"{path}.index.json"
    if path.endswith(".safetensors") and storage.of(path).is_listable and storage.is_file(index):
        raise NotFound(
            f"there is no file '{path}'; the model of that name is in several files, of which '{index}' is "
            "the index: give that",
            path=path,
        )
