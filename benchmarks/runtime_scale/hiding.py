"""How long a computation must take for one controller to be as good as none (figure 6 of the Pathways
paper).
"""

from __future__ import annotations

from benchmarks.runtime_scale.cluster import FAN_OUT, Island, without_controller_s
from benchmarks.runtime_scale.constants import Constants

AS_GOOD = 0.95
"""This share of the throughput without a controller counts as the same."""
IN_FLIGHT = 16
PAPER_S = {16: 2.3e-3, 512: 35e-3}
"""What the paper reports for so many hosts."""
_HALVINGS = 14
_LEAST_S, _MOST_S = 1e-5, 1.0


def share(constants: Constants, hosts: int, compute_s: float, fan_out: int | None = FAN_OUT) -> float:
    """The throughput with a controller, as a share of that without."""
    programs = max(3 * IN_FLIGHT, 4096 // hosts)
    took_s = Island(constants, hosts, compute_s, fan_out=fan_out).run(programs, IN_FLIGHT)
    return without_controller_s(constants, compute_s, programs) / took_s


def smallest_computation_s(constants: Constants, hosts: int, fan_out: int | None = FAN_OUT) -> float:
    """The shortest computation that hides the controller, in seconds."""
    low_s, high_s = _LEAST_S, _MOST_S
    for _ in range(_HALVINGS):
        middle_s = (low_s * high_s) ** 0.5
        if share(constants, hosts, middle_s, fan_out) < AS_GOOD:
            low_s = middle_s
        else:
            high_s = middle_s
    return high_s
