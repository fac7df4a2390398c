"""The build backend: maturin's, which also packs the agent and the licences of the bundled crates.

A wheel holds the extension and `waystation-agent`, a program that is installed beside `waystation`. maturin
builds either an extension or a program, so this backend builds the agent first, and maturin takes it from a
`.data` folder as a script. The licence texts of all linked crates are collected into
`THIRD-PARTY-LICENSES.txt`, which `license-files` in `pyproject.toml` names, and README.md becomes
`README-PACKAGE.md`, which `readme` names.

Wheels are stripped. Editable installs are not, so that backtraces of a checkout name functions.

With maturin's `--zig`, zig links the agent too, for the C library that `--compatibility` names:
`cargo-zigbuild` must be on PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bundled_licenses
import maturin
import package_readme

ROOT = Path(__file__).resolve().parents[2]
# `data` in [tool.maturin] names this folder.
SCRIPTS = ROOT / "target" / "package.data" / "scripts"
AGENT = "waystation-agent"
EXTENSION = "waystation-python"

Settings = Mapping[str, Any] | None

get_requires_for_build_wheel = maturin.get_requires_for_build_wheel
get_requires_for_build_editable = maturin.get_requires_for_build_editable
get_requires_for_build_sdist = maturin.get_requires_for_build_sdist


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    """Writes the metadata that a wheel will have."""
    _prepare(config_settings)
    return maturin.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Builds a wheel of stripped programs."""
    arguments = maturin.get_maturin_pep517_args(config_settings)
    _prepare(config_settings)
    _build_agent(arguments, strip=True)
    stripped = {**(config_settings or {}), "maturin.build-args": [*arguments, "--strip"]}
    return maturin.build_wheel(wheel_directory, stripped, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Builds the extension beside the Python sources, and a wheel that points to these."""
    _prepare(config_settings)
    _build_agent(maturin.get_maturin_pep517_args(config_settings), strip=False)
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Packs the sources, from which `build_wheel` builds the same wheel elsewhere."""
    _prepare(config_settings)
    return maturin.build_sdist(sdist_directory, config_settings)


def _prepare(config_settings: Settings) -> None:
    """Makes what maturin's metadata steps expect: a Rust toolchain, the `.data` folder, the named files."""
    if not os.environ.get("MATURIN_NO_INSTALL_RUST") and shutil.which("cargo") is None:
        from puccinialin import setup_rust  # required by the hooks above where cargo is missing

        os.environ.update(setup_rust())
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    known, _ = _cargo_options(maturin.get_maturin_pep517_args(config_settings))
    bundled_licenses.write(ROOT / "THIRD-PARTY-LICENSES.txt", known.target)
    package_readme.write(ROOT / "README-PACKAGE.md")


def _build_agent(arguments: list[str], strip: bool) -> None:
    """Builds the agent into the folder that maturin takes scripts from."""
    known, locking = _cargo_options(arguments)
    # Beside the extension's package its crates have the features that they have for that and for tests.
    verb = ["rustc"] if strip else ["build", "--package", EXTENSION]
    cargo = "cargo-zigbuild" if known.zig else "cargo"
    command = [cargo, *verb, "--package", AGENT, "--bin", AGENT, "--profile", known.profile, *locking]
    if known.target is not None:
        glibc = re.fullmatch(r"manylinux_(\d+)_(\d+)", known.compatibility or "") if known.zig else None
        command += ["--target", known.target + (f".{glibc[1]}.{glibc[2]}" if glibc else "")]
    command += ["--message-format", "json-render-diagnostics"]
    if strip:
        command += ["--", "-C", "strip=symbols"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False, text=True)
    if done.returncode != 0:
        raise SystemExit(f"'{' '.join(command)}' exited with status {done.returncode}")
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    (program,) = [message["executable"] for message in messages if message.get("executable")]
    shutil.rmtree(SCRIPTS)
    SCRIPTS.mkdir()
    shutil.copy2(program, SCRIPTS / AGENT)


def _cargo_options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options for maturin that a build of the agent must share."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--profile", default="release")
    parser.add_argument("--target")
    parser.add_argument("--zig", action="store_true")
    parser.add_argument("--compatibility")
    known, _ = parser.parse_known_args(arguments)
    locking = [option for option in ("--locked", "--offline", "--frozen") if option in arguments]
    return known, locking
