"""Prepared parts of saves to local storage: who takes them for what, and who may remove them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import waystation
from waystation import _native, storage
from waystation.checkpoint.collect import find_leftovers, remove_leftovers
from waystation.errors import Corrupt, NotFound
from waystation.layouts.native import names, transactions
from waystation.layouts.native.records import CheckpointRecord, Digest, LocalPart
from waystation.storage.attempts import leftovers

TRANSACTION = "00c0ffee00c0ffee"


def prepare(target: Path, *, process_count: int = 1, replaces: Digest | None = None) -> Path:
    """What a process that was killed left of its part of a save."""
    code = (
        "import sys; from waystation.storage.attempts import Attempt\n"
        "print(Attempt(sys.argv[1], transaction=sys.argv[2]).path)"
    )
    command = [sys.executable, "-c", code, str(target), TRANSACTION]
    path = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    part = LocalPart(TRANSACTION, process_count - 1, process_count, replaces)
    (path / "checkpoint.json").write_bytes(CheckpointRecord(1, {}, 1, None, part).encode())
    return path


def local_storage() -> waystation.Context:
    context = waystation.Context()
    context.multiprocessing.primary_host = None
    return context


def verdicts(directory: Path) -> list[str]:
    return [entry.verdict for entry in find_leftovers(directory, older_than_s=0)]


def test_whoever_cannot_ask_leaves_a_prepared_part_alone(tmp_path: Path) -> None:
    path = prepare(tmp_path / "a")
    (leftover,) = leftovers(str(tmp_path), "a")
    assert (leftover.dead, leftover.undecided, leftover.is_over) == (True, True, False)
    assert verdicts(tmp_path) == ["undecided"]
    assert remove_leftovers(find_leftovers(tmp_path, older_than_s=0), older_than_s=0) == []
    assert path.exists()


def test_a_part_is_over_once_something_else_has_its_place(tmp_path: Path) -> None:
    path = prepare(tmp_path / "a")
    waystation.save(tmp_path / "a", {"x": 1})
    assert path.exists(), "a save to shared storage cannot know"
    assert verdicts(tmp_path) == ["dead"]
    waystation.save(tmp_path / "a", {"x": 2}, overwrite=True)
    assert os.listdir(tmp_path) == ["a"]
    assert waystation.load(tmp_path / "a") == {"x": 2}


def test_a_part_that_is_to_replace_what_stands_there(tmp_path: Path) -> None:
    waystation.save(tmp_path / "a", {"x": 1})
    present = transactions.look(str(tmp_path / "a"))
    assert present is not None
    prepare(tmp_path / "a", process_count=2, replaces=present.digest)
    assert verdicts(tmp_path) == ["undecided"]
    waystation.save(tmp_path / "a", {"x": 2}, overwrite=True)
    assert verdicts(tmp_path) == ["dead"]


def test_what_an_overwrite_has_replaced_is_no_prepared_part(tmp_path: Path) -> None:
    """The checkpoint that a swap of names left under an attempt's name has the id of its own save."""
    path = prepare(tmp_path / "a")
    other = path.with_name(path.name.replace(TRANSACTION, "1" * 16))
    path.rename(other)
    assert verdicts(tmp_path) == ["dead"]


@pytest.mark.parametrize("content", [b"", b"{}", b'{"crc64":"0000000000000000","record":{}}\n'])
def test_a_record_that_was_not_written_whole_prepares_nothing(tmp_path: Path, content: bytes) -> None:
    path = prepare(tmp_path / "a")
    (path / "checkpoint.json").write_bytes(content)
    assert verdicts(tmp_path) == ["dead"]


def test_when_nobody_has_committed_the_parts_are_removed(tmp_path: Path) -> None:
    prepare(tmp_path / "a")
    with local_storage(), pytest.raises(NotFound):
        waystation.load(tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_with_too_few_processes_the_parts_stay(tmp_path: Path) -> None:
    prepare(tmp_path / "a", process_count=2)
    with local_storage():
        with pytest.raises(NotFound, match=f"parts of save {TRANSACTION} are prepared"):
            waystation.load(tmp_path / "a")
        assert verdicts(tmp_path) == ["undecided"]
        waystation.save(tmp_path / "a", {"x": 1})
        assert verdicts(tmp_path) == ["dead"]
        waystation.save(tmp_path / "a", {"x": 2}, overwrite=True)
    assert os.listdir(tmp_path) == ["a"]


def test_an_attempt_has_the_id_of_its_transaction_in_its_name(tmp_path: Path) -> None:
    attempt_id = prepare(tmp_path / "a").name.removeprefix("a.waystation-tmp-")
    assert storage.names.transaction(attempt_id) == TRANSACTION
    assert names.mover(names.moved_in("state", attempt_id)) == attempt_id
    assert storage.names.transaction(attempt_id.removesuffix("00c0ffee")) is None


@pytest.mark.parametrize(
    "member",
    [
        {"process": 2},
        {"process": -1},
        {"process_count": 0},
        {"process_count": True},
        {"transaction": "short"},
        {"transaction": TRANSACTION.upper()},
        {"transaction": None},
        {"replaces": {"bytes": 1}},
        {"replaces": 7},
    ],
)
def test_malformed_records_of_parts(tmp_path: Path, member: dict[str, Any]) -> None:
    with local_storage():
        waystation.save(tmp_path / "a", {"x": 1})
    record = tmp_path / "a" / "checkpoint.json"
    body = json.loads(record.read_bytes())["record"]
    assert body["local"]["process_count"] == 1
    body["local"] |= {"process_count": 2, **member}
    record.write_bytes(_native.seal_json(json.dumps(body).encode()))
    for context in (waystation.Context(), local_storage()):
        with context, pytest.raises(Corrupt, match="malformed"):
            waystation.load(tmp_path / "a")
