"""The commands on locations: checkpoints in an object store, and models behind HTTP."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tests.support import programs, s3
from tests.support.long import only_long
from tests.support.web import site

import waystation
import waystation.storage
from waystation.storage import signs_of_life, store_leases

from .conftest import Run


@pytest.fixture
def place() -> s3.Bucket:
    """A bucket."""
    return s3.bucket()


def reached(place: s3.Bucket) -> list[str]:
    """The options of a command by which a bucket is reached."""
    settings = place.context().storage.settings
    return [part for name, value in settings.items() for part in ("--storage", f"{name}={value}")]


def state_of(value: int) -> dict[str, Any]:
    return {"w": np.full((300, 1000), value, np.float32), "step": value}


@pytest.fixture
def run_of_two(place: s3.Bucket) -> str:
    """The location of a run of two steps."""
    with place.context():
        for step in (1, 2):
            waystation.save(f"{place.location}/run/{step}", state_of(step))
    return f"{place.location}/run"


def test_checkpoints_are_listed_inspected_verified_and_compared(
    place: s3.Bucket, run_of_two: str, run: Run
) -> None:
    options = [*reached(place), "--json"]
    (first, second) = run("ls", run_of_two, *options).document["checkpoints"]
    assert (first["path"], second["step"], second["arrays"]) == (f"{run_of_two}/1", 2, 1)
    assert first["bytes"] > state_of(1)["w"].nbytes
    shown = run("inspect", f"{run_of_two}/1", *options).document
    assert (shown["path"], shown["layout"]) == (f"{run_of_two}/1", "native")
    verified = run("verify", run_of_two, "--all", *options).document["checkpoints"]
    assert [(one["path"], one["intact"]) for one in verified] == [
        (f"{run_of_two}/{step}", True) for step in (1, 2)
    ]
    assert run("verify", f"{run_of_two}/2", *options).document["checkpoints"][0]["intact"]
    outcome = run("diff", f"{run_of_two}/1", f"{run_of_two}/2", *options)
    assert outcome.code == 1
    assert {difference["key_path"] for difference in outcome.document["differences"]} == {"['step']", "['w']"}
    assert run("diff", f"{run_of_two}/1", f"{run_of_two}/1", *options).document["same"]


def test_a_checkpoint_is_compared_with_one_of_this_system_and_exported_to_it(
    place: s3.Bucket, run_of_two: str, run: Run, tmp_path: Path
) -> None:
    waystation.save(tmp_path / "ckpt", state_of(1))
    assert run("diff", f"{run_of_two}/1", tmp_path / "ckpt", *reached(place)).code == 0
    outcome = run("export", f"{run_of_two}/2", tmp_path / "model", *reached(place))
    assert outcome.code == 0, outcome.err
    (exported,) = safetensors.numpy.load_file(tmp_path / "model" / "model.safetensors").values()
    np.testing.assert_array_equal(exported, state_of(2)["w"])


def test_damage_is_found(place: s3.Bucket, run_of_two: str, run: Run) -> None:
    (data,) = [name for name in place.names() if name.startswith("run/2/") and name.endswith(".safetensors")]
    file = place.folder / data
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    outcome = run("verify", run_of_two, "--all", "--json", *reached(place))
    assert outcome.code == 1
    assert [one["intact"] for one in outcome.document["checkpoints"]] == [True, False]


def test_published_models_are_verified(place: s3.Bucket, run: Run, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "model.safetensors"
    safetensors.numpy.save_file({"a": np.arange(300_000)}, file)
    assert run("sum", tmp_path / "model").code == 0
    with place.context():
        for path in (tmp_path / "model").iterdir():
            waystation.storage.of(place.location).write_files(
                [(f"{place.location}/model/{path.name}", path.read_bytes())]
            )
    assert "intact" in run("verify", f"{place.location}/model", *reached(place)).out
    outcome = run("sum", f"{place.location}/model", *reached(place))
    assert outcome.code == 2
    assert "before it is uploaded" in outcome.err
    with site(tmp_path, query="sig=not-to-be-seen") as served:
        outcome = run("verify", f"{served.url}/model/model.safetensors?sig=not-to-be-seen")
        assert outcome.code == 0, outcome.err
        assert "intact" in outcome.out
        assert "not-to-be-seen" not in outcome.out + outcome.err
        for command in ("ls", "gc", "inspect"):
            outcome = run(command, f"{served.url}/model?sig=not-to-be-seen")
            assert outcome.code == 2
            assert "not-to-be-seen" not in outcome.out + outcome.err


def test_a_store_is_reached_as_the_environment_says(
    place: s3.Bucket, run_of_two: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in place.context().storage.settings.items():
        monkeypatch.setenv(name.upper(), value)
    assert len(run("ls", run_of_two, "--json").document["checkpoints"]) == 2
    outcome = run("ls", run_of_two, "--storage", "aws_secret_access_key=another")
    assert outcome.code == 2
    assert "check the credentials" in outcome.err


def test_settings_that_make_no_sense_are_told_without_their_values(run: Run) -> None:
    for wrong in ("secret-value", "=secret-value"):
        outcome = run("ls", "s3://bucket/run", "--storage", wrong)
        assert outcome.code == 2
        assert "--storage takes NAME=VALUE" in outcome.err
        assert "secret" not in outcome.err
    outcome = run("ls", "s3://bucket/run", "--storage", "no_such_name=secret-value")
    assert outcome.code == 2
    assert "no_such_name" in outcome.err
    assert "secret" not in outcome.err


@pytest.mark.parametrize("command", ["inspect", "ls", "verify", "diff", "export", "gc", "sum"])
def test_help_says_how_a_store_is_reached(run: Run, command: str) -> None:
    assert "--storage" in run(command, "--help").out


def test_what_needs_a_path_says_so(run: Run, tmp_path: Path) -> None:
    waystation.save(tmp_path / "ckpt", {"a": np.ones(3)})
    for arguments in (("export", tmp_path / "ckpt", "s3://bucket/model"), ("doctor", "s3://bucket")):
        outcome = run(*arguments)
        assert outcome.code == 2
        assert "a path of a mounted file system is needed" in outcome.err


# ---- what killed saves leave -------------------------------------------------------------------


def save(endpoint: str, path: str) -> None:
    with s3.context(endpoint):
        waystation.save(path, state_of(3), overwrite=True)


@pytest.fixture
def killed(place: s3.Bucket) -> Callable[[str], None]:
    """Has a process begin a save to a path, and kills it before it commits."""

    def kill_at(path: str) -> None:
        started = threading.Event()

        def kill(number: int) -> str:
            assert started.wait(programs.HANG_S)
            method, name = between.requests[number - 1]
            if method == "PUT" and name.endswith("checkpoint.json"):
                os.kill(process.pid or 0, signal.SIGKILL)
                return s3.REFUSE
            return s3.PASS

        with s3.proxy(place.endpoint, kill) as between:
            process = programs.context.Process(target=save, args=(between.endpoint, path), daemon=True)
            process.start()
            started.set()
            process.join(programs.HANG_S)
            assert process.exitcode == -signal.SIGKILL

    return kill_at


@pytest.mark.long
@only_long
def test_what_killed_saves_left_is_removed_once_their_leases_have_run_out(
    place: s3.Bucket,
    run_of_two: str,
    run: Run,
    killed: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = place.names()
    killed(f"{run_of_two}/2")
    killed(f"{run_of_two}/3")
    left = place.names()
    assert len(left) > len(whole)
    options = [*reached(place), "--json", "--yes"]
    outcome = run("gc", run_of_two, "--older-than", "0s", *options).document
    assert {entry["verdict"] for entry in outcome["attempts"]} == {"leased"}
    assert [entry["removable"] for entry in outcome["attempts"]] == [False, False]
    assert place.names() == left
    (attempt,) = run("ls", run_of_two, *options[:-1]).document["attempts"][:1]
    assert attempt["owner"]["process"] > 0
    assert attempt["bytes"] > state_of(3)["w"].nbytes
    run_out(monkeypatch)
    (attempt,) = run("gc", f"{run_of_two}/2", "--dry-run", *options).document["attempts"]
    assert (attempt["verdict"], attempt["removable"], attempt["removed"]) == ("dead", True, False)
    assert place.names() == left
    outcome = run("gc", run_of_two, *options).document
    assert [entry["removed"] for entry in outcome["attempts"]] == [True, True]
    assert place.names() == whole
    with place.context():
        assert waystation.load(f"{run_of_two}/2")["step"] == 2
    assert run("gc", run_of_two, *options).document["attempts"] == []


def run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has all leases count as run out."""
    from waystation.checkpoint import collect
    from waystation.layouts.native import in_store

    for module in (store_leases, in_store, collect):
        monkeypatch.setattr(module, "EXPIRES_S", -10.0)
    assert signs_of_life.EXPIRES_S > 0


def test_attempts_of_other_machines_are_left_for_a_while(
    place: s3.Bucket, run_of_two: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt_id = f"{'0' * 12}-17-4242-00c0ffee"
    with place.context():
        store = waystation.storage.of(run_of_two)
        store.write_files(
            [
                (
                    f"{run_of_two}/2/.waystation-tmp-{attempt_id}/owner.json",
                    json.dumps({"host": "it"}).encode(),
                ),
                (f"{run_of_two}/2/state-{attempt_id}/p00000-000.safetensors", bytes(2048)),
            ]
        )
    options = [*reached(place), "--json", "--yes"]
    run_out(monkeypatch)
    (attempt,) = run("gc", run_of_two, *options).document["attempts"]
    assert (attempt["verdict"], attempt["removed"], attempt["owner"]) == ("unknown", False, {"host": "it"})
    (attempt,) = run("gc", run_of_two, "--older-than", "0s", *options).document["attempts"]
    assert (attempt["verdict"], attempt["removed"]) == ("abandoned", True)
    assert not any(attempt_id in name for name in place.names())


def test_a_whole_bucket_is_listed(place: s3.Bucket, run: Run) -> None:
    with place.context():
        waystation.save(f"{place.location}/7", state_of(1))
    options = [*reached(place), "--json"]
    for location in (place.location, f"{place.location}/", place.location.replace("s3://", "S3://")):
        (found,) = run("ls", location, *options).document["checkpoints"]
        assert found["path"] == f"{place.location}/7"
    assert run("gc", place.location, "--dry-run", *options).document["attempts"] == []


def test_runs_in_a_bucket_are_named_by_few_requests(place: s3.Bucket, run_of_two: str, run: Run) -> None:
    """However many steps they have."""
    (place.folder / "data" / "raw").mkdir(parents=True)
    (place.folder / "data" / "raw" / "a.txt").write_text("a")

    def listed(location: str) -> tuple[Any, int]:
        with s3.proxy(place.endpoint) as between:
            settings = place.settings(between.endpoint).items()
            options = [part for name, value in settings for part in ("--storage", f"{name}={value}")]
            outcome = run("ls", location, *options)
            assert outcome.code == 0, outcome.err
            return outcome.out, len(between.requests)

    text, requests = listed(place.location)
    assert text == f"no checkpoints in {place.location}\ndirectories that hold checkpoints: run\n"
    for step in range(3, 30):
        shutil.copytree(place.folder / "run" / "1", place.folder / "run" / str(step))
    assert listed(place.location) == (text, requests)
    assert requests < 25
    assert "directories there: raw" in listed(f"{place.location}/data")[0]


def test_a_location_that_is_not_what_is_meant_is_told_with_what_to_do(
    place: s3.Bucket, run_of_two: str, run: Run
) -> None:
    (place.folder / "file.txt").write_text("a")
    for arguments, told in (
        (("inspect", place.location), f"is a whole bucket, .*'waystation ls {place.location}' lists"),
        (("cp", f"{run_of_two}/1", place.location), "is a whole bucket"),
        (("verify", place.location, "--all"), "no checkpoints in .*; directories there that hold some: run"),
        (("ls", f"{place.location}/file.txt"), "is a file; give a directory that holds checkpoints"),
        (("gc", f"{place.location}/file.txt"), "is a file; give a directory that holds checkpoints"),
        (("inspect", f"{run_of_two}/1/state"), f"there is no checkpoint .*; '{run_of_two}/1' is one"),
        (("ls", "s3://Bad_Name!/run"), "no bucket can have the name of 's3://Bad_Name!'; check that"),
        (("ls", f"{place.location}/a\nb"), r"no object can have the name '.*a\\nb'.*; choose another name"),
    ):
        outcome = run(*arguments, *reached(place))
        assert outcome.code == 2
        assert re.search(told, outcome.err), outcome.err


def test_a_checkpoint_that_was_copied_without_its_record_is_told(
    place: s3.Bucket, run_of_two: str, run: Run
) -> None:
    shutil.copytree(place.folder / "run", place.folder / "copy")
    (place.folder / "copy" / "1" / "checkpoint.json").unlink()
    for command in ("inspect", "verify"):
        outcome = run(command, f"{place.location}/copy/1", *reached(place))
        assert outcome.code == 2
        assert "what is there lacks checkpoint.json" in outcome.err
        assert "copy that to it, too, or save again" in outcome.err
    listed = run("ls", f"{place.location}/copy", *reached(place), "--json").document
    assert [one["name"] for one in listed["checkpoints"]] == ["2"]
    assert listed["directories"] == [], "it is among the attempts"
