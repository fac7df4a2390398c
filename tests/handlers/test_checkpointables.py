"""Several checkpointables in one checkpoint: one commit, separate parts, damage found in each."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tests.handlers.examples import Counter, SubdirectoryHandler
from tests.handlers.states import same, state, with_handlers

import waystation
from waystation import errors


def test_states_of_several_frameworks(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    given = {
        "numpy": {"x": np.arange(3)},
        "jax": {"x": jnp.arange(4)},
        "torch": {"x": torch.arange(5)},
        "nothing": {},
        "scalar": 3,
    }
    waystation.save_checkpointables(path, given)
    loaded = waystation.load_checkpointables(path)
    assert {
        name: type(tree["x"]).__module__.split(".")[0] for name, tree in loaded.items() if "x" in str(tree)
    }
    assert loaded["jax"]["x"].tolist() == [0, 1, 2, 3]
    assert torch.equal(loaded["torch"]["x"], torch.arange(5))
    assert (loaded["nothing"], loaded["scalar"]) == ({}, 3)
    assert list(waystation.load_checkpointables(path, {"torch": None, "jax": None})) == ["torch", "jax"]


def test_the_layout_of_each(saved: Path) -> None:
    assert sorted(os.listdir(saved)) == ["a", "b", "checkpoint.json", "counter"]
    assert sorted(os.listdir(saved / "counter")) == [".waystation-record.json", "deep"]
    body = json.loads((saved / "counter" / ".waystation-record.json").read_text())["record"]
    assert body["kind"] == "handled"
    assert body["handler"] == "tests.handlers.examples.SubdirectoryHandler"
    assert sorted(body["files"]) == ["deep/empty", "deep/er/value.txt"]
    assert sorted(os.listdir(saved / "a")) == sorted(os.listdir(saved / "b"))


def test_metadata_is_what_can_be_loaded(saved: Path) -> None:
    with with_handlers(SubdirectoryHandler):
        found = waystation.checkpointables_metadata(saved)
        assert found.checkpointable_names == ("a", "b", "counter")
        loaded = waystation.load_checkpointables(saved, found)
        assert loaded["counter"] == Counter(3)
    assert same(loaded["a"], state(1))
    assert found.begin_timestamp_ns is not None
    assert found.commit_timestamp_ns is not None
    assert found.begin_timestamp_ns <= found.commit_timestamp_ns
    assert found.init_timestamp is not None
    assert found.init_timestamp_nsecs == found.begin_timestamp_ns


@pytest.mark.parametrize("name", ["a", "b", "counter"])
def test_each_can_be_lost_without_the_others(saved: Path, name: str) -> None:
    assert waystation.delete(saved, checkpointable_name=name)
    assert not (saved / name).exists()
    assert os.listdir(saved.parent) == ["checkpoint"]
    assert not waystation.checkpoint.verify(saved).damages
    with with_handlers(SubdirectoryHandler):
        left = waystation.load_checkpointables(saved)
    assert sorted(left) == sorted({"a", "b", "counter"} - {name})
    record = json.loads((saved / "checkpoint.json").read_text())["record"]
    assert record["generation"] == 2


def test_the_last_checkpointable_goes_with_the_checkpoint(saved: Path) -> None:
    waystation.delete(saved, checkpointable_name="a")
    waystation.delete(saved, checkpointable_name="b")
    with pytest.raises(errors.InvalidInput, match="the last checkpointable"):
        waystation.delete(saved, checkpointable_name="counter")
    assert waystation.delete(saved)


def test_adding(saved: Path) -> None:
    with with_handlers(SubdirectoryHandler):
        waystation.add_checkpointables(saved, {"c": state(5), "more": Counter(6)})
        loaded = waystation.load_checkpointables(saved)
    assert sorted(loaded) == ["a", "b", "c", "counter", "more"]
    assert same(loaded["a"], state(1))
    assert same(loaded["c"], state(5))
    assert (loaded["counter"], loaded["more"]) == (Counter(3), Counter(6))
    found = waystation.checkpoint.verify(saved)
    assert (found.damages, found.strays) == ([], [])
    assert os.listdir(saved.parent) == ["checkpoint"]
    assert waystation.delete(saved, checkpointable_name="c")
    waystation.add_checkpointables(saved, {"c": state(7)})
    assert same(waystation.load(saved, checkpointable_name="c"), state(7))


def test_adding_refuses_what_is_there_and_where_nothing_is(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.Conflict, match="has a checkpointable 'b' already"):
        waystation.add_checkpointables(saved, {"c": state(5), "b": state(6)})
    with pytest.raises(errors.CheckpointNotFound):
        waystation.add_checkpointables(tmp_path / "nothing", {"c": state(5)})
    with pytest.raises(errors.Unsupported):
        waystation.add_checkpointables(saved, {"c": {"x": object()}})
    assert waystation.metadata(saved, "a").checkpointable_names == ("a", "b", "counter")
    assert os.listdir(saved.parent) == ["checkpoint"]


def test_deleting_by_two_threads_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    waystation.save_checkpointables(path, {f"c{number}": {"x": number} for number in range(9)})
    barrier = threading.Barrier(8)

    def remove(number: int) -> None:
        barrier.wait()
        waystation.delete(path, checkpointable_name=f"c{number}")

    threads = [threading.Thread(target=remove, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert waystation.load_checkpointables(path) == {"c8": {"x": 8}}
    assert sorted(os.listdir(path)) == ["c8", "checkpoint.json"]
    assert waystation.checkpoint.verify(path).strays == []


# ---- damage ------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", ["flipped", "missing", "longer"])
def test_damage_of_a_handlers_file(saved: Path, damage: str) -> None:
    file = saved / "counter" / "deep" / "er" / "value.txt"
    if damage == "flipped":
        flip(file)
    elif damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes() + b"0")
    with with_handlers(SubdirectoryHandler):
        with pytest.raises(errors.Corrupt, match=r"value\.txt"):
            waystation.load_checkpointables(saved, {"counter": None})
        assert same(waystation.load_checkpointables(saved, {"a": None})["a"], state(1))
    (found,) = waystation.checkpoint.verify(saved).damages
    assert found.path == str(file)


def test_damage_is_loaded_only_if_asked_for(saved: Path) -> None:
    file = saved / "counter" / "deep" / "er" / "value.txt"
    file.write_text("4")
    context = with_handlers(SubdirectoryHandler)
    context.array.loading.verify = False
    with context:
        assert waystation.load_checkpointables(saved, {"counter": None})["counter"] == Counter(4)


def test_a_damaged_record_of_files(saved: Path) -> None:
    flip(saved / "counter" / ".waystation-record.json")
    with with_handlers(SubdirectoryHandler), pytest.raises(errors.Corrupt, match=r"record\.json"):
        waystation.load_checkpointables(saved)
    assert same(waystation.load(saved, checkpointable_name="b"), state(2))


def test_what_came_later_is_a_stray(saved: Path) -> None:
    (saved / "counter" / "later").write_text("x")
    found = waystation.checkpoint.verify(saved)
    assert [os.path.basename(stray) for stray in found.strays] == ["later"]
    assert not found.damages
    with with_handlers(SubdirectoryHandler):
        assert waystation.load_checkpointables(saved)["counter"] == Counter(3)


def test_a_kind_that_is_not_known_is_refused_by_itself(saved: Path) -> None:
    """What an older reader does with files of handlers, and this one with whatever comes next."""
    from waystation import _native
    from waystation.layouts.native.commit import read_record, replace_record
    from waystation.layouts.native.records import Digest

    path = saved / "counter" / ".waystation-record.json"
    body = json.loads(path.read_text())["record"] | {"kind": "spirits"}
    path.write_bytes(_native.seal_json(json.dumps(body).encode()))
    record = read_record(str(saved))
    record.checkpointables["counter"] = ("counter", Digest.of(path.read_bytes()))
    replace_record(str(saved), record, "x", None)
    with pytest.raises(errors.Unsupported, match="'spirits'"):
        waystation.load_checkpointables(saved)
    assert same(waystation.load(saved, checkpointable_name="a"), state(1))
