"""`cp` and `mirror`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support import s3

import waystation

from .conftest import Run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run of two steps."""
    for step in (1, 2):
        waystation.save(tmp_path / "runs" / str(step), {"w": np.full(70_000, step), "step": step})
    return tmp_path / "runs"


def reached(place: s3.Bucket) -> list[str]:
    settings = place.context().storage.settings
    return [part for name, value in settings.items() for part in ("--storage", f"{name}={value}")]


def test_a_checkpoint_goes_to_a_store_and_back(runs: Path, tmp_path: Path, run: Run) -> None:
    place = s3.bucket()
    there = f"{place.location}/archive/1"
    done = run("cp", runs / "1", there, *reached(place), "--json")
    assert (done.code, done.err) == (0, "")
    document = done.document
    assert (document["path"], document["files"], document["bytes_found"]) == (there, 1, 0)
    assert document["bytes"] > 70_000 * 8
    told = run("cp", there, tmp_path / "back", "--bytes-per-second", "100MB", *reached(place))
    assert (told.code, told.err) == (0, "")
    assert told.out.startswith("[DIR]/back: 550.9 KiB in 1 file copied and verified in ")
    assert run("verify", tmp_path / "back").code == 0
    assert run("verify", there, *reached(place)).code == 0
    assert run("diff", runs / "1", tmp_path / "back").code == 0
    assert run("diff", runs / "1", there, *reached(place)).code == 0


def test_what_is_there_is_replaced_only_if_that_is_asked_for(runs: Path, tmp_path: Path, run: Run) -> None:
    refused = run("cp", runs / "1", runs / "2")
    assert (refused.code, refused.out) == (2, "")
    assert "exists already" in refused.err
    assert run("cp", runs / "1", runs / "2", "--overwrite").code == 0
    assert waystation.load(runs / "2")["step"] == 1


def test_damage_is_told_and_nothing_is_copied(
    runs: Path, tmp_path: Path, run: Run, damage: Callable[[Path, int], None]
) -> None:
    damage(runs / "1" / "state" / "p00000-000.safetensors", 5000)
    done = run("cp", runs / "1", tmp_path / "copy")
    assert done.code == 2
    assert "checksum" in done.err
    assert "p00000-000.safetensors" in done.err
    assert os.listdir(tmp_path) == ["runs"]
    mirrored = run("mirror", runs, tmp_path / "backup")
    assert mirrored.code == 1
    assert "1: not copied: stored bytes are not what was written" in mirrored.out
    assert "[DIR]/backup: 1 checkpoint copied, 0 there already\n" in mirrored.out
    assert os.listdir(tmp_path / "backup") == ["2"]


def test_a_directory_of_runs_has_no_mirror(runs: Path, tmp_path: Path, run: Run) -> None:
    refused = run("mirror", runs.parent, tmp_path / "backup")
    assert refused.code == 2
    assert "there are no checkpoints in" in refused.err
    assert f"directories there that hold some: {runs.name}. Mirror each of them" in refused.err
    (tmp_path / "empty").mkdir()
    assert run("mirror", tmp_path / "empty", tmp_path / "backup").code == 0  # its first may come yet


def test_a_mirror_says_what_it_has_done(runs: Path, tmp_path: Path, run: Run) -> None:
    first = run("mirror", runs, tmp_path / "backup", "--json").document
    assert [entry["name"] for entry in first["copied"]] == ["2", "1"]
    again = run("mirror", runs, tmp_path / "backup")
    assert (again.code, again.out) == (0, "[DIR]/backup: 0 checkpoints copied, 2 there already\n")
    waystation.save(runs / "2", {"w": np.ones(3)}, overwrite=True)
    waystation.delete(runs / "1")
    differing = run("mirror", runs, tmp_path / "backup")
    assert differing.code == 1
    assert "2: left alone: another one is there; --overwrite replaces it" in differing.out
    done = run("mirror", runs, tmp_path / "backup", "--overwrite", "--delete", "--json")
    assert done.code == 0
    assert ([entry["name"] for entry in done.document["copied"]], done.document["deleted"]) == (["2"], ["1"])
    assert os.listdir(tmp_path / "backup") == ["2"]


def test_a_rate_that_is_none_is_refused(runs: Path, tmp_path: Path, run: Run) -> None:
    done = run("cp", runs / "1", tmp_path / "copy", "--bytes-per-second", "fast")
    assert done.code == 2
    assert "'fast' is not a size" in done.err


def test_an_empty_argument_is_no_directory(runs: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    for command in (["cp", "1", ""], ["cp", "", "3"], ["mirror", "/nowhere", "", "--delete"], ["ls", ""]):
        outcome = run(*command)
        assert (outcome.code, "this is empty" in outcome.err) == (2, True)
    assert sorted(path.name for path in runs.iterdir()) == ["1", "2"]


def test_urls_of_files_are_taken_and_options_are_named_as_options(runs: Path, run: Run) -> None:
    refused = run("cp", f"file://{runs}/1", f"file://{runs}/2")
    assert refused.code == 2
    assert "--overwrite" in refused.err
    assert "overwrite=True" not in refused.err
    assert run("cp", f"file://{runs}/1", f"file://{runs}/3").code == 0
    assert run("inspect", f"file://{runs}/3").code == 0


def test_a_rate_that_makes_no_sense_is_told_by_the_option(runs: Path, run: Run) -> None:
    refused = run("cp", runs / "1", runs / "3", "--bytes-per-second", "0")
    assert refused.err.startswith("error: --bytes-per-second must be from 1 to ")
    assert not (runs / "3").exists()


def test_storage_takes_the_deadline(runs: Path, run: Run) -> None:
    wrong = run("ls", runs, "--storage", "deadline_s=soon")
    assert "--storage deadline_s is a number of seconds" in wrong.err
    assert run("ls", runs, "--storage", "deadline_s=300").code == 0
