"""The connection of a program to the manager.

Ray may deliver calls of an asynchronous actor in another order than they were made in. So what a program
asks is numbered here, and the manager takes it in the order of the numbers.
"""

from __future__ import annotations

import threading
from typing import Any

from waystation._errors import Unavailable
from waystation.runtime.hosts.answers import unwrap


def ask(reference: Any, timeout_s: float | None = None) -> Any:
    """What the manager answers.

    Raises:
        TimeoutError: It has not by then.
        Unavailable: It has died.
        WaystationError: What it has answered.
    """
    import ray

    try:
        answer = ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise TimeoutError(f"there is no answer after {timeout_s:g} s; the call goes on") from None
    except ray.exceptions.RayError as error:
        raise Unavailable(f"the cluster's manager has died, and all islands with it: {error}") from None
    return unwrap(answer)


class Connection:
    """Calls of one program, from any of its threads.

    Args:
        manager: The actor.
        client: What this program is known by there.
    """

    def __init__(self, manager: Any, client: str) -> None:
        self.manager = manager
        self.client = client
        self._lock = threading.Lock()
        self._next = 0

    def ask(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Asks for something, after everything that was asked or told before; returns the answer.

        Raises:
            TimeoutError: There is none by then.
            WaystationError: What the manager answers.
        """
        return ask(self._send(method, arguments, 1), timeout_s)

    def tell(self, method: str, *arguments: Any) -> None:
        """Tells something, after everything that was asked or told before; waits for nothing."""
        self._send(method, arguments, 0)

    def _send(self, method: str, arguments: tuple[Any, ...], returns: int) -> Any:
        from waystation.runtime.cluster.calls import Call

        call = Call(method, arguments)
        with self._lock:
            remote = self.manager.call.options(num_returns=returns)
            reference = remote.remote(self.client, self._next, call)
            self._next += 1  # what could not be sent leaves no gap
        return reference
