"""What every command prints, as text and as JSON: compared with the files in `snapshots`, and each document
with the schema that the documentation publishes.

One file for each command has calls, what they print and how they end. `WAYSTATION_UPDATE_SNAPSHOTS=1` writes
them anew; read the difference before it is committed. Commands run in this process, so this costs next to
nothing. Times, the directory, sizes of files and what depends on the machine are replaced.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from typer.testing import CliRunner

import waystation
from waystation.checkpoint.export import export
from waystation.cli.application import application

from .conftest import flip_bit, normalised
from .test_failures import COMMANDS, GROUPS

SNAPSHOTS = Path(__file__).parent / "snapshots"
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "command-line.schema.json").read_text())
UPDATES = bool(os.environ.get("WAYSTATION_UPDATE_SNAPSHOTS"))

# By command: what is called. Each call begins in the directory that `world` makes.
CALLS: dict[str, list[str]] = {
    "inspect": [
        "runs/step_1",
        "runs/step_1 --depth 1",
        "absent",
        "runs",
        "file",
        "runs/step_1/state",
        "damaged",
    ],
    "ls": ["runs", "absent", "runs/step_1", "empty", "file", "ftp://host/run"],
    "sum": ["model", "model/model.safetensors", "file", "empty"],
    "verify": [
        "runs/step_1",
        "damaged",
        "--all runs",
        "--all runs/step_1",
        "runs",
        "absent",
        "file",
        "--all file",
        "--all empty",
    ],
    "diff": [
        "runs/step_1 runs/step_1",
        "runs/step_1 runs/step_2",
        "runs/step_1 runs/step_2 --atol 1",
        "runs/step_1 absent",
    ],
    "view": ["absent", "model/model.safetensors"],
    "export": [
        "runs/step_1 out",
        "runs/step_1 out.npz --select w",
        "runs/step_1 out.pt",
        "runs/step_1 model",
        "runs/step_1 out --cast float32=flaot16",
        "runs/step_1 out --max-shard-bytes much",
    ],
    "cp": ["runs/step_1 copy", "runs/step_1 runs/step_2", "absent copy"],
    "mirror": ["runs copies", "runs/step_1 copies", "runs http://127.0.0.1:1/copies"],
    "safetensors": [
        "spread model --to out copy",
        "spread model --to out",
        "spread absent --to out copy",
        "spread model --to empty model",
        "spread model --to out absent/copy",
    ],
    "gc": ["runs", "runs --dry-run", "runs --older-than soon", "leftovers", "leftovers --yes"],
    "doctor": ["absent", "file"],
    "demo": ["--memory --runtime", "--output file"],
    "launch": ["--torch -- true", "-- false", "--hosts file -- true", "-- ./absent"],
    "runtime": ["status nowhere:1"],
    "program": ["show absent", "show absent_module:name", "show file"],
    "placement": [
        "--hosts 4 --copies 2 --hosts-per-domain 2",
        "--copies 2",
        "--domains file",
        "--domains none",
        "--hosts 1",
    ],
    "agent": ["discard --directory absent"],
    "top": ["--once", "--metrics nowhere --once", "--hosts file --once", "--hosts file --metrics a:1"],
}
WITHOUT_JSON = {"agent"}  # its own program prints a document; see `waystation agent --help`


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two checkpoints, a damaged one, a model, a leftover, a file and an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WAYSTATION_CACHE_DIR", str(tmp_path / ".cache"))
    monkeypatch.delenv("WAYSTATION_AGENT_DIRECTORY", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    state = {"params": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(3)}, "step": 1}
    waystation.save("runs/step_1", state, custom_metadata={"loss": 2.5})
    state["params"]["w"][1, 2] += 0.5  # type: ignore[index]
    waystation.save("runs/step_2", state)
    shutil.copytree("runs/step_1", "damaged")
    flip_bit(tmp_path / "damaged" / "state" / "p00000-000.safetensors", -1)
    (tmp_path / "model").mkdir()
    export("runs/step_1", tmp_path / "model")
    (tmp_path / "file").write_text("hello\n")
    (tmp_path / "none").touch()
    (tmp_path / "empty").mkdir()
    attempt = tmp_path / "leftovers" / f"step_3.waystation-tmp-{'0' * 12}-17-4242-00c0ffee"
    attempt.mkdir(parents=True)
    (attempt / "data").write_bytes(bytes(2048))
    os.utime(attempt, ns=(0, 0))
    return tmp_path


def shown(call: list[str], directory: Path) -> tuple[str, Any]:
    """A call as the snapshot has it, and its document if it has one."""
    done = CliRunner().invoke(application, call, prog_name="waystation")
    text = f"$ waystation {' '.join(call)}\n{done.stdout}"
    if done.stderr:
        text += "--- stderr\n" + done.stderr
    document = json.loads(done.stdout) if "--json" in call and done.stdout else None
    return f"{stable(text, directory)}--- exit {done.exit_code}\n", document


def stable(text: str, directory: Path) -> str:
    """The text without what differs from run to run."""
    text = normalised(text, directory)
    text = re.sub(r"\b\d+(\.\d+)? (KiB|MiB|GiB|TiB)\b", "[SIZE]", text)
    text = re.sub(r'("(?:bytes|bytes_read|file_bytes|bytes_removed)": )\d+', r"\1[BYTES]", text)
    text = re.sub(r'("(?:elapsed_s|silent_s|duration_s|ended_s)": )[\d.e+-]+', r"\1[SECONDS]", text)
    text = re.sub(r"\d+\.\d+ s\b|\b\d{4,} d\b", "[SECONDS]", text)
    text = re.sub(r"pid \d+", "pid [PID]", text)
    text = re.sub(r'"(pid|process_id)": \d+', r'"\1": [PID]', text)
    text = re.sub(r'("(?:started_at_s|ended_at_s|failed_at_s)": )[\d.e+]+', r"\1[SECONDS]", text)
    return re.sub(r" +$", "", text, flags=re.MULTILINE)


def compare(name: str, text: str) -> None:
    """Compares with the file of this name, or writes it."""
    path = SNAPSHOTS / f"{name}.txt"
    if UPDATES:
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; WAYSTATION_UPDATE_SNAPSHOTS=1 writes it anew"


@pytest.mark.parametrize("command", sorted(CALLS))
def test_what_a_command_prints(command: str, world: Path) -> None:
    texts = []
    for arguments in CALLS[command]:
        calls = [[command, *arguments.split()]]
        if command not in WITHOUT_JSON:
            before, dash, after = arguments.partition("-- ")
            calls.append([command, *before.split(), "--json", *(["--", *after.split()] if dash else [])])
        for call in calls:
            forget(world)
            text, document = shown(call, world)
            texts.append(text)
            if document is not None:
                validate(document, " ".join(call[:2]) if command in GROUPS else command)
    compare(command, "\n".join(texts))


def forget(directory: Path) -> None:
    """Removes what a call before has made."""
    for name in ("out", "copy", "copies"):
        shutil.rmtree(directory / name, ignore_errors=True)
    (directory / "out.npz").unlink(missing_ok=True)
    (directory / "model" / "waystation.checksums").unlink(missing_ok=True)


def validate(document: Any, command: str) -> None:
    """Compares a document with the published schema of its command."""
    name = "error" if "error" in document else command
    jsonschema.Draft202012Validator(
        {**SCHEMA, "anyOf": [{"$ref": f"#/$defs/{name.replace(' ', '%20')}"}]}
    ).validate(document)


def test_every_command_has_calls_and_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert CALLS.keys() == set(COMMANDS)
    leaves = {name for name in COMMANDS if name not in GROUPS} - WITHOUT_JSON
    leaves |= {f"{group} {name}" for group, names in GROUPS.items() for name in names}
    assert leaves | {"error"} <= SCHEMA["$defs"].keys()
    assert {file.stem for file in SNAPSHOTS.iterdir()} == {*COMMANDS, "help"}


def test_help(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERMINAL_WIDTH", "100")
    calls = [["--help"], *([command, "--help"] for command in COMMANDS if command != "agent")]
    calls += [[group, name, "--help"] for group, names in GROUPS.items() for name in names]
    compare("help", "\n".join(shown(call, tmp_path)[0] for call in calls))
