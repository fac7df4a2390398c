"""Unpacks Debian's packages into a folder, so that a tool or an interpreter is there without being installed.

`apt-get` resolves and downloads, with lists and a cache of its own, and checks signatures with the keys of
`debian-archive-keyring`. `dpkg-deb` unpacks. No script of a package runs, the machine's own packages stay as
they are, and root is not needed. Works on Debian and what derives from it. Uses the standard library alone.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

MIRROR = "http://deb.debian.org/debian"
SECURITY = "http://deb.debian.org/debian-security"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
# What apt-get takes for the machine's own packages, where a folder is to hold all that its programs need.
NOTHING = "/dev/null"
# What the folder need not repeat, because the machine has it.
OF_THIS_MACHINE = "/var/lib/dpkg/status"


class NoDebian(Exception):
    """This machine cannot unpack Debian's packages; the message says what it lacks."""


def unpack(
    folder: Path, packages: list[str], suite: str, architecture: str, installed: str = NOTHING
) -> Path:
    """Makes a folder with packages and all they need, if the folder does not hold just these yet.

    Args:
        folder: Where to unpack. What it held before is removed.
        packages: Names of packages, each with an architecture where it is not `architecture`: `libc6:arm64`.
        suite: The release of Debian, as `bookworm`.
        architecture: Debian's name of the main architecture, as `amd64`.
        installed: The file that lists packages which need not be unpacked: NOTHING or OF_THIS_MACHINE.

    Returns:
        The folder.

    Raises:
        NoDebian: apt-get or dpkg-deb is missing, or the packages cannot be had.
    """
    made_from = hashlib.sha256(repr((sorted(packages), suite, architecture, installed)).encode()).hexdigest()
    stamp = folder / ".made-from"
    if stamp.exists() and stamp.read_text() == made_from:
        return folder
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise NoDebian(f"{program} is not installed")
    if not os.path.exists(KEYS):
        raise NoDebian(f"{KEYS} is missing: install debian-archive-keyring")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    downloads = _download(folder / ".apt", packages, suite, architecture, installed)
    for archive in downloads:
        _run(["dpkg-deb", "--extract", archive, folder])
    shutil.rmtree(folder / ".apt")
    stamp.write_text(made_from)
    return folder


def _download(place: Path, packages: list[str], suite: str, architecture: str, installed: str) -> list[Path]:
    """Downloads the packages and what they need, and returns the archives."""
    for name in ("state/lists/partial", "cache/archives/partial", "sources"):
        (place / name).mkdir(parents=True)
    sources = [f"deb [signed-by={KEYS}] {MIRROR} {suite} main"]
    sources += [f"deb [signed-by={KEYS}] {SECURITY} {suite}-security main"]
    (place / "sources.list").write_text("\n".join(sources) + "\n")
    architectures = {architecture, *(name.split(":")[1] for name in packages if ":" in name)}
    settings = {
        "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
        "Acquire::Languages": "none",
        "APT::Architecture": architecture,
        "APT::Sandbox::User": "root" if os.geteuid() == 0 else "",
        "Debug::NoLocking": "true",
        "Dir::Cache": str(place / "cache"),
        "Dir::Etc::sourcelist": str(place / "sources.list"),
        "Dir::Etc::sourceparts": str(place / "sources"),
        "Dir::State": str(place / "state"),
        "Dir::State::status": installed,
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    options += [part for name in sorted(architectures) for part in ("-o", f"APT::Architectures::={name}")]
    apt = ["apt-get", "--quiet=2", *options]
    _run([*apt, "update"])
    _run([*apt, "install", "--yes", "--download-only", "--no-install-recommends", *packages])
    return sorted((place / "cache" / "archives").glob("*.deb"))


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, text=True)
    if done.returncode != 0:
        raise NoDebian(
            f"'{' '.join(map(str, command))}' exited with status {done.returncode}:\n{done.stdout}"
        )
