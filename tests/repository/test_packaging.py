"""The package: what is installed with it, whose licences it carries, and that all it names exists.

`make check-packages` installs the built packages into fresh environments, which takes minutes.
"""

import importlib.metadata
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools" / "packaging"))

import bundled_licenses  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_agent_is_installed_with_the_package() -> None:
    files = importlib.metadata.files("waystation") or []
    (agent,) = [file.locate() for file in files if file.name == "waystation-agent"]
    assert os.access(Path(str(agent)), os.X_OK)


def test_the_wheel_and_the_type_checker_take_every_package() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    packages = sorted(path.parent.name for path in (ROOT / "python").glob("*/__init__.py"))
    assert tools["maturin"]["python-packages"] == packages
    assert set(packages) <= set(tools["mypy"]["packages"])


def test_no_extra_needs_a_distribution_of_this_project() -> None:
    extras = PROJECT["optional-dependencies"]
    for name, requirements in extras.items():
        ours = [each for each in requirements if each.startswith("waystation")]
        # 'all' names the other extras of the same distribution, which pip takes from where it installs it.
        assert ours == (requirements if name == "all" else []), name
    named = re.fullmatch(r"waystation\[(.*)\]", extras["all"][0])
    assert named is not None
    assert set(named.group(1).split(",")) == set(extras) - {"all"}


def test_no_page_or_message_installs_this_project_from_a_registry() -> None:
    install = re.compile(r"""pip\s+install\s+(?:-\S+\s+)*['"]?waystation\b""")
    folders = [ROOT / name for name in ("docs", "python", "examples", "benchmarks", "crates")]
    pages = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*"))]
    wrong = [
        f"{path.relative_to(ROOT)}: {found.group()}"
        for path in pages
        if path.suffix in {".md", ".py", ".rs"}
        for found in install.finditer(path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def crates() -> list[dict]:
    if shutil.which("cargo") is None:
        pytest.skip("cargo is not installed")
    return bundled_licenses.linked_crates()


def test_the_licenses_of_all_linked_crates_are_installed(crates: list[dict]) -> None:
    files = importlib.metadata.files("waystation") or []
    (installed,) = [file.read_text() for file in files if file.name == "THIRD-PARTY-LICENSES.txt"]
    assert len(crates) > 30
    for crate in crates:
        assert f"\n{crate['name']} {crate['version']}: {crate['license']}" in installed
        assert all(text in installed for text in bundled_licenses.license_texts(crate)), crate["name"]


def test_a_crate_without_a_text_has_the_license_of_one_that_carries_it(crates: list[dict]) -> None:
    carried = {crate["license"] for crate in crates if any(bundled_licenses.license_texts(crate))}
    assert [crate["name"] for crate in crates if crate["license"] not in carried] == []
    names = {crate["name"] for crate in crates}
    assert {"pyo3", "tokio", "zstd-sys"} <= names  # of the extension, of the agent, with sources in C
    assert not names & {"proptest", "cc", "loom"}  # of tests and of builds
