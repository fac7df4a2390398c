"""A client in a process of its own: makes arrays on a cluster, says so, and waits to be killed."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from tests.runtime.cluster.driving import HANDLES, Slice

from waystation.runtime.cluster import connect


def main() -> None:
    """Joins a cluster under a name; uses the shared array, and has two of its own, one of which it shares."""
    address, name, base, own = sys.argv[1:]
    with connect(address, name=name) as cluster:
        backend = cluster.backend()
        handle = next(HANDLES)
        seen = backend.named(base, handle)
        total = float(backend.get(handle).sum())
        on = Slice(backend, "left", 4)
        arrays = [on.put(np.full(8, number)) for number in range(2)]
        backend.share(arrays[0], own)
        backend.wait(arrays)
        sys.stdout.write(json.dumps({"shape": list(seen.shape), "total": total}) + "\n")
        sys.stdout.flush()
        time.sleep(600)


if __name__ == "__main__":
    main()
