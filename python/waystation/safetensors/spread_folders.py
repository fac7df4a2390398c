"""The folders on several disks that a model is spread over, and how it comes to stand there.

The first folder is the model: it has the index, files of its own, and a symbolic link to each file in
another folder, under the same name. The others hold nothing but files. A note in the first,
`spread.waystation.json`, lists what belongs to it.

Everything is written into hidden directories, one on each disk, made durable and compared with what was
read. Then the files move into the other folders, and the hidden directory of the first, which has links,
index and note by then, becomes the first folder in one act; to overwrite, the two exchange places. Failure
sequence: killed while writing, hidden directories are left; killed after files have moved, these are left,
and the hidden directory has the note that lists them; killed after the commit, it holds the earlier model,
whose note lists that one's files. So whoever finds the hidden directory of a dead process removes the files
that its note lists, and then the directory. Invariants: no file is removed that is not on such a list with
its inode, length and time, nor by the list in a copy of that directory; a reader of the first folder finds
the earlier model, the new one, or nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from waystation import _forks, _native, storage
from waystation._errors import Conflict, DiskFull, InvalidInput, NotFound, WaystationError
from waystation.safetensors.checksums import FILE_NAME
from waystation.safetensors.destination import ALTERNATE
from waystation.safetensors.replacing import index_name, one_name
from waystation.safetensors.sources import checkpoint_of
from waystation.safetensors.spread_note import NOTE, Note, Part, discard, key_of, paths_below, read_note
from waystation.storage import attempts, disks, write_lock

STEM = "model"

_STAGE = "spread"  # what names of hidden directories have, so that saves do not take them for theirs
_OF_MODELS = re.compile(
    rf"{STEM}({re.escape(ALTERNATE)}\d*)?(-\d{{5,}}-of-\d{{5,}})?\.safetensors(\.index\.json)?"
)
_ALLOWED = {FILE_NAME, NOTE, storage.names.WRITER, storage.names.WRITER_REMOVAL}

_log = logging.getLogger("waystation")


# ---- the folders -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placed:
    """A file that was written.

    Attributes:
        folder: The number of its folder.
        staged: Where it was written.
    """

    folder: int
    staged: str


class Folders:
    """Folders that a model is to be spread over.

    Args:
        paths: The folders, absolute; the first is to be the model.
        overwrite: Replace an earlier model that was spread.
        relative_links: Whether links are to be relative.

    Attributes:
        paths: The folders; the first without links in its own name.

    Raises (on creation):
        InvalidInput: A folder cannot be one.
        NotFound: What it is to be in is not there.
        Conflict: Something is there that would be in the way.
    """

    def __init__(self, paths: Sequence[str], *, overwrite: bool, relative_links: bool) -> None:
        self._overwrite = overwrite
        self._relative_links = relative_links
        first = storage.status(paths[0], follow_links=False)
        is_link = first is not None and first.kind == "link"
        self.paths: list[str] = [storage.resolved(paths[0]) if is_link else paths[0], *paths[1:]]
        self._check_paths()
        self._remove_dead()
        self._earlier = self._check_first()
        self._check_others()

    @property
    def place(self) -> str:
        """The folder that is the model."""
        return self.paths[0]

    @property
    def earlier_parts(self) -> tuple[Part, ...]:
        """The files in other folders of the model that is replaced, and of no other."""
        return () if self._earlier is None else self._earlier.owned_parts(self.place)

    def _check_paths(self) -> None:
        whole = [storage.resolved(path) for path in self.paths]
        for number, path in enumerate(whole):
            for other in range(number):
                if path == whole[other]:
                    raise InvalidInput(
                        f"'{self.paths[number]}' was given twice; give one folder on each disk", path=path
                    )
                for inner, outer in ((path, whole[other]), (whole[other], path)):
                    if storage.is_within(inner, outer):
                        raise InvalidInput(
                            f"'{inner}' is inside of '{outer}'; give folders beside each other",
                            path=inner,
                        )
        for path in self.paths:
            parent = os.path.dirname(path)
            found = storage.status(path)
            if found is None and not storage.is_directory(parent):
                raise NotFound(
                    f"there is no directory '{parent}' for the folder '{os.path.basename(path)}'; mount the "
                    "disk, or make the directory",
                    path=parent,
                )
            target = None if found is not None else disks.link_target(path)
            if target is not None:
                raise InvalidInput(
                    f"'{path}' is a link to '{target}', where nothing is; give a directory", path=path
                )
            if found is not None and found.kind != "directory":
                raise InvalidInput(f"'{path}' is not a directory", path=path)
            if checkpoint_of(path) is not None:
                raise InvalidInput(f"'{path}' is (in) a checkpoint; give another folder", path=path)

    def _remove_dead(self) -> None:
        """Removes what dead processes have left."""
        for stage in attempts.export_stages(os.path.dirname(self.place)):
            if stage.target == self._stage_stem(0) and stage.is_over:
                try:
                    attempts.remove(stage, discard)
                except WaystationError as error:
                    _log.warning("a dead attempt could not be removed: %s", error)
        for number, path in enumerate(self.paths[1:], 1):
            if storage.is_directory(path):
                attempts.remove_dead_exports(path, self._stage_stem(number))

    def _check_first(self) -> Note | None:
        """What stands in the first folder, if it may be replaced."""
        place = self.place
        names = set(paths_below(place)) if storage.is_directory(place) else set()
        if storage.is_directory(place) and disks.is_mount_point(place):
            raise InvalidInput(
                f"'{place}' is where a disk is mounted, and the first folder has to appear at once; give a "
                f"folder in it, such as '{os.path.join(place, STEM)}'",
                path=place,
            )
        if not names:
            return None
        note = read_note(place)
        if note is None:
            raise Conflict(
                f"'{place}' holds files already ('{min(names)}' is one); give a first folder that does not "
                "exist yet or is empty",
                path=place,
            )
        if not self._overwrite:
            raise Conflict(
                f"'{place}' holds a model that was spread already; overwrite it (--overwrite, "
                "overwrite=True), or choose other folders",
                path=place,
            )
        strays = names - note.names - _ALLOWED
        if strays:
            raise Conflict(
                f"'{os.path.join(place, min(strays))}' is no part of the model that was spread to that "
                "folder, which is replaced as a whole; move it to elsewhere first",
                path=place,
            )
        return note

    def _check_others(self) -> None:
        known = {part.key for part in self.earlier_parts}
        for path in self.paths[1:]:
            for entry in storage.entries_or_none(path):
                if not _OF_MODELS.fullmatch(entry.name):
                    continue
                file = os.path.join(path, entry.name)
                found = storage.status(file, follow_links=False)
                if found is not None and key_of(found.identity) not in known:
                    raise Conflict(
                        f"'{file}' is in the way: it is no part of a model at '{self.place}'; give another "
                        "folder, or remove the file if no model uses it any more",
                        path=file,
                    )

    def check_source(self, files: Sequence[str], directory: str | None) -> None:
        """Refuses folders within the model that is spread, and a model that is replaced by a part of it.

        Args:
            files: The files that are read, of this system.
            directory: The model's own, if all of it is spread.
        """
        whole = list(map(storage.resolved, files))
        if directory is not None:
            for path in self.paths:
                inner, outer = storage.resolved(path), storage.resolved(directory)
                if inner != outer and storage.is_within(inner, outer):
                    raise InvalidInput(
                        f"'{path}' is inside of the model's directory '{directory}'; give folders beside it",
                        path=path,
                    )
        if self._earlier is None or (
            directory is not None and storage.is_same_directory(directory, self.place)
        ):
            return
        replaced = {storage.resolved(part.path) for part in self.earlier_parts}
        for file in whole:
            if file in replaced or os.path.dirname(file) == storage.resolved(self.place):
                raise InvalidInput(
                    f"'{file}' belongs to the model that is to be replaced; give all of that model, "
                    f"'{self.place}'",
                    path=file,
                )

    def on_one_disk(self, used: Sequence[int]) -> list[tuple[str, str]]:
        """Pairs of folders that are on one disk."""
        found: dict[str, str] = {}
        pairs = []
        for number in used:
            path = self.paths[number]
            other = found.setdefault(disks.disk_of(disks.nearest_directory(path)), path)
            if other != path:
                pairs.append((other, path))
        return pairs

    def check_room(self, needed_bytes: Mapping[int, int]) -> None:
        """Raises DiskFull if a file system has too little room for what goes to its folders."""
        by_device: dict[int, list[int]] = {}
        for number in needed_bytes:
            found = storage.status(disks.nearest_directory(self.paths[number]))
            by_device.setdefault(-1 if found is None else found.identity.device, []).append(number)
        for numbers in by_device.values():
            directory = disks.nearest_directory(self.paths[numbers[0]])
            needed = sum(needed_bytes[number] for number in numbers)
            free = storage.of(directory).free_bytes(directory)
            if free is not None and free < needed:
                paths = ", ".join(f"'{self.paths[number]}'" for number in numbers)
                raise DiskFull(
                    f"the file system of {paths} has {free:,} bytes of room, and {needed:,} are needed; "
                    "nothing was written. Free some, or give more disks",
                    path=self.paths[numbers[0]],
                    needed_bytes=needed,
                    free_bytes=free,
                )

    # ---- hidden directories --------------------------------------------------------------------

    def _stage_stem(self, number: int) -> str:
        return f"{os.path.basename(self.place) if number == 0 else STEM}.{_STAGE}"

    def _stage(self, number: int, attempt_id: str) -> str:
        parent = os.path.dirname(self.place) if number == 0 else self.paths[number]
        return os.path.join(parent, storage.names.export_stage(self._stage_stem(number), attempt_id))

    @contextlib.contextmanager
    def staged(self, used: Sequence[int]) -> Iterator[Stages]:
        """Makes a hidden directory for each folder that is used; at the end none of them is left.

        What was not committed is gone then as well, and so is what was replaced.
        """
        attempt_id = attempts.new_attempt_id()
        paths = {number: self._stage(number, attempt_id) for number in used}
        made = []
        owner = _forks.Owner()
        try:
            for number, stage in paths.items():
                if number > 0 and not storage.is_directory(self.paths[number]):
                    made.append(self.paths[number])
                    storage.make_directory(self.paths[number])
                storage.make_directory(stage)
            yield Stages(self, paths)
        finally:
            if owner.is_here:  # and not a child that was forked meanwhile
                for number, stage in paths.items():
                    if number > 0:
                        storage.remove_tree(stage)
                if storage.is_directory(paths[0]):
                    discard(paths[0])
                for path in made:
                    disks.remove_if_empty(path)

    def names(self, count: int) -> list[str]:
        """Names for so many files that nothing in the folders has."""
        if count == 1:
            return [one_name(STEM)]
        taken = {entry.name for path in self.paths[1:] for entry in storage.entries_or_none(path)}
        stems = (f"{STEM}{ALTERNATE}{number or ''}" for number in itertools.count())
        sets = (
            [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
            for stem in itertools.chain([STEM], stems)
        )
        return next(names for names in sets if taken.isdisjoint(names))

    def link_to(self, number: int, name: str) -> str:
        """What a link in the first folder says of a file in another."""
        target = os.path.join(self.paths[number], name)
        if not self._relative_links:
            return target
        return os.path.relpath(storage.resolved(target), storage.resolved(self.place))

    def appear(self, stage: str) -> None:
        """Makes a hidden directory the first folder, in one act. What was there is the hidden one then."""
        renames = storage.renames(self.place)
        if self._earlier is not None:
            self._check_first()  # once more: others may have put something there
            renames.exchange(stage, self.place)
        else:
            try:
                if storage.is_directory(self.place):
                    renames.over(stage, self.place)  # unless something is in it
                else:
                    renames.new(stage, self.place)
            except Conflict as error:
                raise Conflict(
                    f"'{self.place}' appeared meanwhile; it was left alone", path=self.place
                ) from error
        _native.sync_paths([os.path.dirname(self.place)])


@dataclass(frozen=True, slots=True)
class Stages:
    """The hidden directories.

    Attributes:
        folders: What they are for.
        paths: By the number of the folder.
    """

    folders: Folders
    paths: Mapping[int, str]

    def publish(
        self,
        files: Sequence[Placed],
        index_of: Callable[[Sequence[str]], bytes],
        finish: Callable[[str, Sequence[str]], None],
    ) -> list[str]:
        """Commits files that are durable; returns their names.

        Args:
            files: They, and with them what else is in the hidden directory of the first folder.
            index_of: Gives the index for the names of the files.
            finish: Writes what else depends on the names into the directory.
        """
        others = sorted({path for path in map(self._folder_of, files) if path is not None})
        with contextlib.ExitStack() as locks:
            for path in others:  # names are chosen by what is there, so one after the other
                locks.enter_context(write_lock.held(path))
            return self._publish(files, others, index_of, finish)

    def _folder_of(self, file: Placed) -> str | None:
        """The folder that a file is to be in, unless that is the first."""
        return self.folders.paths[file.folder] if file.folder > 0 else None

    def _publish(
        self,
        files: Sequence[Placed],
        others: Sequence[str],
        index_of: Callable[[Sequence[str]], bytes],
        finish: Callable[[str, Sequence[str]], None],
    ) -> list[str]:
        folders, stage = self.folders, self.paths[0]
        names = folders.names(len(files))
        moves: list[tuple[str, str]] = []
        for file, name in zip(files, names, strict=True):
            if file.folder > 0:
                disks.make_link(os.path.join(stage, name), folders.link_to(file.folder, name))
                moves.append((file.staged, os.path.join(folders.paths[file.folder], name)))
            elif os.path.basename(file.staged) != name:
                storage.renames(stage).new(file.staged, os.path.join(stage, name))
        if len(files) > 1:
            _native.write_small_files([(os.path.join(stage, index_name(STEM)), index_of(names))])
        finish(stage, names)
        # Relative where links are: the folders may be found elsewhere together then.
        links = [
            folders.link_to(file.folder, name) for file, name in zip(files, names, strict=True) if file.folder
        ]
        parts = [Part.of(target, staged) for staged, target in moves]
        note = Note.of(stage, [part.at(link) for part, link in zip(parts, links, strict=True)])
        path = os.path.join(stage, NOTE)
        storage.of(path).replace(path, note.encoded(), attempts.new_attempt_id())  # whole, or not there
        _native.sync_paths([stage])
        for staged, target in moves:
            storage.renames(target).new(staged, target)
        _native.sync_paths([*others, *sorted({os.path.dirname(path) for path in others})])
        folders.appear(stage)
        return names
