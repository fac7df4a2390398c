"""Handlers of small things: JSON values, protocol buffers, and objects that save themselves.

What is one for all processes the primary writes, or with local storage every process. The text is made while
the caller waits, so that what was given may change afterwards. Protocol buffers are not imported here:
a program that has messages has imported them.

JSON has no NaN and no infinity. In the native layout they are written as `{"waystation.float": "nan"}`; in
Orbax's layouts as Orbax writes them, which is `NaN`. Both are read.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from waystation import _native, coordination, storage
from waystation._errors import InvalidInput, NotFound
from waystation._options.in_effect import current_options
from waystation.checkpoint.handlers.types import PathAwaitingCreation, StatefulCheckpointable
from waystation.layouts.native.records import callers_json

_JSON_NAME = "data.json"
_METRICS_NAME = "metrics"
_PROTO_NAME = "proto.pbtxt"
_FLOAT = "waystation.float"  # the one name in the object that stands for a float which JSON lacks
_FLOATS = {repr(value): value for value in (math.nan, math.inf, -math.inf)}


class JsonHandler:
    """Handles JSON values: what `json.dumps` takes, with text as keys. They come back as JSON has them:
    tuples as lists. NaN and infinities come back as they were.

    Args:
        filename: Of the file; one of the default name is also found.
    """

    def __init__(self, filename: str | None = None) -> None:
        self._name = filename or _JSON_NAME

    async def save(self, directory: PathAwaitingCreation, checkpointable: Any) -> Awaitable[None]:
        """Writes the value."""
        return _write(directory, self._name, _text(checkpointable))

    async def load(self, directory: Path, abstract_checkpointable: None = None) -> Awaitable[Any]:
        """Reads the value."""
        names = [self._name, _JSON_NAME, "metadata"]  # the last is what older checkpoints of Orbax have

        async def read() -> Any:
            for name in names:
                if storage.is_file(directory / name):
                    return with_floats(json.loads(_read(directory / name)))
            raise NotFound(f"'{directory}' has no JSON file; looked for: {', '.join(dict.fromkeys(names))}")

        return read()

    async def metadata(self, directory: Path) -> None:
        """Nothing: a JSON value has no abstract form."""

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether it is a JSON value."""
        try:
            json.dumps(checkpointable)
        except (TypeError, ValueError, RecursionError):
            return False
        return True

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Nothing tells that JSON is wanted but that JSON was saved."""
        return None


class MetricsHandler(JsonHandler):
    """Handles the metrics of a step."""

    def __init__(self) -> None:
        super().__init__(_METRICS_NAME)


class ProtoHandler:
    """Handles messages of protocol buffers, as text.

    Args:
        filename: Of the file.
    """

    def __init__(self, filename: str = _PROTO_NAME) -> None:
        self._name = filename

    async def save(self, directory: PathAwaitingCreation, checkpointable: Any) -> Awaitable[None]:
        """Writes the message."""
        from google.protobuf import text_format

        return _write(directory, self._name, text_format.MessageToString(checkpointable))

    async def load(self, directory: Path, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """Reads the message; the abstract checkpointable is its class."""
        from google.protobuf import text_format

        if abstract_checkpointable is None:
            raise InvalidInput(
                "the file of a protocol buffer does not say of which type it is; give the class of the "
                "message: load_checkpointables(path, {name: Message})"
            )

        async def read() -> Any:
            return text_format.Parse(_read(directory / self._name), abstract_checkpointable())

        return read()

    async def metadata(self, directory: Path) -> None:
        """Nothing: the file does not say of which type the message is."""

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether it is a message."""
        message = _message_class()
        return message is not None and isinstance(checkpointable, message)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Whether it is a class of messages."""
        message = _message_class()
        is_class = isinstance(abstract_checkpointable, type)
        return message is not None and is_class and issubclass(abstract_checkpointable, message)


class StatefulCheckpointableHandler:
    """Handles objects that save and load themselves (`StatefulCheckpointable`)."""

    async def save(
        self, directory: PathAwaitingCreation, checkpointable: StatefulCheckpointable
    ) -> Awaitable[None]:
        """Has the object save itself."""
        return await checkpointable.save(directory)

    async def load(
        self, directory: Path, abstract_checkpointable: StatefulCheckpointable | None = None
    ) -> Awaitable[StatefulCheckpointable]:
        """Has the object that is given load itself, and returns it."""
        if abstract_checkpointable is None:
            raise InvalidInput(
                "an object that saved itself has to load itself: give one of its kind, "
                "load_checkpointables(path, {name: object}), or name only the others"
            )
        rest = await abstract_checkpointable.load(directory)

        async def load() -> StatefulCheckpointable:
            await rest
            return abstract_checkpointable

        return load()

    async def metadata(self, directory: Path) -> None:
        """Nothing: only the object knows."""

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether it saves itself; a class does not, its instances may."""
        return not isinstance(checkpointable, type) and isinstance(checkpointable, StatefulCheckpointable)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Whether it loads itself."""
        return self.is_handleable(abstract_checkpointable)


def writes_here() -> bool:
    """Whether this process writes what is one for all processes."""
    primary = current_options().multiprocessing.primary_host
    return primary is None or coordination.current().process_index == primary


def with_floats(value: Any) -> Any:
    """A JSON value that was read, with floats where objects stand for them."""
    if isinstance(value, dict):
        text = value.get(_FLOAT) if len(value) == 1 else None
        if isinstance(text, str) and text in _FLOATS:
            return _FLOATS[text]
        return {name: with_floats(member) for name, member in value.items()}
    return [with_floats(element) for element in value] if isinstance(value, list) else value


def _without_floats(value: Any) -> Any:
    """A JSON value with objects in the place of floats that JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(float(value))}
    if isinstance(value, dict):
        return {name: _without_floats(member) for name, member in value.items()}
    return [_without_floats(element) for element in value] if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    """A JSON value as the layout in effect has it."""
    value = callers_json(value, "what JsonHandler saves", allow_nan=True)
    is_native = current_options().array.saving.use_ocdbt is None
    return json.dumps(_without_floats(value), allow_nan=False) if is_native else json.dumps(value)


async def _nothing() -> None:
    """What a process does that has nothing to write."""


def _write(directory: PathAwaitingCreation, name: str, text: str) -> Awaitable[None]:
    """Writes a text file, if it is this process that does."""

    async def write() -> None:
        path = await directory.await_creation()
        files = [(os.path.join(path, name), text.encode())]
        await asyncio.to_thread(_native.write_small_files, files, sync=False)

    return write() if writes_here() else _nothing()


def _read(path: Path) -> str:
    """The text in a file."""
    with storage.opened(path) as file:
        return file.read(0, file.status.nbytes).decode()


def _message_class() -> type | None:
    """The class of all messages, if the program has imported it."""
    module = sys.modules.get("google.protobuf.message")
    found: type | None = getattr(module, "Message", None)
    return found
