"""The loss of a host, and the errors that it gives to calls."""

from __future__ import annotations

from dataclasses import dataclass

from waystation.runtime.hosts.errors import HostLost
from waystation.runtime.hosts.instructions import Exec, Message


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
        ended: How many messages it had ended, as far as is known.
        restarts_left: How often the island may be rebuilt.
    """

    island: str
    host: str
    devices: tuple[str, ...]
    epoch: int
    process_id: int
    reason: str
    doing: str
    ended: int
    restarts_left: int

    def __str__(self) -> str:
        return f"host '{self.host}' {self.reason}"

    def error(self, program: str, computation: str, sequence: int) -> HostLost:
        """The error of a call.

        Args:
            program: The program that it was of.
            computation: Its first computation.
            sequence: The number of its message.
        """
        named = self.doing if self.doing and sequence == self.ended else computation
        if self.restarts_left > 0:
            next_step = (
                f"island '{self.island}' is being rebuilt, without its buffers: make them again, or load "
                "them, and repeat the call"
            )
        else:
            next_step = f"island '{self.island}' may not be rebuilt again: remove it, and add it anew"
        return HostLost(
            f"program '{program}' was lost at computation '{named}': host '{self.host}' (process "
            f"{self.process_id}, devices {', '.join(self.devices)}) {self.reason}; {next_step}",
            program=program,
            computation=named,
            island=self.island,
            host=self.host,
            device=", ".join(self.devices),
            epoch=self.epoch,
            process_id=self.process_id,
        )


def first_computation(message: Message, names: dict[str, str]) -> str:
    """What a message begins with, for people.

    Args:
        message: The message.
        names: Names of functions, by key.
    """
    for instruction in message.instructions:
        if isinstance(instruction, Exec):
            return instruction.name or names.get(instruction.function, instruction.function)
    kinds = [type(instruction).__name__.lower() for instruction in message.instructions]
    return kinds[0] if kinds else "nothing"
