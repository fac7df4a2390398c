"""What a disk may hold after a power cut: everything that was made durable, and any part of the rest.

A model of a file system follows the calls of a process. Durable is what POSIX says: the content of a file
once it was synced, and the entries of a directory once that was. Everything else may have reached the disk
or not: each piece that was written by itself, the length of a file, and of each directory the changes up
to any one of them. A rename is one change; it is durable with the directory that it goes to. What file
systems promise beyond that (ext4's journal keeps the order of changes in all directories) is not relied on.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from torture.supervisor import WRITES, Told

_NO_REPLACE, _EXCHANGE = 1, 2
_PIECE = 4096


@dataclass(eq=False)
class _Node:
    """A file or a directory: as the process sees it, and as the disk has it."""

    is_directory: bool
    mode: int
    content: bytearray = field(default_factory=bytearray)
    entries: dict[str, _Node] = field(default_factory=dict)
    durable: bytes = b""
    durable_entries: dict[str, _Node] = field(default_factory=dict)
    target: str | None = None


@dataclass(eq=False)
class _Change:
    """A change of entries that is not durable yet.

    Attributes:
        directory: With which it becomes durable.
        nodes: Whose names change.
        apply: What it does to the entries of directories.
    """

    directory: _Node
    nodes: list[_Node]
    apply: Callable[[Callable[[_Node], dict[str, _Node]]], object]


@dataclass(frozen=True, eq=False)
class Image:
    """What a disk holds.

    Attributes:
        found: Path, file or directory, and content.
    """

    found: list[tuple[Path, _Node, bytes]]

    def digest(self) -> bytes:
        """Equal for disks that hold the same."""
        told = hashlib.blake2b(digest_size=16)
        for path, node, content in self.found:
            told.update(repr((path, node.is_directory, node.mode, node.target, len(content))).encode())
            told.update(content)
        return told.digest()

    def write(self, root: Path) -> None:
        """Makes a directory hold this and nothing else."""
        for left in root.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        for path, node, content in self.found:
            place = root / path
            if node.target is not None:
                place.symlink_to(node.target)
            elif node.is_directory:
                place.mkdir()
                place.chmod(node.mode | 0o700)
            else:
                place.write_bytes(content)
                place.chmod(node.mode | 0o600)


class Disk:
    """Follows a process that works in a directory."""

    def __init__(self, root: Path) -> None:
        self._root = _read(root)
        self._changes: list[_Change] = []

    def observe(self, told: Told) -> None:
        """Takes up a call that is about to be made."""
        name = told.name
        if name in WRITES:
            self._write(told)
        elif name in _HANDLERS:
            _HANDLERS[name](self, told)

    def image(self, chance: random.Random, how: str) -> Image:
        """What the disk holds after a power cut.

        Args:
            chance: By which it is decided what has reached the disk.
            how: `nothing` of what is not durable has, only the `entries` of directories have, or `some` has.
        """
        changes: list[_Change] = []
        if how == "entries":
            changes = self._changes
        elif how == "some":
            changes = self._drawn(chance)
        found: dict[int, dict[str, _Node]] = {}
        nodes: dict[int, _Node] = {}

        def entries(node: _Node) -> dict[str, _Node]:
            nodes[id(node)] = node  # so that no other gets its id
            return found.setdefault(id(node), dict(node.durable_entries))

        for change in changes:
            change.apply(entries)
        return Image(list(_listed(self._root, Path(), entries, lambda node: _content(node, chance, how))))

    def leave(self, root: Path, chance: random.Random, how: str) -> None:
        """Makes a directory what the disk holds after a power cut."""
        self.image(chance, how).write(root)

    def _drawn(self, chance: random.Random) -> list[_Change]:
        """Of each directory the changes up to one of them."""
        waiting: dict[int, list[_Change]] = {}
        for change in self._changes:
            waiting.setdefault(id(change.directory), []).append(change)
        drawn = [
            change for changes in waiting.values() for change in changes[: chance.randint(0, len(changes))]
        ]
        return self._with_what_they_need(lambda change: change in drawn)

    # --- calls ------------------------------------------------------------------------------------

    def _find(self, path: str) -> _Node | None:
        node = self._root
        for part in PurePosixPath(path).parts[1:]:
            found = node.entries.get(part)
            if found is None:
                return None
            node = found
        return node

    def _parent(self, path: str) -> tuple[_Node | None, str]:
        where = PurePosixPath(path)
        return self._find(str(where.parent)), where.name

    def _change(
        self,
        directory: _Node,
        nodes: list[_Node],
        apply: Callable[[Callable[[_Node], dict[str, _Node]]], object],
    ) -> None:
        apply(lambda node: node.entries)
        self._changes.append(_Change(directory, nodes, apply))

    def _with_what_they_need(self, wanted: Callable[[_Change], bool]) -> list[_Change]:
        """The changes that are wanted, and the earlier ones of the same files: a file has one name at a
        time."""
        found: list[_Change] = []
        nodes: set[int] = set()
        for change in reversed(self._changes):
            own = {id(node) for node in change.nodes}
            if wanted(change) or nodes & own:
                nodes |= own
                found.append(change)
        return found[::-1]

    def _write(self, told: Told) -> None:
        node = self._find(told.paths[0])
        if node is None:
            return
        position, flags = told.position()
        if told.name.startswith("p"):
            position = told.arguments[3]
        elif flags & os.O_APPEND:
            position = len(node.content)
        data = told.written()
        node.content.extend(bytes(max(0, position - len(node.content))))
        node.content[position : position + len(data)] = data

    def _open(self, told: Told) -> None:
        flags = told.arguments[2 if told.name == "openat" else 1]
        parent, name = self._parent(told.paths[0])
        if parent is None:
            return
        node = parent.entries.get(name)
        if node is None and flags & os.O_CREAT:
            made = _Node(False, told.arguments[3 if told.name == "openat" else 2] & 0o7777)
            self._change(parent, [made], lambda entries: entries(parent).__setitem__(name, made))
        elif node is not None and flags & os.O_TRUNC:
            node.content.clear()

    def _make_directory(self, told: Told) -> None:
        parent, name = self._parent(told.paths[0])
        if parent is not None and name and name not in parent.entries:  # the root has no name
            made = _Node(True, told.arguments[2 if told.name == "mkdirat" else 1] & 0o7777)
            self._change(parent, [made], lambda entries: entries(parent).__setitem__(name, made))

    def _remove(self, told: Told) -> None:
        parent, name = self._parent(told.paths[0])
        node = None if parent is None else parent.entries.get(name)
        if parent is None or node is None or node.entries:
            return
        self._change(parent, [node], lambda entries: entries(parent).pop(name, None))

    def _rename(self, told: Told) -> None:
        (old, old_name), (new, new_name) = map(self._parent, told.paths)
        flags = told.arguments[4] if told.name == "renameat2" else 0
        node = None if old is None else old.entries.get(old_name)
        if old is None or new is None or node is None:
            return
        replaced = new.entries.get(new_name)
        if replaced is not None and (flags & _NO_REPLACE or (replaced.entries and not flags & _EXCHANGE)):
            return
        if flags & _EXCHANGE and replaced is None:
            return

        def apply(entries: Callable[[_Node], dict[str, _Node]]) -> None:
            entries(old).pop(old_name, None)
            entries(new)[new_name] = node
            if flags & _EXCHANGE and replaced is not None:
                entries(old)[old_name] = replaced

        self._change(new, [node] if replaced is None else [node, replaced], apply)

    def _link(self, told: Told) -> None:
        node = self._find(told.paths[0])
        parent, name = self._parent(told.paths[-1])
        if node is not None and parent is not None and name not in parent.entries:
            self._change(parent, [node], lambda entries: entries(parent).__setitem__(name, node))

    def _resize(self, told: Told) -> None:
        node = self._find(told.paths[0])
        if node is not None:
            size = told.arguments[1]
            del node.content[size:]
            node.content.extend(bytes(size - len(node.content)))

    def _allocate(self, told: Told) -> None:
        node = self._find(told.paths[0])
        mode, offset, nbytes = told.arguments[1:4]
        if node is not None and mode == 0:
            node.content.extend(bytes(max(0, offset + nbytes - len(node.content))))

    def _sync(self, told: Told) -> None:
        node = self._find(told.paths[0])
        if node is not None:
            self._make_durable(node)

    def _make_durable(self, node: _Node) -> None:
        if not node.is_directory:
            node.durable = bytes(node.content)
            return
        durable = self._with_what_they_need(lambda change: change.directory is node)
        for change in durable:
            change.apply(lambda each: each.durable_entries)
        self._changes = [change for change in self._changes if change not in durable]

    def _sync_all(self, _: Told) -> None:
        for change in self._changes:
            change.apply(lambda each: each.durable_entries)
        self._changes.clear()
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            node.durable = bytes(node.content)
            waiting += node.entries.values()


_HANDLERS: dict[str, Callable[[Disk, Told], None]] = {
    **dict.fromkeys(("open", "openat", "creat"), Disk._open),
    **dict.fromkeys(("mkdir", "mkdirat"), Disk._make_directory),
    **dict.fromkeys(("rmdir", "unlink", "unlinkat"), Disk._remove),
    **dict.fromkeys(("rename", "renameat", "renameat2"), Disk._rename),
    **dict.fromkeys(("link", "linkat"), Disk._link),
    **dict.fromkeys(("truncate", "ftruncate"), Disk._resize),
    **dict.fromkeys(("fsync", "fdatasync"), Disk._sync),
    "fallocate": Disk._allocate,
    "syncfs": Disk._sync_all,
}


def _content(node: _Node, chance: random.Random, how: str) -> bytes:
    """What a file has on the disk."""
    if bytes(node.content) == node.durable or how == "nothing":
        return node.durable
    if how == "entries":
        # The length is part of what a journal has; what was not written there are zeros.
        return bytes(len(node.content)) if chance.random() < 0.5 else node.durable
    found = bytearray(node.durable)
    size = chance.choice([len(node.durable), len(node.content)])
    del found[size:]
    found.extend(bytes(size - len(found)))
    for begin in range(0, size, _PIECE):
        if chance.random() < 0.5:
            end = min(size, begin + _PIECE)
            piece = bytes(node.content[begin:end])
            found[begin : begin + len(piece)] = piece
    return bytes(found)


def _read(path: Path) -> _Node:
    """A directory that is as it is on the disk."""
    mode = path.lstat().st_mode
    if path.is_symlink():
        return _Node(False, stat.S_IMODE(mode), target=os.readlink(path))
    if path.is_dir():
        entries = {each.name: _read(each) for each in path.iterdir()}
        return _Node(True, stat.S_IMODE(mode), entries=entries, durable_entries=dict(entries))
    content = path.read_bytes()
    return _Node(False, stat.S_IMODE(mode), bytearray(content), durable=content)


def _listed(
    node: _Node,
    path: Path,
    entries: Callable[[_Node], dict[str, _Node]],
    content: Callable[[_Node], bytes],
) -> Iterator[tuple[Path, _Node, bytes]]:
    """What is below a directory: each with its content, directories before what is in them."""
    for name, child in entries(node).items():
        place = path / name
        yield place, child, b"" if child.is_directory or child.target is not None else content(child)
        if child.is_directory:
            yield from _listed(child, place, entries, content)
