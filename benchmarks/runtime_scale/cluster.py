"""A virtual island: the real scheduler and the real order of hosts, with virtual hosts, network and
devices.

The controller hands every dispatch to all hosts, by itself or through relays: processes on hosts that
hand it on to no more than `fan_out` others. Every host brings what it gets into order with a
`ReorderBuffer` and begins it; the devices compute once all hosts have begun, after the computation
before; the answers come back the way that the messages went. Without a controller every host begins one
program after the other by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.runtime_scale.constants import Constants
from benchmarks.runtime_scale.events import Clock, Machine, Process
from waystation.runtime.scheduling import Dispatch, IslandScheduler, ReorderBuffer, RunKey, Submission

FAN_OUT = 16
"""A sender of more messages has relays."""
JITTER = 0.2
"""Hops and core times vary by so much, up or down."""
_FINGERPRINT = "program"


@dataclass(slots=True)
class _Host:
    """A host, or a relay: whom it hands messages on to, and what it waits for."""

    process: Process
    children: list[_Host] = field(default_factory=list)
    order: ReorderBuffer[Dispatch] | None = None


class Island:
    """One island under a controller.

    Args:
        constants: What steps cost.
        hosts: How many hosts there are.
        compute_s: How long the devices take for one program.
        cores: How many cores all processes share; None if every host has a machine of its own.
        fan_out: How many messages a process hands on before it has relays; None for no relays.
        seed: Of the jitter.
    """

    def __init__(
        self,
        constants: Constants,
        hosts: int,
        compute_s: float,
        *,
        cores: int | None = None,
        fan_out: int | None = FAN_OUT,
        seed: int = 0,
    ) -> None:
        self.message_count = 0
        self._constants, self._compute_s = constants, compute_s
        self._clock = Clock()
        self._random = random.Random(seed)
        shared = None if cores is None else Machine(self._clock, cores)
        self._machine: Callable[[], Machine] = lambda: shared or Machine(self._clock, 1)
        self._controller = _Host(Process(self._machine()))
        self._controller.children = self._tree(
            [_Host(Process(self._machine()), order=ReorderBuffer()) for _ in range(hosts)], fan_out
        )
        self._host_count = hosts
        self._scheduler = IslandScheduler("island", seconds_ahead=float("inf"), runs_per_client=1 << 30)
        self._begun: dict[RunKey, int] = {}
        self._device_free_s = 0.0
        self._finished: Callable[[], None] = lambda: None

    def run(self, programs: int, in_flight: int) -> float:
        """How long a client's programs take, of which it keeps so many in flight, in seconds."""
        submitted = 0

        def submit() -> None:
            nonlocal submitted
            if submitted == programs:
                return
            key = RunKey("client", submitted)
            submission = Submission(key, _FINGERPRINT, submitted, cost_seconds=self._compute_s)
            submitted += 1
            self._controller.process.do(
                self._varied(self._constants.submit_s),
                lambda: self._dispatch(self._scheduler.submit(submission)),
            )

        self._finished = submit
        for _ in range(in_flight):
            submit()
        self._clock.run()
        return self._clock.now_s

    # ---- how ------------------------------------------------------------------------------------

    def _tree(self, members: list[_Host], fan_out: int | None) -> list[_Host]:
        """Whom the controller hands messages to, so that nobody has more than `fan_out`."""
        while fan_out is not None and len(members) > fan_out:
            groups = [members[first : first + fan_out] for first in range(0, len(members), fan_out)]
            # A relay is a process of its own, on the machine of the first host that it hands on to.
            members = [_Host(Process(group[0].process.machine), children=group) for group in groups]
        return members

    def _dispatch(self, dispatches: list[Dispatch]) -> None:
        for dispatch in dispatches:
            self._begun[dispatch.key] = self._host_count
            self._hand_on(self._controller, dispatch)

    def _hand_on(self, sender: _Host, dispatch: Dispatch) -> None:
        for receiver in sender.children:
            self.message_count += 1
            sender.process.do(
                self._varied(self._constants.send_s),
                lambda receiver=receiver: self._hop(lambda: self._arrive(receiver, dispatch)),  # type: ignore[misc]
            )

    def _arrive(self, receiver: _Host, dispatch: Dispatch) -> None:
        if receiver.order is None:
            self._hand_on(receiver, dispatch)
            return
        for ready in receiver.order.add(dispatch.epoch, dispatch.sequence, dispatch):
            receiver.process.do(
                self._varied(self._constants.begin_s),
                lambda ready=ready: self._begin(ready),  # type: ignore[misc]
            )

    def _begin(self, dispatch: Dispatch) -> None:
        self._begun[dispatch.key] -= 1
        if self._begun[dispatch.key]:
            return
        del self._begun[dispatch.key]
        self._device_free_s = max(self._device_free_s, self._clock.now_s) + self._compute_s
        # What answers cost the processes on their way is in `send_s`.
        self._clock.after(
            self._device_free_s - self._clock.now_s, lambda: self._hop(lambda: self._complete(dispatch))
        )

    def _complete(self, dispatch: Dispatch) -> None:
        self._dispatch(self._scheduler.complete(dispatch.key, self._compute_s))
        self._finished()

    def _hop(self, then: Callable[[], None]) -> None:
        self._clock.after(self._varied(self._constants.hop_s), then)

    def _varied(self, seconds: float) -> float:
        return seconds * self._random.uniform(1 - JITTER, 1 + JITTER)


def without_controller_s(constants: Constants, compute_s: float, programs: int) -> float:
    """How long the same programs take where every host begins them by itself."""
    return constants.enqueue_s + programs * max(compute_s, constants.enqueue_s)
