"""The front door: what `import waystation` gives, and that it costs next to nothing until it is used."""

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import waystation

FRONT_DOOR = Path(__file__).parents[2] / "python" / "waystation" / "__init__.py"


def test_the_top_level_only_re_exports() -> None:
    """What type checkers are shown, what is imported on first use, and `__all__` are the same."""
    tree = ast.parse(FRONT_DOOR.read_text())
    shown = {
        alias.name: f"{node.module}.{alias.name}"
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(waystation.__all__) == shown.keys()
    for name, origin in shown.items():
        assert getattr(waystation, name) is pkgutil.resolve_name(origin), name
    for block in tree.body[1:]:
        names = [target.id for target in getattr(block, "targets", []) if isinstance(target, ast.Name)]
        assert isinstance(block, ast.Import | ast.ImportFrom | ast.If) or names in (
            ["__all__"],
            ["__version__"],
        ), f"line {block.lineno} of __init__.py does something: {ast.unparse(block)[:80]}"


def test_the_top_level_imports_names_on_first_use() -> None:
    program = """
import sys
import waystation
assert {"save", "load", "errors", "checkpoint", "register_node", "__version__"} <= set(dir(waystation))
assert "numpy" not in sys.modules
try:
    waystation.nothing
except AttributeError as error:
    assert str(error) == "module 'waystation' has no attribute 'nothing'"
else:
    raise AssertionError
from waystation import *
assert save is waystation.save is waystation.checkpoint.save
assert errors.NotFound is waystation.errors.NotFound
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["ls", "--help"]])
def test_help_imports_nothing_slow(arguments: list[str]) -> None:
    program = """
import sys
from waystation.cli import main
try:
    main()
finally:
    slow = {"numpy", "ml_dtypes", "rich", "waystation._native", "waystation.checkpoint"}
    loaded = slow & set(sys.modules)
    assert not loaded, loaded
"""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "AssertionError" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


def test_a_launch_imports_nothing_of_arrays() -> None:
    """Hundreds of hosts begin with it."""
    program = """
import sys
from waystation.cli import main
try:
    main()
finally:
    loaded = {"numpy", "waystation.checkpoint", "waystation.training"} & set(sys.modules)
    assert not loaded, loaded
"""
    command = [sys.executable, "-c", program, "launch", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_names_of_the_older_interface_say_what_to_use() -> None:
    with pytest.raises(AttributeError, match=r"use waystation\.training\.Checkpointer"):
        waystation.CheckpointManager  # type: ignore[attr-defined]  # noqa: B018
    assert waystation.memory.MemoryTier
