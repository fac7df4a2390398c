"""A JAX program of several processes that saves until one of them is killed, with JAX's default settings.

Run as `python surviving_program.py INDEX COUNT PORT DIRECTORY ENDING`. It prints a line after each save, and
one for the error that ends it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import waystation


def save_until_it_fails(count: int, directory: Path, *, in_background: bool) -> None:
    """Saves an array with a part in every process, again and again."""
    mesh = jax.make_mesh((count,), ("x",))
    rows = count << 10
    array = jax.make_array_from_callback(
        (rows, 256),
        NamedSharding(mesh, PartitionSpec("x")),
        lambda index: np.ones((rows, 256), np.float32)[index],
    )
    for step in range(1_000_000):
        if in_background:
            waystation.save_async(directory / "step", {"array": array}, overwrite=True).result()
        else:
            waystation.save(directory / "step", {"array": array}, overwrite=True)
        _tell(f"saved {step}")


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    index, count, port, directory, ending = sys.argv[1:]
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))
    try:
        save_until_it_fails(int(count), Path(directory), in_background=ending == "handled")
    except waystation.errors.Unavailable as error:
        _tell(f"failed {error}")
        if ending == "raised":
            raise
    finally:
        if ending == "shut down":
            jax.distributed.shutdown()


if __name__ == "__main__":
    main()
