"""Readers beside processes that overwrite, delete and save a checkpoint: what is read is of one version.

`make test` reads beside 12 saves, `make test-long` beside 200.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support import overwriting, plain_renames
from tests.support.long import amount
from typer.testing import CliRunner

import waystation as ws
from waystation import _native, safetensors
from waystation.checkpoint.compare import compare
from waystation.checkpoint.export import export
from waystation.checkpoint.paths import check_destination
from waystation.cli.application import application
from waystation.errors import CheckpointNotFound, Corrupt
from waystation.layouts.native.records import CheckpointRecord
from waystation.storage.local import LocalRoot, LocalStorage

_SAVES = amount(6, 100)

State = dict[str, Any]


def _save(path: Path, layout: str) -> None:
    with overwriting.context_of(layout):
        ws.save(path, overwriting.state_of(0))


def _check(state: State) -> None:
    number = state["number"]
    assert all((array == number).all() for array in [state["large"], *state["small"]])


def _swap_after_look(monkeypatch: pytest.MonkeyPatch, path: Path, other: Path) -> None:
    """Has `other` swapped in as soon as somebody has seen that no native checkpoint is at `path`."""
    swaps = iter([lambda: _native.rename_exchange(str(path), str(other))])
    for reader in (LocalRoot, LocalStorage):

        def status(
            self: Any, looked_at: str, original: Callable[..., Any] = reader.status, **options: Any
        ) -> Any:
            found = original(self, looked_at, **options)
            if found is None and looked_at == str(path / "checkpoint.json"):
                next(swaps, lambda: None)()
            return found

        monkeypatch.setattr(reader, "status", status)


@pytest.mark.parametrize("call", ["is_checkpoint", "load", "metadata", "save", "verify", "inspect"])
def test_no_call_takes_a_checkpoint_for_none_while_its_layout_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "checkpoint"
    with overwriting.context_of("ocdbt"):
        ws.save(path, {"number": 0})
    ws.save(tmp_path / "other", {"number": 0})
    _swap_after_look(monkeypatch, path, tmp_path / "other")
    if call == "is_checkpoint":
        assert ws.is_checkpoint(path)
    elif call == "verify":
        assert not ws.checkpoint.verify(path).damages
    elif call == "save":
        ws.save(path, {"number": 1}, overwrite=True)
    elif call == "inspect":
        assert CliRunner().invoke(application, ["inspect", str(path)]).exit_code == 0
    else:
        getattr(ws, call)(path)
    assert (path / "checkpoint.json").exists(), "it was swapped in"


@pytest.mark.parametrize("layout", ["native", "ocdbt"])
def test_a_checkpoint_that_takes_the_place_of_other_data_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    path, other = tmp_path / "1", tmp_path / "other"
    path.mkdir()
    (path / "notes").write_text("notes")
    _save(other, layout)
    _swap_after_look(monkeypatch, path, other)
    aside: list[str] = []
    check_destination(str(path), overwrite=True, on_set_aside=aside.append)
    assert not aside
    _check(ws.load(path))


def _unverified(path: Path) -> None:
    context = ws.Context()
    context.array.loading.verify = False
    with context:
        _check(ws.load(path))


def _mapped(path: Path) -> None:
    context = ws.Context()
    context.array.loading.mmap = True
    with context:
        _check(ws.load(path))


def _exported(path: Path) -> None:
    output = path.parent / "exported"
    export(path, output, overwrite=True)
    found = safetensors.load(output, framework="numpy")
    number = found["number"]
    assert all((array == number).all() for array in found.values())


def _verified(path: Path) -> None:
    assert not ws.verify(path).damages  # strays may be there: data of a save that moves in


def _described(path: Path) -> None:
    assert ws.metadata(path).metadata["large"].shape == (200_000,)
    assert ws.checkpointables_metadata(path).metadata["state"]["large"].shape == (200_000,)


def _compared(path: Path) -> None:
    found = compare(path, path.parent / "zero")
    values = {difference.key_path for difference in found.differences if difference.kind == "value"}
    assert len(values) in {0, 52}  # of another number all values differ, or none do


READS: dict[str, Callable[[Path], None]] = {
    "load": lambda path: _check(ws.load(path)),
    "load without verification": _unverified,
    "load mapped": _mapped,
    "load in the background": lambda path: _check(ws.load_async(path).result()),
    "load checkpointables": lambda path: _check(ws.load_checkpointables(path)["state"]),
    "load checkpointables in the background": lambda path: _check(
        ws.load_checkpointables_async(path).result()["state"]
    ),
    "metadata": _described,
    "verify": _verified,
    "compare": _compared,
    "export": _exported,
}
_OF_ORBAX = ("load", "load in the background", "metadata", "compare", "export")


@pytest.mark.share(20)
@pytest.mark.parametrize("way", ["swap", "in place"])
@pytest.mark.parametrize("read", READS)
def test_what_is_read_beside_overwrites_is_one_version(tmp_path: Path, read: str, way: str) -> None:
    if way == "in place" and not plain_renames.SUPPORTED:
        pytest.skip("the filter of system calls is for x86-64 and AArch64 Linux")
    _read_beside_writers(tmp_path, read, way, "native")


@pytest.mark.share(12)
@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
@pytest.mark.parametrize("read", _OF_ORBAX)
def test_so_it_is_in_the_layouts_of_orbax(tmp_path: Path, read: str, layout: str) -> None:
    _read_beside_writers(tmp_path, read, "swap", layout)


def _read_beside_writers(directory: Path, read: str, way: str, layout: str) -> None:
    path = directory / "same"
    _save(path, layout)
    _save(directory / "zero", layout)
    with overwriting.writing(path, way, layout, _SAVES) as writers:
        while writers.are_running:
            READS[read](path)
        assert writers.values() == [None] * overwriting.WRITERS
    _check(ws.load(path))


@pytest.mark.long
@pytest.mark.parametrize("layout", ["native", "zarr", "ocdbt"])
def test_beside_deletions_there_is_a_whole_checkpoint_or_none(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "same"
    _save(path, layout)
    found = absent = 0
    with overwriting.writing(path, "delete", layout, _SAVES) as writers:
        while writers.are_running:
            try:
                _check(ws.load(path))
                found += 1
            except CheckpointNotFound:
                absent += 1
        assert writers.values() == [None] * overwriting.WRITERS
    assert found + absent > 0


@pytest.mark.parametrize("is_deleted", [False, True])
def test_what_a_replacement_removed_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    """Replaced between the look at the record and that at the directories which it names."""
    path = tmp_path / "same"
    ws.save(path, overwriting.state_of(1))
    present = CheckpointRecord.present

    def replace_first(record: CheckpointRecord, *arguments: Any) -> Any:
        monkeypatch.setattr(CheckpointRecord, "present", present)
        if is_deleted:
            ws.delete(path)
        else:
            ws.save(path, overwriting.state_of(2), overwrite=True)
        return present(record, *arguments)

    monkeypatch.setattr(CheckpointRecord, "present", replace_first)
    if is_deleted:
        with pytest.raises(CheckpointNotFound):
            ws.checkpointables_metadata(path)
    else:
        assert list(ws.checkpointables_metadata(path).metadata) == ["state"]


def test_damage_of_a_checkpoint_that_stays_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    ws.save(path, overwriting.state_of(1))
    data = next((path / "state").glob("*.safetensors"))
    with data.open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"damage")
    with pytest.raises(Corrupt):
        ws.load(path)
