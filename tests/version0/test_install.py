"""`install` puts this package in the place of `orbax.checkpoint`, for libraries of the program, too."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import orbax.checkpoint as theirs
import pytest
from tests.support.programs import running

import waystation.compat.orbax
from waystation.errors import InvalidInput
from waystation.storage import names
from waystation.storage.attempts import new_attempt_id


def test_what_is_imported_already_is_not_replaced() -> None:
    importlib.import_module("orbax.checkpoint")
    with pytest.raises(InvalidInput, match="imported already"):
        waystation.compat.orbax.install()


def test_a_name_that_is_not_here_says_why() -> None:
    with pytest.raises(AttributeError, match="engine"):
        _ = waystation.compat.orbax.serialization
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


def test_version_1_alone_is_replaced_where_a_program_needs_more_of_orbax(tmp_path: Any) -> None:
    from tests.version0 import install_scenarios

    scenario = install_scenarios.imports_of_version_1
    with running(scenario, count=1, framework="torch", directory=tmp_path) as programs:
        (found,) = programs.values()
    assert found == {
        "v1": "waystation",
        "below": "waystation.training",
        "package": True,
        "more": "orbax.checkpoint.experimental.emergency",
        "twice": "InvalidInput",
    }


def test_programs_pass_over_what_killed_saves_have_left(tmp_path: Path) -> None:
    """flax looks for the newest checkpoint by name, and passes over what has the suffix of the package."""
    suffix = waystation.compat.orbax.utils.TMP_DIR_SUFFIX
    assert suffix in theirs.utils.TMP_DIR_SUFFIX
    assert suffix in names.attempt("checkpoint_4", new_attempt_id())
    left = waystation.compat.orbax.test_utils.save_fake_tmp_dir(tmp_path, 4, "default")
    assert theirs.utils.is_tmp_checkpoint(left.parent)
