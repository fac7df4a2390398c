"""Collects the licences of everything that is compiled into the programs of a wheel.

The crates are those that cargo resolves for the extension and the agent, without what only builds or tests
need. The texts are the files that the crates themselves carry. A crate without one is listed with its SPDX
expression and its authors, and the texts of its licences are those of other crates.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("waystation-python", "waystation-agent")
_NAMES = ("license", "licence", "copying", "copyright", "notice", "unlicense")

_HEADING = """\
The programs of this package contain Rust's standard library (MIT OR Apache-2.0, Copyright (c) The Rust
Project Developers) and these crates, each under its own licence. The texts of the licences follow the list.
"""


def write(path: Path, target: str | None = None) -> None:
    """Writes the list of crates and the texts of their licences, if these have changed.

    Args:
        path: The file to write.
        target: The platform that is built for, as Rust names it. None is this machine's.
    """
    text = "\n".join(_lines(linked_crates(target)))
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def linked_crates(target: str | None = None) -> list[dict[str, Any]]:
    """The crates of other authors in the programs, as `cargo metadata` describes them, by name."""
    command = ["cargo", "metadata", "--format-version", "1", "--filter-platform", target or _host()]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    packages = {package["id"]: package for package in metadata["packages"]}
    edges = {node["id"]: list(_normal_dependencies(node)) for node in metadata["resolve"]["nodes"]}
    pending = [number for number, package in packages.items() if package["name"] in PROGRAMS]
    found = set(pending)
    while pending:
        for number in edges[pending.pop()]:
            if number not in found:
                found.add(number)
                pending.append(number)
    foreign = [packages[number] for number in found if packages[number]["source"] is not None]
    return sorted(foreign, key=lambda package: (package["name"], package["version"]))


def _host() -> str:
    """This machine's platform, as Rust names it."""
    answer = subprocess.run(["rustc", "-vV"], check=True, stdout=subprocess.PIPE, text=True)
    lines = answer.stdout.splitlines()
    return next(line.removeprefix("host: ") for line in lines if line.startswith("host: "))


def _normal_dependencies(node: dict[str, Any]) -> Iterator[str]:
    for dependency in node["deps"]:
        if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
            yield dependency["pkg"]


def _lines(crates: list[dict[str, Any]]) -> Iterator[str]:
    """The whole file: the list, then each text once with the crates that carry it."""
    carriers: dict[str, list[str]] = defaultdict(list)
    yield _HEADING
    for crate in crates:
        name = f"{crate['name']} {crate['version']}"
        texts = list(license_texts(crate))
        for text in texts:
            carriers[text].append(name)
        authors = ", ".join(crate["authors"]) or f"the authors of {crate['name']}"
        note = "" if texts else f"; it carries no licence file. Copyright (c) {authors}"
        yield f"{name}: {crate['license']}{note}"
    for text, names in carriers.items():
        yield f"\n{'=' * 80}\n{', '.join(dict.fromkeys(names))}\n{'=' * 80}\n"
        yield text
    yield ""


def license_texts(crate: dict[str, Any]) -> Iterator[str]:
    """The texts of the licence files in a crate's folder, and in those of the C sources that it bundles."""
    folder = Path(crate["manifest_path"]).parent
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name.lower().startswith(_NAMES):
            yield path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n").strip("\n")
