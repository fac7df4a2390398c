"""How the directories of steps are named, and found again: `NameFormat`.

The standard format is a prefix, an underscore and the number of the step, which may be padded with zeros to a
fixed length. Found is only what has been committed. `waystation.path.step` shows these names to users.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from waystation import storage
from waystation._arguments import require_type
from waystation._errors import InvalidInput, WaystationError
from waystation.training import step_records
from waystation.training.errors import StepNotFoundError
from waystation.training.step_metadata import CheckpointMetadata, as_step

PathLike: TypeAlias = str | os.PathLike[str]


@runtime_checkable
class NameFormat(Protocol):
    """Names the directories of steps, and finds those that are there."""

    def build_name(self, step: int) -> str:
        """The name of the directory of a step that is to be saved."""
        ...

    def find_all(self, base_path: PathLike) -> Iterator[CheckpointMetadata[None]]:
        """The committed checkpoints in a directory, in any order."""
        ...

    def find_step(self, base_path: PathLike, step: int) -> CheckpointMetadata[None]:
        """The committed checkpoint of a step.

        Raises:
            StepNotFoundError: There is none. (It is a ValueError.)
        """
        ...


@dataclass(frozen=True)
class StandardNameFormat:
    """`[prefix_]step`; see `standard_name_format`."""

    step_prefix: str | None = None
    step_format_fixed_length: int | None = None

    def __post_init__(self) -> None:
        length = self.step_format_fixed_length
        require_type("step_prefix", self.step_prefix, (str, type(None)), "a string or None")
        require_type("step_format_fixed_length", length, (int, type(None)), "an integer or None")
        if length is not None and length < 0:
            raise InvalidInput(f"names cannot have {length} digits")
        if self.step_prefix is not None and not set(self.step_prefix).isdisjoint("/\0"):
            raise InvalidInput(f"{self.step_prefix!r} cannot begin the name of a directory")

    def __str__(self) -> str:
        return f'StandardNameFormat("{self.build_name(1234)}")'

    def build_name(self, step: int) -> str:
        """The name of the directory of a step."""
        return f"{self._prefix}{as_step(step):0{self.step_format_fixed_length or 0}d}"

    def find_all(self, base_path: PathLike) -> Iterator[CheckpointMetadata[None]]:
        """The committed checkpoints in a directory; none in one that does not exist."""
        found = storage.side_by_side(base_path, _described_or_none, self.find_named(base_path))
        yield from filter(None, found)

    def find_named(self, base_path: PathLike) -> Iterator[tuple[int, storage.AnyPath]]:
        """The directories that have the name of a step, whatever they are."""
        for entry in storage.entries_or_none(base_path):
            step = self._step_of(entry.name)
            if step is not None and entry.kind != "file":
                yield step, storage.as_path(os.path.join(base_path, entry.name))

    def find_step(self, base_path: PathLike, step: int) -> CheckpointMetadata[None]:
        """The committed checkpoint of a step."""
        path = storage.as_path(os.path.join(base_path, self.build_name(step)))
        if not step_records.is_committed(path):
            raise StepNotFoundError(
                f"there is no checkpoint '{path.name}' of step {step} in '{os.fspath(base_path)}'",
                step=step,
                path=os.fspath(path),
            )
        return _described(step, path)

    @property
    def _prefix(self) -> str:
        return "" if self.step_prefix is None else f"{self.step_prefix}_"

    def _step_of(self, name: str) -> int | None:
        """The step whose directory has this name."""
        length = self.step_format_fixed_length or 0
        digits = f"[0-9]{{{length}}}|[1-9][0-9]{{{length},}}" if length else "0|[1-9][0-9]*"
        match = re.fullmatch(f"{re.escape(self._prefix)}({digits})", name)
        return int(match[1]) if match else None


@dataclass(frozen=True)
class CompositeNameFormat:
    """Several formats to find steps by, one of them to name new ones; see `composite_name_format`."""

    write_name_format: NameFormat
    read_name_formats: Sequence[NameFormat]

    def __post_init__(self) -> None:
        require_type("read_name_formats", self.read_name_formats, (list, tuple), "a list of name formats")
        if self.write_name_format not in self.read_name_formats:
            raise InvalidInput(
                f"what {self.write_name_format} names could not be found again by {self}; "
                "put it into read_name_formats"
            )

    def __str__(self) -> str:
        return f"CompositeNameFormat([{', '.join(map(str, self.read_name_formats))}])"

    def build_name(self, step: int) -> str:
        """The name of the directory of a step."""
        return self.write_name_format.build_name(step)

    def find_all(self, base_path: PathLike) -> Iterator[CheckpointMetadata[None]]:
        """The committed checkpoints that any of the formats finds, each directory once."""
        seen = set()
        for name_format in self.read_name_formats:
            for found in name_format.find_all(base_path):
                if found.path not in seen:
                    seen.add(found.path)
                    yield found

    def find_named(self, base_path: PathLike) -> Iterator[tuple[int, storage.AnyPath]]:
        """What has the name of a step, as far as the formats tell, each directory once."""
        seen = set()
        for name_format in self.read_name_formats:
            for step, path in named_in(base_path, name_format):
                if path not in seen:
                    seen.add(path)
                    yield step, path

    def find_step(self, base_path: PathLike, step: int) -> CheckpointMetadata[None]:
        """The committed checkpoint of a step, by the first format that finds it."""
        problems = []
        for name_format in self.read_name_formats:
            try:
                return name_format.find_step(base_path, step)
            except (ValueError, OSError) as error:
                problems.append(error.message if isinstance(error, WaystationError) else str(error))
        raise StepNotFoundError("; ".join(problems), step=step, path=os.fspath(base_path))


def standard_name_format(
    *,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    single_host_load_and_broadcast: bool = False,
) -> NameFormat:
    """The format of common names: `23`, `0023`, `step_23` or `step_0023`.

    Args:
        step_prefix: What stands before the number, without the underscore that divides them.
        step_format_fixed_length: To how many digits zeros pad the number.
        single_host_load_and_broadcast: Has no effect: in a program of several processes it is always one
            that lists the steps, and tells the others.
    """
    return StandardNameFormat(step_prefix, step_format_fixed_length)


def composite_name_format(
    write_name_format: NameFormat, read_name_formats: Sequence[NameFormat]
) -> NameFormat:
    """Several formats to find steps by, and one to name new ones.

    Args:
        write_name_format: The one for new steps; has to be among the others.
        read_name_formats: Those by which steps are found. Where several find the same step, the first counts.

    Raises:
        InvalidInput: The format for new steps is not among the others.
    """
    return CompositeNameFormat(write_name_format, read_name_formats)


def named_in(base_path: PathLike, name_format: NameFormat) -> Iterator[tuple[int, storage.AnyPath]]:
    """What has the name of a step, committed or not; of other formats than ours, what is committed."""
    find_named = getattr(name_format, "find_named", None)
    if find_named is not None:
        yield from find_named(base_path)
        return
    for found in name_format.find_all(base_path):
        yield found.step, storage.as_path(found.path)


def _described_or_none(found: tuple[int, storage.AnyPath]) -> CheckpointMetadata[None] | None:
    """What is known of a step; None if it was not committed."""
    return _described(*found) if step_records.is_committed(found[1]) else None


def _described(step: int, path: storage.AnyPath) -> CheckpointMetadata[None]:
    """What is known of a step; of a damaged one, that it is there."""
    try:
        record = step_records.read(path)
    except WaystationError:
        return CheckpointMetadata(step, path, metadata=None)
    return CheckpointMetadata(
        step,
        path,
        metadata=None,
        init_timestamp_nsecs=record.init_ns,
        commit_timestamp_nsecs=record.commit_ns,
        custom_metadata=record.custom_metadata,
        metrics=record.metrics,
    )
