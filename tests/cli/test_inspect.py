"""`waystation inspect`: whole outputs for a fixed checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.support.long import only_long

import waystation

EXPECTED = """\
[DIR]/runs/step_9
  committed        [TIME]
  generation       1
  format           native, version 1
  custom metadata  {"loss": 1.5}

state: 5 arrays (1 JAX, 3 NumPy, 1 NumPy scalar), 2 other values, 4.1 KiB in 1 file
(root)         dict of 7 leaves          4.1 KiB
├─ params      dict of 3 leaves          4.0 KiB
│  ├─ w        bfloat16[64, 32]          4.0 KiB  JAX P('data', None) of data=2, model=4 (8 cpu)
│  ├─ b        float64[5]                   40 B  NumPy
│  └─ 'odd\\n'  int4[2, 3]                    6 B  NumPy
├─ opt         example.Adam of 2 leaves     28 B
│  ├─ .mu      float32[2, 3]                24 B  NumPy
│  └─ .nu      list of 1 leaf                4 B
│     ├─ [0]   int32[]                       4 B  NumPy scalar
│     ├─ [1]   None
│     └─ [2]   dict of 0 leaves              0 B
├─ step        int 12
└─ name        str 'run'
"""


def test_the_whole_output(checkpoint: Path, script) -> None:
    outcome = script("inspect", checkpoint)
    assert (outcome.out, outcome.err, outcome.code) == (EXPECTED, "", 0)


def test_depth_sums_up_what_is_below(checkpoint: Path, run) -> None:
    outcome = run("inspect", checkpoint, "--depth", 1)
    tree = outcome.out.split("\n\n")[1]
    assert tree == (
        "state: 5 arrays (1 JAX, 3 NumPy, 1 NumPy scalar), 2 other values, 4.1 KiB in 1 file\n"
        "(root)     dict of 7 leaves          4.1 KiB\n"
        "├─ params  dict of 3 leaves          4.0 KiB\n"
        "├─ opt     example.Adam of 2 leaves     28 B\n"
        "├─ step    int 12\n"
        "└─ name    str 'run'\n"
    )


def test_json_says_all_of_it(checkpoint: Path, script) -> None:
    document = script("inspect", checkpoint, "--json").document
    state = document["checkpointables"]["state"]
    leaves = {leaf["path"]: leaf for leaf in state.pop("leaves")}
    assert document["custom_metadata"] == {"loss": 1.5}
    assert (document["format_version"], document["generation"]) == (1, 1)
    assert {key: state[key] for key in ("arrays", "array_bytes", "files", "processes")} == {
        "arrays": 5,
        "array_bytes": 4096 + 40 + 6 + 24 + 4,
        "files": 1,
        "processes": 1,
    }
    weights = leaves["['params']['w']"]
    assert (weights["dtype"], weights["shape"], weights["name"]) == ("bfloat16", [64, 32], "params.w")
    assert weights["sharding"]["mesh"]["axes"] == [["data", 2], ["model", 4]]
    assert leaves["['step']"] == {"path": "['step']", "kind": "int", "value": 12}


def test_numbers_that_json_lacks_become_text(tmp_path: Path, run) -> None:
    waystation.save(tmp_path / "c", {"a": float("nan"), "b": 1 << 20_000, "c": b"\xff", "d": 2**64 - 1})
    leaves = run("inspect", tmp_path / "c", "--json").document["checkpointables"]["state"]["leaves"]
    values = [leaf["value"] for leaf in leaves]
    assert values == ["nan", hex(1 << 20_000), "b'\\xff'", 2**64 - 1]


def test_only_the_checkpointable_that_is_asked_for(tmp_path: Path, run) -> None:
    waystation.save(tmp_path / "c", {"a": 1}, checkpointable_name="weights")
    assert "weights: 0 arrays, 1 other value, 0 B in 0 files" in run("inspect", tmp_path / "c").out
    wrong = run("inspect", tmp_path / "c", "--checkpointable", "state")
    assert wrong.code == 2
    assert "has no checkpointable 'state'; it has: weights" in wrong.err


def test_names_from_a_file_cannot_control_the_terminal(tmp_path: Path, run) -> None:
    waystation.save(tmp_path / "c", {"\x1b[31mred": np.zeros(1), "\ud800": "\x1b]0;title\x07", "[bold]x": 1})
    out = run("inspect", tmp_path / "c").out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "'\\x1b[31mred'" in out
    assert "'\\ud800'" in out
    assert "'[bold]x'" in out


@pytest.mark.long
@only_long
def test_a_tree_deeper_than_any_stack(tmp_path: Path, run) -> None:
    state: dict[str, object] = {"leaf": 1}
    for _ in range(1500):
        state = {"x": state}
    waystation.save(tmp_path / "c", state)
    assert run("inspect", tmp_path / "c").out.count("dict of 1 leaf") == 1501
    assert run("inspect", tmp_path / "c", "--depth", 3).out.count("dict of 1 leaf") == 4


def test_no_framework_is_imported(checkpoint: Path) -> None:
    code = (
        "import sys; from waystation.cli.application import application\n"
        "application(sys.argv[1:], standalone_mode=False)\n"
        "assert not {'jax', 'torch', 'flax'} & sys.modules.keys()"
    )
    for command in (
        ["inspect", str(checkpoint)],
        ["ls", str(checkpoint.parent)],
        ["verify", str(checkpoint)],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *command],
            capture_output=True,
            text=True,
            check=False,
            env=dict(os.environ),
        )
        assert done.returncode == 0, done.stderr
