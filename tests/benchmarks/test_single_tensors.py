"""Tensors read one by one, and a load over another axis: what is read is right, and so are the targets."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from tests.support.long import only_long

from benchmarks import command, machine, resharded, tensors


@pytest.mark.parametrize("framework", tensors.FRAMEWORKS)
@pytest.mark.parametrize("reader", [tensors.LIMIT, tensors.PACKAGE, tensors.COMPAT, tensors.OPEN])
def test_every_reader_reads_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: str, reader: str
) -> None:
    monkeypatch.setattr(tensors, "QUICK_TENSORS", 20)
    monkeypatch.setattr(tensors, "UNTIMED", 5)
    path = tensors._write(tmp_path, 8192, quick=True)
    assert tensors._measured(path, framework, reader) > 0


def test_readers_take_turns_and_are_compared_in_the_same_round(tmp_path: Path) -> None:
    microseconds = {tensors.LIMIT: 2.0, tensors.PACKAGE: 10.0, tensors.COMPAT: 5.0, tensors.OPEN: 20.0}
    runs = [
        {
            "round": repetition,
            "cache": cache,
            "tensor_bytes": size,
            "framework": framework,
            "reader": reader,
            "microseconds": microseconds[reader] * (1 + repetition),
        }
        for repetition in range(2)
        for cache, size, framework, reader in tensors._cases(repetition)
    ]
    assert [run["reader"] for run in runs[:2]] == [tensors.LIMIT, tensors.PACKAGE]
    document = {"machine": machine.describe(tmp_path), "quick": False, "runs": runs}
    tensors.show(document, command.wide_console())
    found = {(line.measured, line.reached) for line in tensors.evaluate(document)}
    assert found == {("2.00x", True), ("0.50x", False)}


def test_planning_is_told_for_each_part_and_chunk(tmp_path: Path) -> None:
    runs = [
        {"round": 0, "system": resharded.OWN, "load": 0.02, "planning": 0.004, resharded.LIMIT: 0.001},
        {"round": 0, "system": resharded.PEER, "load": 0.1, "planning": None, resharded.LIMIT: 0.001},
    ]
    document = {"machine": machine.describe(tmp_path), "quick": False, "runs": runs}
    document |= {"chunks": 128, "parts": 1000}
    resharded.show(document, command.wide_console())
    assert [(line.measured, line.reached) for line in resharded.evaluate(document)] == [
        ("4.00 µs", False),
        ("5.0x", True),
    ]


@pytest.mark.long
@only_long
def test_a_resharded_load_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "")
    arguments = argparse.Namespace(quick=True, rounds=1, directory=tmp_path)
    document = resharded.run(arguments, command.wide_console())
    assert {run["system"] for run in document["runs"]} == {resharded.OWN, resharded.PEER}
    assert all(run["load"] > 0 for run in document["runs"])
