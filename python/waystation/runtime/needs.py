"""What to install where a package is missing that the runtime needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from waystation._errors import Unsupported
from waystation._extras import install_command

_PACKAGES = frozenset({"flatbuffers", "jax", "jaxlib", "ray"})


def advice(error: ImportError) -> str | None:
    """What to install, if an import failed for a package of the runtime's extra; else None."""
    package = (error.name or "").partition(".")[0]
    return install_command("ray") if package in _PACKAGES else None


@contextlib.contextmanager
def needing_packages() -> Iterator[None]:
    """Says what to install if the block imports a package that is missing.

    Raises:
        Unsupported: Ray, JAX or flatbuffers is not installed.
    """
    try:
        yield
    except ImportError as error:
        command = advice(error)
        if command is None:
            raise
        raise Unsupported(
            f"the runtime needs Ray and JAX 0.12 or later, on Python 3.12 or later ({error}): {command}"
        ) from None
