"""When the devices of a host did the calls of a run, as far as the host can see it.

JAX does not say when a device begins and ends a call; it says when a result is there. So the smallest result
of each call that nobody takes over is kept until it is there, at the pace of the devices, and a call is taken
to begin when it had been dispatched and its device had ended the one before. A call of which no result can be
seen any more counts to the next one on its device. While nothing is recorded, nothing is kept.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from waystation.frameworks.jax_public import Device
from waystation.runtime.ir import Exec
from waystation.runtime.timeline import HostRecorder


class _Call(NamedTuple):
    step: Exec
    name: str
    began_ns: int
    result: jax.Array | None
    devices: Mapping[int, Device]


class ObservedCalls:
    """The calls of one run.

    Args:
        recorder: Stamps them; knows since when each device has been free.
        run: The number of the run.
    """

    def __init__(self, recorder: HostRecorder, run: int) -> None:
        self._recorder = recorder
        self._run = run
        self._calls: deque[_Call] = deque()

    def called(
        self,
        step: Exec,
        name: str,
        began_ns: int,
        results: Sequence[jax.Array],
        devices: Mapping[int, Device],
    ) -> None:
        """A function has been dispatched.

        Args:
            step: The call.
            name: The function.
            began_ns: When that began; 0 if it is not to be stamped.
            results: What it makes.
            devices: The devices of this host, by their numbers.
        """
        if began_ns:
            least = min(results, key=lambda array: array.nbytes, default=None)
            self._calls.append(_Call(step, name, began_ns, least, devices))

    def called_host(self, step: Exec, name: str, began_ns: int) -> None:
        """A host function has returned: its devices had to wait for it, from `began_ns` on."""
        for device in step.devices if began_ns else ():
            self._recorder.computed(self._run, name, device, began_ns, 0)

    def finish(self) -> None:
        """Waits for each call in order, on each device."""
        unseen: Counter[int] = Counter()
        first_ns: dict[int, int] = {}
        while self._calls:
            call = self._calls.popleft()  # which lets go of what it has made, once that is there
            shards = _shards(call)
            for device in call.step.devices:
                first_ns.setdefault(device, call.began_ns)
                if not _wait(shards.get(device)):
                    unseen[device] += 1
                    continue
                began_ns = first_ns.pop(device)
                self._recorder.computed(self._run, call.name, device, began_ns, unseen.pop(device, 0))


def _shards(call: _Call) -> dict[int, jax.Array]:
    """The shards of what a call has made, by the number of the device; none if another call has it now."""
    if call.result is None or call.result.is_deleted():
        return {}
    try:
        found = {shard.device: shard.data for shard in call.result.addressable_shards}
    except RuntimeError:  # it was taken over meanwhile
        return {}
    return {device: found[each] for device, each in call.devices.items() if each in found}


def _wait(shard: jax.Array | None) -> bool:
    """Waits until a shard is there; whether that could be seen."""
    if shard is None:
        return False
    try:
        shard.block_until_ready()
    except Exception:  # whoever waits for the run itself raises it; taken over, it says nothing
        return not shard.is_deleted()
    return True
