"""The loss of a host, and the errors that it gives to calls."""

from __future__ import annotations

from dataclasses import dataclass

from waystation.runtime.errors import HostLost


@dataclass(frozen=True, slots=True)
class Loss:
    """A host that was lost, and its island with it.

    Attributes:
        island: The island.
        host: The host.
        devices: Its devices.
        epoch: The epoch that ended so.
        process_id: Its process.
        reason: Why, to go on after its name.
        doing: The computation that it was in, as far as is known.
        work: The number of the work that it was at, as far as is known.
        restarts_left: How often the island may be rebuilt.
    """

    island: str
    host: str
    devices: tuple[str, ...]
    epoch: int
    process_id: int
    reason: str
    doing: str
    work: int
    restarts_left: int

    def __str__(self) -> str:
        return f"host '{self.host}' {self.reason}"

    def error(self, program: str, computation: str, work: int) -> HostLost:
        """The error of a work.

        Args:
            program: The program that it was of.
            computation: Its first computation.
            work: Its number.
        """
        named = self.doing if self.doing and work == self.work else computation
        return self._error(f"program '{program}' was lost at computation '{named}'", program, named)

    def array_error(self, program: str) -> HostLost:
        """The error of an array that was there.

        Args:
            program: The program that has made it.
        """
        return self._error(f"an array of program '{program}' was lost", program, "")

    def _error(self, what: str, program: str, computation: str) -> HostLost:
        if self.restarts_left > 0:
            next_step = (
                f"island '{self.island}' is being rebuilt, without its arrays: make them again, or load "
                "them, and repeat the call"
            )
        else:
            next_step = f"island '{self.island}' may not be rebuilt again: remove it, and add it anew"
        return HostLost(
            f"{what}: host '{self.host}' (process {self.process_id}, devices {', '.join(self.devices)}) "
            f"{self.reason}; {next_step}",
            program=program,
            computation=computation or None,
            island=self.island,
            host=self.host,
            device=", ".join(self.devices),
            epoch=self.epoch,
            process_id=self.process_id,
        )
