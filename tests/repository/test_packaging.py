"""The package: what is installed with it, whose licences it carries, and that all it names exists.

`make check-packages` installs the built packages into fresh environments, which takes minutes.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools" / "packaging"))

import bundled_licenses  # noqa: E402
import package_readme  # noqa: E402

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


def test_the_description_leads_nowhere_inside_a_checkout() -> None:
    readme = (ROOT / "README.md").read_text()
    text = package_readme.with_absolute_links(readme, "https://forge/waystation", "1.2.3")
    assert "![" in text
    assert "](https://forge/waystation/raw/v1.2.3/docs/images/benchmark.svg)" in text
    assert "](https://forge/waystation/blob/v1.2.3/docs/tutorial.md)" in text
    assert "not-run" not in text
    outside_code = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)]*)\)", outside_code)
    assert [target for target in targets if not target.startswith("https://")] == []
    # Every link of README.md leads to a file, so its absolute form leads to the same file of the tag.
    ours = [target.split("/v1.2.3/")[1].partition("#")[0] for target in targets if "/v1.2.3/" in target]
    assert len(ours) > 20
    assert [target for target in ours if not (ROOT / target).exists()] == []


def test_code_and_other_addresses_in_the_description_stay() -> None:
    text = "[a](https://other/b) [c](#d)\n```md\n[e](f.md)\n```\n[g](h.md#i)\n"
    expected = "[a](https://other/b) [c](#d)\n```md\n[e](f.md)\n```\n[g](https://forge/x/blob/v1/h.md#i)\n"
    assert package_readme.with_absolute_links(text, "https://forge/x", "1") == expected


def test_the_metadata_lead_to_the_project_and_name_what_is_tried() -> None:
    metadata = importlib.metadata.metadata("waystation")
    urls = dict(entry.split(", ", 1) for entry in metadata.get_all("Project-URL") or [])
    assert urls == PROJECT["urls"]
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} <= set(urls)
    assert package_readme.repository() in str(metadata.get_payload())
    classifiers = "\n".join(PROJECT["classifiers"])
    named = re.findall(r"Python :: (3\.\d+)", classifiers)
    versions = re.search(
        r"^VERSIONS = \((.*)\)$", (ROOT / "tools" / "test_wheels.py").read_text(), re.MULTILINE
    )
    assert versions is not None
    assert named == re.findall(r"3\.\d+", versions.group(1))
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_every_platform_of_the_wheels_is_on_the_page_that_says_where_it_runs() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    source = (ROOT / "tools" / "build_wheels.py").read_text()
    platforms = re.findall(r'Platform\("(\w+)-unknown-linux-\w+", "(\w+)"\)', source)
    assert len(platforms) == 4
    for processor, tag in platforms:
        assert f"`{tag}`" in page
        assert f"| {tag.partition('_')[0]} {processor} |" in page
    for extra in PROJECT["optional-dependencies"]:
        assert re.search(rf"^\| .*`{extra}`", page, re.MULTILINE), extra


def test_only_named_platforms_are_built(capfd: pytest.CaptureFixture[str]) -> None:
    program = [sys.executable, str(ROOT / "tools" / "build_wheels.py"), "beos_1_0"]
    assert subprocess.run(program, check=False).returncode == 2
    assert "manylinux_2_17_aarch64" in capfd.readouterr().err
