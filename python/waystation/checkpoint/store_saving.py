"""Saves to an object store: the primary makes one attempt there, and commits it.

Handlers write to a directory of this machine, a scratch, and what they have made there is uploaded. Of files
that several processes have made under one name, which have to be equal, one process uploads its own.

What can go wrong is as in `native_saving`, and what a killed primary leaves the next save to the same path
removes. There is nothing to sync: what a store has taken is durable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from waystation import storage
from waystation._errors import HandlerFailed
from waystation.checkpoint.native_saving import Writing
from waystation.checkpoint.paths import check_destination
from waystation.checkpoint.saving import Layout, Save, undone_on_error
from waystation.layouts.native import handler_files
from waystation.layouts.native.records import Digest, join_strings, split_strings
from waystation.storage.scratch import ScratchDirectory
from waystation.transfers.handle import Progress

# Of each file of a handler, by the name of the checkpointable and its own: what vouches for it, and which
# process uploads it.
_Shares = dict[str, dict[str, tuple[Digest, int]]]


class Attempt(Protocol):
    """One try at writing a checkpoint to a store; the object that begins it holds a lease."""

    @property
    def path(self) -> str:
        """Where all processes write."""
        ...

    def discard(self) -> None:
        """Removes all that it has made."""
        ...


A = TypeVar("A", bound=Attempt)


class StoreLayout(Layout, Protocol[A]):
    """A layout of objects in a store."""

    def begin_in_store(self, save: Save, *, overwrite: bool) -> A:
        """Begins the attempt, in the primary.

        Raises:
            Conflict, Unsupported: Nothing can be saved there.
        """
        ...

    def files_in_store(self, attempt_path: str, name: str) -> str:
        """The directory of the files of a handler."""
        ...

    def write(self, save: Save, writing: Writing) -> bytes:
        """See `FileLayout`."""
        ...

    def publish_in_store(
        self,
        save: Save,
        attempt: A,
        told: Sequence[bytes],
        made: Mapping[str, Mapping[str, Digest]],
        check: Callable[[], None],
    ) -> None:
        """Makes what has been written a checkpoint, and commits it.

        Args:
            save: The save.
            attempt: The attempt.
            told: What `write` has returned in each process.
            made: What vouches for the files of each handler.
            check: Called right before the commit; ends a save that was cancelled.
        """
        ...


class SharedStore(Generic[A]):
    """A store that all processes share.

    Args:
        layout: What is written there.
        overwrite: Whether a checkpoint there is replaced.
        on_set_aside: See `paths.check_destination`.
    """

    def __init__(
        self, layout: StoreLayout[A], *, overwrite: bool, on_set_aside: Callable[[str], None] | None = None
    ) -> None:
        self._layout = layout
        self._overwrite = overwrite
        self._on_set_aside = on_set_aside
        self._path = ""  # of the attempt, once that is there
        self._attempt: A | None = None  # in the process that has made it
        self._scratch = ScratchDirectory()  # in which handlers of this process put their files

    def begin(self, save: Save, checkpointables: Collection[str], check: Callable[[], None]) -> None:
        """See `Destination`."""
        save.begin(
            check,
            lambda: check_destination(
                save.target, overwrite=self._overwrite, on_set_aside=self._on_set_aside
            ),
        )

    def start(self, save: Save) -> str:
        """See `Destination`. Handlers need their scratch only; the attempt begins once earlier saves to the
        path have ended."""
        if not save.handlers:
            self._begin_attempt(save)
            return self._path

        def prepare() -> bytes:
            for name in save.handlers:
                storage.make_directory(self._scratch.below(name), parents=True)
            return b""

        save.session.round(prepare, lambda _: b"")
        return self._scratch.path

    def _begin_attempt(self, save: Save) -> None:
        def make(_: Sequence[bytes]) -> bytes:
            self._attempt = self._layout.begin_in_store(save, overwrite=self._overwrite)
            return os.fsencode(self._attempt.path)

        self._path = self._path or os.fsdecode(save.session.round(lambda: b"", make))

    def finish(self, save: Save, progress: Progress, on_copied_out: Callable[[], None]) -> None:
        """See `Destination`."""

        def write() -> bytes:
            return self._write(save, progress, on_copied_out)

        def commit(told: Sequence[bytes]) -> bytes:
            self._commit(save, progress, told, {})
            return b""

        with undone_on_error(self, save):
            self._begin_attempt(save)
            if save.handlers:
                self._finish_with_handlers(save, progress, write)
            else:
                save.session.round(write, commit)

    def _finish_with_handlers(self, save: Save, progress: Progress, write: Callable[[], bytes]) -> None:
        told: list[bytes] = []  # of states, in the primary

        def work() -> bytes:
            own = write()
            assert save.calls is not None, "they have been called"
            save.calls.finish()
            made = {name: handler_files.made(self._scratch.below(name), name) for name in save.handlers}
            return join_strings([own, _encode({name: _own(files) for name, files in made.items()})])

        def share_out(parts: Sequence[bytes]) -> bytes:
            states, made = zip(*map(split_strings, parts), strict=True)
            told.extend(states)
            return _encode(_shared_out([_decode(each) for each in made], save.target))

        shares = _decode(save.session.round(work, share_out))

        def upload() -> bytes:
            self._upload(save, progress, shares)
            return b""

        def commit(_: Sequence[bytes]) -> bytes:
            files = {
                name: {file: digest for file, (digest, _) in entries.items()}
                for name, entries in shares.items()
            }
            self._commit(save, progress, told, files)
            return b""

        save.session.round(upload, commit)

    def _write(self, save: Save, progress: Progress, on_copied_out: Callable[[], None]) -> bytes:
        """Writes the states, while handlers work."""
        if save.calls is not None:
            save.calls.start()
            progress.add(save.calls)
        told = self._layout.write(save, Writing(self._path, None, progress, on_copied_out, lambda: None))
        save.wrote()
        save.clock.synced_s = save.clock.written_s
        save.check_cancelled(progress)
        return told

    def _upload(self, save: Save, progress: Progress, shares: _Shares) -> None:
        own = {}
        for name, entries in shares.items():
            target = self._layout.files_in_store(self._path, name)
            for file, (_, process) in entries.items():
                if process == save.writer.process:
                    own[f"{target}/{file}"] = self._scratch.below(f"{name}/{file}")
        handler_files.upload(own, save.options, progress.add)
        save.clock.written_s = save.clock.synced_s = save.clock.now_s()
        save.check_cancelled(progress)

    def _commit(
        self,
        save: Save,
        progress: Progress,
        told: Sequence[bytes],
        files: Mapping[str, Mapping[str, Digest]],
    ) -> None:
        assert self._attempt is not None, "the primary has started the attempt"
        self._layout.publish_in_store(
            save, self._attempt, told, files, lambda: save.check_cancelled(progress)
        )

    def undo(self, save: Save) -> None:
        """Removes the attempt once every process has stopped writing to it, or cannot be waited for."""
        save.session.close_together()
        if self._attempt is not None:
            self._attempt.discard()

    def close(self) -> None:
        """See `Destination`."""
        self._scratch.remove()


def _own(files: Mapping[str, Digest]) -> dict[str, tuple[Digest, int]]:
    return {file: (digest, 0) for file, digest in files.items()}


def _shared_out(made: Sequence[_Shares], target: str) -> _Shares:
    """Which process uploads which file, given what each has made.

    Raises:
        HandlerFailed: Two have made one file, and not the same.
    """
    found: _Shares = {}
    for process, shares in enumerate(made):
        for name, entries in shares.items():
            own = found.setdefault(name, {})
            for file, (digest, _) in entries.items():
                other, first = own.setdefault(file, (digest, process))
                if other != digest:
                    raise HandlerFailed(
                        f"could not save checkpointable '{name}': its handler has made the file '{file}' in "
                        f"processes {first} and {process}, with different contents; in an object store each "
                        "process has a directory of its own, so have one process make it, or give it another "
                        "name in each",
                        path=target,
                        checkpointable=name,
                    )
    return found


def _encode(shares: _Shares) -> bytes:
    return json.dumps(
        {
            name: {file: [digest.nbytes, digest.crc64, process] for file, (digest, process) in own.items()}
            for name, own in shares.items()
        }
    ).encode()


def _decode(data: bytes) -> _Shares:
    return {
        name: {file: (Digest(nbytes, crc64), process) for file, (nbytes, crc64, process) in entries.items()}
        for name, entries in json.loads(data).items()
    }
