"""Reads files in a process of its own that may take little more memory, and prints what came of it.

`python -m tests.published.claims READERS FILE…`, with readers of `readers.py`, or `all` of them. The first
reads are of a small sound file: they start what a process starts once.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.published import models, readers
from tests.support.peaks import begin_peak, status

from waystation import errors

_ADDRESS_SPACE_BYTES = 1 << 29


def main(names: str, *paths: str) -> None:
    every: dict[str, Any] = readers.LOADING | readers.SUMMING
    chosen = every if names == "all" else {names: every[names]}
    with tempfile.TemporaryDirectory() as directory:
        sound = models.write_file(Path(directory) / "model.safetensors", {"w": np.ones(4, np.float32)})
        readers.SUMMING["write_checksums"](sound)
        for read in [*chosen.values()] * 3:
            read(sound)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + _ADDRESS_SPACE_BYTES, hard))
    reports = {name: report(read, [Path(path) for path in paths]) for name, read in chosen.items()}
    sys.stdout.write(json.dumps(reports))


def report(read: Callable[[Path], object], paths: list[Path]) -> dict[str, Any]:
    """What comes of reading files in one way, and what memory that takes at most."""
    before = begin_peak()
    kinds: list[str | None] = []
    for path in paths:
        try:
            read(path)
        except errors.WaystationError as error:
            kinds.append(error.kind)
        else:
            kinds.append(None)
    return {"kinds": kinds, "peak_bytes": status("VmHWM") - before}


if __name__ == "__main__":
    main(*sys.argv[1:])
