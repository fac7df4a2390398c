"""Memory whose last part makes every thread wait that touches it, until it is released (userfaultfd).

So a job of the engine can be held in the middle of its work for as long as a test needs, without the engine
having a part in it. Linux on x86-64 and AArch64, where the system grants userfaultfd to this user.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import platform
import struct
import threading

_CALL_NUMBERS = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1
_API, _API_REQUEST, _REGISTER_REQUEST = 0xAA, 0xC018AA3F, 0xC020AA00
_MISSING_PAGES = 1


class HeldMemory:
    """Zeros, of which the last `held_bytes` cannot be read before `release`.

    Attributes:
        buffer: The memory.
        address: Where it is.
        nbytes: How much it is.
    """

    def __init__(self, free_bytes: int, held_bytes: int = mmap.PAGESIZE) -> None:
        self.nbytes = free_bytes + held_bytes
        self.buffer = mmap.mmap(-1, self.nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        self._lock = threading.Lock()
        self._handler: int | None = _open_handler()
        held = struct.pack("QQQQ", self.address + free_bytes, held_bytes, _MISSING_PAGES, 0)
        fcntl.ioctl(self._handler, _REGISTER_REQUEST, bytearray(held))

    def release(self) -> None:
        """Lets those go on that wait, and all who come later."""
        with self._lock:
            if self._handler is not None:
                os.close(self._handler)
            self._handler = None


def _open_handler() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    handler = int(libc.syscall(_CALL_NUMBERS[platform.machine()], os.O_CLOEXEC | _USER_MODE_ONLY))
    if handler < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    fcntl.ioctl(handler, _API_REQUEST, bytearray(struct.pack("QQQ", _API, 0, 0)))
    return handler


@functools.cache
def is_granted() -> bool:
    """Whether this system lets this user hold memory."""
    if platform.system() != "Linux" or platform.machine() not in _CALL_NUMBERS:
        return False
    try:
        HeldMemory(mmap.PAGESIZE).release()
    except OSError:
        return False
    return True
