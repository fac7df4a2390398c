"""States that are saved in parts: of the same parts genuine Orbax makes the same whole, which we load, and it
refuses the same calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.orbax import oracle
from tests.support.long import amount

import waystation
from waystation import errors

PARTS = 3
_numbers = itertools.count()

leaves = st.one_of(
    st.integers(0, 100).map(lambda seed: jnp.arange(6.0).reshape(2, 3) + seed),
    st.integers(0, 100).map(lambda seed: np.arange(4) + seed),
    st.integers(0, 100),
)


@st.composite
def states_in_parts(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Parts of a state of nested dicts, none of them empty, which together have every leaf once."""
    places = draw(
        st.lists(
            st.tuples(st.sampled_from("ab"), st.sampled_from("cd"), st.sampled_from("efg")),
            min_size=PARTS,
            max_size=8,
            unique=True,
        )
    )
    parts: list[dict[str, Any]] = [{} for _ in range(PARTS)]
    for number, place in enumerate(places):
        part = parts[number if number < PARTS else draw(st.integers(0, PARTS - 1))]
        for key in place[:-1]:
            part = part.setdefault(key, {})
        part[place[-1]] = draw(leaves)
    return parts


@settings(
    max_examples=amount(8), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(parts=states_in_parts(), in_background=st.booleans())
def test_the_whole_is_the_same(tmp_path: Path, parts: list[dict[str, Any]], in_background: bool) -> None:
    root = tmp_path / str(next(_numbers))
    for library in (waystation, oracle.v1):
        path = root / library.__name__
        for number, part in enumerate(parts):
            metadata = {f"part {number}": number}
            if in_background:
                library.partial.save_async(path, part, custom_metadata=metadata).result()
            else:
                library.partial.save(path, part, custom_metadata=metadata)
            assert not path.exists()
        library.partial.finalize(path)
    ours, theirs = (root / library.__name__ for library in (waystation, oracle.v1))
    expected = oracle.load(theirs)
    oracle.assert_same(waystation.load(ours), expected)
    oracle.assert_same(waystation.load(theirs), expected)
    found, wanted = waystation.metadata(ours), oracle.v1.metadata(theirs)
    assert found.custom_metadata == wanted.custom_metadata
    assert jax.tree.structure(found.metadata) == jax.tree.structure(wanted.metadata)


def test_several_parts_may_have_text_unlike_in_orbax(tmp_path: Path) -> None:
    for library in (waystation, oracle.v1):
        for name in "ab":
            library.partial.save(tmp_path / library.__name__, {name: name * 3})
    with pytest.raises(FileExistsError, match=r"_strings\.json"):
        oracle.v1.partial.finalize(tmp_path / oracle.v1.__name__)
    waystation.partial.finalize(tmp_path / waystation.__name__)
    assert waystation.load(tmp_path / waystation.__name__) == {"a": "aaa", "b": "bbb"}


FIRST: dict[str, Any] = {"a": {"b": np.arange(3)}, "step": 1}


def begin(ocp: Any, path: Path) -> None:
    ocp.partial.save(path, FIRST)


def save_again(ocp: Any, path: Path) -> None:
    begin(ocp, path)
    ocp.partial.save(path, {"step": 2})


def finalize_nothing(ocp: Any, path: Path) -> None:
    ocp.partial.finalize(path)


def finalize_twice(ocp: Any, path: Path) -> None:
    begin(ocp, path)
    ocp.partial.finalize(path)
    ocp.partial.finalize(path)


def save_after_the_end(ocp: Any, path: Path) -> None:
    begin(ocp, path)
    ocp.partial.finalize(path)
    ocp.partial.save(path, {"more": 1})


def save_after_the_end_in_the_background(ocp: Any, path: Path) -> None:
    begin(ocp, path)
    ocp.partial.finalize(path)
    ocp.partial.save_async(path, {"more": 1}).result()


def finalize_over_another(ocp: Any, path: Path) -> None:
    begin(ocp, path)
    ocp.save(path, {"a": 1})
    ocp.partial.finalize(path)


def load_too_early(ocp: Any, path: Path) -> None:
    begin(ocp, path)
    ocp.load(path)


@pytest.mark.parametrize(
    "call",
    [
        save_again,
        finalize_nothing,
        finalize_twice,
        save_after_the_end,
        save_after_the_end_in_the_background,
        finalize_over_another,
        load_too_early,
    ],
    ids=lambda call: call.__name__,
)
def test_the_same_calls_are_refused(tmp_path: Path, call: Callable[[Any, Path], None]) -> None:
    with pytest.raises(Exception) as wanted:  # noqa: PT011 - whatever Orbax raises
        call(oracle.v1, tmp_path / "theirs")
    built_in = next(base for base in type(wanted.value).__mro__ if base.__module__ == "builtins")
    with pytest.raises(built_in) as found:
        call(waystation, tmp_path / "ours")
    assert isinstance(found.value, errors.WaystationError)


def test_parts_of_orbax_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "c"
    oracle.v1.partial.save(path, {"a": np.arange(3)})
    (directory,) = tmp_path.iterdir()
    before = sorted(entry.relative_to(directory) for entry in directory.rglob("*"))
    for call in (lambda: waystation.partial.save(path, {"b": 1}), lambda: waystation.partial.finalize(path)):
        with pytest.raises(errors.Conflict, match="parts that Waystation has not saved"):
            call()
    assert sorted(entry.relative_to(directory) for entry in directory.rglob("*")) == before
    oracle.v1.partial.finalize(path)
    assert waystation.load(path)["a"].tolist() == [0, 1, 2]


def test_unfinished_parts_stand_where_orbax_has_them(tmp_path: Path) -> None:
    for library, root in ((oracle.v1, tmp_path / "theirs"), (waystation, tmp_path / "ours")):
        root.mkdir()
        library.partial.save(root / "c", {"a": np.arange(3)})  # type: ignore[attr-defined]
        assert [entry.name for entry in root.iterdir()] == ["c.partial_save"]
        library.partial.finalize(root / "c.partial_save")  # type: ignore[attr-defined]
        assert [entry.name for entry in root.iterdir()] == ["c"]
