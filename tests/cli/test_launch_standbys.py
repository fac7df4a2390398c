"""`waystation launch --restarts`: standbys become the program, and nobody can tell them from fresh processes.

The launches log what becomes of their standbys, and the tests go by that. A program waits at each start for
the file `go`, so nothing depends on who is faster.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.agents import end_agent, memory_directory
from tests.support.watching import runs, wait_until

from waystation_launch.standbys import PythonCommand, python_command

HANG_S = 120
LOGGING = (
    "import logging; logging.basicConfig(level=logging.DEBUG, format='%(message)s'); "
    "from waystation.cli import main; main()"
)

# What every program here begins with. It tells of its step as a save does, and imports no more than it needs.
BEGIN = """
import json
import os
import signal
import sys
import time
from pathlib import Path

from waystation._launched import note_step
"""
# What it goes on with: it tells what it has seen, takes a step, and waits; the first start is killed.
WAIT = """
directory, rank = Path(os.environ["TEST_DIRECTORY"]), os.environ["RANK"]
start = len(list(directory.glob(f"start-{rank}-*")))


def go_on(seen):
    path = directory / f"start-{rank}-{start}"
    path.with_suffix(".new").write_text(json.dumps(seen))
    note_step()
    path.with_suffix(".new").rename(path)
    until = time.monotonic() + 120
    while not (directory / f"go-{start}").exists():
        assert time.monotonic() < until, "a hang"
        time.sleep(0.01)
    if start == 0:
        os.kill(os.getpid(), signal.SIGKILL)
"""
# Instead of the step, for programs that save.
SAVING = "import numpy as np\nimport waystation\n"
SAVE = 'waystation.save(directory / f"save-{rank}-{start}", {"w": np.zeros(3)})'


def _be_nice() -> None:
    """Runs the launch at a priority between others, whatever that of the tests is."""
    with contextlib.suppress(OSError):  # who may not raise it
        os.setpriority(os.PRIO_PROCESS, 0, 3)


class Launched:
    """A launch that says what becomes of its standbys.

    Attributes:
        process: The launch.
        said: What it has written to stderr so far.
    """

    def __init__(self, directory: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.said = ""
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", LOGGING, "launch", "--json", *arguments],
            cwd=directory,
            env=os.environ | {"TEST_DIRECTORY": str(directory)} | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_be_nice,  # noqa: PLW1509
        )

    def hear(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Waits until it has said something so often; as long as it goes on saying anything."""
        assert self.process.stderr is not None
        until = time.monotonic() + HANG_S
        while len(found := list(re.finditer(pattern, self.said))) < count:
            assert time.monotonic() < until, f"a hang:\n{self.said}"
            if select.select([self.process.stderr], [], [], 1)[0]:
                data = os.read(self.process.stderr.fileno(), 1 << 16)
                assert data, f"it has ended:\n{self.said}"
                self.said += data.decode()
                until = time.monotonic() + HANG_S
        return found

    def standbys(self, count: int = 1) -> list[int]:
        """The process ids of those that are being prepared, once they are so many."""
        found = self.hear(r"the standby of process \d+ is being prepared \(pid (\d+)\)", count)
        return [int(match[1]) for match in found]

    def hear_ready(self, count: int = 1) -> None:
        """Waits until so many standbys have become ready, of all starts."""
        self.hear(r"the standby of process \d+ is ready", count)

    def go(self, start: int) -> None:
        """Lets a start of the program go on."""
        (self.directory / f"go-{start}").touch()

    def end(self) -> dict[str, Any]:
        """Waits for its end; returns its report. No standby may be left."""
        out, err = self.process.communicate(timeout=HANG_S)
        self.said += err
        prepared = re.findall(r"is being prepared \(pid (\d+)\)", self.said)
        assert not any(runs(int(process_id)) for process_id in prepared)
        report: dict[str, Any] = json.loads(out)
        return report

    def seen(self, start: int, rank: int = 0) -> Any:
        """What a start of the program has seen, once it says so."""
        path = self.directory / f"start-{rank}-{start}"
        wait_until(path.exists)
        return json.loads(path.read_text())


@contextlib.contextmanager
def launched(
    directory: Path, command: list[str], *options: str, env: dict[str, str] | None = None
) -> Iterator[Launched]:
    """A launch that may restart its program once."""
    launch = Launched(directory, *(options or ("--restarts", "1")), "--", *command, env=env)
    try:
        yield launch
    finally:
        launch.process.kill()
        launch.process.communicate()


def script(directory: Path, code: str, name: str = "program.py") -> list[str]:
    (directory / name).write_text(BEGIN + code)
    return [sys.executable, name]


def restarted(launch: Launched, standbys: int = 1) -> dict[str, Any]:
    """Has the program killed once the standby is ready, and started again; returns the report."""
    launch.hear_ready()
    launch.go(0)
    launch.go(1)
    report = launch.end()
    assert [start["standbys"] for start in report["starts"]] == [0, standbys], launch.said
    return report


# What a program can see of how it was started.
LOOK = '''
import ctypes
import inspect
import multiprocessing
import pickle
import threading


class Kept:
    """Of `__main__`."""


def square(value):
    return value * value, Kept.__module__


def kept():
    return type(pickle.loads(pickle.dumps(Kept()))) is sys.modules["__main__"].Kept


def is_open(number):
    try:
        os.fstat(number)
    except OSError:  # that of the listing
        return False
    return True


def death_signal():
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number))
    return number.value


def look():
    main = sys.modules["__main__"]
    late = {"WAYSTATION_RECOVERY", "JAX_COORDINATOR_ADDRESS", "MASTER_PORT"}
    tasks = [int(task) for task in os.listdir("/proc/self/task")]
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    descriptors = [number for number in descriptors if is_open(number)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.map(square, [3])
    return {
        "namespace": [(name, type(value).__name__) for name, value in NAMESPACE.items()],
        "names": {name: repr(NAMESPACE[name]) for name in ("__name__", "__file__", "__package__", "__doc__")},
        "spec": getattr(main.__spec__, "name", None),
        "is main": vars(main) is globals(),
        "argv": [sys.argv, sys.orig_argv],
        "command": Path("/proc/self/cmdline").read_bytes().decode("latin").rstrip("\\0"),
        "path": sys.path,
        "flags": list(sys.flags),
        "options": [sys.warnoptions, {name: str(value) for name, value in sys._xoptions.items()}],
        "environment": {name: value for name, value in os.environ.items() if name not in late},
        "late": sorted(late & os.environ.keys()),
        "directory": os.getcwd(),
        "stdin": sys.stdin.read(),
        "streams": [[stream.fileno(), stream.write_through] for stream in (sys.stdout, sys.stderr)],
        "descriptors": descriptors,
        "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), death_signal()],
        "group": Path("/proc/self/cgroup").read_text(),
        "priorities": sorted({os.getpriority(os.PRIO_PROCESS, task) for task in tasks}),
        "order": Path("/proc/self/oom_score_adj").read_text(),
        "signals": {number.name: repr(signal.getsignal(number)) for number in signal.Signals
                    if "function" not in repr(signal.getsignal(number))},
        "hooks": [sys.excepthook is sys.__excepthook__, len(sys.meta_path), len(sys.path_hooks)],
        "thread": threading.current_thread() is threading.main_thread(),
        "spawned": spawned,
        "kept": kept(),
        "last": hasattr(sys, "last_value"),
        "frames": [frame.function for frame in inspect.stack()],
    }


if __name__ == "__main__":
    go_on(look())
'''
ODD = ["--", "", " a b", "-x", "'\"$(x)\\", "ü\n", "\udcff", "--json"]


@pytest.mark.parametrize(
    ("options", "saves"),
    [
        ([], True),
        (["-u", "-O"], False),
        (["-PB", "-W", "error::UserWarning"], False),
        (["-X", "dev"], False),
        (["-m"], False),
        (["-PXutf8", "-um"], True),
    ],
    ids=["script", "optimised", "safe", "development", "module", "module with options"],
)
@pytest.mark.share(2)
def test_a_standby_cannot_be_told_from_a_fresh_process(
    tmp_path: Path, options: list[str], saves: bool
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    begin, wait = (SAVING + BEGIN, WAIT.replace("note_step()", SAVE)) if saves else (BEGIN, WAIT)
    (package / "part.py").write_text(begin + "NAMESPACE = dict(globals())\n" + wait + LOOK)
    is_module = any(option.endswith("m") for option in options)
    target = "package.part" if is_module else "./package/../package/part.py"
    with launched(
        tmp_path, [sys.executable, *options, target, *ODD], env={"PYTHONPATH": str(tmp_path)}
    ) as launch:
        report = restarted(launch)
        fresh, standby = launch.seen(0), launch.seen(1)
    assert report["restarts"] == 1
    assert fresh["spawned"] == [[9, "__mp_main__"]]
    *frames, outermost = standby.pop("frames")
    if is_module:
        frames.pop()  # that calls what runs a module
    assert (frames, outermost) == (fresh.pop("frames"), "<module>")
    assert standby == fresh


ENDS = """
def fail():
    raise ValueError("of the program")


def end():
    match int(rank):
        case 0:
            sys.exit(3)
        case 1:
            fail()
        case 2:
            sys.exit("some words")
        case 3:
            raise KeyboardInterrupt
        case 4:
            import atexit

            atexit.register(print, "at the end")
        case 5:
            sys.excepthook = lambda kind, error, trace: print("hooked", kind, trace.tb_frame.f_code.co_name)
            fail()
        case 6:
            import threading

            threading.Thread(target=lambda: (time.sleep(0.1), print("of a thread"))).start()
        case 7:
            os._exit(4)


if __name__ == "__main__":
    go_on(None)
    if start == 1:
        end()
"""


@pytest.mark.parametrize(("options", "count"), [([], 8), (["-m"], 2)], ids=["script", "module"])
@pytest.mark.share(2)
def test_it_ends_as_a_fresh_process_does(tmp_path: Path, options: list[str], count: int) -> None:
    found = []
    for is_standby in (True, False):
        directory = tmp_path / str(is_standby)
        directory.mkdir()
        (directory / "part.py").write_text(BEGIN + WAIT + ENDS)
        command = [sys.executable, *options, "part" if options else "part.py"]
        more = [] if is_standby else ["--no-standby"]
        with launched(
            directory, command, "-n", str(count), "--grace", "90", "--restarts", "1", *more
        ) as launch:
            if is_standby:
                launch.hear_ready(count)
            launch.seen(0, count - 1)
            launch.go(0)
            launch.go(1)
            report = launch.end()
        assert [start["standbys"] for start in report["starts"]] == [0, count * is_standby], launch.said
        ends = [(each["exit_code"], each["signal"], each["told_to_end"]) for each in report["processes"]]
        lines = sorted(line for line in launch.said.splitlines() if re.match(r"\[\d\]", line))
        found.append((ends, [line.replace(str(directory), "") for line in lines]))
    assert found[0] == found[1]
    assert "[1] ValueError: of the program" in found[0][1]
    assert ("[5] hooked <class 'ValueError'> <module>" in found[0][1]) == (count == 8)


def installed(directory: Path, name: str, code: str) -> dict[str, str]:
    """Installs a module where packages are; returns the environment in which it is found."""
    path = directory / "site-packages" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(directory / "site-packages"), os.environ["PYTHONPATH"]])}


def test_modules_of_the_program_are_run_when_it_starts_and_as_they_are_then(tmp_path: Path) -> None:
    own = "import numpy\nfrom pathlib import Path\n"
    own += "with Path(__file__).with_suffix('.runs').open('a') as file:\n    file.write('x')\nVALUE = {}\n"
    (tmp_path / "model.py").write_text(own.format(1))
    with launched(tmp_path, script(tmp_path, "import model\n" + WAIT + "go_on(model.VALUE)\n")) as launch:
        launch.hear_ready()
        assert (tmp_path / "model.runs").read_text() == "x"
        (tmp_path / "model.py").write_text(own.format("1 + 1"))  # of another size, or old bytecode is taken
        restarted(launch)
        assert (launch.seen(0), launch.seen(1)) == (1, 2)
    assert (tmp_path / "model.runs").read_text() == "xx"


@pytest.mark.parametrize("changed", ["program.py", "site-packages/library.py"])
def test_a_standby_whose_imports_are_of_yesterday_is_not_used(tmp_path: Path, changed: str) -> None:
    env = installed(tmp_path, "library.py", "VALUE = 1\n")
    code = "import library\n" + WAIT + "go_on(library.VALUE)\n"
    with launched(tmp_path, script(tmp_path, code), env=env) as launch:
        launch.hear_ready()
        if changed == "program.py":
            script(tmp_path, "import wave\n" + code.replace("VALUE)", "VALUE + 1)"))
        else:
            installed(tmp_path, "library.py", "VALUE = 1 + 1\n")  # of another size, or old bytecode is taken
        restarted(launch, standbys=0)
        assert launch.seen(1) == 2
    assert "process 0 starts without a standby: ImportError" in launch.said


# A package that keeps what it found in the environment as it was imported.
READS = "import os\nVALUE = os.environ.get('LIBRARY_OPTION')\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("os.environ['LIBRARY_OPTION'] = 'a'\nimport library.late\n", ["a", True]),
        ("os.environ.setdefault('LIBRARY_OPTION', 'b')\nimport library.late\n", ["b", True]),
        ("os.environ['LIBRARY_OPTION'] = 'x'.upper()\nimport library.late\n", ["X", False]),
        ("os.environ.update(LIBRARY_OPTION='c')\nimport library.late\n", ["c", False]),
        ("print()\nimport library.late\n", [None, True]),
        ("if TYPE_CHECKING:\n    import nowhere\ntry:\n    import nowhere\nexcept ImportError:\n    pass\n"
         "class Thing(dict):\n    size: int = 3\nimport library.late\n", [None, True]),
    ],
)  # fmt: skip
@pytest.mark.share(2)
def test_imports_find_the_environment_that_the_program_gives_them(
    tmp_path: Path, code: str, expected: list[Any]
) -> None:
    env = installed(tmp_path, "library/__init__.py", "")
    installed(tmp_path, "library/late.py", READS)
    begin = "from typing import TYPE_CHECKING\nimport library\nIS_EARLY = 'library.late' in sys.modules\n"
    command = script(tmp_path, begin + code + WAIT + "go_on([library.late.VALUE, IS_EARLY])\n")
    with launched(tmp_path, command, env=env) as launch:
        restarted(launch)
        assert launch.seen(0) == [expected[0], False]
        assert launch.seen(1) == expected


def test_what_is_imported_later_is_imported_in_time(tmp_path: Path) -> None:
    """Of what the program has imported by its first step; another package is left to it."""
    env = installed(tmp_path, "library/__init__.py", "")
    for name in ("library/late.py", "other.py"):
        installed(tmp_path, name, "")
    code = """
names = ["library.late", "other"]
are_early = [name in sys.modules for name in names]


def run():
    import library.late
    import other

    go_on(are_early)


run()
"""
    with launched(tmp_path, script(tmp_path, "import library\n" + WAIT + code), env=env) as launch:
        restarted(launch)
        assert (launch.seen(0), launch.seen(1)) == ([False, False], [True, False])


def ended_without(launch: Launched, start: int = 1) -> None:
    """Has the program restarted with a fresh process."""
    launch.go(0)
    launch.go(1)
    report = launch.end()
    assert (report["restarts"], report["starts"][start]["standbys"]) == (1, 0), launch.said
    (unused,) = report["starts"][start]["unused_standbys"]
    assert unused["process"] == 0
    assert f"process 0 starts without a standby: {unused['reason']}" in launch.said
    assert report["starts"][0]["unused_standbys"] == []
    assert report["first_failure"] is None


@pytest.mark.parametrize(
    ("name", "why"),
    [("sysconfig", "'.*' has the name of the installed module"), ("helper", "'helper' is a module of")],
    ids=["of the standby", "of a library"],
)
def test_a_file_of_the_program_with_the_name_of_a_module_is_what_it_gets(
    tmp_path: Path, name: str, why: str
) -> None:
    env = installed(tmp_path, "library.py", "import helper\n")
    installed(tmp_path, "helper.py", "VALUE = 2\n")
    (tmp_path / f"{name}.py").write_text("VALUE = 1\n")
    code = f"import library\nimport {name}\n" + WAIT + f"go_on({name}.VALUE)\n"
    with launched(tmp_path, script(tmp_path, code), env=env) as launch:
        launch.hear(f"the standby of process 0 has ended: ImportError: {why}")
        ended_without(launch)
        assert launch.seen(1) == 1


def test_what_an_import_writes_is_seen_once_and_in_its_place(tmp_path: Path) -> None:
    env = installed(tmp_path, "library.py", "print('of the library')\n")
    code = "import library\nprint('of the program')\n" + WAIT + "go_on(None)\n"
    with launched(tmp_path, script(tmp_path, code), env=env) as launch:
        restarted(launch)
    lines = [line for line in launch.said.splitlines() if line.startswith("[0]")]
    assert lines == ["[0] of the library", "[0] of the program"] * 2


# Is imported once the file `import` is there; says who imports it, at which priority, and starts a thread.
SLOW = """
import os, pathlib, threading, time
directory = pathlib.Path(os.environ["TEST_DIRECTORY"])
(directory / f"imports-{os.getpid()}").write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))
until = time.monotonic() + 120
while not (directory / "import").exists():
    assert time.monotonic() < until, "a hang"
    time.sleep(0.01)
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@contextlib.contextmanager
def importing(directory: Path) -> Iterator[tuple[Launched, int]]:
    """A launch whose standby is within an import; yields the process id of the standby."""
    env = installed(directory, "library.py", SLOW)
    (directory / "import").touch()
    code = "import library\n" + WAIT
    code += "import threading\ntasks = os.listdir('/proc/self/task')\n"
    code += "(directory / 'import').unlink() if start == 0 else None\n"
    code += "go_on(sorted({os.getpriority(os.PRIO_PROCESS, int(task)) for task in tasks}))\n"
    with launched(directory, script(directory, code), env=env) as launch:
        (standby,) = launch.standbys()
        wait_until((directory / f"imports-{standby}").exists)
        yield launch, standby


def test_a_standby_imports_at_low_priority_and_runs_at_that_of_the_program(tmp_path: Path) -> None:
    with importing(tmp_path) as (launch, standby):
        wait_until((tmp_path / f"imports-{standby}").read_text)
        if os.geteuid() == 0:
            assert (tmp_path / f"imports-{standby}").read_text() == "10"
        (tmp_path / "import").touch()
        restarted(launch)
        assert launch.seen(1) == launch.seen(0)
        assert os.geteuid() != 0 or launch.seen(0) == [3]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_standby_that_is_not_ready_is_not_waited_for(tmp_path: Path, is_killed: bool) -> None:
    with importing(tmp_path) as (launch, standby):
        if is_killed:
            os.kill(standby, signal.SIGKILL)
            launch.hear("the standby of process 0 has ended")
        else:
            launch.go(0)
            launch.hear("process 0 starts without a standby: the standby was not ready")
            wait_until(lambda: not runs(standby))
        (tmp_path / "import").touch()
        ended_without(launch)


def test_a_standby_that_is_killed_while_it_waits_costs_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, script(tmp_path, WAIT + "go_on(None)\n")) as launch:
        launch.hear_ready()
        (standby,) = launch.standbys()
        assert Path(f"/proc/{standby}/oom_score_adj").read_text() == "1000\n"
        os.kill(standby, signal.SIGKILL)
        launch.hear("the standby of process 0 has ended")
        ended_without(launch)


def test_a_standby_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    with launched(tmp_path, script(tmp_path, WAIT + "go_on(None)\n")) as launch:
        launch.hear_ready()
        (standby,) = launch.standbys()
        os.kill(standby, signal.SIGSTOP)
        ended_without(launch)
    assert "process 0 starts without a standby: the standby did not answer within 2 s" in launch.said
    assert not runs(standby)


def test_a_standby_that_is_killed_while_it_takes_over_costs_nothing(tmp_path: Path) -> None:
    """It reads the source of the program again then, which does not come to its end."""
    own, away = tmp_path / "program.py", tmp_path / "away"
    with launched(tmp_path, script(tmp_path, WAIT + "go_on(None)\n")) as launch:
        launch.hear_ready()
        own.rename(away)
        os.mkfifo(own)
        launch.go(0)
        opened: list[int] = []

        def is_read() -> bool:
            with contextlib.suppress(OSError):  # while nobody reads it
                opened.append(os.open(own, os.O_WRONLY | os.O_NONBLOCK))
            return bool(opened)

        wait_until(is_read)
        away.rename(own)
        os.kill(launch.standbys()[0], signal.SIGKILL)
        os.close(opened[0])
        ended_without(launch)


@pytest.mark.parametrize("is_ready", [False, True])
def test_standbys_die_with_a_launch_that_is_killed(tmp_path: Path, is_ready: bool) -> None:
    with importing(tmp_path) as (launch, standby):
        if is_ready:
            (tmp_path / "import").touch()
            launch.hear_ready()
        assert runs(standby)
        launch.process.kill()
        wait_until(lambda: not runs(standby))


def test_what_was_a_standby_gets_the_signals_of_the_launch(tmp_path: Path) -> None:
    with launched(tmp_path, script(tmp_path, WAIT + "go_on(None)\n")) as launch:
        launch.hear_ready()
        launch.go(0)
        launch.seen(1)
        launch.process.send_signal(signal.SIGTERM)
        report = launch.end()
    assert launch.process.returncode == 143
    assert (report["passed_on"], report["processes"][0]["signal"]) == ("SIGTERM", "SIGTERM")
    assert report["starts"][1]["standbys"] == 1


def test_one_that_was_a_standby_and_is_killed_is_named(tmp_path: Path) -> None:
    code = WAIT + "go_on(None)\nprint('the last line')\nos.kill(os.getpid(), signal.SIGKILL)\n"
    with launched(tmp_path, script(tmp_path, code)) as launch:
        standbys = launch.standbys()
        launch.hear_ready()
        launch.go(0)
        launch.go(1)
        report = launch.end()
    assert launch.process.returncode == 1
    assert (report["first_failure"], report["starts"][1]["standbys"]) == (0, 1)
    assert re.fullmatch(
        rf"process 0 \(pid {standbys[0]}\) was killed by SIGKILL first, after \d+\.\d s", report["report"][0]
    )
    assert report["processes"][0]["last_lines"] == ["the last line"]


@pytest.mark.parametrize("options", [["--restarts", "1", "--no-standby"], ["--restarts", "0"]])
def test_there_are_no_standbys_where_none_are_wanted(tmp_path: Path, options: list[str]) -> None:
    with launched(tmp_path, script(tmp_path, WAIT + "go_on(None)\n"), *options) as launch:
        launch.seen(0)
        launch.go(0)
        launch.go(1)
        report = launch.end()
    assert "standby of process" not in launch.said
    assert {start["standbys"] for start in report["starts"]} == {0}


def test_a_command_of_another_kind_is_restarted_as_before(tmp_path: Path) -> None:
    command = ["sh", "-c", f"exec {' '.join(script(tmp_path, WAIT + 'go_on(None)'))}"]
    with launched(tmp_path, command) as launch:
        launch.seen(0)
        launch.go(0)
        launch.go(1)
        report = launch.end()
    assert (report["restarts"], report["first_failure"]) == (1, None)
    assert [(start["standbys"], start["unused_standbys"]) for start in report["starts"]] == [(0, []), (0, [])]
    assert "standby" not in launch.said


# Starts a program twice by the classes of the launcher, in different environments or without a first step.
DRIVER = """
import logging, os, sys, time
from waystation_launch.processes import Launch, Signals, spawn
from waystation_launch.standbys import Standbys, python_command

logging.basicConfig(level=logging.DEBUG, format="%(message)s")
command, seconds = [sys.executable, "program.py"], float(sys.argv[1])
standbys = Standbys(python_command(command), spawn, print, seconds)
for environment in sys.argv[2:]:
    told = dict(pair.split("=") for pair in environment.split(","))
    told = {**os.environ, **standbys.environment, "RANK": "0", **told}
    signals = Signals()
    launch = Launch(command, [told], 1, lambda *line: None, lambda program: None, signals, reserve=standbys)
    outcome = launch.run()
    signals.close()
    print(outcome.programs[0].was_standby, outcome.programs[0].signal_name, flush=True)
standbys.close()
"""


@pytest.mark.parametrize(
    ("seconds", "second", "is_used"),
    [
        (600, "OMP_NUM_THREADS=1,MASTER_PORT=2", True),
        (600, "OMP_NUM_THREADS=2,MASTER_PORT=1", False),
        (0, "OMP_NUM_THREADS=1,MASTER_PORT=1", True),
    ],
    ids=["another port", "another number of threads", "no step"],
)
def test_a_standby_is_of_one_environment(tmp_path: Path, seconds: int, second: str, is_used: bool) -> None:
    code = WAIT if seconds else WAIT.replace("note_step()", "pass")
    script(tmp_path, code + "go_on([os.environ['OMP_NUM_THREADS'], os.environ['MASTER_PORT']])\n")
    arguments = [str(seconds), "OMP_NUM_THREADS=1,MASTER_PORT=1", second]
    launch = Launched.__new__(Launched)
    launch.directory, launch.said = tmp_path, ""
    launch.process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments],
        cwd=tmp_path,
        env=os.environ | {"TEST_DIRECTORY": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        launch.hear_ready()
        launch.go(0)
        launch.go(1)
        out, err = launch.process.communicate(timeout=HANG_S)
    finally:
        launch.process.kill()
    unused = [] if is_used else ["{0: 'the standby was prepared with other values of OMP_NUM_THREADS'}"]
    assert out.splitlines() == ["False SIGKILL", *unused, f"{is_used} None"], err
    assert launch.seen(1) == [pair.partition("=")[2] for pair in second.split(",")]


TRAIN = """
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from waystation.memory import MemoryTier
from waystation.training import Checkpointer, save_decision_policies

{connect}
never = save_decision_policies.SpecificStepsPolicy(())
with Checkpointer("run", save_decision_policy=never, memory=MemoryTier()) as checkpointer:
    state = {{"weights": np.zeros(1000), "step": 0}}
    was_there = checkpointer.latest is not None
    if was_there:
        state = checkpointer.load()
    while state["step"] < 9:
        state["step"] += 1
        state["weights"] += state["step"]
        checkpointer.save(state["step"], state)
        until = time.monotonic() + 120
        while state["step"] == 3 and not was_there and not Path("go-0").exists():
            assert time.monotonic() < until, "a hang"
            time.sleep(0.01)
        if state["step"] == 3 and not was_there:
            checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
    assert (state["weights"] == 45).all()
{part}
"""
CONNECT = "import torch\n\ntorch.distributed.init_process_group('gloo')"
PART = "torch.distributed.destroy_process_group()"


@pytest.mark.parametrize("hosts", [0, 2])
@pytest.mark.share(2)
def test_a_recovery_from_memory_has_its_phases(tmp_path: Path, hosts: int) -> None:
    code = TRAIN.format(connect=CONNECT if hosts else "", part=PART if hosts else "")
    (tmp_path / "train.py").write_text(code)
    with memory_directory() as directory:
        store = directory / "agent"
        options = ["--torch", "--agent", str(store), "--agent-memory", "64MiB", "--restarts", "1"]
        options += ["--grace", "5", *(["--hosts", str(hosts)] if hosts else [])]
        env = {"GLOO_SOCKET_IFNAME": "lo"}
        try:
            with launched(tmp_path, [sys.executable, "train.py"], *options, env=env) as launch:
                launch.hear_ready(max(hosts, 1))
                launch.go(0)
                report = launch.end()
        finally:
            for index in range(hosts):
                end_agent(store / f"host-{index}")
            end_agent(store)
    assert [start["standbys"] for start in report["starts"]] == [0, max(hosts, 1)], launch.said
    assert report["first_failure"] is None
    (recovery,) = report["recoveries"]
    assert recovery["step"] == 3
    assert {"detect", "start"} <= recovery["phases_s"].keys()
    assert min(recovery["phases_s"].values()) >= 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["{file}", "-m", "x"], (1, 1, None)),
        (["-u", "{file}"], (2, 2, None)),
        (["-Wignore", "-X", "dev", "-uB", "{file}", "-c"], (5, 5, None)),
        (["-uXdev", "-m", "package.part", "-m"], (2, 4, "package.part")),
        (["-mpackage"], (1, 2, "package")),
        (["-um", "package", "a"], (2, 3, "package")),
        (["-c", "pass"], None),
        (["-ic", "pass"], None),
        (["-i", "{file}"], None),
        (["-x", "{file}"], None),
        (["--version"], None),
        (["-"], None),
        (["-m"], None),
        (["-W"], None),
        ([], None),
        (["absent.py"], None),
        (["{directory}"], None),
    ],
)
def test_which_commands_have_standbys(
    tmp_path: Path, words: list[str], expected: tuple[int, int, str | None] | None
) -> None:
    file = tmp_path / "program.py"
    file.touch()
    command = [sys.executable, *(word.format(file=file, directory=tmp_path) for word in words)]
    found = python_command(command)
    if expected is None:
        assert found is None
        return
    options, place, module = expected
    assert found is not None
    interpreter = command[:options] if "-um" not in words else [sys.executable, "-u"]
    assert found == PythonCommand(tuple(command), tuple(interpreter), place, module)


@pytest.mark.parametrize("name", ["python3", "/usr/bin/python3.13", "python3.13t"])
def test_names_of_interpreters(name: str) -> None:
    assert python_command([name, "-m", "x"]) is not None


@pytest.mark.parametrize("name", ["pythonw", "ipython", "python-config", "torchrun", "sh", ""])
def test_other_names(name: str) -> None:
    assert python_command([name, "-m", "x"]) is None
