"""`waystation launch`: who failed first is named, signals arrive, and nothing outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.watching import runs, wait_until

SCRIPT = str(Path(sys.executable).parent / "waystation")
HANG_S = 120


def program(tmp_path: Path, code: str) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text("import os, signal, subprocess, sys, time\nindex = int(os.environ['RANK'])\n" + code)
    return [sys.executable, str(path)]


def launch(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, "launch", *arguments], capture_output=True, text=True, timeout=HANG_S, check=False, **options
    )


@contextlib.contextmanager
def launched(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A launch that goes on meanwhile."""
    process = subprocess.Popen(
        [SCRIPT, "launch", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def process_ids(directory: Path, count: int) -> list[int]:
    """What the processes have written to the files 0, 1, …, once they have."""
    paths = [directory / str(number) for number in range(count)]
    wait_until(lambda: all(path.exists() and path.read_text().endswith("\n") for path in paths))
    return [int(path.read_text()) for path in paths]


# Leaves its process id in a file named after its index, then waits. The file is closed by name, since what
# the handler of a signal raises while the collector closes a file is only printed.
WAIT = """
with open(f'{sys.argv[1]}/{index}', 'w') as file:
    file.write(f'{os.getpid()}\\n')
time.sleep(600)
"""


def test_each_process_gets_its_place_and_each_line_its_process(tmp_path: Path) -> None:
    names = (
        "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT JAX_COORDINATOR_ADDRESS "
        "WAYSTATION_PROCESS_INDEX WAYSTATION_PROCESS_COUNT"
    )
    code = (
        f"print(*(os.environ[name] for name in {names!r}.split()))\nprint(f'err {{index}}', file=sys.stderr)"
    )
    done = launch("-n", "3", "--", *program(tmp_path, code))
    assert done.returncode == 0, done.stderr
    pattern = r"\[(\d)\] (\d) 3 \2 3 127\.0\.0\.1 (\d+) 127\.0\.0\.1:(\d+) \2 3"
    found = [re.fullmatch(pattern, line) for line in sorted(done.stdout.splitlines())]
    assert [line and line[1] == line[2] for line in found] == [True] * 3
    assert len({line.groups()[2:] for line in found if line}) == 1
    assert sorted(done.stderr.splitlines()) == [f"[{index}] err {index}" for index in range(3)]


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_only_what_one_framework_reads(framework: str, tmp_path: Path) -> None:
    names = ["JAX_COORDINATOR_ADDRESS", "MASTER_ADDR"]
    code = f"import os\nprint([name for name in {names} if name in os.environ])"
    clean = {key: value for key, value in os.environ.items() if key not in names}
    done = launch(f"--{framework}", sys.executable, "-c", code, env=clean)
    assert done.stdout == f"[0] {[names[framework == 'torch']]}\n"


def test_a_killed_process_is_named_with_its_last_lines(tmp_path: Path) -> None:
    code = """
print("line", *range(3), sep="\\n", flush=True)
if index == 2:
    sys.stdout.write("no end of line")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    done = launch("-n", "3", "--grace", "0.2", *program(tmp_path, code))
    assert done.returncode == 1
    report = done.stderr.splitlines()
    announced = r"process 2 \(pid (\d+)\) was killed by SIGKILL"
    assert re.fullmatch(announced + "; the others have 0.2 s to end", report[0])
    assert re.fullmatch(
        announced + r" first, after \d+\.\d s; the others ended because of that",
        report[1],
    )
    for index in (0, 1):
        ended = rf"  process {index} \(pid \d+\) was killed by SIGTERM, \d+\.\d s later"
        assert re.fullmatch(f"{ended}, after it was sent SIGTERM", report[2 + index])
    last_lines = ["  | line", "  | 0", "  | 1", "  | 2", "  | no end of line"]
    assert report[4:] == ["the last lines of process 2:", *last_lines]
    assert "[2] no end of line\n" in done.stdout


def test_the_first_of_several_deaths_is_named(tmp_path: Path) -> None:
    """As JAX does it: one is killed, the others abort because of that."""
    code = """
path = f'{sys.argv[1]}/victim'
if index == 1:
    open(path + '.new', 'w').write(str(os.getpid()))
    os.rename(path + '.new', path)
    time.sleep(0.2)
    raise SystemExit(7)
while not os.path.exists(path):
    time.sleep(0.001)
victim = open(path).read()
def victim_runs():
    try:
        return open(f'/proc/{victim}/stat').read().rpartition(')')[2].split()[0] != 'Z'
    except (FileNotFoundError, ProcessLookupError):
        return False
while victim_runs():
    time.sleep(0.001)
print("Terminating because another process failed", flush=True)
os.kill(os.getpid(), signal.SIGABRT)
"""
    done = launch("-n", "4", "--json", *program(tmp_path, code), str(tmp_path))
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["first_failure"] == 1
    assert [process["signal"] for process in document["processes"]] == ["SIGABRT", None, "SIGABRT", "SIGABRT"]
    assert [process["exit_code"] for process in document["processes"]] == [None, 7, None, None]
    assert document["passed_on"] is None
    assert re.fullmatch(
        r"process 1 \(pid \d+\) exited with code 7 first, after \d+\.\d s; the others ended because of that",
        document["report"][0],
    )
    ended = [process["ended_s"] for process in document["processes"]]
    assert min(ended) == ended[1]
    assert "Terminating because another process failed" in done.stderr


def test_an_exception_is_shown(tmp_path: Path) -> None:
    code = "if index == 0:\n    raise ValueError('of process 0')\n"
    done = launch("-n", "2", *program(tmp_path, code))
    assert done.returncode == 1
    assert "[0] ValueError: of process 0\n" in done.stderr
    assert re.search(r"^process 0 \(pid \d+\) exited with code 1 first", done.stderr, re.MULTILINE)
    assert re.search(r"^  process 1 \(pid \d+\) ended well, \d+\.\d s (later|earlier)$", done.stderr, re.M)
    assert "because of that" not in done.stderr
    assert done.stderr.endswith("  | ValueError: of process 0\n")


def test_a_restart_does_not_wait_long_for_the_others(tmp_path: Path) -> None:
    code = """
from pathlib import Path
directory = Path(sys.argv[1])
mark = directory / f"first-{index}"
is_first = not mark.exists()
mark.touch()
if index == 1:
    while not (directory / "first-0").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600 if is_first else 0)
"""
    done = launch("-n", "2", "--restarts", "1", "--no-standby", *program(tmp_path, code), str(tmp_path))
    assert done.returncode == 1
    announced = re.findall(r"was killed by SIGKILL; the others have (\d+) s to end", done.stderr)
    assert announced == ["1", "30"]
    assert re.search(
        r"process 0 .* was killed by SIGTERM, \d+\.\d s later, after it was sent SIGTERM", done.stderr
    )


def test_who_does_not_heed_sigterm_is_killed(tmp_path: Path) -> None:
    code = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"{sys.argv[1]}/deaf{index}", "w").close()
if index == 0:
    while not os.path.exists(f"{sys.argv[1]}/deaf1"):
        time.sleep(0.01)
    raise SystemExit(3)
time.sleep(600)
"""
    done = launch("-n", "2", "--grace", "0", "--json", *program(tmp_path, code), str(tmp_path))
    document = json.loads(done.stdout)
    assert document["first_failure"] == 0
    assert document["processes"][1]["signal"] == "SIGKILL"
    assert document["processes"][1]["told_to_end"] == "SIGKILL"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
@pytest.mark.share(3)
def test_signals_are_passed_on(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with launched("-n", "2", "--json", "--", *program(tmp_path, WAIT), str(tmp_path)) as process:
        ids = process_ids(tmp_path, 2)
        process.send_signal(number)
        out, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == code
    document = json.loads(out)
    assert document["passed_on"] == number.name
    assert document["report"][0] == f"{number.name} was passed on to all processes"
    told = [(entry["pid"], entry["told_to_end"]) for entry in document["processes"]]
    assert told == [(process_id, number.name) for process_id in ids]
    if number != signal.SIGINT:  # of which Python makes an exception
        assert {entry["signal"] for entry in document["processes"]} == {number.name}


def test_a_program_that_ends_well_on_sigterm_ends_the_launch_well(tmp_path: Path) -> None:
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + WAIT
    with launched("-n", "2", "--", *program(tmp_path, code), str(tmp_path)) as process:
        process_ids(tmp_path, 2)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, err) == (0, "")


def test_a_second_signal_kills(tmp_path: Path) -> None:
    code = "signal.signal(signal.SIGINT, lambda *_: open(f'{sys.argv[1]}/heard{index}', 'w'))\n" + WAIT
    code += "time.sleep(600)\n" * 3
    with launched("-n", "2", "--grace", "600", "--", *program(tmp_path, code), str(tmp_path)) as process:
        process_ids(tmp_path, 2)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: all((tmp_path / f"heard{index}").exists() for index in range(2)))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)  # a signal that comes sooner belongs to the first
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert err.count("was killed by SIGKILL") == 2


def test_signals_to_a_launch_and_to_its_group_are_one(tmp_path: Path) -> None:
    """As `timeout` sends them, and schedulers."""
    code = "signal.signal(signal.SIGTERM, lambda *_: open(f'{sys.argv[1]}/heard{index}', 'w'))\n"
    code += WAIT.replace("time.sleep(600)\n", "")
    code += "while not os.path.exists(f'{sys.argv[1]}/go'):\n    time.sleep(0.01)\n"
    with launched("-n", "2", "--json", "--", *program(tmp_path, code), str(tmp_path)) as process:
        process_ids(tmp_path, 2)
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
        wait_until(lambda: all((tmp_path / f"heard{index}").exists() for index in range(2)))
        (tmp_path / "go").touch()
        out, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    assert [entry["told_to_end"] for entry in json.loads(out)["processes"]] == ["SIGTERM"] * 2


# Runs the command line; a signal comes as a function of the launch begins.
SIGNALLED = """
import importlib, os, signal, sys
from waystation.cli import main

module, name = sys.argv.pop(1).rsplit(".", 1)
module = importlib.import_module(module)
before = getattr(module, name)

def signalled(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    return before(*arguments)

setattr(module, name, signalled)
main()
"""


@pytest.mark.parametrize(
    "when",
    ["processes.kill_adopted", "launch._ended", "launch.Launch"],
    ids=["as the last process has ended", "as a start is over", "before the next start"],
)
def test_a_signal_between_two_starts_ends_the_launch(when: str, tmp_path: Path) -> None:
    code = WAIT if when == "launch.Launch" else "sys.exit(3)"
    options = ["launch", "--restarts", "5", "--json", "--", *program(tmp_path, code), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, f"waystation_launch.{when}", *options],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 143, done.stderr
    assert "started again" not in done.stderr.replace("not started again", "")
    assert json.loads(done.stdout)["passed_on"] == "SIGTERM"


@pytest.mark.parametrize("end", ["failure", "success"])
def test_what_a_process_starts_does_not_outlive_the_launch(end: str, tmp_path: Path) -> None:
    """A child in its group, and one that has left it, holding the output open."""
    code = f"""
children = []
for number, own_session in enumerate((False, True)):
    child = subprocess.Popen(["sleep", "600"], start_new_session=own_session)
    open(f'{{sys.argv[1]}}/{{number}}', 'w').write(f'{{child.pid}}\\n')
sys.exit({int(end == "failure")})
"""
    done = launch("-n", "1", "--", *program(tmp_path, code), str(tmp_path))
    assert done.returncode == int(end == "failure")
    assert not any(runs(process_id) for process_id in process_ids(tmp_path, 2))


def test_processes_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with launched("-n", "2", "--", *program(tmp_path, WAIT), str(tmp_path)) as process:
        ids = process_ids(tmp_path, 2)
        assert all(runs(process_id) for process_id in ids)
        process.kill()
        wait_until(lambda: not any(runs(process_id) for process_id in ids))


def test_long_lines_and_progress_bars(tmp_path: Path) -> None:
    code = r"""
out = sys.stdout.buffer
out.write(b"x" * 300_000 + b"\n" + b"10%\r50%\r100%\r\n" + b"\xff\n")
out.flush()
"""
    done = launch(*program(tmp_path, code))
    lines = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
    assert "".join(lines[:-2]) == "x" * 300_000
    assert lines[-2:] == ["100%", "\ufffd"]


@pytest.mark.parametrize("command", ["nonesuch", "/etc/hostname"])
def test_a_command_that_cannot_be_started(command: str) -> None:
    done = launch("-n", "2", "--", command)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: '{command}' cannot be started: ")
    assert done.stderr.count("\n") == 1


def test_options_of_the_command_are_its_own(tmp_path: Path) -> None:
    done = launch("-n", "1", sys.executable, "-c", "import sys; print(sys.argv[1:])", "-n", "3", "--json")
    assert done.stdout == "[0] ['-n', '3', '--json']\n"
