"""One of two processes that save in Orbax's layouts is killed before one of its changes of the disk.

What genuine Orbax then finds is what stood there before, whole, or what was saved, whole; a later save works
and leaves nothing else. Which steps are walked is as in `tests.distributed.test_deaths`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.distributed.test_deaths import OTHER, PRIMARY, check_told, save_and_kill, steps_of
from tests.orbax import oracle, writing
from tests.orbax.write_scenarios import check_tensors
from tests.support import system_calls
from tests.support.programs import Ended

pytestmark = pytest.mark.skipif(not system_calls.SUPPORTED, reason="needs ptrace on x86-64 Linux")

OLD = {"old": np.arange(1000)}


def run(
    directory: Path, victim: int, kill_before: int | None, layout: dict[str, Any], *, overwrite: bool
) -> tuple[bool, list[str], list[Ended]]:
    """Has two processes save where there is something already, or nothing."""
    path = directory / "checkpoints" / "1"
    path.parent.mkdir(parents=True)
    if overwrite:
        oracle.save(path, OLD)
    return save_and_kill(directory, victim, kill_before, **layout)


def is_new(path: Path, *, overwrite: bool) -> bool:
    """Whether what stands there is what was saved; otherwise it is what was there before."""
    loaded = oracle.load(path) if overwrite or path.exists() else OLD
    if "old" in loaded:
        oracle.assert_same(loaded, OLD)
        return False
    check_tensors(loaded)
    return True


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "layout", "overwrite"),
    [
        (PRIMARY, {"use_ocdbt": False}, True),
        (OTHER, {"use_ocdbt": False, "use_compression": False}, False),
        (PRIMARY, {"use_ocdbt": True, "use_compression": False}, False),
        (OTHER, {"use_ocdbt": True}, True),
    ],
    ids=["primary-files-overwrite", "other-files-new", "primary-ocdbt-new", "other-ocdbt-overwrite"],
)
@pytest.mark.share(4)
def test_killed_before_each_change_of_the_disk(
    victim: int, layout: dict[str, Any], overwrite: bool, tmp_path: Path
) -> None:
    killed, changes, ended = run(tmp_path / "whole", victim, None, layout, overwrite=overwrite)
    check_told(ended, victim, killed=killed)
    assert not killed
    assert is_new(tmp_path / "whole" / "checkpoints" / "1", overwrite=overwrite)
    assert len(changes) > 4, changes
    seen = set()
    for step in steps_of(changes):
        killed, _, ended = run(tmp_path / str(step), victim, step, layout, overwrite=overwrite)
        check_told(ended, victim, killed=killed)
        path = tmp_path / str(step) / "checkpoints" / "1"
        seen.add(is_new(path, overwrite=overwrite))
        if victim == OTHER:
            left = ["1"] if overwrite or path.exists() else []
            assert os.listdir(path.parent) == left, "the primary lives and has removed the attempt"
        writing.save(path, OLD, overwrite=True, **layout)
        oracle.assert_same(oracle.load(path), OLD)
        assert os.listdir(path.parent) == ["1"]
    assert False in seen, "every kill came too late"
