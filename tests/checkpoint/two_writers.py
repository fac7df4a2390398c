"""What a process does that writes to a checkpoint while others write to it in other ways."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.support import plain_renames
from tests.support.programs import Place

import waystation as ws
from waystation.errors import Conflict, NotFound
from waystation.training import Checkpointer
from waystation.training.save_decision_policies import FixedIntervalPolicy


def write(place: Place, path: Path, calls: list[str], times: int) -> None:
    """Writes in its way. Whoever adds or removes may find that another process was first."""
    call, number = calls[place.index], place.index + 1
    state = {"number": np.array(number), "values": np.full(10_000, number)}
    if "in place" in call:
        plain_renames.allow_only_plain_renames()
    for time in range(times):
        try:
            if "overwrite" in call:
                ws.save(path, state, overwrite=True)
            elif call == "add":
                ws.add_checkpointables(path, {f"added {number} {time}": state})
            elif call == "remove":
                for name in ws.checkpointables_metadata(path).metadata:
                    if name != "state":
                        ws.delete(path, checkpointable_name=name)
            else:
                with Checkpointer(path, save_decision_policy=FixedIntervalPolicy(1)) as checkpointer:
                    checkpointer.save(time, state)
        except (Conflict, NotFound):
            if "overwrite" in call:
                raise
        place.report(time)
