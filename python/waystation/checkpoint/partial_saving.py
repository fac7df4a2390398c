"""Saves of parts, one after another, that become one checkpoint at the end.

Each part is a checkpoint of its own, committed as any other, in a directory beside the place where the whole
will be (`<name>.partial_save/000000`, …). `finalize` joins them in an attempt at the whole, which has
the data files of all by further names, and commits that.

What can go wrong, in order: killed while a part is saved: the parts before it are whole, and the program goes
on from there. Killed while the whole is put together: likewise; the attempt is as dead as its owner, and the
next save or `finalize` removes it. Killed after the commit, before the parts are gone: the whole is there,
and the next `finalize` or part sees by their files that they are its own, and removes them. At no time is
there half of anything at the path. A part that is saved beside `finalize` is joined, or its save fails: both
commit under the lock of the directory of parts.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from waystation import _forks, storage
from waystation._errors import Conflict, InvalidInput, NotFound, Unsupported
from waystation._options import Options
from waystation._options.in_effect import current_options
from waystation.checkpoint import sessions
from waystation.checkpoint.handlers.choice import STATE
from waystation.checkpoint.joining import Part, open_part, write_whole
from waystation.checkpoint.native_saving import FileLayout, NativeLayout, SharedStorage
from waystation.checkpoint.paths import PathLike, check_destination, is_checkpoint, resolve
from waystation.checkpoint.save import in_background
from waystation.checkpoint.saving import Saving
from waystation.layouts.native import commit, names
from waystation.layouts.native.assemble import join_structures
from waystation.storage import leases, write_lock
from waystation.storage.attempts import Attempt, remove_dead
from waystation.transfers.handle import AsyncResponse, Progress
from waystation.tree import Structure

_DIGITS = 6  # of the number of a part


def save(path: PathLike, state: Any, *, custom_metadata: Any = None) -> None:
    """Saves a part of a state, to be joined with others by `finalize`.

    Nothing is at `path` until then. A part adds what the parts before it do not have: two of them may have
    the same dicts, with other keys.

    Args:
        path: Where the checkpoint will be.
        state: The part: dicts with anything in them that `waystation.save` takes.
        custom_metadata: A JSON object; the whole has the members of all, later ones before earlier.

    Raises:
        Conflict: There is a checkpoint at `path`, or an earlier part has something of this one.
        InvalidInput, Unsupported, Unavailable: As `waystation.save`.
    """
    with _open(path) as saving:
        saving.begin({STATE: state}, _checked(custom_metadata), is_state=True)
        saving.prepare({STATE: state})
        saving.finish(Progress())
    saving.report()


def save_async(path: PathLike, state: Any, *, custom_metadata: Any = None) -> AsyncResponse[None]:
    """Saves a part in the background, as `save` does.

    Parts come one after another: this first waits until an earlier one for the same path has been saved.
    """
    saving = _open(path)
    final = saving.target  # of the whole; that of the part is known once it has begun
    response = in_background(saving, {STATE: state}, _checked(custom_metadata), is_state=True)
    _running.add(final, response)
    return response


def finalize(path: PathLike) -> None:
    """Makes one checkpoint of all parts that have been saved for `path`; all processes call it.

    Raises:
        NotFound: No part has been saved for it.
        Conflict: Something is at `path`.
    """
    options = _checked_options(current_options())
    final = _final(resolve(path))
    _running.wait(final)
    session = sessions.open_session(f"finalize '{final}'", options)
    try:
        session.broadcast(lambda: _finalize(final, options))
    finally:
        session.close()


def _finalize(final: str, options: Options) -> bytes:
    """What the primary does."""
    parent, name = os.path.split(final)
    remove_dead(parent, name)
    _check_place(final)
    with contextlib.suppress(_NoParts), _locked_parts(final):
        parts = _open_parts(final)
        if parts:
            attempt = Attempt(final, options.file.path_permission_mode)
            try:
                write_whole(attempt, parts, begun_ns=parts[0][0].begun_ns)
                commit.publish_new(attempt)
            except BaseException:
                attempt.discard()
                raise
            storage.remove_tree(names.partial(final))
            return b""
    raise NotFound(
        f"no part has been saved for '{final}': call partial.save with this path first", path=final
    )


class _PlaceOfPart:
    """Where the next part of a whole goes.

    Args:
        final: Where the whole will be.
    """

    replaces = False

    def __init__(self, final: str) -> None:
        self._final = final
        self._parts: list[Part] = []

    def check(self, checkpointables: Collection[str]) -> str:
        """Looks at what is there; returns the place of the part."""
        _check_place(self._final)
        self._parts = _open_parts(self._final)
        return _place(self._final, len(self._parts))

    def check_structure(self, structure: Structure) -> None:
        """Refuses what earlier parts have, in the primary, which alone knows these."""
        join_structures([*(opened.tree.structure for _, opened in self._parts), structure])

    def publish(self, attempt: Attempt, layout: FileLayout) -> None:
        """Commits the part, unless the parts have been joined."""
        with contextlib.suppress(_NoParts), _locked_parts(self._final):
            if not is_checkpoint(self._final):
                commit.publish_new(attempt)
                return
        raise Conflict(
            f"'{self._final}' was finalized while a part of it was saved, and does not have the part; save "
            "it as a checkpoint of its own",
            path=self._final,
        )


def _open(path: PathLike) -> Saving:
    options = _checked_options(current_options())
    final = _final(resolve(path))
    _running.wait(final)
    deadline_s = min(options.multiprocessing.deadline_s, options.asynchronous.timeout_secs)
    place = _PlaceOfPart(final)
    layout = NativeLayout(place.check_structure)
    destination = SharedStorage(place, layout)
    return Saving(final, options, layout, destination, deadline_s=deadline_s, begun_ns=time.time_ns())


def _checked_options(options: Options) -> Options:
    if options.multiprocessing.primary_host is None:
        raise Unsupported(
            "parts cannot be saved to local storage (multiprocessing.primary_host = None); save the whole "
            "state, or set primary_host to a process to save to storage that all share"
        )
    if options.array.saving.use_ocdbt is not None:
        raise Unsupported(
            "parts are saved in the native layout only; leave array.saving.use_ocdbt as it is (None), or "
            "save the whole state"
        )
    return options


def _checked(custom_metadata: Any) -> Any:
    if custom_metadata is not None and not isinstance(custom_metadata, dict):
        raise InvalidInput(f"custom_metadata must be a JSON object or None, not {custom_metadata!r:.60}")
    return custom_metadata


class _NoParts(Exception):
    """There is no directory of parts."""


@contextlib.contextmanager
def _locked_parts(final: str) -> Iterator[None]:
    """Keeps parts from being committed while others are joined, with which they would be removed.

    Raises:
        _NoParts: There are none any more.
        Conflict: Another process joins them, or commits one, for too long.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(write_lock.held(names.partial(final)))
        except NotFound as error:
            raise _NoParts from error
        yield


def _final(path: str) -> str:
    """The path of the whole, by that or by the directory of the parts."""
    return names.whole(path) or path


def _place(final: str, number: int) -> str:
    return os.path.join(names.partial(final), f"{number:0{_DIGITS}}")


def _check_place(final: str) -> None:
    if is_checkpoint(final):
        _remove_leftover(final)
    check_destination(final, overwrite=False)
    _check_parts(final)


def _remove_leftover(final: str) -> None:
    """Removes the parts of a whole whose process was killed right after the commit: they share files."""
    directory = os.path.join(final, STATE)
    with contextlib.suppress(OSError):
        own = [os.path.join(directory, name) for name in storage.list_names(directory)]
        others = [path for _, part in _open_parts(final) for path in part.paths()]
        if set(_inodes(own)) & set(_inodes(others)):
            storage.remove_tree(names.partial(final))


def _inodes(paths: Iterable[str]) -> Iterator[tuple[int, int]]:
    for found in filter(None, map(storage.status, paths)):
        yield found.identity.device, found.identity.inode


def _check_parts(final: str) -> None:
    """Refuses parts that another library has saved, as Orbax gives their directory the same name."""
    directory = names.partial(final)
    names_in = [entry.name for entry in storage.entries_or_none(directory)]
    others = [name for name in leases.without_marks(names_in) if not _is_part(name)]
    if others:
        raise Conflict(
            f"'{directory}' holds parts that Waystation has not saved, such as '{others[0]}'; finalize "
            "them with the library that has, or choose another path",
            path=directory,
        )


def _is_part(name: str) -> bool:
    """Whether a name is that of a part, or of an attempt at one."""
    part = storage.names.attempt_target(name) or name
    return len(part) == _DIGITS and part.isascii() and part.isdecimal()


def _open_parts(final: str) -> list[Part]:
    """The parts that have been saved, in order."""
    found: list[Part] = []
    while is_checkpoint(place := _place(final, len(found))):
        found.append(open_part(place))
    return found


class _Running:
    """Parts that are being saved in the background, by the path of the whole."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: dict[str, threading.Event] = {}
        self._in_parent: dict[str, int] = {}  # the process, of what it was saving when it was forked
        self._process_id = os.getpid()
        _forks.watch(self)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`."""
        self._lock = threading.Lock()
        going_on = [final for final, ended in self._ended.items() if not ended.is_set()]
        self._in_parent.update(dict.fromkeys(going_on, self._process_id))
        self._ended = {}
        self._process_id = os.getpid()

    def add(self, final: str, response: AsyncResponse[None]) -> None:
        """Remembers one until it has ended."""
        ended = threading.Event()
        with self._lock:
            self._ended[final] = ended
        response.on_end(lambda _: ended.set())

    def wait(self, final: str) -> None:
        """Waits until none is running for a path; how they end, their own handles say.

        Raises:
            InvalidInput: One runs in the parent of this process.
        """
        if final in self._in_parent:
            what = f"a part of '{final}' that is being saved"
            raise _forks.not_of_this_process(what, self._in_parent[final], "save the rest there")
        with self._lock:
            ended = self._ended.pop(final, None)
        if ended is not None:
            ended.wait()


_running = _Running()
