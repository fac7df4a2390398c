"""What the commands do with checkpoints in Orbax's layouts, which genuine Orbax has saved."""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import waystation
from waystation.errors import Unsupported

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax"),
    pytest.mark.filterwarnings("ignore::UserWarning:orbax"),
    # Orbax leaves coroutines behind, which are found whenever garbage is collected.
    pytest.mark.filterwarnings("ignore:.*coroutine.*:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*coroutine.*:RuntimeWarning"),
]


def orbax_context(*, use_ocdbt: bool) -> ocp.Context:
    context = ocp.Context()
    context.array_options.saving.use_ocdbt = use_ocdbt
    return context


@pytest.fixture(params=[True, False], ids=["ocdbt", "files"])
def runs(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    with orbax_context(use_ocdbt=request.param):
        ocp.save(
            tmp_path / "runs" / "step_7",
            {"params": {"w": jnp.ones((64, 8), jnp.bfloat16), "b": np.zeros(5)}, "step": 7, "name": "run"},
            custom_metadata={"loss": 1.5},
        )
    return tmp_path / "runs"


@pytest.mark.share(2)
def test_inspect_shows_the_tree(runs: Path, script) -> None:
    outcome = script("inspect", runs / "step_7")
    head, _, tree = outcome.out.partition("\n\n")
    assert outcome.code == 0
    assert head.splitlines() == [
        "[DIR]/runs/step_7",
        "  committed        [TIME]",
        "  format           Orbax",
        '  custom metadata  {"loss": 1.5}',
    ]
    lines = tree.splitlines()
    assert lines[0].startswith("state: 3 arrays (")
    assert any("w    bfloat16[64, 8]   1.0 KiB  JAX" in line for line in lines)
    assert any("b    float64[5]           40 B  NumPy" in line for line in lines)
    assert any("name    str 'run'" in line for line in lines)
    assert any("step    int64[]               8 B  Python number" in line for line in lines)


@pytest.mark.share(2)
def test_inspect_for_programs(runs: Path, script) -> None:
    document = script("inspect", runs / "step_7", "--json").document
    state = document["checkpointables"]["state"]
    leaves = {leaf["path"]: leaf for leaf in state["leaves"]}
    assert (document["layout"], document["custom_metadata"]) == ("orbax", {"loss": 1.5})
    weights = leaves["['params']['w']"]
    assert (weights["dtype"], weights["shape"], weights["chunks"], weights["bytes"]) == (
        "bfloat16",
        [64, 8],
        1,
        1024,
    )
    on_disk = sum(path.lstat().st_size for path in (runs / "step_7" / "state").rglob("*") if path.is_file())
    assert state["file_bytes"] == on_disk


def test_ls_names_them(runs: Path, run) -> None:
    waystation.save(runs / "step_8", {"n": 8})
    listed = run("ls", runs)
    assert listed.code == 0
    assert "step_8" in listed.out
    assert "in Orbax's layout, which can be loaded and exported: step_7\n" in listed.out
    document = run("ls", runs, "--json").document
    assert document["orbax_checkpoints"] == ["[DIR]/runs/step_7"]
    assert [entry["name"] for entry in document["checkpoints"]] == ["step_8"]


def test_verify_says_that_there_is_nothing_to_verify_them_by(runs: Path, run) -> None:
    one = run("verify", runs / "step_7")
    assert one.code == 2
    assert "has no checksums of data to verify: Waystation has not written it" in one.err
    waystation.save(runs / "step_8", {"n": 8})
    every = run("verify", "--all", runs)
    assert every.code == 0
    assert "[DIR]/runs/step_8: intact" in every.out
    said = "[DIR]/runs/step_7: not verified: Orbax has written it, without checksums of data\n"
    assert said in every.out
    assert run("verify", "--all", runs, "--json").document["not_verified"] == ["[DIR]/runs/step_7"]


def test_verify_takes_those_that_waystation_has_written(runs: Path, run) -> None:
    context = waystation.Context()
    context.array.saving.use_ocdbt = False
    with context:
        waystation.save(runs / "step_8", {"w": np.zeros((64, 8)), "n": 8})
    assert "[DIR]/runs/step_8: intact" in run("verify", "--all", runs).out
    chunk = runs / "step_8" / "state" / "w" / "c.0.0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    every = run("verify", "--all", runs, "--json")
    assert every.code == 1
    assert every.document["not_verified"] == ["[DIR]/runs/step_7"]
    damages = every.document["checkpoints"][0]["damages"]
    assert {damage["path"] for damage in damages} == {"[DIR]/runs/step_8/state/w/c.0.0"}
    assert ["w"] in [damage["arrays"] for damage in damages]


def test_diff_compares_them_with_native_ones(runs: Path, run) -> None:
    waystation.save(runs / "same", waystation.load(runs / "step_7"))
    same = run("diff", runs / "step_7", runs / "same")
    assert same.code == 0, same.out
    state = waystation.load(runs / "step_7")
    state["params"]["b"][3] = 0.5
    waystation.save(runs / "other", {**state, "step": 8})
    other = run("diff", runs / "step_7", runs / "other")
    assert other.code == 1
    assert "['params']['b']: 1 of 5 elements differ; by up to 0.5" in other.out
    assert "['step']: 7 in A, 8 in B" in other.out


def test_tuples_and_lists_are_one_in_orbax_and_so_no_difference(runs: Path, run) -> None:
    with orbax_context(use_ocdbt=False):
        ocp.save(runs / "theirs", {"pair": (np.zeros(2), np.ones(2))})
    waystation.save(runs / "ours", {"pair": (np.zeros(2), np.ones(2))})
    assert run("diff", runs / "theirs", runs / "ours").code == 0
    assert run("diff", runs / "ours", runs / "theirs").code == 0


def test_files_of_handlers_are_compared_by_content(tmp_path: Path, run) -> None:
    for name, value in (("one", 1), ("two", 2), ("again", 1)):
        ocp.save_checkpointables(tmp_path / name, {"data": {"position": value}})
    assert run("diff", tmp_path / "one", tmp_path / "again").code == 0
    assert run("diff", tmp_path / "one", tmp_path / "two").code == 1


def test_what_works_on_native_checkpoints_only_says_so(runs: Path) -> None:
    with pytest.raises(Unsupported, match=r"is a checkpoint in Orbax's layout.*load it and save it again"):
        waystation.add_checkpointables(runs / "step_7", {"more": {"n": 1}})


def test_an_absent_neighbour_is_told_of_both_layouts(runs: Path) -> None:
    waystation.save(runs / "step_8", {"n": 8})
    with pytest.raises(waystation.errors.NotFound, match=r"step_7.*step_8"):
        waystation.load(runs / "step_9")


def test_export_hands_on_their_arrays(runs: Path, run, tmp_path: Path) -> None:
    assert run("export", runs / "step_7", tmp_path / "out.npz", "--select", "params.b").code == 0
    assert np.load(tmp_path / "out.npz")["params.b"].shape == (5,)


def test_a_checkpoint_is_no_directory_of_checkpoints(runs: Path, run) -> None:
    outcome = run("ls", runs / "step_7")
    assert outcome.code == 2
    assert "is a checkpoint itself; 'waystation inspect [DIR]/runs/step_7' shows it" in outcome.err


def test_damage_is_told_of_without_a_promise_to_list_more(runs: Path, run) -> None:
    os.truncate(runs / "step_7" / "state" / "_METADATA", 30)
    outcome = run("inspect", runs / "step_7")
    assert outcome.code == 2
    assert "path: [DIR]/runs/step_7/state/_METADATA" in outcome.err
    assert "where there are checksums, 'waystation verify PATH' lists all damage" in outcome.err
