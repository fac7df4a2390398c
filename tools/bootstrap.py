"""Makes `.venv` match the lock file, and the extension in it match the Rust sources.

Three steps, each with a stamp in `.venv` that holds the digest of what the step was made from, so that
a step whose inputs are unchanged is skipped, also without a network:

1. the environment, made anew when the interpreter is another;
2. the packages: exactly those of `requirements.lock`, by hash, nothing built from source;
3. the package: its extension, built next to the Python sources, which are used where they lie, and the agent
   of the memory tier, a program beside the interpreter.

A stamp is written last, so a step that was interrupted runs again. Uses the standard library alone.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / "bin" / "python"
LOCK = ROOT / "requirements.lock"
EXTENSION = ROOT / "python" / "waystation" / "_native.abi3.so"
PROGRAM = ENVIRONMENT / "bin" / "waystation-agent"
# What tests import as they are collected, and a program that compiles it, and the sources here, to bytecode.
# pytest compiles the files of tests itself.
IMPORTED = (
    *("equinox", "fastsafetensors", "flax.nnx", "grain", "hypothesis.strategies", "jax", "optax"),
    *("orbax.checkpoint", "pytest", "ray", "torch._dynamo", "torch.distributed.checkpoint"),
    *("torch.distributed.tensor", "typer", "yaml"),
)
COMPILE = f"""
import compileall, re
for directory in ("python", "benchmarks", "torture", "tests"):
    compileall.compile_dir(directory, quiet=2, rx=re.compile("/(test_|conftest)"))
import {", ".join(IMPORTED)}
"""
# CI keeps to the lock, and builds what `cargo test` needs as well, with its debug assertions: each crate is
# compiled once.
IN_CI = {"MATURIN_PEP517_ARGS": "--locked --profile dev --features as-tested"}


def main() -> None:
    """Runs the steps whose inputs have changed."""
    parser = argparse.ArgumentParser(prog="tools/bootstrap", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--force-build", action="store_true", help="build the extension in any case")
    arguments = parser.parse_args()

    interpreter = f"{sys.executable} {sys.version}"
    if stamp_of("environment") != digest([interpreter]) or not runs(PYTHON):
        make_environment()
        write_stamp("environment", digest([interpreter]))

    locked = digest([LOCK])
    importing = None
    if stamp_of("packages") != locked:
        install_packages()
        write_stamp("packages", locked)
        # Processes of tests begin at once, and each would compile to bytecode all that they import. One
        # process does it now, while the extension is built; if it fails, tests do it.
        importing = subprocess.Popen(
            [PYTHON, "-c", COMPILE],
            cwd=ROOT,
            env=python_variables(),
            stderr=subprocess.DEVNULL,
        )

    sources = digest([locked, *rust_sources()])
    is_built = stamp_of("extension") == sources and EXTENSION.exists() and PROGRAM.exists()
    if arguments.force_build or not is_built:
        build()
        write_stamp("extension", sources)
    if importing is not None:
        importing.wait()


def make_environment() -> None:
    """Makes an empty environment and puts the locked uv into it."""
    say(f"making .venv with Python {sys.version.split()[0]} ({sys.executable})")
    if ENVIRONMENT.exists():
        shutil.rmtree(ENVIRONMENT)
    # Without pip, because Debian's python3 cannot put one there unless python3-venv is installed.
    run([sys.executable, "-m", "venv", "--without-pip", ENVIRONMENT])
    with tempfile.TemporaryDirectory() as directory:
        requirements = Path(directory) / "uv.txt"
        requirements.write_text(locked_entry("uv"))
        options = ["--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:", "-r", requirements]
        run([*pip(), "install", "--disable-pip-version-check", *options])


def pip() -> list[str | Path]:
    """The pip that can install into the new environment."""
    own = [sys.executable, "-m", "pip", "--python", PYTHON]
    if succeeds([*own, "--version"]):  # pip before 22.3 has no --python
        return own
    if succeeds([PYTHON, "-m", "ensurepip"]):
        return [PYTHON, "-m", "pip"]
    return fail(
        f"{sys.executable} has neither a pip of 22.3 or later nor a working ensurepip, so nothing can be "
        "installed into .venv. Install its pip (on Debian and Ubuntu: apt-get install python3-pip or "
        "python3-venv), or name another CPython in WAYSTATION_PYTHON."
    )


def locked_entry(name: str) -> str:
    """The entry of one package in the lock file: its pinned version and hashes."""
    found = re.search(rf"^{re.escape(name)}==(?:.*\\\n)*.*\n", LOCK.read_text(), re.MULTILINE)
    if found is None:
        fail(f"{LOCK.name} does not hold {name}: run 'make lock'")
    return found.group()


def install_packages() -> None:
    """Installs what the lock file names and removes everything else."""
    say(f"installing the packages of {LOCK.name}")
    # The system's certificates, as pip and cargo use them: a proxy's own is only there.
    options = ["--quiet", "--require-hashes", "--no-build", "--system-certs"]
    run([ENVIRONMENT / "bin" / "uv", "pip", "sync", *options, LOCK])
    stamp_path("extension").unlink(missing_ok=True)  # the package itself was among everything else


def build() -> None:
    """Builds the Rust workspace; installs the package in place, and the agent beside the interpreter."""
    say("building the extension and the agent")
    # `maturin develop` would ask the index for the development group, which the lock has settled.
    options = ["--quiet", "--offline", "--no-deps", "--no-build-isolation", "--reinstall", "--no-cache"]
    in_ci = IN_CI if os.environ.get("CI") else {}
    run([ENVIRONMENT / "bin" / "uv", "pip", "install", *options, "--editable", ROOT], **in_ci)


def rust_sources() -> list[Path]:
    """Everything that the extension and the package's metadata are made from."""
    crates = (path for path in (ROOT / "crates").rglob("*") if path.suffix in {".rs", ".toml"})
    backend = (ROOT / "tools" / "packaging").glob("*.py")
    named = [ROOT / "pyproject.toml", ROOT / "Cargo.toml", ROOT / "Cargo.lock"]
    return [*named, *sorted(backend), *sorted(crates)]


def digest(parts: Iterable[str | Path]) -> str:
    """The digest of texts, and of the names and contents of files."""
    total = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else b""
        total.update(f"{part}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


def stamp_path(step: str) -> Path:
    """Where a step records what it was made from."""
    return ENVIRONMENT / f".waystation-{step}"


def stamp_of(step: str) -> str | None:
    """What a step was made from, if it ever was finished."""
    path = stamp_path(step)
    return path.read_text() if path.exists() else None


def write_stamp(step: str, value: str) -> None:
    """Marks a step as finished."""
    stamp_path(step).write_text(value)


def succeeds(command: list[str | Path]) -> bool:
    """Whether a command can be started and exits with 0."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def runs(python: Path) -> bool:
    """Whether an environment's interpreter is still there: the one it links to may have been removed."""
    return succeeds([python, "-c", ""])


def run(command: list[str | Path], **extra: str) -> None:
    """Runs a command with the environment on PATH, and ends with its exit status if it fails."""
    variables = {**python_variables(), "VIRTUAL_ENV": str(ENVIRONMENT), **extra}
    variables["PATH"] = f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    status = subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode
    if status != 0:
        say(f"failed with status {status}: {' '.join(map(str, command))}")
        sys.exit(status if status > 0 else 1)


def python_variables() -> dict[str, str]:
    """The environment without what leads Python to other packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def say(text: str) -> None:
    """Tells the person at the terminal what happens now."""
    print(f"bootstrap: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    """Ends with an explanation."""
    say(text)
    sys.exit(1)


if __name__ == "__main__":
    main()
