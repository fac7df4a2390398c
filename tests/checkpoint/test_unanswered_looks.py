"""A file system that does not answer, or refuses a look, has not said that nothing is there.

`os.path.exists` and the like say so: a checkpoint is then called missing, and may be replaced.
"""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import failing_calls

from waystation.errors import UnusablePath
from waystation.storage import is_directory, is_file, is_there, status

DEADLINE_S = 120.0

PROGRAM = """
import errno, os, sys
import numpy as np
import waystation
from waystation import safetensors, training
from waystation.layouts.native import names
from waystation.storage import attempts
from tests.support import failing_calls

root, code = sys.argv[1], getattr(errno, sys.argv[2])
checkpoint, model, run = (os.path.join(root, name) for name in ("checkpoint", "model", "run"))
state = {"w": np.arange(6.0)}
paths = {"checkpoint": checkpoint, "model": model, "run": run}

def save(step):
    with training.Checkpointer(run) as checkpointer:
        checkpointer.save(step, state)

calls = {
    "is_checkpoint": lambda: waystation.is_checkpoint(checkpoint),
    "load": lambda: waystation.load(checkpoint),
    "metadata": lambda: waystation.metadata(checkpoint),
    "save": lambda: waystation.save(checkpoint, state),
    "overwrite": lambda: waystation.save(checkpoint, state, overwrite=True),
    "delete": lambda: waystation.delete(checkpoint, missing_ok=True),
    "name of a record": lambda: names.checkpointable_record(os.path.join(checkpoint, "state")),
    "sign of life": lambda: attempts._sign(checkpoint),
    "model": lambda: safetensors.load(model, framework="numpy"),
    "save a model": lambda: safetensors.save({"w": np.ones(3)}, model, overwrite=True),
    "save a step": lambda: save(2),
    "open a run": lambda: training.Checkpointer(run).latest,
}

waystation.save(checkpoint, state)
safetensors.save({"w": np.arange(3.0)}, model)
save(1)
for name in ("is_checkpoint", "load", "metadata", "overwrite", "model", "save a model", "open a run"):
    calls[name]()  # imports what it needs

failing_calls.fail("newfstatat", code)
for name, call in calls.items():
    try:
        print(name, "->", call(), flush=True)
    except OSError as error:
        print(name, "raises", type(error).__name__, error.errno == code, flush=True)
"""


@pytest.mark.skipif(not failing_calls.SUPPORTED, reason="system calls are made to fail on Linux only")
@pytest.mark.parametrize(
    ("code", "kind"), [("EIO", "Unavailable"), ("ESTALE", "Unavailable"), ("EACCES", "PermissionDenied")]
)
@pytest.mark.share(3)
def test_what_cannot_be_looked_at_is_not_called_absent(code: str, kind: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), code],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    told = done.stdout.splitlines()
    assert len(told) == 12, done.stderr
    assert [line for line in told if not line.endswith(f"raises {kind} True")] == [], done.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint", "model", "run"]


def test_only_absence_is_absence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for absent in ("nothing", "file/below", "x" * 1000):
        assert not is_there(tmp_path / absent)
        assert not is_file(tmp_path / absent)
        assert not is_directory(tmp_path / absent)
    assert is_there(tmp_path / "dangling")
    assert status(tmp_path / "dangling") is None
    assert is_file(tmp_path / "file")
    assert is_directory(tmp_path)
    assert is_there(tmp_path / "circle")
    with pytest.raises(UnusablePath, match="could not look at") as raised:
        is_file(tmp_path / "circle")
    assert raised.value.errno == errno.ELOOP
