"""`_CHECKPOINT_METADATA`: what a checkpoint says of itself, first of all which handler wrote each part of it.

Readers do without it: a checkpoint whose file is missing says nothing. One that is there has to make sense.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from waystation.layouts.orbax.json_files import dump, parse_object, reading, require
from waystation.layouts.orbax.names import check_checkpointable

# What the free functions of version 1 say of trees.
PYTREE_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """The content of the file.

    Attributes:
        item_handlers: For each checkpointable the class of the handler that wrote it; of version 0, where a
            checkpoint is one tree, that class alone; None if nothing is said.
        metrics: Of the step.
        performance_metrics: Of the save.
        init_timestamp_nsecs: When the save began, nanoseconds since 1970.
        commit_timestamp_nsecs: When it ended.
        custom_metadata: The caller's own.
    """

    item_handlers: dict[str, str] | str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    performance_metrics: dict[str, Any] = field(default_factory=dict)
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The bytes of the file."""
        return dump({entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)})

    @classmethod
    def decode(cls, data: bytes, path: str) -> CheckpointMetadata:
        """Reads the bytes of the file. Members that it does not know are the caller's own, as in Orbax.

        Raises:
            Corrupt: They are not such a file.
        """
        body = parse_object(data, path)
        with reading(path):
            known = {entry.name for entry in dataclasses.fields(cls)}
            others = {name: value for name, value in body.items() if name not in known}
            return cls(
                _handlers(body.get("item_handlers"), path),
                _mapping(body.get("metrics")),
                _mapping(body.get("performance_metrics")),
                _timestamp(body.get("init_timestamp_nsecs")),
                _timestamp(body.get("commit_timestamp_nsecs")),
                {**others, **_mapping(body.get("custom_metadata"))},
            )

    def handler_of(self, name: str) -> str | None:
        """The class of the handler that wrote a checkpointable, as far as that is said."""
        return self.item_handlers.get(name) if isinstance(self.item_handlers, dict) else None


def _handlers(value: Any, path: str) -> dict[str, str] | str | None:
    if value is None or isinstance(value, str):
        return value
    require(isinstance(value, dict), "the handlers are no object")
    for name, handler in value.items():
        check_checkpointable(name, path)
        require(handler is None or isinstance(handler, str), "a handler is no name of a class")
    return {name: handler for name, handler in value.items() if handler is not None}


def _mapping(value: Any) -> dict[str, Any]:
    require(value is None or isinstance(value, dict), "something is no object that should be")
    return dict(value or {})


def _timestamp(value: Any) -> int | None:
    require(value is None or type(value) is int, "a time is no number of nanoseconds")
    return None if value is None else int(value)
