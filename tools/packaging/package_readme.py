"""Writes the description that the package shows on an index: README.md, with links that work there.

A page of an index knows no file of the repository, so links and pictures that are relative in README.md lead
to the repository of `[project.urls]`, at the tag of the version.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# `[text](target)` and `![text](target)`, where the target is neither a URL nor a heading of the page.
_RELATIVE = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?![a-z]+:|#)(?P<target>[^)\s]+)\)")


def write(path: Path) -> None:
    """Writes the description, if it has changed."""
    text = with_absolute_links((ROOT / "README.md").read_text(), repository(), version())
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def with_absolute_links(text: str, home: str, release: str) -> str:
    """The text of README.md, whose relative links lead to a release in the repository.

    Code stays as it is: nothing in a fenced block is a link.

    Args:
        text: Markdown.
        home: The URL of the repository, without a slash at its end.
        release: The version, as `0.1.0`.
    """

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({home}/{kind}/v{release}/{link['target']})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [_RELATIVE.sub(absolute, part) for part in parts[::2]]
    # Why a block is not run as a test is for the test.
    return re.sub(r"^(```\w+) not-run: .*$", r"\1", "".join(parts), flags=re.MULTILINE)


def repository() -> str:
    """The URL of the repository, as `pyproject.toml` has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["urls"]["Repository"]).rstrip("/")


def version() -> str:
    """The version, which the Cargo workspace holds."""
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]
    return str(workspace["package"]["version"])
