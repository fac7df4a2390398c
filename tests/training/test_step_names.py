"""Directories of steps are named, and found again, as genuine Orbax does."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.training import oracle

import waystation
from waystation import errors
from waystation.storage import AnyPath
from waystation.training.step_names import composite_name_format, standard_name_format

theirs = oracle.ocp.path.step

prefixes = st.sampled_from([None, "step", "checkpoint", "a_b", ""])
lengths = st.sampled_from([None, 0, 1, 3, 8])
NAMES = ["0", "1", "01", "007", "0070", "12345678", "123456789", "00000012", "x", "5x", "\u0661"]


@given(prefixes, lengths, st.integers(0, 10**9))
def test_names_are_those_of_orbax(prefix: str | None, length: int | None, step: int) -> None:
    own = standard_name_format(step_prefix=prefix, step_format_fixed_length=length)
    other = theirs.standard_name_format(step_prefix=prefix, step_format_fixed_length=length)
    assert own.build_name(step) == other.build_name(step)


@pytest.fixture(scope="module")
def directories() -> Path:
    """A directory with checkpoints of many names, which both libraries take for committed."""
    root = Path(tempfile.mkdtemp())
    waystation.save(root / "0", {"a": np.zeros(1)})
    record = (root / "0" / "checkpoint.json").read_bytes()
    for prefix in ("", "step_", "checkpoint_", "a_b_", "_"):
        for name in NAMES:
            (root / f"{prefix}{name}").mkdir(exist_ok=True)
            (root / f"{prefix}{name}" / "checkpoint.json").write_bytes(record)
    return root


@pytest.mark.parametrize("prefix", [None, "step", "a_b", ""])
@pytest.mark.parametrize("length", [None, 0, 1, 3, 8])
def test_the_same_directories_are_found(directories: Path, prefix: str | None, length: int | None) -> None:
    own = standard_name_format(step_prefix=prefix, step_format_fixed_length=length)
    other = theirs.standard_name_format(step_prefix=prefix, step_format_fixed_length=length)
    found = {(info.step, info.path.name) for info in own.find_all(directories)}
    # Digits of other scripts are digits to Orbax's pattern; no format writes them.
    wanted = {(info.step, info.path.name) for info in other.find_all(directories) if info.path.name.isascii()}
    assert found == wanted
    assert found or length == 1, "or nothing was compared"


def test_a_step_is_found_with_its_times(directory: AnyPath) -> None:
    name_format = standard_name_format(step_prefix="step", step_format_fixed_length=4)
    waystation.save(directory / "step_0012", {"a": np.zeros(1)}, custom_metadata={"x": 1})
    found = name_format.find_step(directory, 12)
    assert (found.step, found.path, found.custom_metadata) == (12, directory / "step_0012", {"x": 1})
    assert found.commit_timestamp_nsecs == waystation.metadata(directory / "step_0012").commit_timestamp_ns
    assert [info.step for info in name_format.find_all(directory)] == [12]


def test_what_is_not_there_is_the_error_that_it_is_in_orbax(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3"):
        theirs.standard_name_format().find_step(tmp_path, 3)
    with pytest.raises(ValueError, match="no checkpoint '3' of step 3") as caught:
        standard_name_format().find_step(tmp_path, 3)
    assert isinstance(caught.value, errors.StepNotFoundError)
    assert list(standard_name_format().find_all(tmp_path / "nowhere")) == []


def test_what_was_not_committed_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "4").mkdir()
    (tmp_path / "5").write_text("a file")
    assert list(standard_name_format().find_all(tmp_path)) == []


def test_several_formats_find_and_one_names(directory: AnyPath) -> None:
    plain, padded = standard_name_format(), standard_name_format(step_format_fixed_length=6)
    waystation.save(directory / "3", {"a": np.zeros(1)})
    waystation.save(directory / "000007", {"a": np.zeros(1)})
    both = composite_name_format(padded, [padded, plain])
    assert both.build_name(9) == "000009"
    assert {info.path.name for info in both.find_all(directory)} == {"3", "000007"}
    assert both.find_step(directory, 3).path.name == "3"
    with pytest.raises(ValueError, match=r"'000008'.*'8'"):
        both.find_step(directory, 8)


def test_the_format_that_names_has_to_be_one_that_finds() -> None:
    plain, padded = standard_name_format(), standard_name_format(step_format_fixed_length=6)
    other = (theirs.standard_name_format(), theirs.standard_name_format(step_format_fixed_length=6))
    with pytest.raises(ValueError, match="read_name_formats"):
        theirs.composite_name_format(other[0], [other[1]])
    with pytest.raises(errors.InvalidInput, match="read_name_formats"):
        composite_name_format(plain, [padded])


@pytest.mark.parametrize("arguments", [{"step_format_fixed_length": -1}, {"step_prefix": "a/b"}])
def test_impossible_names_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(errors.InvalidInput):
        standard_name_format(**arguments)  # type: ignore[arg-type]
