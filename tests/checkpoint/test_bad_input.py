"""Bad input: each gives its typed error with path and key path, and leaves the disk as it was."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
import torch
from flax import nnx
from tests.support.programs import without_privileges

import waystation
from waystation import _native, errors
from waystation.layouts.native import tree_file


def tree(directory: Path) -> dict[str, bytes | None]:
    """Every name below a directory, with contents."""
    return {
        str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    random = np.random.default_rng(0)
    state = {
        "layers": {f"w{i}": random.standard_normal((64, 64 + i)).astype(np.float32) for i in range(5)},
        "big": random.integers(0, 255, 1_000_000, np.uint8),
        "step": 7,
    }
    waystation.save(path, state)
    return path


def test_missing_path(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(errors.NotFound, match=r"no checkpoint .*nothing.*there: checkpoint") as caught:
        waystation.load(tmp_path / "nothing")
    assert isinstance(caught.value, FileNotFoundError)
    assert caught.value.context["path"].endswith("nothing")
    for call in (waystation.metadata, waystation.delete):
        with pytest.raises(errors.NotFound):
            call(tmp_path / "nothing")
    assert waystation.delete(tmp_path / "nothing", missing_ok=True) is False


def test_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "notes").write_text("text")
    (tmp_path / "file").write_text("text")
    before = tree(tmp_path)
    for name in ("directory", "file"):
        assert not waystation.is_checkpoint(tmp_path / name)
        for call in (waystation.load, waystation.metadata, waystation.delete):
            with pytest.raises(errors.InvalidInput, match="not a checkpoint"):
                call(tmp_path / name)
        with pytest.raises(errors.Conflict, match="not a checkpoint"):
            waystation.save(tmp_path / name, {"x": 1}, overwrite=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("use_ocdbt", [None, True], ids=["native", "orbax"])
def test_a_directory_of_checkpoints_is_said_to_be_one(
    tmp_path: Path, use_ocdbt: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = waystation.Context()
    context.array.saving.use_ocdbt = use_ocdbt
    with context:
        for name in ("runs/first", "runs/second", "sibling"):
            waystation.save(tmp_path / name, {"x": 1})
    monkeypatch.chdir(tmp_path / "runs")
    for path in (tmp_path / "runs", "."):
        with pytest.raises(errors.InvalidInput, match="a directory of them: first, second") as caught:
            waystation.load(path)
        assert "sibling" not in str(caught.value)


def test_a_part_of_a_checkpoint_names_the_checkpoint(saved: Path) -> None:
    for name in ("state", "checkpoint.json"):
        with pytest.raises(errors.InvalidLayoutError, match="a part of the checkpoint") as caught:
            waystation.load(saved / name)
        assert f"'{saved}'" in str(caught.value)


def test_unfinished_checkpoint(tmp_path: Path, saved: Path) -> None:
    attempt = tmp_path / "next.waystation-tmp-0123456789ab-1-1-01234567"
    shutil.copytree(saved, attempt)
    with pytest.raises(errors.InvalidInput, match="unfinished attempt at checkpoint 'next'"):
        waystation.load(attempt)
    with pytest.raises(errors.NotFound, match="1 unfinished attempt"):
        waystation.load(tmp_path / "next")
    assert not waystation.is_checkpoint(attempt)
    with pytest.raises(errors.InvalidInput, match="unfinished attempt"):
        waystation.save(attempt, {"x": 1})


def test_newer_format_version(saved: Path) -> None:
    record = saved / "checkpoint.json"
    body = json.loads(record.read_bytes())["record"] | {"format_version": 2}
    record.write_bytes(_native.seal_json(json.dumps(body).encode()))
    with pytest.raises(errors.Unsupported, match="format version 2") as caught:
        waystation.load(saved)
    assert caught.value.context["path"] == str(record)


def files_of(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*") if entry.is_file())


FILES = [
    "checkpoint.json",
    *(
        f"state/{name}"
        for name in (
            "checksums.bin",
            "chunks.bin",
            "files.bin",
            "model.safetensors.index.json",
            "p00000-000.safetensors",
            "record.json",
            "tree.json",
        )
    ),
]


def test_the_list_of_files_is_complete(saved: Path) -> None:
    assert files_of(saved) == FILES


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere(saved: Path, name: str) -> None:
    path = saved / name
    original = path.read_bytes()
    random = np.random.default_rng(len(name))
    places = {0, len(original) - 1, len(original) // 2, *random.integers(0, len(original), 12).tolist()}
    if name.endswith(".safetensors"):
        places |= {4000, 4096}
    for place in sorted(places):
        damaged = bytearray(original)
        damaged[place] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(errors.Corrupt) as caught:
            waystation.load(saved)
        assert name.rpartition("/")[2] in str(caught.value), (place, str(caught.value))
        found = waystation.checkpoint.verify(saved)
        assert any(damage.path == str(path) for damage in found.damages), (place, found)
    path.write_bytes(original)
    waystation.load(saved)
    assert not waystation.checkpoint.verify(saved).damages


def test_a_damaged_block_names_its_arrays(saved: Path) -> None:
    path = saved / "state" / "p00000-000.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(errors.Corrupt) as caught:
        waystation.load(saved)
    assert caught.value.context["path"] == str(path)
    assert "big" in caught.value.context["array"]


@pytest.mark.parametrize("name", FILES)
def test_truncated_and_missing_files(saved: Path, name: str) -> None:
    path = saved / name
    original = path.read_bytes()
    for length in {0, 1, len(original) // 2, len(original) - 1}:
        path.write_bytes(original[:length])
        with pytest.raises(errors.Corrupt) as caught:
            waystation.load(saved)
        assert name.rpartition("/")[2] in str(caught.value)
    path.unlink()
    expected = errors.InvalidInput if name == "checkpoint.json" else errors.Corrupt
    with pytest.raises(expected):
        waystation.load(saved)


def test_swapped_files_of_two_checkpoints(tmp_path: Path) -> None:
    """Files that are each valid, but not of one commit."""
    for seed in (1, 2):
        waystation.save(tmp_path / str(seed), {"x": np.full(1000, seed)})
    for name in FILES[1:]:
        if not (tmp_path / "1" / name).exists():
            continue
        shutil.copytree(tmp_path / "1", tmp_path / "mixed")
        shutil.copy(tmp_path / "2" / name, tmp_path / "mixed" / name)
        if (tmp_path / "1" / name).read_bytes() != (tmp_path / "2" / name).read_bytes():
            with pytest.raises(errors.Corrupt):
                waystation.load(tmp_path / "mixed")
        shutil.rmtree(tmp_path / "mixed")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_disk_full(small_disk: Path, asynchronous: bool) -> None:
    waystation.save(small_disk / "old", {"x": np.arange(10)})
    before = tree(small_disk)
    state = {"x": np.zeros(16 << 20, np.uint8)}

    def save(target: Path, state: object, *, overwrite: bool) -> None:
        if asynchronous:
            waystation.save_async(target, state, overwrite=overwrite).result()
        else:
            waystation.save(target, state, overwrite=overwrite)

    for overwrite in (False, True):
        target = small_disk / ("old" if overwrite else "new")
        with pytest.raises(errors.DiskFull) as caught:
            save(target, state, overwrite=overwrite)
        assert str(small_disk) in str(caught.value)
        assert tree(small_disk) == before
    waystation.save(small_disk / "new", {"x": np.zeros(1 << 20, np.uint8)})


def test_read_only_file_system(tmp_path: Path, small_disk: Path) -> None:
    waystation.save(small_disk / "old", {"x": np.arange(10)})
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for call in (waystation.save, waystation.save_async):
        with pytest.raises(errors.PermissionDenied) as caught:
            call(small_disk / "new", {"x": 1})
        assert isinstance(caught.value, PermissionError)
    with pytest.raises(errors.PermissionDenied):
        waystation.delete(small_disk / "old")
    np.testing.assert_array_equal(waystation.load(small_disk / "old")["x"], np.arange(10))


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux, when run as root")
def test_permission_denied(tmp_path: Path, saved: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o500)
    (saved / "state" / "p00000-000.safetensors").chmod(0)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    code = f"""
for call in (
    lambda: waystation.save({str(closed / "new")!r}, [1]),
    lambda: waystation.save_async({str(closed / "new")!r}, [1]),
    lambda: waystation.load({str(saved)!r}),
):
    try:
        call()
    except waystation.errors.PermissionDenied as error:
        assert isinstance(error, PermissionError)
        print("refused", error.context["path"])
"""
    printed = without_privileges(code)
    assert printed.count("refused") == 3
    assert "p00000-000.safetensors" in printed
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_existing_destination(saved: Path) -> None:
    before = tree(saved)
    with pytest.raises(errors.Conflict, match="exists already; give overwrite=True") as caught:
        waystation.save(saved, {"x": 1})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, FileExistsError)
    assert tree(saved) == before


def test_parent_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(errors.InvalidInput, match="not a directory"):
        waystation.save(tmp_path / "file" / "checkpoint", {"x": 1})
    assert (tmp_path / "file").read_text() == "text"


def test_missing_parents_are_created_and_on_failure_removed(tmp_path: Path) -> None:
    waystation.save(tmp_path / "a" / "b" / "checkpoint", {"x": 1})
    assert waystation.load(tmp_path / "a" / "b" / "checkpoint") == {"x": 1}
    before = tree(tmp_path)
    with pytest.raises(errors.Unsupported):
        waystation.save(tmp_path / "c" / "d" / "checkpoint", {"x": object()})
    response = waystation.save_async(tmp_path / "e" / "f", {"x": np.zeros(1 << 27, np.uint8)})
    response.cancel()
    with pytest.raises(errors.Cancelled):
        response.result()
    assert tree(tmp_path) == before


class Opaque:
    pass


@pytest.mark.parametrize(
    "leaf",
    [object(), Opaque(), {1, 2}, lambda: 0, np.array([object()]), range(3)],
    ids=lambda leaf: type(leaf).__name__,
)
def test_unsupported_leaf(tmp_path: Path, leaf: Any) -> None:
    with pytest.raises(errors.Unsupported) as caught:
        waystation.save(tmp_path / "checkpoint", {"fine": 1, "outer": [0, {"inner": leaf}]})
    assert "['outer'][1]['inner']" in str(caught.value)
    assert isinstance(caught.value, TypeError)
    assert list(tmp_path.iterdir()) == []


def framework_objects() -> dict[str, tuple[Any, str]]:
    """Objects that hold a state but are none, and what the error advises."""

    class NoNode(nnx.Module, pytree=False):
        def __init__(self) -> None:
            self.weights = nnx.Param(np.ones(2))

    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters())
    return {
        "module": (module, "state_dict()"),
        "optimizer": (optimizer, "state_dict()"),
        "scheduler": (torch.optim.lr_scheduler.StepLR(optimizer, 1), "state_dict()"),
        "nnx": (NoNode(), "nnx.split(module)"),
        "equinox": (eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)), "eqx.filter(model, eqx.is_array)"),
    }


@pytest.mark.parametrize("name", ["module", "optimizer", "scheduler", "nnx", "equinox"])
def test_the_error_of_an_object_of_a_framework_says_what_to_save(tmp_path: Path, name: str) -> None:
    value, advice = framework_objects()[name]
    with pytest.raises(errors.UnsupportedLeaf, match=re.escape(advice)) as caught:
        waystation.save(tmp_path / "checkpoint", {"model": value})
    assert "['model']" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments(tmp_path: Path) -> None:
    for path in ("", "/", "a\0b", 3, b"bytes", "ftp://host/name"):
        with pytest.raises(errors.InvalidInput):
            waystation.save(path, {"x": 1})  # type: ignore[arg-type]
    for name in ("", "a/b", "..", ".hidden", 3):
        with pytest.raises(errors.InvalidInput):
            waystation.save(tmp_path / "checkpoint", {"x": 1}, checkpointable_name=name)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidInput, match="custom_metadata"):
        waystation.save(tmp_path / "checkpoint", {"x": 1}, custom_metadata={"x": object()})
    assert list(tmp_path.iterdir()) == []


def test_structure_mismatch_shows_the_difference(saved: Path) -> None:
    abstract = waystation.metadata(saved).metadata
    abstract["layers"].pop("w0")
    abstract["layers"]["w9"] = np.zeros(3)
    with pytest.raises(errors.StructureMismatch) as caught:
        waystation.load(saved, abstract)
    text = str(caught.value)
    assert "- ['layers']['w0']: only in the checkpoint" in text
    assert "+ ['layers']['w9']: only in the abstract state" in text
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, KeyError)


def test_shape_mismatch_shows_the_difference(saved: Path) -> None:
    abstract = waystation.metadata(saved).metadata
    abstract["layers"]["w1"] = np.zeros((64, 66), np.float32)
    with pytest.raises(
        errors.StructureMismatch, match=r"\(64, 65\) in the checkpoint, shape \(64, 66\) wanted"
    ):
        waystation.load(saved, abstract)


def test_a_load_never_imports_what_a_file_names(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {"x": 1})
    tree = tmp_path / "checkpoint" / "state" / "tree.json"
    assert b"antigravity" not in tree.read_bytes()
    body = json.loads(tree.read_bytes())["record"]
    body["structure"] = json.loads(json.dumps(body["structure"]).replace("dict", "antigravity.Thing"))
    tree.write_bytes(_native.seal_json(json.dumps(body).encode()))
    with pytest.raises(errors.Corrupt):
        waystation.load(tmp_path / "checkpoint")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("shape", [[2]], "no extent"),
        ("shape", [-1], "no extent"),
        ("shape", [True], "no extent"),
        ("shape", [1.0], "no extent"),
        ("storage_shape", [{}], "no extent"),
        ("dtype", ["float64"], "no string"),
        ("framework", {}, "no string"),
        ("storage_dtype", None, "no string"),
        ("label", [1], "no string"),
        ("sharding", [0], "a sharding number"),
        ("sharding", -1, "a sharding number"),
    ],
)
def test_a_column_of_the_tree_that_holds_something_else_is_corrupt(
    tmp_path: Path, column: str, value: Any, told: str
) -> None:
    waystation.save(tmp_path / "checkpoint", {"a": np.ones((1,)), "b": np.ones(()), "c": np.ones((1,))})
    body = json.loads((tmp_path / "checkpoint" / "state" / "tree.json").read_bytes())["record"]
    values = body["arrays"][column]
    same = values["all"] if isinstance(values, dict) else values[0]
    # Beside one that is right, and that True or 1.0 equals.
    body["arrays"][column] = [same, same, value]
    with pytest.raises(errors.Corrupt, match=told) as caught:
        tree_file.decode(_native.seal_json(json.dumps(body).encode()), "tree.json")
    assert caught.value.context["path"] == "tree.json"


@pytest.mark.parametrize("extra", [None, [], {"0": 5}, {"0": None}, {"7": {}}, {"-1": {}}, {"x": {}}])
def test_something_odd_said_of_single_arrays_is_corrupt(tmp_path: Path, extra: Any) -> None:
    waystation.save(tmp_path / "checkpoint", {"a": np.ones(3)})
    body = json.loads((tmp_path / "checkpoint" / "state" / "tree.json").read_bytes())["record"]
    body["arrays"]["extra"] = extra
    with pytest.raises(errors.Corrupt, match=r"said of|invalid literal"):
        tree_file.decode(_native.seal_json(json.dumps(body).encode()), "tree.json")


def difference(path: Path, state: Any, abstract: Any) -> str:
    """What the error says of a load that asks for something else than was saved."""
    waystation.save(path, state, overwrite=True)
    with pytest.raises(errors.StructureMismatch) as caught:
        waystation.load(path, abstract)
    return str(caught.value)


def test_what_differs_at_one_path_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    none = difference(path, {"a": np.ones(3), "b": 1}, {"a": None, "b": 1})
    assert "! ['a']: shape (3,) in the checkpoint, None wanted" in none
    assert "only in" not in none
    assert "put waystation.PLACEHOLDER (...) there" in none
    assert "! ['a']: None in the checkpoint, shape (3,) wanted" in difference(
        path, {"a": None}, {"a": np.ones(3)}
    )
    assert "! ['a']: an empty container in the checkpoint, a number (shape ()) wanted" in difference(
        path, {"a": {}}, {"a": int}
    )
    nested = difference(path, {"a": {"b": 1, "c": 2}}, {"a": None})
    assert "- ['a']['b']: only in the checkpoint" in nested
    assert "+ ['a']: only in the abstract state" in nested


def test_numbers_and_strings_that_differ_are_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    for number in (int, 3):
        text = difference(path, {"a": "text"}, {"a": number})
        assert "! ['a']: str in the checkpoint, a number (shape ()) wanted" in text
    assert "! ['a']: a number (shape ()) in the checkpoint, str wanted" in difference(
        path, {"a": 1}, {"a": "b"}
    )


def test_typed_keys_and_their_data_are_told_apart(tmp_path: Path) -> None:
    key = jax.random.key(0)
    data = jax.random.key_data(key)
    text = difference(tmp_path / "typed", {"rng": key}, {"rng": data})
    assert "the checkpoint has typed PRNG keys at ['rng']" in text
    assert "jax.random.key_data" in text
    text = difference(tmp_path / "data", {"rng": data}, {"rng": key})
    assert "the abstract state has typed PRNG keys at ['rng']" in text
    assert "jax.random.wrap_key_data" in text
    assert "PRNG" not in difference(tmp_path / "other", {"rng": data}, {"rng": np.zeros(3, np.uint32)})


def test_all_leaves_that_cannot_be_saved_are_named(tmp_path: Path) -> None:
    state = {"a": object(), "b": 1, "c": {"d": len}, "e": [object()] * 9, "f": np.zeros(2)}
    with pytest.raises(errors.UnsupportedLeaf) as caught:
        waystation.save(tmp_path / "c", state)
    assert str(caught.value).startswith(
        "leaf ['a'] is a builtins.object, which cannot be saved, nor can ['c']['d'] "
        "(builtins.builtin_function_or_method), ['e'][0] (builtins.object), ['e'][1] (builtins.object), "
        "['e'][2] (builtins.object), ['e'][3] (builtins.object) and 5 more; save arrays"
    )
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("stored", "wanted", "text"),
    [
        (1.5, int, r"the stored float 1.5 cannot be loaded as int.*ask for float, and convert it"),
        (float("nan"), int, r"the stored float nan cannot be loaded as int.*ask for float"),
        (1 + 2j, float, r"the stored complex \(1\+2j\) cannot be loaded as float.*ask for complex"),
        pytest.param(
            10**5000, float, r"the stored int of 16610 bits cannot be loaded as float.*ask for int", id="huge"
        ),
        (1.5, list, r"\['number'\] is the type list; give"),
        (1.5, object(), r"\['number'\] is of type object; give"),
    ],
)
def test_numbers_that_do_not_fit_say_what_to_ask_for(
    tmp_path: Path, stored: Any, wanted: Any, text: str
) -> None:
    waystation.save(tmp_path / "number", {"number": stored})
    with pytest.raises(errors.InvalidInput, match=text) as caught:
        waystation.load(tmp_path / "number", {"number": wanted})
    assert caught.value.context["array"] == "['number']"


def test_a_table_that_differs_tells_what_of_it_differs(saved: Path) -> None:
    table = saved / "state" / "tree.json"
    content = table.read_bytes()
    table.write_bytes(content[:-2] + b"~" + content[-1:])
    with pytest.raises(errors.Corrupt, match="committed: its checksum differs; restore"):
        waystation.load(saved)
    table.write_bytes(content[:-1])
    with pytest.raises(
        errors.Corrupt, match=f"committed: it has {len(content) - 1} bytes where {len(content)} were written"
    ):
        waystation.load(saved)


def test_an_int_that_no_array_holds_is_asked_for_as_int(tmp_path: Path) -> None:
    waystation.save(tmp_path / "c", {"n": 2**80})
    for wanted in (np.zeros((), np.int64), jax.ShapeDtypeStruct((), np.float32), torch.zeros(())):
        with pytest.raises(errors.InvalidInput, match="more than 64 bits, so no array can hold it") as caught:
            waystation.load(tmp_path / "c", {"n": wanted})
        assert caught.value.context["array"] == "['n']"


def test_a_name_that_is_too_long_for_an_attempt_is_unusable(tmp_path: Path) -> None:
    with pytest.raises(errors.UnusablePath, match=r"is too long: .* choose a name"):
        waystation.save(tmp_path / ("x" * 250), {"a": 1})
    assert not os.listdir(tmp_path)


def test_a_wrong_flatten_function_is_told_of() -> None:
    class Wrong:
        pass

    waystation.register_node(Wrong, flatten=lambda _: [1], unflatten=lambda *_: Wrong())
    with pytest.raises(errors.InvalidInput, match=r"flatten of .*Wrong gives .* pairs.*, not \[1\]"):
        waystation.save("never", {"a": Wrong()})
    with pytest.raises(errors.WrongType, match="a node must be a class, not 5"):
        waystation.register_node(5, flatten=lambda _: ([], None), unflatten=lambda *_: None)  # type: ignore[arg-type]


def test_the_newest_checkpoints_are_named_and_the_others_counted(tmp_path: Path) -> None:
    for step in range(12):
        waystation.save(tmp_path / f"step_{step}", {"a": step})
    newest = "step_7, step_8, step_9, step_10, step_11 and 7 more"
    with pytest.raises(errors.NotFound, match=rf"\(checkpoints there: {newest}\)"):
        waystation.load(tmp_path / "step_100")
    with pytest.raises(errors.InvalidInput, match=f"a directory of them: {newest}; give"):
        waystation.load(tmp_path)


@pytest.mark.parametrize("wanted", [0, int, float, bool, complex, str])
def test_a_key_is_no_scalar(tmp_path: Path, wanted: Any) -> None:
    waystation.save(tmp_path / "keys", {"model": {"key": jax.random.key(0)}})
    with pytest.raises(errors.StructureMismatch, match=r"a PRNG key .*\n.*typed PRNG keys"):
        waystation.load(tmp_path / "keys", {"model": {"key": wanted}})
    with pytest.raises(errors.StructureMismatch) as caught:
        waystation.load(tmp_path / "keys", {"model": {"key": jax.random.key(0), "more": 1}})
    assert "['key']" not in str(caught.value)


def test_a_tensor_of_zeros_without_memory(tmp_path: Path) -> None:
    state = {"model": {"zeros": torch._efficientzerotensor(2)}}
    with pytest.raises(errors.UnsupportedLeaf, match="zeros_like") as caught:
        waystation.save(tmp_path / "zeros", state)
    assert caught.value.context["array"] == "['model']['zeros']"


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    code = """
import os, sys
import waystation
from waystation import checkpoint, partial, safetensors, training
os.rmdir(os.getcwd())
for call in (
    lambda: waystation.load("x"),
    lambda: waystation.save("x", {"a": 1}),
    lambda: waystation.delete("x"),
    lambda: waystation.is_checkpoint("x"),
    lambda: waystation.metadata("x"),
    lambda: checkpoint.verify("x"),
    lambda: partial.save("x", {"a": 1}),
    lambda: training.Checkpointer("x"),
    lambda: safetensors.load("x", framework="numpy"),
    lambda: safetensors.save({}, "x"),
):
    try:
        call()
    except waystation.errors.NotFound as error:
        assert "working directory" in str(error) and error.context["path"] == "x", error
    else:
        raise AssertionError("nothing was raised")
waystation.save(sys.argv[1], {"a": 1})
assert waystation.load(sys.argv[1]) == {"a": 1}
"""
    (tmp_path / "gone").mkdir()
    command = [sys.executable, "-c", code, str(tmp_path / "saved")]
    subprocess.run(command, cwd=tmp_path / "gone", check=True, timeout=300)


def test_a_name_that_is_too_long_tells_how_long_it_may_be(tmp_path: Path) -> None:
    with pytest.raises(errors.UnusablePath, match=r"up to \d+ bytes") as caught:
        waystation.save(tmp_path / ("x" * 240), {"a": 1})
    most = int(re.findall(r"up to (\d+) bytes", str(caught.value))[0])
    waystation.save(tmp_path / ("x" * most), {"a": 1})
    with pytest.raises(errors.UnusablePath):
        waystation.save(tmp_path / ("y" * (most + 1)), {"a": 1})


@pytest.mark.parametrize(("path", "reason"), [("", "it is empty"), ("a\0b", "it has a NUL")])
def test_a_text_that_is_no_path_tells_why(path: str, reason: str) -> None:
    for call in (waystation.load, lambda path: waystation.save(path, {"a": 1})):
        with pytest.raises(errors.UnusablePath, match=reason):
            call(path)


def test_a_number_that_json_lacks_comes_with_advice(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidInput, match="nan; give text or None in its place"):
        waystation.save(tmp_path / "c", {"a": 1}, custom_metadata={"loss": float("nan")})


def test_a_path_beneath_a_file_is_no_directory_for_every_call(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    beneath = tmp_path / "file" / "checkpoint"
    calls = [
        waystation.load,
        waystation.metadata,
        waystation.delete,
        lambda path: waystation.save(path, {"a": 1}),
    ]
    for call in calls:
        with pytest.raises(errors.NotDirectory, match="file' is not a directory, so no checkpoint"):
            call(beneath)
    assert not waystation.is_checkpoint(beneath)
    assert not waystation.delete(beneath, missing_ok=True)


@pytest.mark.parametrize("name", ["n" * 300, "circle", "circle/beneath", "n" * 300 + "/beneath"])
def test_a_path_that_the_system_rejects_is_unusable_for_every_call(tmp_path: Path, name: str) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    path = tmp_path / name
    calls = [
        waystation.load,
        waystation.metadata,
        waystation.delete,
        lambda path: waystation.save(path, {"a": 1}),
    ]
    for call in calls:
        with pytest.raises(errors.UnusablePath):
            call(path)
    if name.startswith("n"):
        assert not waystation.is_checkpoint(path)
    else:
        with pytest.raises(errors.UnusablePath):
            waystation.is_checkpoint(path)


def test_links_that_lead_nowhere_are_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(errors.CheckpointNotFound, match=r"symbolic link to '.*/nothing', where nothing is"):
        waystation.load(tmp_path / "dangling")
    with pytest.raises(errors.InvalidInput, match=r"symbolic link to '.*/nothing', where nothing is"):
        waystation.delete(tmp_path / "dangling")
    with pytest.raises(errors.UnusablePath, match="leads back to itself"):
        waystation.delete(tmp_path / "circle")
