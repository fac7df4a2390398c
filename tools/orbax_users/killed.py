"""Runs programs of this directory with one of the plugins, and kills them."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

HERE = Path(__file__).resolve().parent
GENUINE = "genuine"
STEPS, KILLS = 12, 3
TIME_LIMIT_S = 300.0


def run(program: str, directory: Path, plugin: str, kill_after: int | None = None) -> list[str]:
    """Runs a program that prints a line for each step, and a digest at its end.

    Args:
        program: Its file.
        directory: Where it keeps its checkpoints.
        plugin: What decides which Orbax it gets.
        kill_after: After how many lines it is killed with SIGKILL; None for not at all.

    Returns:
        The lines that it has printed.
    """
    code = f"import {plugin}, runpy; runpy.run_path({str(HERE / program)!r}, run_name='__main__')"
    command = [sys.executable, "-u", "-c", code, str(directory), str(STEPS)]
    log = directory.with_name(f"{directory.name}.log")
    lines = []
    with (
        log.open("a") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as running,
    ):
        assert running.stdout is not None, "it was asked for"
        limit = threading.Timer(TIME_LIMIT_S, running.kill)
        limit.start()
        for line in running.stdout:
            if line.startswith(("step", "digest")):
                lines.append(line.strip())
            if len(lines) == kill_after:
                running.send_signal(signal.SIGKILL)  # while the last step is being saved, perhaps
        status = running.wait()
        limit.cancel()
    expected = 0 if kill_after is None else -signal.SIGKILL
    assert status == expected, f"{program} ended with {status}: {log.read_text()[-4000:]}"
    return lines


def assert_same_bits(program: str, directory: Path) -> None:
    """Asserts that a program which is killed ends as it does on genuine Orbax without a kill.

    The plugin of this process decides which Orbax is used where the program is killed.
    """
    plugin = next(
        name for name in ("in_place_of_orbax", "in_place_of_version_1", GENUINE) if name in sys.modules
    )
    expected = run(program, directory / "not killed", GENUINE)
    chance = random.Random(program)
    for _ in range(KILLS):
        begun = run(program, directory / "killed", plugin, kill_after=chance.randint(2, 4))
    last = run(program, directory / "killed", plugin)
    assert begun[0] != expected[0], "it has resumed after a kill"
    assert len(last) < len(expected), "it has resumed"
    assert last[-1] == expected[-1]
