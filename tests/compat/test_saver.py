"""Sets of files: the same as fastsafetensors writes, except for the name of the set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fastsafetensors.saver as genuine
import pytest
import torch
from safetensors import safe_open
from tests.compat.comparing import outcome

from waystation import errors, telemetry
from waystation.compat.fastsafetensors import SafeTensorsMetadata, saver

STATE = {
    "a": torch.arange(24.0).reshape(4, 6),
    "b": torch.arange(6).reshape(3, 2).T,
    "c": torch.ones(7, dtype=torch.bfloat16),
    "none": torch.zeros(0, 2),
    "packed": torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(torch.float4_e2m1fn_x2),
}


def contents(paths: list[str]) -> list[Any]:
    """What files hold, without the name of the set."""
    found = []
    for path in paths:
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata()
            assert metadata.pop(saver.KEY_SHARD_SET)
            tensors = {
                name: opened.get_tensor(name).contiguous().reshape(-1).view(torch.uint8).tolist()
                for name in opened.offset_keys()
            }
        length = int.from_bytes(Path(path).read_bytes()[:8], "little")
        found.append((os.path.basename(path), metadata, tensors, length))
    return found


@pytest.mark.parametrize("fsync", [True, False])
@pytest.mark.parametrize("align", [8, 4096, 24])
def test_sets_are_theirs(tmp_path: Path, align: int, fsync: bool) -> None:
    found = []
    for name, module in (("ours", saver), ("theirs", genuine)):
        made = module.ParallelSaver(
            num_shards=3, fsync=fsync, shard_metadata=lambda entries: {"count": str(len(entries))}
        )
        paths = made.save(
            STATE,
            str(tmp_path / name / "model"),
            metadata={"who": "me"},
            shard0_metadata={"first": "yes"},
            header_align=align,
        )
        assert sorted(os.listdir(tmp_path / name)) == sorted(map(os.path.basename, paths))
        found.append(contents(paths))
    assert found[0] == found[1]


def test_files_of_a_set_know_each_other(tmp_path: Path) -> None:
    sets = [saver.ParallelSaver(num_shards=2).save(STATE, str(tmp_path / name)) for name in ("one", "two")]
    metas = [[SafeTensorsMetadata.from_file(path, None) for path in paths] for paths in sets]
    saver.validate_shard_set(metas[0])
    for wrong in ([], metas[0][:1], metas[0][::-1], [metas[0][0], metas[1][1]]):
        with pytest.raises(saver.ShardSetError):
            saver.validate_shard_set(wrong)


@pytest.mark.parametrize("fsync", [True, False])
def test_what_a_function_makes_is_written(tmp_path: Path, fsync: bool) -> None:
    seen: list[int] = []

    def fill(work: list[tuple[memoryview, saver.WriteEntry]]) -> None:
        for buffer, entry in work:
            seen.append(entry.nbytes)
            buffer[:] = bytes([entry.source]) * entry.nbytes

    entries = [
        saver.WriteEntry(
            f"t{number}",
            saver.plain_entry("t", torch.zeros(1, dtype=torch.uint8)).dtype,
            [size],
            size,
            number,
        )
        for number, size in enumerate((3, 0, 9, 5))
    ]
    paths = saver.ParallelSaver(num_shards=2, fill=fill, fsync=fsync).save_entries(
        entries, str(tmp_path / "m")
    )
    assert seen == sorted(seen, reverse=True)
    loaded = {name: values for _, _, tensors, _ in contents(paths) for name, values in tensors.items()}
    assert loaded == {"t0": [0] * 3, "t1": [], "t2": [2] * 9, "t3": [3] * 5}


@pytest.mark.parametrize("kind", ["mapped", "threads"])
def test_what_fails_leaves_nothing(tmp_path: Path, kind: str) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no")

    fill = fail if kind == "mapped" else saver.per_entry_fill(fail)
    with pytest.raises(OSError, match="no"):
        saver.ParallelSaver(num_shards=2, fill=fill).save(STATE, str(tmp_path / "model"))
    assert os.listdir(tmp_path) == []


def test_room_is_asked_for_first(tmp_path: Path) -> None:
    for module in (genuine, saver):
        with pytest.raises(OSError, match="free"):
            module.ParallelSaver(min_free_bytes=1 << 60).save(STATE, str(tmp_path / "model"))
    assert os.listdir(tmp_path) == []


def plan(module: Any, **options: Any) -> Any:
    entry = module.plain_entry("a", torch.zeros(2))
    arguments: dict[str, Any] = {"entries": [entry], "paths": ["p"]} | {
        key: value(module, entry) if callable(value) and key != "shard_metadata" else value
        for key, value in options.items()
    }
    return module.plan_shards(**arguments)


BAD_PLANS: dict[str, dict[str, Any]] = {
    "no path": {"paths": []},
    "a path twice": {"paths": ["p", "./p"]},
    "align": {"header_align": 12},
    "a name twice": {"entries": lambda _, entry: [entry, entry]},
    "the name of metadata": {
        "entries": lambda module, _: [module.plain_entry("__metadata__", torch.zeros(1))]
    },
    "metadata": {"metadata": {"a": 1}},
    "reserved": {"shard_metadata": lambda _: {saver.KEY_SHARD_SET: "mine"}},
    "numbers": {"shard_metadata": lambda _: {"a": 1}},
    "size": {"entries": lambda module, entry: [module.WriteEntry("a", entry.dtype, [3], 4)]},
    "shape": {"entries": lambda module, entry: [module.WriteEntry("a", entry.dtype, [-1], 4)]},
    "auto": {"entries": lambda module, entry: [module.WriteEntry("a", type(entry.dtype).AUTO, [1], 4)]},
    "packed": {"entries": lambda module, entry: [module.WriteEntry("a", type(entry.dtype).F4, [3], 2)]},
}


@pytest.mark.parametrize("bad", BAD_PLANS)
def test_bad_plans_raise_what_theirs_raise(bad: str) -> None:
    for module in (genuine, saver):
        assert isinstance(outcome(lambda module=module: plan(module, **BAD_PLANS[bad])), ValueError)
    assert isinstance(outcome(lambda: plan(saver, **BAD_PLANS[bad])), errors.InvalidInput)


def test_saves_are_observed(tmp_path: Path) -> None:
    seen: list[Any] = []
    with telemetry.subscribe(seen.append):
        paths = saver.ParallelSaver(num_shards=2).save(STATE, str(tmp_path / "model"))
        with pytest.raises(OSError, match="free"):
            saver.ParallelSaver(num_shards=2, min_free_bytes=1 << 60).save(STATE, str(tmp_path / "model"))
    saved, failed = seen
    assert (saved.path, saved.bytes_written) == (str(tmp_path), sum(map(os.path.getsize, paths)))
    assert failed.operation == "save"
    assert isinstance(failed.error, errors.DiskFull)
