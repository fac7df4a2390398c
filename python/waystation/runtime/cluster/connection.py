"""The connection of a program to the manager.

Ray may deliver calls of an asynchronous actor in another order than they were made in. So what a program
submits is numbered here, and the manager takes it in the order of the numbers.
"""

from __future__ import annotations

import threading
from typing import Any

from waystation.runtime.hosts.instructions import Message


class Connection:
    """Calls of one program, from any of its threads.

    Args:
        manager: The actor.
        client: The name of this program there.
    """

    def __init__(self, manager: Any, client: str) -> None:
        self.manager = manager
        self.client = client
        self._lock = threading.Lock()
        self._next = 0

    def submit(self, island: str, message: Message, epoch: int | None) -> Any:
        """Sends a message to all hosts of an island, after everything that was submitted before."""
        with self._lock:
            reference = self.manager.submit.remote(self.client, self._next, island, message, epoch)
            self._next += 1  # what could not be sent leaves no gap
        return reference
