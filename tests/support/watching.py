"""What tests of processes wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.support.programs import HANG_S


def wait_until(condition: Callable[[], object]) -> None:
    """Waits, within bounds that nothing comes near."""
    until = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < until, "a hang"
        time.sleep(0.01)


def runs(process_id: int) -> bool:
    """Whether a process is there, and has not ended."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] != "Z"
