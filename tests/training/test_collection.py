"""What somebody reads is not collected: in this process, in others, and in such as cannot be seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from orbax.checkpoint import v1 as oracle
from tests.support.places import names_in
from tests.training.gates import Gate

import waystation
from waystation.errors import Conflict
from waystation.layouts.native import commit
from waystation.storage import AnyPath, attempts, leases, signs_of_life
from waystation.storage.attempts import new_attempt_id, owner_record
from waystation.storage.leases import Leases
from waystation.training import (
    Checkpointer,
    preservation_policies,
    save_decision_policies,
    step_records,
)

EVERY_STEP = save_decision_policies.FixedIntervalPolicy(1)
READER = """
import sys
from pathlib import Path
from waystation.storage.leases import Leases
with Leases(Path(sys.argv[1])).hold(sys.argv[2]) as may_read:
    print(may_read, flush=True)
    sys.stdin.read()
"""


def keeper(root: Path, n: int = 1) -> Checkpointer:
    return Checkpointer(
        root, save_decision_policy=EVERY_STEP, preservation_policy=preservation_policies.LatestN(n)
    )


def steps_of(checkpointer: Checkpointer) -> list[int]:
    return [info.step for info in checkpointer.checkpoints]


def lease_files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if leases.is_mark(path.name)]


def other_system() -> str:
    """The identity of a process of another machine."""
    return "0" * 12 + new_attempt_id()[12:]


class SlowReader:
    """A checkpointable whose load the test holds up."""

    began = threading.Event()
    may_end = threading.Event()

    async def save(self, directory: Any) -> Any:
        async def write() -> None:
            ((await directory.await_creation()) / "file").write_text("x")

        return write()

    async def load(self, directory: Path) -> Any:
        async def read() -> None:
            self.began.set()
            assert self.may_end.wait(60)
            assert (directory / "file").read_text() == "x"

        return read()


def test_a_step_that_is_being_loaded_stays(tmp_path: Path) -> None:
    reader = SlowReader()
    with keeper(tmp_path) as checkpointer:
        checkpointer.save_checkpointables(0, {"slow": reader})
        loading = checkpointer.load_checkpointables_async(0, {"slow": reader})
        assert reader.began.wait(60)
        checkpointer.save(1, {"a": 1})
        assert steps_of(checkpointer) == [0, 1]
        assert len(lease_files(tmp_path)) == 1
        assert sorted(os.listdir(tmp_path)) == ["0", "1"], "programs that list steps meet these alone"
        assert waystation.verify(tmp_path / "0").strays == []
        reader.may_end.set()
        loading.result()
        assert lease_files(tmp_path) == []
        checkpointer.save(2, {"a": 2})
        assert steps_of(checkpointer) == [2]
        assert not (tmp_path / "0").exists()


@pytest.mark.parametrize("use_ocdbt", [True, None])
def test_what_is_read_is_what_it_was_to_orbax(tmp_path: Path, use_ocdbt: bool | None) -> None:
    context = waystation.Context()
    context.array.saving.use_ocdbt = use_ocdbt
    with Checkpointer(tmp_path, context=context) as checkpointer:
        checkpointer.save(0, {"a": np.arange(3)})
    before = sorted(os.listdir(tmp_path / "0"))
    with Leases(tmp_path).hold("0") as may_read, Leases(tmp_path).hold("0"):
        assert may_read
        assert len(lease_files(tmp_path)) == 2
        assert waystation.load(tmp_path / "0")["a"].tolist() == [0, 1, 2]
        if use_ocdbt:
            assert oracle.load(tmp_path / "0")["a"].tolist() == [0, 1, 2]
            assert list(oracle.checkpointables_metadata(tmp_path / "0").metadata) == ["state"]
            with oracle.training.Checkpointer(tmp_path) as theirs:
                assert [entry.step for entry in theirs.checkpoints] == [0]
                assert theirs.load(0)["a"].tolist() == [0, 1, 2]
    assert sorted(os.listdir(tmp_path / "0")) == before


def test_a_step_that_another_process_reads_stays_until_that_dies(tmp_path: Path) -> None:
    with keeper(tmp_path) as checkpointer:
        checkpointer.save(0, {"a": np.zeros(3)})
        command = [sys.executable, "-c", READER, str(tmp_path), "0"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "True\n"
            checkpointer.save(1, {"a": 1})
            assert steps_of(checkpointer) == [0, 1]
            process.kill()
        assert len(lease_files(tmp_path)) == 1, "it was killed, so its lease is there"
        checkpointer.save(2, {"a": 2})
        assert steps_of(checkpointer) == [2]
        assert lease_files(tmp_path) == [], "which a collection has removed"


@pytest.mark.parametrize(
    ("age_s", "expires_s", "kept"), [(0, 600, [0, 1]), (660, 600, [1]), (660, 1e9, [0, 1])]
)
def test_a_reader_of_another_machine_counts_while_it_shows_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, expires_s: float, kept: list[int]
) -> None:
    monkeypatch.setattr(signs_of_life, "EXPIRES_S", expires_s)
    with keeper(tmp_path) as checkpointer:
        checkpointer.save(0, {"a": 0})
        path = tmp_path / "0" / f"{leases.LEASE}{other_system()}"
        path.write_text(json.dumps(owner_record()))
        os.utime(path, (time.time() - age_s,) * 2)
        checkpointer.save(1, {"a": 1})
        assert steps_of(checkpointer) == kept


def test_what_is_being_overwritten_is_not_collected(tmp_path: Path) -> None:
    gate = Gate()
    with Checkpointer(
        tmp_path,
        save_decision_policy=EVERY_STEP,
        preservation_policy=preservation_policies.LatestN(1),
        max_saves_in_flight=2,
    ) as checkpointer:
        checkpointer.save(0, {"a": 0})
        checkpointer.save_checkpointables_async(
            0, {"state": {"a": 5}, "gate": gate}, overwrite=True, force=True
        )
        checkpointer.save(1, {"a": 1})
        assert steps_of(checkpointer) == [0, 1]
        gate.open()
        checkpointer.wait()
        assert steps_of(checkpointer) == [1], "it was overwritten, and then collected"


def test_a_version_that_was_not_judged_stays(directory: AnyPath) -> None:
    path = directory / "3"
    waystation.save(path, {"step": 1})
    judged = step_records.read(path).commit_ns
    waystation.save(path, {"step": 2}, overwrite=True)
    with pytest.raises(Conflict, match="was not judged"):
        commit.withdraw(os.fspath(path), attempts.new_attempt_id(), created_ns=judged)
    assert waystation.load(path)["step"] == 2
    judged = step_records.read(path).commit_ns
    commit.withdraw(os.fspath(path), attempts.new_attempt_id(), created_ns=judged)
    assert not waystation.is_checkpoint(path)
    assert names_in(directory) == []
