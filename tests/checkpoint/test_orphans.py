"""Overwriting where file systems cannot swap names, and what is left inside a checkpoint when that is killed.

`kill_walk` kills such a save at every step; here is what must not be touched, and what fails without a kill.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.support import plain_renames

import waystation
from waystation.checkpoint.collect import find_leftovers, remove_leftovers
from waystation.layouts.native.commit import read_record
from waystation.storage.attempts import new_attempt_id

pytestmark = pytest.mark.skipif(
    not plain_renames.SUPPORTED, reason="the filter of system calls is for x86-64 and AArch64 Linux"
)


def with_plain_renames(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a process that has no renames but the plain one."""
    program = (
        "import sys; import numpy as np; import waystation\n"
        "from tests.support.plain_renames import allow_only_plain_renames\n"
        f"allow_only_plain_renames()\n{code}"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def overwrite(path: Path, value: int) -> None:
    done = with_plain_renames(
        "waystation.save(sys.argv[1], {'x': int(sys.argv[2])}, overwrite=True)", path, value
    )
    assert (done.returncode, done.stderr) == (0, "")


def dead_attempt_id() -> str:
    """The id of an attempt whose process has ended."""
    code = "from waystation.storage.attempts import new_attempt_id; print(new_attempt_id())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "checkpoint"
    waystation.save(path, {"x": 1})
    return path


def test_the_filter_leaves_plain_renames_only(tmp_path: Path) -> None:
    code = """
import os
from waystation import _native, errors
os.mkdir("a"); os.mkdir("b")
for call in (_native.rename_new, _native.rename_exchange):
    try:
        call("a", "c" if call is _native.rename_new else "b")
    except errors.Unsupported:
        print("refused")
os.rename("a", "c")
"""
    done = with_plain_renames(f"import os; os.chdir({str(tmp_path)!r})\n{code}")
    assert (done.returncode, done.stdout) == (0, "refused\nrefused\n"), done.stderr
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]


def test_overwrites_in_place_replace_the_record_and_leave_nothing(saved: Path) -> None:
    for generation in (2, 3):
        overwrite(saved, generation)
        assert waystation.load(saved) == {"x": generation}
        assert waystation.checkpoint.verify(saved).strays == []
        assert os.listdir(saved.parent) == ["checkpoint"]
        assert read_record(str(saved)).generation == generation


def test_a_checkpoint_with_a_damaged_record_is_overwritten_like_any_other(saved: Path) -> None:
    (saved / "checkpoint.json").write_bytes(b"damaged")
    overwrite(saved, 2)
    assert waystation.load(saved) == {"x": 2}
    # What the damaged record named could be told apart only after the process had ended.
    remove_leftovers(find_leftovers(saved.parent))
    assert waystation.checkpoint.verify(saved).strays == []


@pytest.mark.parametrize("by_saving", [True, False], ids=["save", "gc"])
@pytest.mark.share(2)
def test_orphans_of_the_dead_go_and_nothing_else_does(saved: Path, by_saving: bool) -> None:
    overwrite(saved, 2)  # the record now names a directory of a process that has ended
    (data,) = (path for path in saved.iterdir() if path.is_dir())
    dead = ["state", f"state-{dead_attempt_id()}"]
    for name in dead:
        shutil.copytree(data, saved / name)
    kept = [f"state-{new_attempt_id()}", "notes", "results", "damaged"]
    shutil.copytree(data, saved / kept[0])  # of this process, which runs
    (saved / "notes").mkdir()
    (saved / "results").mkdir()
    (saved / "results" / "record.json").write_text("{}")  # of somebody else's program
    (saved / "damaged").mkdir()
    (saved / "damaged" / "record.json").write_bytes((data / "record.json").read_bytes()[:-2])
    (saved / "state-link").symlink_to(data)
    if by_saving:
        overwrite(saved, 3)
    else:
        found = find_leftovers(saved.parent)
        verdicts = {Path(entry.leftover.path).name: entry.verdict for entry in found}
        assert verdicts == {**dict.fromkeys(dead, "dead"), kept[0]: "running"}
        remove_leftovers(found)
    assert waystation.load(saved) == {"x": 3 if by_saving else 2}
    strays = [Path(path).name for path in waystation.checkpoint.verify(saved).strays]
    assert sorted(strays) == sorted([*kept, "state-link"])
    assert os.listdir(saved.parent) == ["checkpoint"]


def test_data_of_a_checkpoint_that_was_never_overwritten_in_place_are_left_alone(saved: Path) -> None:
    shutil.copytree(saved / "state", saved / "copy")
    assert find_leftovers(saved.parent) == []


def test_orphans_of_other_machines_only_after_a_while(saved: Path) -> None:
    orphan = saved / f"state-{'0' * 12}-17-4242-00c0ffee"
    shutil.copytree(saved / "state", orphan)
    (recent,) = find_leftovers(saved.parent, older_than_s=3600)
    assert (recent.verdict, remove_leftovers([recent], older_than_s=3600)) == ("unknown", [])
    for path in (orphan, saved):
        os.utime(path, (time.time() - 7200,) * 2)
    (old,) = find_leftovers(saved.parent, older_than_s=3600)
    assert (old.verdict, remove_leftovers([old], older_than_s=3600)) == ("abandoned", [old])
    assert not orphan.exists()
    assert waystation.load(saved) == {"x": 1}


def test_a_record_that_was_being_replaced_goes_with_the_next_save(saved: Path) -> None:
    (saved / f"checkpoint.json.waystation-tmp-{dead_attempt_id()}").write_bytes(b"half")
    overwrite(saved, 2)
    assert waystation.checkpoint.verify(saved).strays == []


def test_no_room_for_the_record_leaves_the_disk_as_it_was(small_disk: Path) -> None:
    waystation.save(small_disk / "checkpoint", {"x": np.arange(10)})
    before = sorted(str(path) for path in small_disk.rglob("*"))
    # The attempt's own record fits into the 8 MiB, the one that names the directories moved in does not.
    done = with_plain_renames(
        """
try:
    waystation.save(sys.argv[1], {"x": 2}, overwrite=True, custom_metadata={"m": "m" * (9 << 19)})
except waystation.errors.DiskFull as error:
    print(error.context["path"])
""",
        small_disk / "checkpoint",
    )
    assert "/checkpoint/checkpoint.json.waystation-tmp-" in done.stdout, done.stderr
    assert sorted(str(path) for path in small_disk.rglob("*")) == before
    np.testing.assert_array_equal(waystation.load(small_disk / "checkpoint")["x"], np.arange(10))
