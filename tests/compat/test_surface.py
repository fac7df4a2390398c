"""Every public name and parameter of the genuine packages is in ours, except what the guide lists; and what
that lists does differ."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "compat.md"
OWN = "waystation.compat"
MODULES = {
    "safetensors": "safetensors",
    "safetensors.numpy": "safetensors_numpy",
    "safetensors.flax": "safetensors_flax",
    "safetensors.torch": "safetensors_torch",
    "fastsafetensors": "fastsafetensors",
    **{
        f"fastsafetensors.{name}": f"fastsafetensors.{name}"
        for name in (
            *("auto_loader", "common", "config", "ep_slice", "file_buffer", "loader"),
            *("parallel_loader", "saver", "st_types"),
        )
    },
}
# What stands in for another library where that is not installed.
NO_NAMES = {"tqdm"}


def public(module: Any, package: str) -> Iterator[tuple[str, Any]]:
    """The functions and classes that a module defines, those of the package for its top."""
    for name, value in vars(module).items():
        if name.startswith("_") or inspect.ismodule(value) or not callable(value):
            continue
        home = getattr(value, "__module__", "")
        if home == module.__name__ or (
            module.__name__ == package and home.split(".")[0] in (package, "builtins")
        ):
            yield name, value


def members(value: Any) -> Iterator[tuple[str, Any]]:
    """The public methods of a class, and how it is made."""
    for name in dir(value):
        member = inspect.getattr_static(value, name)
        is_own = name in {attribute for cls in value.__mro__[:-1] for attribute in vars(cls)}
        if is_own and (name == "__init__" or not name.startswith("_")) and not isinstance(member, property):
            yield name, getattr(value, name)


def parameters(function: Any) -> list[tuple[str, str, Any]] | None:
    """Names, kinds and defaults of parameters; None where nothing tells them."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [
        (own.name, own.kind.name, own.default if isinstance(own.default, int | str | None) else None)
        for own in found
        if own.name not in ("self", "cls") and not own.name.startswith("_")
    ]


def differences() -> dict[str, str]:
    """What differs, by its name in the genuine package."""
    found: dict[str, str] = {}
    for genuine_name, own_name in MODULES.items():
        genuine = importlib.import_module(genuine_name)
        own = importlib.import_module(f"{OWN}.{own_name}")
        for name, value in public(genuine, genuine_name.split(".")[0]):
            full = (
                f"{value.__module__}.{name}"
                if genuine_name == "fastsafetensors"
                else f"{genuine_name}.{name}"
            )
            if name in NO_NAMES:
                continue
            if not hasattr(own, name):
                found[full] = "absent"
                continue
            found |= different(full, value, getattr(own, name))
    return found


def different(full: str, genuine: Any, own: Any) -> dict[str, str]:
    """What differs of a function or a class."""
    if not inspect.isclass(genuine):
        return {full: "parameters"} if not accepts(own, genuine) else {}
    found: dict[str, str] = {}
    for member, method in members(genuine):
        if not hasattr(own, member):
            found[f"{full}.{member}"] = "absent"
            continue
        value, mine = (genuine, own) if member == "__init__" else (method, getattr(own, member))
        if callable(value) and not accepts(mine, value):
            found[f"{full}.{member}"] = "parameters"
    if dataclasses.is_dataclass(genuine):
        names = [{field.name for field in dataclasses.fields(cls)} for cls in (genuine, own)]
        assert names[0] <= names[1], full
    return found


def accepts(own: Any, genuine: Any) -> bool:
    """Whether a function takes the parameters of another by the same names, in the same places."""
    expected, offered = parameters(genuine), parameters(own)
    if expected is None or offered is None:
        return expected is None
    return offered[: len(expected)] == expected or (
        [parameter[:2] for parameter in offered[: len(expected)]] == [parameter[:2] for parameter in expected]
        and all(
            mine[2] == theirs[2] or theirs[2] is None for mine, theirs in zip(offered, expected, strict=False)
        )
    )


def listed() -> dict[str, str]:
    """What the guide says to differ: names and the first word about them."""
    rows = re.findall(r"^\| `([\w.]+)` \| (\w+)", GUIDE.read_text(), re.MULTILINE)
    return dict(rows)


def test_the_guide_lists_every_difference_and_no_other() -> None:
    assert differences() == listed()


@pytest.mark.parametrize("name", ["safetensors_jax", "fastsafetensors"])
def test_modules_are_imported_without_a_framework(name: str) -> None:
    code = f"import sys, {OWN}.{name}; assert not {{'jax', 'torch'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_errors_are_those_that_programs_catch() -> None:
    from waystation.compat import fastsafetensors
    from waystation.compat.fastsafetensors.saver import ShardSetError

    assert issubclass(fastsafetensors.BudgetInfeasibleError, ValueError)
    assert issubclass(ShardSetError, ValueError)
