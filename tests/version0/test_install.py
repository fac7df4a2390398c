"""`install` puts this package in the place of `orbax.checkpoint`, for libraries of the program, too."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from tests.support.programs import running

import waystation.compat.orbax
from waystation.errors import InvalidInput


def test_what_is_imported_already_is_not_replaced() -> None:
    importlib.import_module("orbax.checkpoint")
    with pytest.raises(InvalidInput, match="imported already"):
        waystation.compat.orbax.install()


def test_a_name_that_is_not_here_says_why() -> None:
    with pytest.raises(AttributeError, match="Pathways"):
        _ = waystation.compat.orbax.pathways
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = waystation.compat.orbax.nonsense
    assert waystation.compat.orbax.v1 is waystation


def test_the_programs_own_imports_give_this_package(tmp_path: Any) -> None:
    from tests.version0 import install_scenarios

    with running(install_scenarios.imports, count=1, framework="torch", directory=tmp_path) as programs:
        (found,) = programs.values()
    assert found == {
        "package": "waystation.compat.orbax",
        "args": "waystation.compat.orbax.args",
        "step": "waystation.compat.orbax.step",
        "v1": "waystation",
        "flax": "waystation.compat.orbax",
        "grain": True,
        "refused": "ModuleNotFoundError",
        "spec": "waystation.compat.orbax.args",
    }
