"""Who a process is decides whether what it was writing may be removed: never on a guess."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import waystation
from waystation import _processes

OTHER_NAME = "a-copy-of-this-machine"
BEGIN_AND_DIE = textwrap.dedent("""
    import os, signal, sys
    from waystation.storage.attempts import Attempt
    attempt = Attempt(sys.argv[1])
    print(attempt.path, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
""")


def in_namespaces(*flags: str, script: str, arguments: list[str]) -> "subprocess.CompletedProcess[str]":
    """Runs a shell script in new namespaces, which only root may make."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare (util-linux) is not installed")
    probe = subprocess.run(["unshare", *flags, "true"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"namespaces cannot be made here: {probe.stderr.strip()}")
    command = ["unshare", *flags, "sh", "-c", script, "sh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


WITHOUT_TABLE = [
    pytest.param(["--pid", "--fork"], "true", id="the process table of another namespace"),
    pytest.param(["--mount"], "mount -t tmpfs none /proc", id="no process table"),
]


def begin_and_die(target: Path, flags: list[str], before: str) -> Path:
    """The attempt that a process in new namespaces has left."""
    # Not by `exec`: the first process of a namespace cannot kill itself.
    begun = in_namespaces(
        *flags,
        script=f'{before} && "$@"; exit $?',
        arguments=[sys.executable, "-c", BEGIN_AND_DIE, str(target)],
    )
    assert begun.returncode == 128 + signal.SIGKILL, begun.stderr
    return Path(begun.stdout.strip())


@pytest.mark.parametrize(
    ("flags", "before"),
    [
        pytest.param(["--uts"], f"hostname {OTHER_NAME}", id="a copy of this machine"),
        pytest.param(["--time", "--boottime", "5000"], "true", id="another namespace of time"),
        *WITHOUT_TABLE,
    ],
)
def test_a_save_leaves_alone_what_may_be_alive(flags: list[str], before: str, tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    attempt = begin_and_die(target, flags, before)
    waystation.save(target, {"x": np.ones(3)})
    assert attempt.is_dir()
    assert np.array_equal(waystation.load(target)["x"], np.ones(3))


@pytest.mark.parametrize(("flags", "before"), WITHOUT_TABLE)
@pytest.mark.share(2)
def test_saves_go_on_where_no_process_can_be_looked_up(flags: list[str], before: str, tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    attempt = begin_and_die(target, flags, before)
    code = (
        "import sys, waystation; waystation.save(sys.argv[1], {'x': 1}); "
        "waystation.save(sys.argv[1], {'x': 2}, overwrite=True); "
        "checkpointer = waystation.training.Checkpointer(sys.argv[1] + ' steps'); "
        "checkpointer.save(1, {'x': 3}); checkpointer.close(); "
        "print(waystation.load(sys.argv[1]), waystation.training.Checkpointer(sys.argv[1] + ' steps').load())"
    )
    arguments = [sys.executable, "-c", code, str(target)]
    saved = in_namespaces(*flags, script=f'{before} && "$@"; exit $?', arguments=arguments)
    assert saved.stdout.strip() == "{'x': 2} {'x': 3}", saved.stderr
    assert attempt.is_dir()


def test_a_save_removes_what_a_killed_process_of_this_machine_left(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    begun = subprocess.run(
        [sys.executable, "-c", BEGIN_AND_DIE, str(target)], capture_output=True, text=True, check=False
    )
    assert begun.returncode == -signal.SIGKILL, begun.stderr
    attempt = Path(begun.stdout.strip())
    assert attempt.is_dir()
    waystation.save(target, {"x": np.ones(3)})
    assert not attempt.exists()


def test_a_process_that_cannot_be_looked_at_may_run() -> None:
    script = 'mount -t proc -o hidepid=2 proc /proc && exec setpriv --reuid 65534 --clear-groups "$@"'
    # Prints its answer for a process of root, and for an id that no process has.
    code = (
        "import importlib.util, sys; "
        "spec = importlib.util.spec_from_file_location('processes', sys.argv[1]); "
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); "
        "print(module.may_run(int(sys.argv[2]), sys.argv[3]), module.may_run(2**22 + 1, '1'))"
    )
    own = os.getpid()
    copy = Path(tempfile.gettempdir()) / f"waystation-processes-{own}.py"  # where every user may read it
    arguments = ["/usr/bin/python3", "-I", "-c", code, str(copy), str(own), _processes.start_time(own)]
    if not os.path.exists(arguments[0]) or shutil.which("setpriv") is None:
        pytest.skip("there is no interpreter that every user may run, or no setpriv")
    copy.write_text(Path(_processes.__file__).read_text())
    copy.chmod(0o644)
    try:
        answered = in_namespaces("--mount", script=script, arguments=arguments)
    finally:
        copy.unlink()
    assert answered.stdout.split() == ["True", "False"], answered.stderr


def test_an_end_is_seen_and_another_start_is_another_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        start = _processes.start_time(child.pid)
        assert _processes.may_run(child.pid, start)
        assert not _processes.may_run(child.pid, start + "1")
        child.kill()
        deadline = time.monotonic() + 60
        # Nobody has waited for it: it is a zombie without threads.
        while _processes.may_run(child.pid, start):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not _processes.may_run(child.pid, start)
