"""Rules for every file under version control."""

import ast
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# In pieces, so that this file keeps its own rule. A mirror or an offline machine serves what a public
# registry would, so no file may insist on one.
REGISTRY_HOSTS = [
    ("pypi", "org"),
    ("pythonhosted", "org"),
    ("crates", "io"),
    ("npmjs", "org"),
    ("download.pytorch", "org"),
]
# How Cargo writes 'the default registry' in its lock; it goes to whatever replaces it all the same.
CARGO_DEFAULT_REGISTRY = "registry+https://github.com/rust-lang/crates.io-index"

# A body that no longer fits on a screen does more than its name says. The docstring does not count.
FUNCTION_LINES_LIMIT = 50


def tracked_files() -> list[Path]:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def text_of(path: Path) -> str:
    content = path.read_bytes()
    return "" if b"\0" in content else content.decode(errors="replace")


def test_no_file_names_the_host_of_a_package_registry() -> None:
    hosts = re.compile("|".join(re.escape(".".join(host)) for host in REGISTRY_HOSTS))
    wrong = []
    for path in tracked_files():
        text = text_of(path).replace(CARGO_DEFAULT_REGISTRY, "")
        wrong += [f"{path.relative_to(ROOT)}: {found.group()}" for found in hosts.finditer(text)]
    assert not wrong, "\n".join(wrong)


def test_no_test_of_rust_is_in_its_documentation() -> None:
    """`make test` does not look for any: rustdoc takes long to find that there are none."""
    fence = re.compile(r"^\s*//[/!].*```", re.MULTILINE)
    wrong = [path for path in tracked_files() if path.suffix == ".rs" and fence.search(text_of(path))]
    assert not wrong


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    begin = (first.end_lineno or first.lineno) + 1 if has_docstring else first.lineno
    return (function.end_lineno or begin) - begin + 1


def test_functions_of_the_package_stay_short() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {lines} lines, limit {FUNCTION_LINES_LIMIT}"
        for path in sorted((ROOT / "python").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := body_lines(node)) > FUNCTION_LINES_LIMIT
    ]
    assert not wrong, "\n".join(wrong)


def test_every_dependency_of_the_package_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = {
        match.group(1).replace("_", "-")
        for match in re.finditer(r"^([\w.-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    }
    named = {re.split(r"[^\w.-]", entry)[0].replace("_", "-") for entry in project["dependencies"]}
    assert named <= locked, f"run 'make lock': {sorted(named - locked)} are not in requirements.lock"
