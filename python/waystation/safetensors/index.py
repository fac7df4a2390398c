"""The index of a model in several files, as tools of Hugging Face write and read it.

A JSON object whose `weight_map` says of each tensor which file holds it. It is text that somebody published.
Invariants of what is returned: every file is a plain name, so in the directory of the index, and no tensor is
named twice. `check` holds the index against the files, in both directions.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from waystation import _native
from waystation._errors import Corrupt, from_os_error
from waystation.safetensors.headers import Header

SUFFIX = ".safetensors.index.json"

_LIMIT_BYTES = 256 << 20
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Index:
    """An index.

    Attributes:
        path: Where it is.
        weight_map: The name of the file of each tensor.
        metadata: What it says besides; nothing here relies on it.
    """

    path: str
    weight_map: dict[str, str]
    metadata: dict[str, Any]

    def files(self) -> list[str]:
        """The paths of the files, in the order of their names."""
        directory = os.path.dirname(self.path)
        return [os.path.join(directory, name) for name in sorted(set(self.weight_map.values()))]

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


def read_index(path: str) -> Index:
    """Reads an index and checks that its files are there.

    Raises:
        NotFound: There is no index.
        Corrupt: It is malformed, names a file elsewhere, or one that is not there.
    """
    index = _decode(_content(path), path)
    absent = [file for file in index.files() if not os.path.lexists(file)]
    if absent:
        shown = ", ".join(repr(os.path.basename(file)) for file in absent[:_SHOWN])
        more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
        raise Corrupt(
            f"{len(absent)} of {len(index.files())} files that the index names are missing: {shown}{more}; "
            "the model was downloaded in part",
            path=absent[0],
            index_file=path,
        )
    return index


def _content(path: str) -> bytes:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise Corrupt("a regular file was expected here", path=path)
    except OSError as error:
        raise from_os_error(error, "read", path) from error
    (content,) = _native.read_small_files([path], limit_bytes=_LIMIT_BYTES)
    return content


def _decode(content: bytes, path: str) -> Index:
    try:
        decoded = json.loads(content, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"the index is no valid JSON: {error}", path=path) from error
    weight_map = decoded.get("weight_map") if isinstance(decoded, dict) else None
    if not isinstance(weight_map, dict):
        raise Corrupt("the index has no object 'weight_map'", path=path)
    if not weight_map:
        raise Corrupt("the index names no tensor", path=path)
    for tensor, name in weight_map.items():
        problem = _problem(name)
        if problem is not None:
            raise Corrupt(f"the index names {name!r:.200} as a file, {problem}", path=path, tensor=tensor)
    metadata = decoded.get("metadata")
    return Index(path, weight_map, metadata if isinstance(metadata, dict) else {})


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((repeated, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {repeated!r:.200} occurs twice")
    return found


def _problem(name: object) -> str | None:
    """Why something is no name of a file beside the index; completes "… as a file, "."""
    if not isinstance(name, str) or not is_text(name):
        return "which is no text"
    if not name or "\0" in name or name in (".", ".."):
        return "which is no name of a file"
    if "/" in name or "\\" in name:
        return "which leads elsewhere; only names of files beside the index are taken"
    if not name.endswith(".safetensors"):
        return "which is no safetensors file"
    return None


def is_text(value: str) -> bool:
    """Whether a string holds no lone surrogates, which no file and no name of a file can hold."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode_index(files: Iterable[tuple[str, Sequence[str]]], total_bytes: int) -> bytes:
    """The content of an index.

    Args:
        files: The names of files, each with those of its tensors.
        total_bytes: Of all tensors.
    """
    entries = sorted((tensor, name) for name, tensors in files for tensor in tensors)
    content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(entries)}
    return json.dumps(content, indent=2).encode() + b"\n"
