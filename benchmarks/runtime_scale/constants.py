"""What the model takes each step to cost. All but the network are fitted to real actors (`fit`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constants:
    """Seconds, each for one.

    Attributes:
        submit_s: Core time of the client and the controller to take a program, whatever the number of hosts.
        send_s: Core time of the controller, or a relay, to give one message to a host and take its answer.
        begin_s: Core time of a host to begin a program and to answer.
        hop_s: Between the sending of a message and its arrival, on the network.
        enqueue_s: Core time of a host that has no controller, for a program of the same kind.
    """

    submit_s: float
    send_s: float
    begin_s: float
    hop_s: float
    enqueue_s: float
