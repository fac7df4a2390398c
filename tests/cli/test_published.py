"""`waystation sum`, and `waystation verify` of published models."""

import os
from pathlib import Path

import numpy as np
import pytest

import waystation
import waystation.safetensors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    arrays = {f"w{number}": np.full((256, 256), number, np.float32) for number in range(4)}
    waystation.safetensors.save(arrays, tmp_path / "model", max_file_bytes=1 << 19)
    return tmp_path / "model"


def test_summed_and_intact(model: Path, script) -> None:
    outcome = script("sum", model)
    assert (outcome.out, outcome.err, outcome.code) == (
        "[DIR]/model/checksums.waystation.json: 1.0 MiB in 2 files summed\n",
        "",
        0,
    )
    outcome = script("verify", model)
    assert (outcome.out, outcome.code) == ("[DIR]/model: intact (1.0 MiB in 2 files verified)\n", 0)
    (file, *_) = sorted(model.glob("*.safetensors"))
    assert script("verify", file).out == f"[DIR]/model/{file.name}: intact (516.0 KiB in 1 file verified)\n"


def test_damage(model: Path, run, damage) -> None:
    assert run("sum", model, "--json").document["files"] == 2
    second = model / "model-00002-of-00002.safetensors"
    damage(second, second.stat().st_size - 1)
    outcome = run("verify", model)
    assert outcome.code == 1
    assert outcome.out.splitlines() == [
        "[DIR]/model: 1 damaged file (1.0 MiB in 2 files read)",
        "  model-00002-of-00002.safetensors: 1 of 3 blocks differ, the first at 524288",
        "    in w3",
    ]
    outcome = run("verify", model, "--json")
    (found,) = outcome.document["models"]
    assert (outcome.code, found["intact"], found["damages"][0]["tensors"]) == (1, False, ["w3"])


@pytest.mark.parametrize("given", ["the model", "the file"])
@pytest.mark.parametrize("lost", ["cut off", "removed"])
def test_files_that_are_cut_off_or_removed(model: Path, run, given: str, lost: str) -> None:
    run("sum", model)
    second = model / "model-00002-of-00002.safetensors"
    if lost == "removed":
        second.unlink()
    else:
        os.truncate(second, second.stat().st_size - 1)
    path = model if given == "the model" else second
    outcome = run("verify", path)
    assert (outcome.code, outcome.err) == (1, "")
    assert "1 damaged file" in outcome.out
    outcome = run("verify", path, "--json")
    (found,) = outcome.document["models"]
    (damage,) = found["damages"]
    assert (outcome.code, found["intact"], Path(damage["path"]).name) == (1, False, second.name)
    assert damage["tensors"] == (["w2", "w3"] if lost == "removed" else ["w3"])
    assert damage["problem"] == "is missing" if lost == "removed" else "were summed" in damage["problem"]


def test_what_was_never_summed(model: Path, run) -> None:
    outcome = run("verify", model)
    assert outcome.code == 2
    assert "run 'waystation sum'" in outcome.err
    assert run("sum", model / "absent").code == 2


def test_checkpoints_are_verified_as_such(tmp_path: Path, run) -> None:
    waystation.save(tmp_path / "checkpoint", {"w": np.ones(3)})
    assert run("verify", tmp_path / "checkpoint").out.startswith("[DIR]/checkpoint: intact")
    for inside in (tmp_path / "checkpoint" / "state", next((tmp_path / "checkpoint").rglob("*.safetensors"))):
        outcome = run("verify", inside)
        assert outcome.code == 2
        assert "'waystation verify [DIR]/checkpoint' check them" in outcome.err


def test_what_cannot_be_verified_is_not_advised_to_be_verified(tmp_path: Path, run) -> None:
    (tmp_path / "empty.safetensors").touch()
    outcome = run("verify", tmp_path / "empty.safetensors")
    assert outcome.code == 2
    assert "is too short for a safetensors header" in outcome.err
    assert "hint" not in outcome.err
    outcome = run("sum", tmp_path / "empty.safetensors")
    assert "'waystation verify PATH' lists all damage" in outcome.err


@pytest.mark.parametrize(
    "options",
    [
        "{model} --to a b",
        "{model} --to=a b",
        "{model} --to a --to b",
        "--to a b --max-shard-bytes 1GB {model}",
        "--to a b -- {model}",
    ],
)
def test_folders_follow_their_option(options: str, model: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    document = run("safetensors", "spread", "--json", *options.format(model=model).split()).document
    assert document["path"] == "[DIR]/a"
    assert {file["folder"] for file in document["files"]} == {"[DIR]/a", "[DIR]/b"}
    assert run("verify", "a").code == 2, "it was never summed"
    assert run("sum", "a").code == 0
    assert run("verify", "a").code == 0


def test_a_spread_that_is_called_wrongly(model: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    for call, text in (
        (["--to", "a", "b", str(model)], "Missing argument 'MODEL'"),
        ([str(model)], "Missing option '--to'"),
        ([str(model), "--to"], "requires an argument"),
        ([str(model), "--to", "a", "s3://bucket/b"], "is a URL"),
        ([str(model), "--to", "a", "b", "--max-shard-bytes", "0"], "--max-shard-bytes is 0"),
    ):
        outcome = run("safetensors", "spread", *call)
        assert outcome.code == 2
        assert text in outcome.err
    assert [path.name for path in model.parent.iterdir()] == ["model"]
