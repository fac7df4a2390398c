"""Builds the packages of a release into `dist/`: a wheel for each platform, and the sdist (`make wheels`).

`tools/wheels build_wheels.py [PLATFORM…]` builds for each platform, as PLATFORMS lists them, or for some. zig
links the extension and the agent, so a wheel needs no newer C library than its tag says, whatever machine
builds it. One wheel serves every Python from 3.11 (abi3).

Rust's standard library for a platform is that of the toolchain on PATH where it has one, as after `rustup
target add`. For the others Debian's packages of Rust are unpacked below `target/`, on a Debian 12. They have
no standard library for musl, so there cargo builds one from their sources.

Packages come from PyPI, the registry of crates and Debian; nothing else is downloaded.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "packaging")]

import debian_packages  # noqa: E402

PLACE = ROOT / "target" / "cross"
# The oldest Debian whose Rust is new enough; its programs need no newer C library than that of this Debian.
DEBIAN = "bookworm"
DEBIAN_RUST = ["rustc-web", "cargo-web", "rust-web-src", "libstd-rust-web-dev", "libstd-rust-web-dev:arm64"]


@dataclass(frozen=True)
class Platform:
    """A platform that has a wheel.

    Attributes:
        target: Rust's name of it.
        tag: The tag of its wheels, without the processor. It names the oldest C library that will do.
    """

    target: str
    tag: str

    @property
    def is_musl(self) -> bool:
        """Whether its C library is musl."""
        return self.target.endswith("-musl")

    @property
    def processor(self) -> str:
        """The processor, as wheels name it."""
        return self.target.partition("-")[0]

    @property
    def name(self) -> str:
        """The platform, as wheels name it."""
        return f"{self.tag}_{self.processor}"


PLATFORMS = [
    Platform("x86_64-unknown-linux-gnu", "manylinux_2_17"),
    Platform("aarch64-unknown-linux-gnu", "manylinux_2_17"),
    Platform("x86_64-unknown-linux-musl", "musllinux_1_2"),
    Platform("aarch64-unknown-linux-musl", "musllinux_1_2"),
]


def main() -> None:
    """Builds what the command line names, each platform in a process of its own."""
    parser = argparse.ArgumentParser(prog="make wheels", description=(__doc__ or "").splitlines()[0])
    names = [platform.name for platform in PLATFORMS]
    parser.add_argument("platforms", nargs="*", metavar="PLATFORM", help=f"of {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder of the packages")
    arguments = parser.parse_args()
    if unknown := set(arguments.platforms) - set(names):
        parser.error(f"no such platform: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for platform in PLATFORMS:
        if not arguments.platforms or platform.name in arguments.platforms:
            say(f"building for {platform.name}")
            call_backend("build_wheel", arguments.out, wheel_options(platform), toolchain(platform))
    if not arguments.platforms:
        call_backend("build_sdist", arguments.out, [], {})
    for package in sorted(arguments.out.iterdir()):
        say(f"{package.name}: {package.stat().st_size / 1e6:.1f} MB")


def wheel_options(platform: Platform) -> list[str]:
    """What maturin is told for a platform. An interpreter is named by version, since none of it runs here."""
    options = ["--locked", "--profile", "release", "--target", platform.target, "--interpreter", "python3.11"]
    return [*options, "--zig", "--compatibility", platform.tag, "--auditwheel", "check"]


def call_backend(hook: str, folder: Path, options: list[str], variables: dict[str, str]) -> None:
    """Calls a hook of the build backend as a build frontend does."""
    program = "import json, sys; sys.path.insert(0, 'tools/packaging'); import build_backend"
    settings = {"maturin.build-args": options} if options else None
    program += f"; build_backend.{hook}({str(folder.resolve())!r}, {settings!r})"
    path = os.pathsep.join([str(Path(sys.executable).parent), variables.pop("PATH", os.environ["PATH"])])
    # A wheel is stripped, so nobody would read what a debugger needs.
    settled = {"CARGO_PROFILE_RELEASE_DEBUG": "false", "CARGO_INCREMENTAL": "0"}
    caches = {
        "CARGO_ZIGBUILD_CACHE_DIR": str(PLACE / "zigbuild"),
        "ZIG_GLOBAL_CACHE_DIR": str(PLACE / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(PLACE / "zig"),
    }
    kept = {name: value for name, value in os.environ.items() if name not in ("PYO3_PYTHON", "PYTHONPATH")}
    environment = {**kept, **settled, **caches, **variables, "PATH": path}
    if subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=False).returncode:
        raise SystemExit(f"make wheels: {hook} failed ({' '.join(options)})")


def toolchain(platform: Platform) -> dict[str, str]:
    """The variables with which cargo finds a standard library for a platform."""
    variables = {}
    if platform.is_musl:  # an extension is loaded by the musl of the interpreter, and the agent shares crates
        name = platform.target.upper().replace("-", "_")
        variables[f"CARGO_TARGET_{name}_RUSTFLAGS"] = "-C target-feature=-crt-static"
    if has_standard_library("rustc", platform.target):
        return variables
    try:
        programs = debian_toolchain(PLACE / "debian-rust")
    except debian_packages.NoDebian as error:
        raise SystemExit(
            f"make wheels: rustc has no standard library for {platform.target}. "
            f"With rustup: rustup target add {platform.target}. Debian's could not be had: {error}"
        ) from None
    variables["PATH"] = os.pathsep.join([str(programs), os.environ["PATH"]])
    if not has_standard_library(str(programs / "rustc"), platform.target):
        say(f"building Rust's standard library for {platform.target} as well")
        # Unstable in cargo, which a stable one is told to allow so.
        variables.update(RUSTC_BOOTSTRAP="1", CARGO_UNSTABLE_BUILD_STD="std,panic_unwind")
    return variables


def has_standard_library(rustc: str, target: str) -> bool:
    """Whether a compiler finds the standard library of a platform."""
    command = [rustc, "--print", "target-libdir", "--target", target]
    answer = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False, text=True
    )
    return answer.returncode == 0 and any(Path(answer.stdout.strip()).glob("libstd-*.rlib"))


def debian_toolchain(folder: Path) -> Path:
    """Unpacks Debian's Rust, and returns the folder of its programs."""
    # gcc and the like are on this machine already, for rustc needs a linker anywhere.
    status = debian_packages.OF_THIS_MACHINE
    debian_packages.unpack(folder, DEBIAN_RUST, DEBIAN, "amd64", installed=status)
    sources = folder / "usr" / "lib" / "rustlib" / "src" / "rust"
    if sources.is_symlink() and not sources.exists():  # it leads to where Debian installs it
        inside = folder / os.readlink(sources).lstrip("/")
        sources.unlink()
        sources.symlink_to(inside)
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    libraries = folder / "usr" / "lib" / "x86_64-linux-gnu"
    for name in ("cargo", "rustc", "rustdoc"):
        wrapper = programs / name
        wrapper.write_text(
            f'#!/bin/sh\nLD_LIBRARY_PATH="{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" '
            f'exec "{folder}/usr/bin/{name}" "$@"\n'
        )
        wrapper.chmod(0o755)
    if shutil.which("cc") is None:
        raise debian_packages.NoDebian("there is no C compiler for this machine's own programs: install gcc")
    return programs


def say(text: str) -> None:
    """Tells the person at the terminal what happens now."""
    print(f"make wheels: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
