"""`Recovery`: how long it took a program that was started again to come to its next step, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How a process of a program that was started again came to its next step, from a state in memory.

    Moments are seconds since 1970. Those of this process are apart as its monotonic clock says; between them
    and those of the launch lies what the clock of the machine says.

    Attributes:
        step: The step that was loaded.
        failed_at_s: The launch on this host saw a process of the program fail. None, as the next two, if
            this is not known: the program was not started again by the launch that had seen it fail.
        ended_at_s: All processes of the program on this host had ended.
        started_at_s: The launch started them again.
        begun_at_s: This process opened its `Checkpointer`.
        prepared_at_s: It was decided for all processes what memory offers them, and was on their hosts.
        loading_at_s: The program asked for its state.
        loaded_at_s: It had the state.
        stepped_at_s: It gave the next step to be saved.
        transfer_s: For how long agents brought shards to their hosts, before `prepared_at_s`.
        brought_s: For how long this process waited for shards of other hosts, while it loaded.
    """

    step: int
    failed_at_s: float | None = None
    ended_at_s: float | None = None
    started_at_s: float | None = None
    begun_at_s: float
    prepared_at_s: float
    loading_at_s: float
    loaded_at_s: float
    stepped_at_s: float
    transfer_s: float = 0.0
    brought_s: float = 0.0

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds of each phase, in their order; `detect` and `start` only if the launch has seen the
        failure.

        `detect`: from the first failure until all processes on this host had ended. `start`: until the
        program opened its `Checkpointer`, so imports and meeting the others are in it. `decide`: until all
        had agreed on a version. `transfer`: shards came from other hosts. `restore`: from memory to the
        program's arrays. `first step`: from there until the program gave the next step to be saved.
        """
        phases: dict[str, float] = {}
        if self.failed_at_s is not None and self.ended_at_s is not None:
            phases["detect"] = self.ended_at_s - self.failed_at_s
            phases["start"] = self.begun_at_s - self.ended_at_s
        return phases | {
            "decide": self.prepared_at_s - self.begun_at_s - self.transfer_s,
            "transfer": self.transfer_s + self.brought_s,
            "restore": self.loaded_at_s - self.loading_at_s - self.brought_s,
            "first step": self.stepped_at_s - self.loaded_at_s,
        }
