"""One execution: files are made and damaged, opened, and read if they could be; and what must hold of that.

- What comes out is arrays, or one of the errors that are documented, which names a path.
- What is accepted, the package `safetensors` accepts, with the same names, dtypes, shapes and bytes; and the
  index says the same of it to Python's reader of JSON.
- What that package accepts and we refuse has one of the reasons for which we are stricter.
- What is accepted holds no more bytes than its files.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

import safetensors

import waystation.safetensors
from fuzz.open_path.damage import damaged_text, framed
from fuzz.open_path.documents import SHARDS, file_document, index_tokens
from fuzz.open_path.places import CHECKSUMS, SINGLE, Place
from waystation import _native, errors
from waystation.safetensors.handle import Tensors

_POOL = 1000
_MEMORY_BYTES = 1 << 20
_READ = 0.25  # of what is accepted is read through the engine as well, which takes longer than all else

# Why we refuse what the package accepts: two readers could understand it differently, or it is too large.
_STRICTER = re.compile(
    r"twice|unknown field|holds a NUL|has more than \d+ (numbers|entries)|white space before|lone surrogate"
)

# The tokens of checksums, up to the length of the file and from there to the checksum of its only block.
_SUMS = (
    *("{", '"version"', ":", "1", ",", '"block_bytes"', ":", "262144", ",", '"files"', ":", "{"),
    *('"single.safetensors"', ":", "{", '"nbytes"', ":"),
)
_CRC = (",", '"crc64"', ":")

Expected = dict[str, tuple[str, list[int], bytes]]


class Broken(AssertionError):
    """Something that must hold does not."""


class Execution:
    """Runs executions by their numbers; each depends on the seed and its number alone.

    Attributes:
        counts: What came out, and how often.
        most_bytes: The most that the files of one execution had.
    """

    def __init__(self, seed: int, directory: str) -> None:
        self._seed = seed
        self._random = Random(seed)
        self._place = Place(directory)
        self._files = [file_document(self._random) for _ in range(_POOL)]
        self._first = [file_document(self._random, "a.") for _ in range(_POOL)]
        self._second = [file_document(self._random, "b.") for _ in range(_POOL)]
        self.counts: Counter[str] = Counter()
        self.most_bytes = 0

    def __call__(self, number: int) -> None:
        """Runs one."""
        random = self._random
        random.seed(self._seed << 64 | number)
        chance = random.random()
        if chance < 0.94:
            self._single(random)
        elif chance < 0.985:
            self._set(random)
        elif chance < 0.995:
            self._odd(random)
        else:
            self._summed(random)

    def summary(self) -> dict[str, Any]:
        """What came out, and how often."""
        return dict(sorted(self.counts.items()))

    # ---- what is opened ------------------------------------------------------------------------

    def _single(self, random: Random) -> None:
        document = random.choice(self._files)
        content = framed(random, damaged_text(random, document.tokens), document.data)
        self._place.single.write(content)
        self._examine(random, "file", self._place.single.path, {SINGLE: content}, None)

    def _set(self, random: Random) -> None:
        """Two files and their index, of which one is damaged, mostly the index."""
        documents = [random.choice(self._first), random.choice(self._second)]
        victim = random.choice((0, 1, 2, 2, 2, 2))
        contents = {}
        for number, (file, document) in enumerate(zip(self._place.shards, documents, strict=True)):
            text = "".join(document.tokens).encode()
            content = len(text).to_bytes(8, "little") + text + document.data
            if number == victim:
                content = framed(random, damaged_text(random, document.tokens), document.data)
            file.write(content)
            contents[SHARDS[number]] = content
        named = [(name, document.names) for name, document in zip(SHARDS, documents, strict=True)]
        tokens = index_tokens(random, named)
        self._place.index.write(
            damaged_text(random, tokens) if victim == 2 else "".join(tokens).encode("utf-8", "surrogatepass")
        )
        files: Any = random.choice((self._place.set_directory, self._place.index.path))
        if random.random() < 0.2:
            files = [file.path for file in self._place.shards]
            self._examine(random, "files", files, contents, None)
        else:
            self._examine(random, "set", files, contents, self._place.index.content)

    def _odd(self, random: Random) -> None:
        """A directory of anything."""
        documents = [random.choice(self._files) for _ in range(3)]
        contents = [
            framed(random, damaged_text(random, document.tokens), document.data) for document in documents
        ]
        named = [(random.choice(SHARDS), document.names) for document in documents]
        contents.append(damaged_text(random, index_tokens(random, named)))
        directory = self._place.make_odd(random, contents)
        try:
            opened = waystation.safetensors.open(directory)
        except (errors.Corrupt, errors.NotFound, errors.InvalidInput) as error:
            self._refused("directory", error)
            return
        self.counts["directory accepted"] += 1
        expected: Expected = {}
        for path in opened.files:
            with open(path, "rb") as file:
                expected |= _decoded(file.read())
        self._compare(random, opened, expected, has_checksums=os.path.lexists(f"{directory}/{CHECKSUMS}"))

    def _summed(self, random: Random) -> None:
        """A file beside checksums that are damaged: it is refused, or read as it is."""
        document = random.choice(self._files)
        content = framed(random, "".join(document.tokens).encode(), document.data)
        self._place.single.write(content)
        body = damaged_text(random, [*_SUMS, str(len(content)), *_CRC, f'"{_crc(content)}"', "}", "}", "}"])
        sealed = _sealed(body) if random.random() < 0.8 else body
        with self._place.checksums(sealed):
            self._examine(random, "summed", self._place.single.path, {SINGLE: content}, None)

    # ---- what must hold ------------------------------------------------------------------------

    def _examine(
        self, random: Random, kind: str, files: Any, contents: Mapping[str, bytes], index: bytes | None
    ) -> None:
        """Opens files and holds what comes out against what is in them."""
        total = sum(map(len, contents.values()))
        self.most_bytes = max(self.most_bytes, total + len(index or b""))
        try:
            opened = waystation.safetensors.open(files)
        except (errors.Corrupt, errors.NotFound, errors.InvalidInput) as error:
            if kind == "file" and not isinstance(error, errors.Corrupt):
                raise Broken(f"a file is refused by {type(error).__name__}") from error
            self._refused(kind, error)
            if index is None and kind == "file":
                _check_strictness(contents[SINGLE], error)
            return
        self.counts[f"{kind} accepted"] += 1
        if opened.nbytes > total:
            raise Broken(f"{opened.nbytes} bytes were accepted of files of {total}")
        expected: Expected = {}
        for path in opened.files:
            expected |= _decoded(contents[os.path.basename(path)])
        if index is not None:
            _check_index(index, contents, opened)
        self._compare(random, opened, expected, has_checksums=kind == "summed")

    def _refused(self, kind: str, error: errors.WaystationError) -> None:
        self.counts[f"{kind} refused"] += 1
        if "path" not in error.context and not isinstance(error, errors.InvalidInput):
            raise Broken("an error names no path") from error

    def _compare(self, random: Random, opened: Tensors, expected: Expected, *, has_checksums: bool) -> None:
        """Holds what was opened against what the package finds in the same files."""
        if opened.keys() != expected.keys():
            raise Broken(f"the names are {sorted(opened)}, and {sorted(expected)} to the package")
        self._check_spans(opened, expected)
        if random.random() > _READ and not has_checksums:
            return
        try:
            for name, array in _read(random, opened):
                dtype, shape, data = expected.pop(name)
                halved = [*shape[:-1], shape[-1] // 2] if dtype == "F4" else shape
                if list(array.shape) != halved or array.tobytes() != data:
                    raise Broken(f"the tensor {name!r} differs from what the package reads")
        except errors.Unsupported:
            self.counts["not for NumPy"] += 1
        except (errors.Corrupt, errors.InvalidInput) as error:
            if not has_checksums:  # these are looked at when data is read
                raise Broken("what was opened cannot be read") from error
            self.counts["checksums refused"] += 1
        else:
            if expected:
                raise Broken(f"{sorted(expected)} were not read")
            self.counts["read"] += 1

    def _check_spans(self, opened: Tensors, expected: Expected) -> None:
        """Where tensors are said to be in their files are the bytes that the package reads."""
        contents = {file.path: file.content for file in self._place.files}
        for header in opened.opened.headers:
            content = contents.get(header.path)
            for name, dtype, shape, begin, end in header.tensors:
                *described, data = expected[name]
                if [dtype, list(shape)] != described or (content or header.read(0, end))[begin:end] != data:
                    raise Broken(f"the tensor {name!r} is described otherwise than by the package")


def _read(random: Random, opened: Tensors) -> Iterable[tuple[str, Any]]:
    """All tensors, in one of the ways to read them."""
    how = random.random()
    if how < 0.9:
        return waystation.safetensors.load(opened, framework="numpy", memory_limit=_MEMORY_BYTES).items()
    if how < 0.95:
        return waystation.safetensors.stream(opened, framework="numpy", memory_limit=_MEMORY_BYTES)
    if how < 0.975:
        return [(name, opened.tensor(name)) for name in opened]
    return [(name, opened.slice(name)[...]) for name in opened]


def _decoded(content: bytes) -> Expected:
    """What the package finds in a file that was accepted."""
    try:
        found = safetensors.deserialize(content)
    except safetensors.SafetensorError as error:
        raise Broken("a file is accepted that the package refuses") from error
    return {name: (entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in found}


def _check_strictness(content: bytes, refusal: errors.WaystationError) -> None:
    """What the package accepts is refused for a reason that is documented."""
    try:
        safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return
    if not _STRICTER.search(refusal.message):
        raise Broken("a file is refused that the package accepts, for no documented reason") from refusal


def _check_index(index: bytes, contents: Mapping[str, bytes], opened: Tensors) -> None:
    """The index that was accepted says of every tensor where it is, and of no other."""
    weight_map = json.loads(index)["weight_map"]
    if weight_map.keys() != opened.keys():
        raise Broken("the index names other tensors than were accepted")
    for path in opened.files:
        name = os.path.basename(path)
        own = {tensor for tensor, file in weight_map.items() if file == name}
        if own != _decoded(contents[name]).keys():
            raise Broken(f"the index says something else of {name}")


def _sealed(body: bytes) -> bytes:
    try:
        return _native.seal_json(body)
    except errors.InvalidInput:  # it is no text
        return body


def _crc(content: bytes) -> str:
    return base64.b64encode(_native.crc64(content).to_bytes(8, "little")).decode()
