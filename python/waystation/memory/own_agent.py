"""The agent of this process's host: connected when it is first needed, and greeted anew if that failed."""

from __future__ import annotations

from waystation import _native

# How long a save waits for an agent that has gone and may come back.
PATIENCE_S = 2.0


class OwnAgent:
    """That agent.

    Args:
        directory: Of its store.
        run: The id that the store must have; None for any.
        deadline_s: How long to wait for it.
    """

    def __init__(self, directory: str, run: str | None, deadline_s: float) -> None:
        self.directory = directory
        self.deadline_s = deadline_s
        self._run = run
        self._clients: dict[float, _native.AgentClient] = {}

    @property
    def client(self) -> _native.AgentClient:
        """It, for what a program waits for before it goes on.

        Raises:
            Unavailable: None is there.
            Conflict: It is that of another run.
        """
        return self.waiting(self.deadline_s)

    @property
    def saver(self) -> _native.AgentClient:
        """It, for what a program rather goes on without: saves."""
        return self.waiting(min(self.deadline_s, PATIENCE_S))

    def waiting(self, timeout_s: float) -> _native.AgentClient:
        """It, waited for so long in every call."""
        client = self._clients.get(timeout_s)
        if client is None:
            client = _native.AgentClient(self.directory, run=self._run, timeout_s=timeout_s)
            self._clients[timeout_s] = client
        return client
