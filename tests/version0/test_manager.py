"""`CheckpointManager`: what is on the disk at every moment, and what it says to wrong arguments."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as theirs
import pytest

import waystation.compat.orbax as ocp

_LIMIT_SECONDS = 30.0


class GatedHandler(ocp.AsyncCheckpointHandler):
    """Its saves end when they are let."""

    async def async_save(self, directory: Any, args: Any = None) -> Any:  # type: ignore[override]
        return [ocp.future.ThreadFuture(lambda: args.gate.wait(_LIMIT_SECONDS))]

    def restore(self, directory: Any, args: Any = None) -> None:  # type: ignore[override]
        pass


@ocp.args.register_with_handler(GatedHandler, for_save=True, for_restore=True)
class Gated(ocp.args.CheckpointArgs):
    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate = gate


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def on_disk(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.isdigit())


def test_steps_that_give_way_to_a_save_stay_until_it_is_committed(tmp_path: Path) -> None:
    gates = [threading.Event() for _ in range(4)]
    state = {"w": np.ones(3)}

    def save(step: int) -> None:
        args = ocp.args
        manager.save(step, args=args.Composite(state=args.StandardSave(state), gate=Gated(gates[step])))

    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        gates[0].set()
        save(0)
        manager.wait_until_finished()
        save(1)
        later = threading.Thread(target=save, args=(2,))
        later.start()
        until(lambda: list(manager.all_steps()) == [1, 2])  # 0 is to go once 2 is there
        gates[1].set()
        until(lambda: "1" in on_disk(tmp_path))
        later.join(_LIMIT_SECONDS)
        time.sleep(0.3)
        assert on_disk(tmp_path) == ["0", "1"]
        gates[2].set()
        manager.wait_until_finished()
        assert on_disk(tmp_path) == ["1", "2"]


# ---- options and arguments ---------------------------------------------------------------------


def test_a_manager_that_is_not_to_create_its_directory_finds_nothing_there(tmp_path: Path) -> None:
    root, options = tmp_path / "a" / "b", ocp.CheckpointManagerOptions(create=False)
    with ocp.CheckpointManager(root, options=options) as manager:
        assert manager.latest_step() is None
        manager.reload()
        manager.wait_until_finished()
        with pytest.raises(FileNotFoundError):
            manager.restore(None)
        with pytest.raises(FileNotFoundError):
            manager.delete(0)
        assert not root.parent.exists()
        assert manager.save(3, args=ocp.args.StandardSave({"w": np.ones(3)}))
        manager.wait_until_finished()
        assert manager.all_steps() == [3]
    with ocp.CheckpointManager(root, options=options) as manager:
        assert manager.latest_step() == 3


def test_what_is_no_handler_is_refused_at_once(tmp_path: Path) -> None:
    options: Any = ocp.CheckpointManagerOptions(max_to_keep=1)
    with pytest.raises(ValueError, match="options="):
        ocp.CheckpointManager(tmp_path / "c", options)
    with pytest.raises(ValueError, match="JsonCheckpointHandler"):
        ocp.CheckpointManager(tmp_path / "c", item_handlers={"config": ocp.JsonCheckpointHandler})
    with pytest.raises(ValueError, match="save_interval_steps"):
        ocp.CheckpointManagerOptions(save_interval_steps=0)


def test_a_missing_item_is_not_taken_for_a_missing_checkpoint(tmp_path: Path) -> None:
    """Programs that find no file begin anew, which a misspelled item must not make them do."""
    kinds = []
    for library in (ocp, theirs):
        with library.CheckpointManager(tmp_path / library.__name__) as manager:
            manager.save(0, args=library.args.Composite(params=library.args.StandardSave({"a": np.ones(2)})))
            manager.wait_until_finished()
            with pytest.raises(KeyError, match="param") as raised:
                manager.restore(0, args=library.args.Composite(param=library.args.StandardRestore()))
            kinds.append(isinstance(raised.value, FileNotFoundError))
    assert kinds == [False, False]
