"""What loggers of metrics have recorded once the blocks of the documentation for them have run.

The project's environment has none of these packages. An environment with one of them runs its blocks.
"""

from __future__ import annotations

import json
import struct
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.docs.test_code_blocks import ROOT, blocks_of, run_python

from waystation import telemetry

PAGE = ROOT / "docs" / "guides" / "telemetry.md"
STEPS = [0, 1, 2]
BYTES = 4_000_000  # of the arrays; files have a header more
BLOCK_BYTES, HEADER, FULL, LAST = 32768, struct.Struct("<IHB"), 1, 4  # of LevelDB


def of_tensorboard() -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator("logs")
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("waystation/save_bytes")]


def of_mlflow() -> list[tuple[int, float]]:
    import mlflow

    (run,) = mlflow.search_runs(output_format="list")  # one, for all threads
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "waystation/save_bytes")
    return [(metric.step, metric.value) for metric in history]


def of_wandb() -> list[tuple[int, float]]:
    from wandb.proto import wandb_internal_pb2

    (file,) = Path("wandb").glob("offline-run-*/run-*.wandb")
    found = []
    for data in records(file.read_bytes()[7:]):
        record: Any = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        logged = {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
        }
        if "waystation/save_bytes" in logged:
            found.append((logged["step"], logged["waystation/save_bytes"]))
    return found


def records(log: bytes) -> Iterator[bytes]:
    """The records of a log of LevelDB, which `wandb` writes behind seven bytes of its own."""
    record, at = b"", 0
    while at < len(log):
        left = BLOCK_BYTES - (at + 7) % BLOCK_BYTES  # of a block; the seven bytes count
        if left < HEADER.size:
            at += left
            continue
        _, length, kind = HEADER.unpack_from(log, at)
        record += log[at + HEADER.size : at + HEADER.size + length]
        at += HEADER.size + length
        if kind in (FULL, LAST):
            yield record
            record = b""


@pytest.mark.parametrize(
    ("package", "recorded"), [("tensorboard", of_tensorboard), ("mlflow", of_mlflow), ("wandb", of_wandb)]
)
@pytest.mark.filterwarnings("default")  # of packages that the project does not choose
def test_a_logger_has_the_measures_of_each_save(
    package: str,
    recorded: Callable[[], list[tuple[int, float]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # which it keeps, but does not recommend
    monkeypatch.setenv("WANDB_MODE", "offline")
    blocks = [block for block in blocks_of(PAGE) if block.language == "python"]
    (own,) = [block for block in blocks if block.excuse == f"not-run: needs the package {package}"]
    page = types.ModuleType("documentation_page")
    vars(page)["telemetry"] = telemetry
    for block in (blocks[0], own):  # the first has the state
        run_python(block, page)
    found = recorded()
    assert [step for step, _ in found] == STEPS
    assert all(BYTES <= value < BYTES * 1.1 for _, value in found)
