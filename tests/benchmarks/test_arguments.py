"""Files that benchmarks are told to read, and that are not there or something else."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as whole_command
from benchmarks import command

ARGUMENTS = ["--report", "--resume"]


@pytest.fixture(name="parser")
def made_parser() -> argparse.ArgumentParser:
    return command.session_parser("benchmarks", 1)


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file or directory"),
        ("", "holds no JSON: Expecting value"),
        ("{", "holds no JSON: Expecting property name"),
        ("[1]", "holds no JSON object"),
    ],
)
def test_what_is_no_results_file_is_told_in_a_line(
    parser: argparse.ArgumentParser,
    argument: str,
    content: str | None,
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as raised:
        parser.parse_args([argument, str(path)])
    assert raised.value.code == 2
    *_, told = capsys.readouterr().err.splitlines()
    assert told.startswith(f"python -m benchmarks: error: argument {argument}: '{path}' {problem}")


def test_a_results_file_is_read(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"runs": []}))
    assert parser.parse_args(["--report", str(path)]).report == {"runs": []}
    assert parser.parse_args(["--resume", str(path)]).resume == path


def test_nothing_is_measured_where_a_report_is_wanted(
    parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"runs": []}))

    def measure() -> command.Document:
        raise AssertionError("nothing is to be measured")

    assert command.document_of(parser.parse_args(["--report", str(path)]), measure) == {"runs": []}


def test_a_report_is_shown_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"runs": []}))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--report", str(path), "--markdown", "--no-mapped"])
    whole_command.main()
    assert capsys.readouterr().out == ""  # no state was measured
