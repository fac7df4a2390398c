"""`asynchronous.timeout_secs`: how long a save in the background waits for a process. No other save is
bounded by it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.distributed.timeout_scenarios import LATE, save_with_one_late
from tests.support.programs import Raised, running

import waystation

TIMEOUT_S = 2.0
COUNT = 2


def test_a_late_process_is_waited_for_so_long_in_the_background(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    with running(
        save_with_one_late, TIMEOUT_S, count=COUNT, framework="torch", directory=tmp_path
    ) as programs:
        given_up = programs.report(1 - LATE)
        assert isinstance(given_up, Raised), given_up
        assert given_up.type == "Unavailable", given_up
        assert f"process {LATE}" in given_up.message, given_up
        programs.send(LATE, "go on")
        came_back = programs.report(LATE)
        assert isinstance(came_back, Raised), came_back  # what it went on with is gone
        assert os.listdir(checkpoints) == ["0"]

        for index in range(COUNT):
            programs.send(index, "save at once")
        time.sleep(1.5 * TIMEOUT_S)  # longer than a save in the background would have waited
        programs.send(LATE, "go on")
        assert [programs.report(index) for index in range(COUNT)] == [None] * COUNT
        assert waystation.verify(checkpoints / "2").damages == []
        programs.values()
