"""A bound on the bytes that jobs of the engine read in a second, all together."""

from __future__ import annotations

import operator
import os
import reprlib
from typing import SupportsIndex

from waystation import _native
from waystation._errors import InvalidInput, WrongType
from waystation.storage.scratch import ScratchDirectory

_MOST = 10**15


class Bandwidth:
    """A bound on the bytes that copies read in a second, all together; enter it, and use it within.

    Args:
        bytes_per_second: The bound; None for none.

    Raises:
        InvalidInput: It is not positive, or larger than any machine copies.
    """

    def __init__(self, bytes_per_second: int | None) -> None:
        if bytes_per_second is not None:
            if isinstance(bytes_per_second, bool) or not isinstance(bytes_per_second, SupportsIndex):
                raise WrongType(
                    f"bytes_per_second must be an integer or None, not {reprlib.repr(bytes_per_second)}"
                )
            bytes_per_second = operator.index(bytes_per_second)
            if not 1 <= bytes_per_second <= _MOST:
                raise InvalidInput(
                    f"bytes_per_second must be from 1 to {_MOST:,}, or None for no bound; not "
                    f"{reprlib.repr(bytes_per_second)}"
                )
        self._bytes_per_second = bytes_per_second
        self._descriptor: int | None = None

    def __enter__(self) -> Bandwidth:
        if self._bytes_per_second is not None:
            scratch = ScratchDirectory()
            try:
                path = scratch.below("throttle")
                _native.create_throttle(path, bytes_per_s=self._bytes_per_second)
                # Once it is open its name can go, which a killed process would leave.
                self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            finally:
                scratch.remove()
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def path(self) -> str | None:
        """The file by which the engine keeps the bound."""
        return None if self._descriptor is None else f"/proc/self/fd/{self._descriptor}"
