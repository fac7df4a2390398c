"""`tools/size.py` counts what it says."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.long import only_long

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import size  # noqa: E402

PYTHON = '''"""A module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import low
from pack import low as same

if TYPE_CHECKING:
    from pack import shown

__all__ = ["FIRST", "call"]

FIRST, _hidden = 1, 2  # two names


def call() -> str:
    """Says what it does,
    in two lines."""
    from pack.late import answer

    # a comment
    return """text,
not a docstring""" + answer()
'''
RUST = """//! A crate.
pub fn shown() -> &'static str {
    /* a block
       of comments */
    "// no comment"
}

pub(crate) struct Hidden;

#[cfg(test)]
mod tests {
    pub fn helper() {}
}
"""


def made(folder: Path) -> Path:
    package = folder / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "top.py").write_text(PYTHON)
    (package / "low.py").write_text("from pack import late\n")
    (package / "late.py").write_text("def answer() -> str:\n    return 'yes'\n")
    (package / "shown.py").write_text("from pack import top\n")
    return folder


def test_python_is_counted_without_blank_lines_comments_and_docstrings(tmp_path: Path) -> None:
    modules = size.python_modules(made(tmp_path))
    top = modules["pack.top"]
    assert top.size == size.Size(files=1, code_lines=12, public=2, exported=2, small=1)
    assert top.imports == {"pack.low", "pack.late", "pack.shown"}
    assert top.imports_first == {"pack.low"}
    graph = {name: module.imports_first for name, module in modules.items()}
    assert size.longest_chain(graph) == ["pack.shown", "pack.top", "pack.low", "pack.late"]


def test_modules_that_import_each_other_count_once() -> None:
    assert size.longest_chain({"a": {"b"}, "b": {"a", "c"}, "c": set(), "d": {"a"}}) == ["d", "a", "c"]


def test_rust_is_counted_without_comments_and_tests(tmp_path: Path) -> None:
    (tmp_path / "lib.rs").write_text(RUST)
    (tmp_path / "tests.rs").write_text("fn all() {}\n")
    assert size.rust_size(tmp_path) == size.Size(files=1, code_lines=4, public=1, small=1)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="journeys are made with sys.monitoring")
def test_a_journey_is_the_files_whose_functions_run(tmp_path: Path) -> None:
    path = made(tmp_path) / "pack" / "late.py"
    specification = importlib.util.spec_from_file_location("late", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert size.files_passed(lambda: None, tmp_path) == []
    assert size.files_passed(module.answer, tmp_path) == ["pack/late.py"]


@pytest.mark.long
@only_long
def test_the_command_prints_a_table_of_the_packages() -> None:
    command = [sys.executable, ROOT / "tools" / "size.py", "--no-calls"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert int(rows["checkpoint"][0]) == len(list((ROOT / "python/waystation/checkpoint").rglob("*.py")))
    assert int(rows["waystation-io"][1]) > 1000
