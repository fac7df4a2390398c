"""The site: its navigation has every page, and the reference every public module and every option."""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from waystation._options import OptionGroup, Options

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages() -> Iterator[ModuleType]:
    """The hook of MkDocs that makes the pages of the reference."""
    pytest.importorskip("mkdocs")
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield importlib.import_module("documentation_pages")
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def navigation() -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]


def described(group: OptionGroup) -> set[str]:
    """The names that the docstring of a group explains under `Attributes:`."""
    _, _, attributes = (inspect.getdoc(type(group)) or "").partition("Attributes:\n")
    return set(re.findall(r"^    (\w+): \S", attributes, re.MULTILINE))


def test_every_option_is_described_in_the_reference(pages: ModuleType) -> None:
    groups = list(pages.option_groups(Options()))
    text = pages.options_page()
    for path, group in groups:
        missing = set(pages.option_names(group)) - described(group)
        assert not missing, f"the docstring of {type(group).__name__} lacks {sorted(missing)}"
        assert f"\n## {path}\n\n::: {type(group).__module__}.{type(group).__qualname__}\n" in text
    found = {f"{path}.{name}" for path, group in groups for name in pages.option_names(group)}
    walked = {name for name, _ in Options().walk()} - {"checkpoint_layout"}
    assert walked <= found, "an option that a context has is in no section"


def test_the_reference_has_the_modules_that_the_documentation_imports(
    pages: ModuleType, navigation: Any
) -> None:
    public = set(pages.public_modules(navigation))
    assert "waystation" in public
    for name in public:
        assert not any(part.startswith("_") for part in name.split(".")), name
        importlib.import_module(name)
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"^ *from (waystation[\w.]*) import", page.read_text(), re.MULTILINE):
            assert name in public, f"{page.relative_to(ROOT)} imports {name}, which is not in mkdocs.yml"


def test_the_navigation_has_every_page(pages: ModuleType, navigation: Any) -> None:
    def listed(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for child in entry if isinstance(entry, list) else entry.values():
                yield from listed(child)

    found = [page for page in listed(navigation) if not page.startswith("reference/")]
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert len(found) == len(set(found))
    assert set(found) == written | set(pages.ROOT_PAGES.values())
