"""How commands fail: one message, the right exit code, a traceback only on demand."""

import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import waystation
from waystation.cli import commands
from waystation.cli.application import application
from waystation.cli.reporting import reporting
from waystation.errors import Unavailable

from .conftest import SCRIPT, Outcome, normalised

TOPICS = {
    "Checkpoints": [
        "inspect",
        "ls",
        "sum",
        "verify",
        "diff",
        "view",
        "export",
        "cp",
        "mirror",
        "gc",
        "safetensors",
    ],
    "Getting started": ["demo", "doctor"],
    "Programs and clusters": ["launch", "runtime", "program"],
    "Memory tier": ["placement", "agent", "top"],
}
COMMANDS = [command for commands in TOPICS.values() for command in commands]
GROUPS = {"runtime": ["status", "top"], "program": ["show"], "safetensors": ["spread"]}


def test_version(script) -> None:
    outcome = script("--version")
    assert (outcome.out, outcome.err, outcome.code) == (f"waystation {waystation.__version__}\n", "", 0)


def test_the_package_runs_as_a_module(tmp_path: Path, script) -> None:
    for arguments, code in ((["--version"], 0), (["inspect", "absent"], 2), (["frobnicate"], 2)):
        done = subprocess.run(
            [sys.executable, "-m", "waystation", *arguments],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "100"},
            capture_output=True,
            text=True,
            check=False,
        )
        expected = script(*arguments)
        found = Outcome(done.returncode, done.stdout, normalised(done.stderr, tmp_path))
        assert found == expected
        assert found.code == code


def test_help_lists_every_command_by_topic(script) -> None:
    outcome = script("--help")
    assert outcome.code == 0
    sections = re.findall(r"^(\S[^\n]*):\n((?:  [^\n]*\n)+)", outcome.out, re.MULTILINE)
    listed = {topic: re.findall(r"^  (\w+)  ", rows, re.MULTILINE) for topic, rows in sections}
    listed.pop("Options")
    assert list(listed.items()) == list(TOPICS.items())


@pytest.mark.parametrize("group", [[], *([group] for group in GROUPS)], ids=" ".join)
def test_help_cuts_no_description(group: list[str], run) -> None:
    outcome = run(*group, "--help")
    assert "..." not in outcome.out.partition("Options:")[2]
    listed = " ".join(outcome.out.split())
    for command in GROUPS[group[0]] if group else [name for name in COMMANDS if name != "agent"]:
        own = run(*group, command, "--help").out.split("\n\n")[1]
        assert f" {command} {' '.join(own.split())}" in listed


# The options of the agent are those of another program, which is asked for them.
@pytest.mark.parametrize(
    "command",
    [
        *([command] for command in COMMANDS if command != "agent" and command not in GROUPS),
        *([group, command] for group, commands in GROUPS.items() for command in commands),
    ],
    ids=" ".join,
)
def test_every_command_has_json_and_traceback(command: list[str], run) -> None:
    outcome = run(*command, "--help")
    assert outcome.code == 0
    assert "--json" in outcome.out
    assert "--traceback" in outcome.out


@pytest.mark.parametrize(
    "arguments",
    [["inspect"], ["frobnicate"], ["inspect", "x", "--depth", "0"], ["diff", "a", "b", "--atol", "-1"]],
)
def test_wrong_calls_exit_with_2(arguments: list[str], run) -> None:
    outcome = run(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert "Usage: waystation" in outcome.err


def test_a_typed_error_is_one_message(tmp_path: Path, script) -> None:
    outcome = script("inspect", tmp_path / "absent")
    assert (outcome.out, outcome.err, outcome.code) == (
        "",
        "error: there is no checkpoint '[DIR]/absent'\n",
        2,
    )


def test_a_traceback_on_demand(tmp_path: Path, run) -> None:
    outcome = run("inspect", tmp_path / "absent", "--traceback")
    assert outcome.code == 2
    assert outcome.err.startswith("Traceback (most recent call last):")
    assert outcome.err.endswith("error: there is no checkpoint '[DIR]/absent'\n")


def test_with_json_an_error_is_a_document_too(tmp_path: Path, script) -> None:
    outcome = script("verify", tmp_path / "absent", "--json")
    assert outcome.code == 2
    assert outcome.document == {
        "error": {
            "kind": "NotFound",
            "message": "there is no checkpoint '[DIR]/absent'",
            "context": {},
            "hint": None,
        }
    }
    assert outcome.err == "error: there is no checkpoint '[DIR]/absent'\n"


def test_context_and_hint_follow_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exit_info, reporting(as_json=False, show_traceback=False):
        raise Unavailable("no room in 'x'", path="x", array="layers.w\x1b", errno=11)
    assert exit_info.value.exit_code == 2
    assert capsys.readouterr().err == (
        "error: no room in 'x'\n"
        "  array: layers.w\\x1b\n"
        "  hint: fix the cause that the message names, then run the command again\n"
    )


def test_a_defect_is_reported_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exit_info, reporting(as_json=False, show_traceback=False):
        raise AssertionError("two is three")
    assert exit_info.value.exit_code == 2
    assert capsys.readouterr().err == (
        "error: unexpected AssertionError: two is three\n"
        "  hint: please report this, with what --traceback shows\n"
    )


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (
            PermissionError(13, "Permission denied", "/runs"),
            "error: could not use '/runs': Permission denied\n",
        ),
        (
            MemoryError(),
            "error: this machine has too little free memory for the command; free some, or use another "
            "machine\n",
        ),
        (
            Unavailable("could not open the file: No space left on device (os error 28)", path="/x"),
            "error: could not open the file: No space left on device\n  path: /x\n"
            "  hint: fix the cause that the message names, then run the command again\n",
        ),
    ],
    ids=["system", "memory", "engine"],
)
def test_what_the_machine_refuses_is_no_defect(
    raised: Exception, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as exit_info, reporting(as_json=False, show_traceback=False):
        raise raised
    assert exit_info.value.exit_code == 2
    assert capsys.readouterr().err == told


def test_a_path_without_end_is_too_long(tmp_path: Path, run) -> None:
    waystation.save(tmp_path / "runs" / "1", {"a": 1})
    outcome = run("mirror", tmp_path / "runs", tmp_path / ("x/" * 3000))
    assert outcome.code == 2
    assert "report this" not in outcome.err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_paths_without_permission_are_named(tmp_path: Path) -> None:
    """Each command in a child that may not see the directory."""
    waystation.save(tmp_path / "closed" / "1", {"a": 1})
    (tmp_path / "file").write_text("")
    os.chmod(tmp_path / "file", 0o000)
    os.chmod(tmp_path / "closed", 0o700)
    for directory in (tmp_path, *list(tmp_path.parents)[:1]):
        os.chmod(directory, 0o755)
    inside = tmp_path / "closed" / "1"
    calls: list[list[object]] = [
        ["inspect", inside],
        ["ls", tmp_path / "closed"],
        ["verify", inside],
        ["diff", inside, inside],
        ["export", inside, tmp_path / "out"],
        ["cp", inside, tmp_path / "copy"],
        ["mirror", tmp_path / "closed", tmp_path / "copies"],
        ["gc", tmp_path / "closed"],
        ["sum", tmp_path / "file"],
        ["doctor", tmp_path / "closed"],
        ["placement", "--domains", tmp_path / "file"],
        ["top", "--once", "--hosts", tmp_path / "file"],
        ["program", "show", tmp_path / "file"],
        ["launch", "--hosts", tmp_path / "file", "--", "true"],
    ]
    for module in pkgutil.iter_modules(commands.__path__, f"{commands.__name__}."):
        importlib.import_module(module.name)  # the child may not be able to
    importlib.import_module("waystation_launch.launch")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.seteuid(65534)
            runner = CliRunner()
            for call in calls:
                done = runner.invoke(application, [str(part) for part in call], prog_name="waystation")
                os.write(write, f"{call[0]} {done.exit_code} {done.stderr!r}\n".encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as told:
        lines = told.read().splitlines()
    os.waitpid(child, 0)
    assert len(lines) == len(calls)
    for line in lines:
        assert line.split(" ")[1] == "2", line
        assert "ermission denied" in line, line
        assert "report this" not in line, line


def test_a_question_that_is_left_is_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exit_info, reporting(as_json=False, show_traceback=False):
        raise typer.Abort
    assert exit_info.value.exit_code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_file_without_end_is_no_list(run) -> None:
    for call in (["top", "--once", "--hosts"], ["launch", "--hosts"]):
        outcome = run(*call, "/dev/zero", *(["--", "true"] if call[0] == "launch" else []))
        assert outcome.code == 2
        assert "'/dev/zero' is not a list of hosts" in outcome.err
    assert "is not a host and its domain" in run("placement", "--domains", "/dev/zero").err


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_a_full_disk_under_the_output(tmp_path: Path, as_json: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [SCRIPT, "ls", tmp_path, *as_json], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: the output could not be written: No space left on device\n")
    assert "report this" not in ended.stderr


def test_an_interrupt_is_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exit_info, reporting(as_json=False, show_traceback=False):
        raise KeyboardInterrupt
    assert exit_info.value.exit_code == 130
    assert capsys.readouterr().err == "interrupted\n"


# What is typed before Tab, and what the shell is to offer. One shell completes both.
COMPLETIONS = {"waystation ins": ["inspect"], "waystation inspect st": ["step_1"]}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(tmp_path: Path) -> None:
    shown = completed(tmp_path, "bash", BASH)
    assert shown == COMPLETIONS


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_takes_the_script(tmp_path: Path) -> None:
    (tmp_path / "script").write_text(completion_script("zsh"))
    program = (
        "autoload -Uz compinit && compinit -u && . ./script && (( $+functions[_waystation_completion] ))"
    )
    subprocess.run(["zsh", "-fc", program], cwd=tmp_path, env=shell_environment(tmp_path), check=True)


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes(tmp_path: Path) -> None:
    assert completed(tmp_path, "fish", FISH) == COMPLETIONS


BASH = """
. ./script
for line in 'waystation ins' 'waystation inspect st'; do
    COMP_WORDS=($line) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$line COMP_POINT=${#line}
    command=$(complete -p waystation | sed -E 's/.*-F ([^ ]+).*/\\1/')
    $command waystation
    echo "$line: ${COMPREPLY[*]}"
done
"""
FISH = """
. ./script
for line in 'waystation ins' 'waystation inspect st'
    echo "$line: "(complete -C $line | string split -f1 \\t)
end
"""


def shell_environment(directory: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(directory)}


def completion_script(shell: str) -> str:
    """What `waystation --show-completion` prints in this shell."""
    from typer.completion import get_completion_script

    return get_completion_script(prog_name="waystation", complete_var="_WAYSTATION_COMPLETE", shell=shell)


def completed(directory: Path, shell: str, program: str) -> dict[str, list[str]]:
    """What a real shell offers, by what was typed."""
    (directory / "step_1").mkdir()
    (directory / "step_2.txt").touch()
    (directory / "script").write_text(completion_script(shell))
    done = subprocess.run(
        [shell, "-c", program],
        cwd=directory,
        env=shell_environment(directory),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.partition(": ") for line in done.stdout.splitlines()]
    return {typed: offered.split() for typed, _, offered in lines}


def test_a_wrong_call_is_a_document_too(run) -> None:
    for wrong in (["ls", "--bogus", "--json"], ["inspect", "--json"], ["absent", "--json"]):
        outcome = run(*wrong)
        assert outcome.code == 2
        assert outcome.document["error"]["kind"] == "InvalidInput"
        assert outcome.err
    assert run("inspect").out == ""


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.share(2)
def test_a_closed_pipe_is_no_damage(tmp_path: Path, as_json: list[str]) -> None:
    waystation.save(tmp_path / "checkpoint", {"a": 1})
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [SCRIPT, "inspect", tmp_path / "checkpoint", *as_json],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")
