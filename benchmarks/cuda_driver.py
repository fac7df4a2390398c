"""The few calls of the CUDA driver that a plain copy needs, by ctypes: no framework, nothing of ours.

What the device benchmark compares with, and how tests get device memory that no framework owns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_PORTABLE = 1


class CudaError(RuntimeError):
    """A call of the driver failed."""


class CudaDriver:
    """One device in its primary context, current on the calling thread."""

    def __init__(self, ordinal: int = 0) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"no CUDA driver: {error}") from error
        self._call("cuInit", ctypes.c_uint(0))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxPushCurrent_v2", context)
        self.ordinal = ordinal

    @contextmanager
    def device_memory(self, nbytes: int) -> Iterator[int]:
        """The address of memory on the device."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        try:
            yield address.value
        finally:
            self._call("cuMemFree_v2", address)

    @contextmanager
    def pinned_memory(self, nbytes: int) -> Iterator[int]:
        """The address of pinned host memory."""
        address = ctypes.c_void_p()
        size, flags = ctypes.c_size_t(nbytes), ctypes.c_uint(_PORTABLE)
        self._call("cuMemHostAlloc", ctypes.byref(address), size, flags)
        try:
            yield address.value or 0
        finally:
            self._call("cuMemFreeHost", address)

    def copy_to_device(self, destination: int, source: int, nbytes: int) -> None:
        """Copies host memory, and waits."""
        address, size = ctypes.c_uint64(destination), ctypes.c_size_t(nbytes)
        self._call("cuMemcpyHtoD_v2", address, ctypes.c_void_p(source), size)

    def copy_to_host(self, destination: int, source: int, nbytes: int) -> None:
        """Copies device memory, and waits."""
        address, size = ctypes.c_uint64(source), ctypes.c_size_t(nbytes)
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(destination), address, size)

    def close(self) -> None:
        """Makes the context no longer current. It is never released: it may be a framework's, too."""
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CudaError(f"{name} failed with CUDA error {status}")
