"""Every Python and shell block of the documentation runs, or its fence says why not.

The blocks of one page run in order, as a reader would run them: Python blocks share one namespace, shell
blocks run in the same directory, which is empty at first. A warning is an error, as in all tests. A
block that cannot run here is excused by name in its fence, with the reason:

    ```sh not-run: needs two hosts

Fences of data and output name what they are (`text`, `json`, `toml`, …) and are left alone.
"""

import functools
import os
import re
import subprocess
import sys
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.long import IS_LONG
from tests.support.warm_python import python

from waystation.runtime.cluster import Cluster, connect

ROOT = Path(__file__).parents[2]
PYTHON = {"python", "py"}
SHELL = {"sh", "bash", "shell", "console"}
NOT_RUN = {"", "text", "json", "toml", "yaml", "diff", "rust", "make", "c", "mermaid"}
OPENING = re.compile(r"^(?P<indent>\s*)(?P<fence>```+|~~~+)\s*(?P<language>[\w+-]*)\s*(?P<rest>.*)$")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of the first line of code, from 1
    language: str
    excuse: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    return [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if path.exists()]


def blocks_of(page: Path) -> Iterator[Block]:
    lines = iter(enumerate(page.read_text().splitlines(), start=1))
    for number, line in lines:
        opening = OPENING.match(line)
        if opening is None:
            continue
        code = []
        for _, inner in lines:
            if inner.strip() == opening["fence"]:
                break
            code.append(inner.removeprefix(opening["indent"]))
        else:
            pytest.fail(f"{page.relative_to(ROOT)}:{number}: the fence is never closed")
        yield Block(page, number + 1, opening["language"].lower(), opening["rest"], "\n".join(code) + "\n")


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", pages(), ids=page_name)
def test_fences_say_what_they_hold(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in PYTHON | SHELL | NOT_RUN, (
            f"{block.place}: unknown language '{block.language}'"
        )
        if block.language in PYTHON | SHELL and block.excuse:
            reason = re.fullmatch(r"not-run: (\S.{7,})", block.excuse)
            assert reason, f"{block.place}: '{block.excuse}' should be 'not-run: REASON'"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One on the Ray that pages find started, which takes ten seconds of CPU."""
    with connect(hosts=0) as cluster:
        yield cluster


@pytest.mark.long
@pytest.mark.parametrize("page", pages(), ids=page_name)
def test_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    blocks = [block for block in blocks_of(page) if block.language in PYTHON | SHELL and not block.excuse]
    monkeypatch.chdir(tmp_path)
    # In `make test-long` each page starts a Ray of its own.
    has_cluster = not IS_LONG and any("runtime.connect(hosts=0)" in block.code for block in blocks)
    shared: Cluster | None = request.getfixturevalue("cluster") if has_cluster else None
    try:
        run_blocks(blocks, monkeypatch)
    finally:
        for name in shared.islands if shared is not None else ():
            shared.remove_island(name)


def run_blocks(blocks: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    # Classes that the blocks define look their module up by name.
    module = types.ModuleType("documentation_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks:
        run_block(block, module)


def run_block(block: Block, module: types.ModuleType) -> None:
    if block.language in PYTHON:
        run_python(block, module)
    else:
        run_shell(block)


def run_python(block: Block, module: types.ModuleType) -> None:
    padding = "\n" * (block.line - 1)  # tracebacks then show lines of the page
    try:
        exec(compile(padding + block.code, str(block.page), "exec"), vars(module))
    except Exception:
        pytest.fail(f"{block.place}:\n{block.code}\n{traceback.format_exc()}", pytrace=False)


@functools.cache
def commands() -> list[Path]:
    """Where shell blocks find `python` and `waystation`.

    In `make test` both are forked from a process that has imported everything, as dozens of them would take
    seconds each. In `make test-long` they are those that are installed.
    """
    installed = Path(sys.executable).parent
    if IS_LONG:
        return [installed]
    forked = Path(python()).parent
    (forked / "waystation").write_text('#!/bin/sh\nexec "${0%/*}/python" -m waystation "$@"\n')
    (forked / "waystation").chmod(0o700)
    return [forked, installed]


def run_shell(block: Block) -> None:
    code = block.code
    if block.language == "console":  # lines with a prompt are commands, the others what they print
        code = "\n".join(line[2:] for line in code.splitlines() if line.startswith("$ "))
    path = os.pathsep.join([*map(str, commands()), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{block.place}:\n{code}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "print(undefined)\n"),
        ("python", "import warnings; warnings.warn('old')\n"),
        ("sh", "false\necho unreached\n"),
        ("console", "$ false\noutput\n"),
    ],
    ids=["error", "warning", "shell", "console"],
)
def test_a_block_that_fails_is_a_failure(language: str, code: str) -> None:
    block = Block(ROOT / "README.md", 7, language, "", code)
    with pytest.raises((pytest.fail.Exception, AssertionError), match=r"README\.md:7"):
        run_block(block, types.ModuleType("page"))


def test_blocks_are_found_with_their_line_language_and_excuse(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n\n```python\nx = 1\n```\n\n- item\n\n  ```sh not-run: needs two hosts\n  ls\n  ```\n"
    )
    found = [(block.line, block.language, block.excuse, block.code) for block in blocks_of(page)]
    assert found == [(4, "python", "", "x = 1\n"), (10, "sh", "not-run: needs two hosts", "ls\n")]
