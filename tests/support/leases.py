"""What holds for leases wherever they are."""

from __future__ import annotations

import contextvars
import threading

from waystation.storage.leases import Leases
from waystation.storage.store_leases import StoreLeases


def require_never_both(leases: Leases | StoreLeases, *, rounds: int) -> None:
    """Two readers and a collector at once, on the checkpoint `1`: while a reader may read, the collector may
    not remove."""
    reading: list[int] = []
    removing: list[int] = []
    wrong: list[str] = []

    def read() -> None:
        for _ in range(rounds):
            with leases.hold("1") as may_read:
                if may_read:
                    reading.append(1)
                    if removing:
                        wrong.append("a reader began while it was being removed")
                    reading.pop()

    def remove() -> None:
        for _ in range(rounds):
            with leases.condemned("1") as may_go:
                if may_go:
                    removing.append(1)
                    if reading:
                        wrong.append("it was removed while it was being read")
                    removing.pop()

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(work,)) for work in (read, read, remove)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
