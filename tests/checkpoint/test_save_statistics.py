"""What a save tells of itself once it is committed."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

import waystation

STATE = {"w": np.arange(1 << 20, dtype=np.float32), "step": 3, "t": torch.ones(1000)}
ARRAY_BYTES = (4 << 20) + 4000


def saved(path: Path, layout: str, *, in_background: bool) -> list[waystation.SaveStatistics]:
    seen: list[waystation.SaveStatistics] = []
    context = waystation.Context()
    context.array.saving.on_statistics = seen.append
    context.array.saving.use_ocdbt = {"native": None, "ocdbt": True, "zarr": False}[layout]
    context.array.saving.use_compression = False
    with context:
        if in_background:
            waystation.save_async(path, STATE).result()
        else:
            waystation.save(path, STATE)
    return seen


@pytest.mark.parametrize("layout", ["native", "ocdbt", "zarr"])
@pytest.mark.parametrize("in_background", [False, True])
def test_bytes_and_stages(
    layout: str, in_background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "waystation"):
        (statistics,) = saved(tmp_path / "checkpoint", layout, in_background=in_background)
    assert statistics.path == str(tmp_path / "checkpoint")
    assert ARRAY_BYTES <= statistics.bytes_written <= ARRAY_BYTES + 10_000
    assert 0 < statistics.written_s <= statistics.synced_s <= statistics.duration_s
    if in_background:
        assert 0 < statistics.blocked_s <= statistics.duration_s
    else:
        assert statistics.blocked_s == statistics.duration_s
    assert statistics.bytes_per_s == statistics.bytes_written / statistics.duration_s
    (line,) = [record.message for record in caplog.records if record.message.startswith("saved ")]
    assert f"saved '{tmp_path}/checkpoint': {statistics.bytes_written} bytes at " in line


def test_an_error_of_the_function_does_not_undo_the_save(tmp_path: Path) -> None:
    def fail(_: waystation.SaveStatistics) -> None:
        raise RuntimeError("no metrics today")

    context = waystation.Context()
    context.array.saving.on_statistics = fail
    with context, pytest.raises(RuntimeError, match="no metrics today") as caught:
        waystation.save(tmp_path / "checkpoint", STATE)
    assert caught.value.__notes__ == [
        f"raised by array.saving.on_statistics; '{tmp_path}/checkpoint' is whole"
    ]
    assert waystation.load(tmp_path / "checkpoint")["step"] == 3


@pytest.mark.parametrize("in_background", [False, True])
def test_a_function_that_ends_the_program_tells_that_the_checkpoint_is_whole(
    in_background: bool, tmp_path: Path
) -> None:
    def end(_: waystation.SaveStatistics) -> None:
        raise SystemExit(3)

    context = waystation.Context()
    context.array.saving.on_statistics = end

    def save() -> None:
        if in_background:
            waystation.save_async(tmp_path / "checkpoint", STATE).result()
        else:
            waystation.save(tmp_path / "checkpoint", STATE)

    with context, pytest.raises(SystemExit) as caught:
        save()
    assert caught.value.__notes__ == [
        f"raised by array.saving.on_statistics; '{tmp_path}/checkpoint' is whole"
    ]


def test_a_save_that_fails_tells_nothing(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint", "native", in_background=False)
    seen: list[waystation.SaveStatistics] = []
    context = waystation.Context()
    context.array.saving.on_statistics = seen.append
    with context, pytest.raises(waystation.errors.Conflict):
        waystation.save(tmp_path / "checkpoint", STATE)
    assert seen == []


@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpointer_knows_a_step_whose_statistics_nobody_took(
    in_background: bool, tmp_path: Path
) -> None:
    def fail(_: waystation.SaveStatistics) -> None:
        raise RuntimeError("no metrics today")

    context = waystation.Context()
    context.array.saving.on_statistics = fail

    def save(checkpointer: waystation.training.Checkpointer, step: int) -> None:
        if not in_background:
            checkpointer.save(step, STATE)
        elif response := checkpointer.save_async(step, STATE):
            response.result()

    keep_one = waystation.training.preservation_policies.LatestN(1)
    with waystation.training.Checkpointer(tmp_path, preservation_policy=keep_one) as checkpointer, context:
        for step in (1, 2):
            with pytest.raises(RuntimeError, match="no metrics today"):
                save(checkpointer, step)
        assert [found.step for found in checkpointer.checkpoints] == [2]
    assert not (tmp_path / "1").exists()


def test_an_error_of_the_function_of_loads_is_no_damage(tmp_path: Path) -> None:
    def fail(_: waystation.LoadStatistics) -> None:
        raise RuntimeError("no metrics today")

    waystation.save(tmp_path / "checkpoint", STATE)
    context = waystation.Context()
    context.array.loading.on_statistics = fail
    with context, pytest.raises(RuntimeError, match="no metrics today") as caught:
        waystation.load(tmp_path / "checkpoint")
    assert caught.value.__notes__ == [
        f"raised by array.loading.on_statistics; '{tmp_path}/checkpoint' is whole"
    ]
