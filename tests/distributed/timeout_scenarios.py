"""What processes do that save in the background with a time limit, when one of them is late there."""

from __future__ import annotations

import threading
from typing import Any

from tests.distributed.torch_scenarios import connect, outcome
from tests.support.programs import Place
from tests.training.gates import Gate

import waystation

LATE = 1


def save_with_one_late(place: Place, timeout_s: float) -> None:
    """Saves in the background and then at once, both held up in one process until the test lets it go on."""
    connect(place)
    checkpoints = place.directory / "checkpoints"
    context = waystation.Context()
    context.asynchronous.timeout_secs = timeout_s
    waystation.save(checkpoints / "0", {"a": 0})  # after this both are as far, and have imported all
    with context:
        response = waystation.save_checkpointables_async(checkpoints / "1", _held_up(place))
        place.report(outcome(response.result))
        place.receive()
        at_once = _held_up(place)
        place.report(outcome(lambda: waystation.save_checkpointables(checkpoints / "2", at_once)))
    place.disconnect()


def _held_up(place: Place) -> dict[str, Any]:
    """Something whose save goes on in the background; in the late process once the test says so."""
    gate = Gate()
    if place.index == LATE:
        threading.Thread(target=_open_when_told, args=(place, gate), daemon=True).start()
    else:
        gate.open()
    return {"state": {"a": 1}, "gate": gate}


def _open_when_told(place: Place, gate: Gate) -> None:
    place.receive()
    gate.open()
