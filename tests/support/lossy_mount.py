"""A file system in memory, by FUSE, that loses files, and tells the descriptor that wrote them.

    python lossy_mount.py DIRECTORY PATTERN TOLD BEHIND_S

mounts it until the directory is unmounted. Its clock is behind that of the machine. A file whose name matches
the pattern is emptied by a close of a descriptor that has written. By `TOLD`, with EIO:

- `close`: that close fails, as on network file systems whose server has no room, or is gone.
- `sync`: a sync of that descriptor would have failed before. Those of others succeed, as everywhere on Linux
  where write-back has failed and somebody was told.

Tests use `mounted`.
"""

from __future__ import annotations

import ctypes
import errno
import fnmatch
import itertools
import os
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import pytest

MOUNTED = "mounted\n"
REQUEST_BYTES = (1 << 20) + 4096
WRITE_BYTES = 128 << 10
ROOT = 1
HEADER = struct.Struct("=IIQQIIII")
ATTRIBUTES = struct.Struct("=6Q10I")
SIZE_IS_SET, MODE_IS_SET = 1 << 3, 1 << 0
EXCHANGE, NO_REPLACE = 2, 1


@contextmanager
def mounted(
    place: Path, pattern: str, told: Literal["close", "sync"] = "close", behind_s: int = 0
) -> Iterator[Path]:
    """Such a file system, or a skipped test where the system mounts none."""
    place.mkdir()
    # A file outside the package is run by its path, so that the server imports nothing of the tests.
    command = [sys.executable, __file__, str(place), pattern, told, str(behind_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        try:
            if (said := server.stdout.readline()) != MOUNTED:
                reason = (said + server.stdout.read()).strip()[-200:]
                pytest.skip(f"needs the right to mount a FUSE file system: {reason}")
            yield place
        finally:
            subprocess.run(["umount", "--lazy", place], check=False, capture_output=True)
            server.kill()


def now_s() -> int:
    """The time of the file system."""
    return int(time.time()) - Server.behind_s


@dataclass(slots=True)
class Node:
    """A file or directory."""

    number: int
    mode: int
    name: str = ""
    content: bytearray = field(default_factory=bytearray)
    children: dict[str, Node] = field(default_factory=dict)
    changed_s: int = field(default_factory=now_s)

    @property
    def is_directory(self) -> bool:
        """Which of both it is."""
        return stat.S_ISDIR(self.mode)

    def attributes(self) -> bytes:
        """As the kernel takes them."""
        size, seconds = len(self.content), self.changed_s
        numbers = (self.number, size, -(-size // 512), seconds, seconds, seconds, 0, 0, 0, self.mode, 1)
        return ATTRIBUTES.pack(*numbers, os.getuid(), os.getgid(), 0, 4096, 0)


class Server:
    """Answers the kernel's requests, one after another.

    Attributes:
        behind_s: How far the clock of the file system is behind.
    """

    behind_s: ClassVar[int] = 0

    def __init__(self, device: int, pattern: str, told: str = "close") -> None:
        self._device, self._pattern, self._told = device, pattern, told
        self._descriptors = itertools.count(1)
        self._writers: set[int] = set()  # descriptors that have written
        self._nodes = {ROOT: Node(ROOT, stat.S_IFDIR | 0o755)}
        self._written: set[int] = set()  # nodes that were written since they were last closed
        self._calls: dict[int, Callable[[Node, bytes], bytes]] = {
            1: self._lookup,
            3: lambda node, _: struct.pack("=QII", 0, 0, 0) + node.attributes(),
            4: self._set_attributes,
            9: self._make_directory,
            10: self._remove,
            11: self._remove,
            12: lambda node, body: self._rename(node, body[:8] + bytes(8) + body[8:]),
            14: self._open,
            15: self._read,
            16: self._write,
            17: lambda *_: struct.pack("=5Q4I24x", *(1 << 20,) * 5, 4096, 255, 4096, 0),
            18: lambda *_: b"",
            20: self._sync,
            25: self._flush,
            26: self._begin,
            27: lambda *_: bytes(16),
            28: self._list,
            29: lambda *_: b"",
            30: lambda *_: b"",
            35: self._create,
            45: self._rename,
        }

    def serve(self) -> None:
        """Until the file system is unmounted."""
        while True:
            try:
                request = os.read(self._device, REQUEST_BYTES)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR):
                    continue
                return
            _, call, unique, number, *_ = HEADER.unpack_from(request)
            if call in (2, 36, 42):  # of which no answer is expected
                continue
            code, answer = 0, b""
            try:
                answer = self._answer(call, number, request[HEADER.size :])
            except OSError as error:
                code = error.errno or errno.EIO
            os.write(self._device, struct.pack("=IiQ", 16 + len(answer), -code, unique) + answer)

    def _answer(self, call: int, number: int, body: bytes) -> bytes:
        if call not in self._calls:
            raise OSError(errno.ENOSYS, "")
        if number not in self._nodes and call != 26:
            raise OSError(errno.ESTALE, "")
        return self._calls[call](self._nodes.get(number, self._nodes[ROOT]), body)

    def _begin(self, _: Node, body: bytes) -> bytes:
        major, minor, ahead, _flags = struct.unpack_from("=4I", body)
        return struct.pack("=4IHHIIHHI28x", major, min(minor, 31), ahead, 0, 16, 12, WRITE_BYTES, 1, 0, 0, 0)

    def _entry(self, node: Node) -> bytes:
        return struct.pack("=QQQQII", node.number, 0, 0, 0, 0, 0) + node.attributes()

    def _lookup(self, node: Node, body: bytes) -> bytes:
        return self._entry(self._child(node, _name(body)))

    def _child(self, node: Node, name: str) -> Node:
        if name not in node.children:
            raise OSError(errno.ENOENT, "")
        return node.children[name]

    def _add(self, parent: Node, name: str, mode: int) -> Node:
        if name in parent.children:
            raise OSError(errno.EEXIST, "")
        made = Node(max(self._nodes) + 1, mode, name)
        self._nodes[made.number] = parent.children[name] = made
        return made

    def _set_attributes(self, node: Node, body: bytes) -> bytes:
        (valid,) = struct.unpack_from("=I", body)
        if valid & SIZE_IS_SET:
            (size,) = struct.unpack_from("=Q", body, 16)
            del node.content[size:]
            node.content.extend(bytes(size - len(node.content)))
        if valid & MODE_IS_SET:
            (node.mode,) = struct.unpack_from("=I", body, 68)
        return struct.pack("=QII", 0, 0, 0) + node.attributes()

    def _make_directory(self, node: Node, body: bytes) -> bytes:
        (mode,) = struct.unpack_from("=I", body)
        return self._entry(self._add(node, _name(body[8:]), stat.S_IFDIR | mode & 0o7777))

    def _create(self, node: Node, body: bytes) -> bytes:
        _, mode = struct.unpack_from("=II", body)
        made = self._add(node, _name(body[16:]), stat.S_IFREG | mode & 0o7777)
        return self._entry(made) + self._open(made, b"")

    def _open(self, _: Node, __: bytes) -> bytes:
        return struct.pack("=QII", next(self._descriptors), 0, 0)

    def _remove(self, node: Node, body: bytes) -> bytes:
        name = _name(body)
        if self._child(node, name).children:
            raise OSError(errno.ENOTEMPTY, "")
        del node.children[name]
        return b""

    def _rename(self, node: Node, body: bytes) -> bytes:
        number, flags = struct.unpack_from("=QI", body)
        old, new = (name.decode() for name in body[16:].split(b"\0")[:2])
        target, moved = self._nodes[number], self._child(node, old)
        replaced = target.children.get(new)
        if replaced is not None and flags & NO_REPLACE:
            raise OSError(errno.EEXIST, "")
        del node.children[old]
        target.children[new], moved.name = moved, new
        if flags & EXCHANGE:
            if replaced is None:
                raise OSError(errno.ENOENT, "")
            node.children[old], replaced.name = replaced, old
        return b""

    def _read(self, node: Node, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("=QQI", body)
        return bytes(node.content[offset : offset + size])

    def _write(self, node: Node, body: bytes) -> bytes:
        descriptor, offset, size = struct.unpack_from("=QQI", body)
        self._writers.add(descriptor)
        node.content.extend(bytes(max(0, offset - len(node.content))))
        node.content[offset : offset + size] = body[40 : 40 + size]
        node.changed_s = now_s()
        self._written.add(node.number)
        return struct.pack("=II", size, 0)

    def _flush(self, node: Node, _: bytes) -> bytes:
        if node.number in self._written and fnmatch.fnmatch(node.name, self._pattern):
            node.content.clear()
            if self._told == "close":
                raise OSError(errno.EIO, "")
        self._written.discard(node.number)
        return b""

    def _sync(self, node: Node, body: bytes) -> bytes:
        (descriptor,) = struct.unpack_from("=Q", body)
        is_lost = fnmatch.fnmatch(node.name, self._pattern) and descriptor in self._writers
        if self._told == "sync" and is_lost:
            raise OSError(errno.EIO, "")
        return b""

    def _list(self, node: Node, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("=QQI", body)
        listed = b""
        for index, (name, child) in enumerate(list(node.children.items())[offset:], offset + 1):
            encoded = name.encode()
            entry = struct.pack("=QQII", child.number, index, len(encoded), child.mode >> 12) + encoded
            entry += bytes(-len(entry) % 8)
            if len(listed) + len(entry) > size:
                break
            listed += entry
        return listed


def _name(body: bytes) -> str:
    return body.partition(b"\0")[0].decode()


def main() -> None:
    """Mounts and serves."""
    place, pattern, told, behind_s = sys.argv[1:]
    Server.behind_s = int(behind_s)
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
    if libc.mount(b"lossy", place.encode(), b"fuse", ctypes.c_ulong(0), options) != 0:
        raise OSError(ctypes.get_errno(), f"mount: {os.strerror(ctypes.get_errno())}")
    sys.stdout.write(MOUNTED)
    sys.stdout.flush()
    Server(device, pattern, told).serve()


if __name__ == "__main__":
    main()
