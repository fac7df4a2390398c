"""Audits the wheels in `dist/`, and uses them as people would who install them (`make test-wheels`).

1. Each wheel: both programs are there, stripped, for the processor of the tag, and need no library or symbol
   that the tag does not promise (auditwheel); the extension uses the stable ABI alone (abi3audit); the
   licences of its crates are in it; it is at most 15 MB; an index can show its description (twine).
2. Each Python from 3.11 to 3.14 that this machine has, or that Debian has, which is unpacked below `target/`:
   the wheel is installed into fresh environments with NumPy alone, with JAX alone and with torch alone. A
   program saves and loads there, the command line reads the checkpoint, and emulated hosts keep a state in
   the memory of agents. With the oldest of these Pythons so do the oldest releases of NumPy, JAX, torch and
   all else that the package says it takes.
3. The wheels for other processors and for musl: under qemu and Debian's packages, as far as these go.

The last lines say for each wheel and Python what was tried and what this machine could not try. Needs the
package registries, and takes a quarter of an hour and more.
"""

from __future__ import annotations

import argparse
import json
import platform as machine
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools")]

import check_packages  # noqa: E402
import debian_packages  # noqa: E402
from build_wheels import PLATFORMS, Platform  # noqa: E402
from check_packages import run  # noqa: E402

MOST_BYTES = 15_000_000
PROGRAMS = Path(sys.executable).parent
PLACE = ROOT / "target" / "pythons"
UV = ROOT / ".venv" / "bin" / "uv"
INSTALL = ["pip", "install", "--quiet", "--system-certs", "--no-build"]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
# The releases of Debian that have a Python which this machine may lack, and Debian's names of processors.
DEBIAN_PYTHONS = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}
DEBIAN_PROCESSORS = {"aarch64": "arm64", "x86_64": "amd64"}
# What packages of PyPI expect of any Linux.
EXPECTED_LIBRARIES = ["libstdc++6", "zlib1g"]
MACHINES = {"aarch64": "EM_AARCH64", "x86_64": "EM_X86_64"}
# The libraries that every Linux with the C library has, by whether that is musl.
LIBRARIES = {
    False: re.compile(r"lib(c|m|dl|rt|pthread|gcc_s)\.so\.\d|ld-linux-\S+"),
    True: re.compile(r"libc\.so|libc\.musl-\w+\.so\.1"),
}

WITH_TORCH = """
import torch, waystation
state = {"weights": torch.arange(1000.0, dtype=torch.bfloat16), "step": 7}
waystation.save_async("run/step_10", state).result()
loaded = waystation.load("run/step_10")
assert loaded["step"] == 7 and torch.equal(loaded["weights"], state["weights"])
"""

WITH_JAX = """
import jax, jax.numpy as jnp, waystation
state = {"weights": jnp.arange(1000.0, dtype=jnp.bfloat16), "step": 7}
waystation.save_async("run/step_8", state).result()
loaded = waystation.load("run/step_8", jax.tree.map(lambda leaf: leaf, state))
assert loaded["step"] == 7 and (loaded["weights"] == state["weights"]).all()
"""

OF_DCP = """
import torch, waystation.integrations.dcp as dcp
dcp.save({"weights": torch.ones(9)}, checkpoint_id="run/step_9")
wanted = {"weights": torch.zeros(9)}
dcp.load(wanted, checkpoint_id="run/step_9")
assert wanted["weights"].eq(1).all()
"""

ONE_HOST = """
import numpy
from waystation.memory import MemoryTier
from waystation.training import Checkpointer, save_decision_policies

never = save_decision_policies.SpecificStepsPolicy(())
with Checkpointer("memory-run", save_decision_policy=never, memory=MemoryTier()) as checkpointer:
    if checkpointer.latest is None:
        checkpointer.save_async(3, {"weights": numpy.arange(1000.0), "step": 3})
        checkpointer.wait()
    else:
        state = checkpointer.load()
        assert state["step"] == 3 and (state["weights"] == numpy.arange(1000.0)).all()
        print("loaded", state["step"], "from", checkpointer.latest.tiers, flush=True)
"""

TWO_HOSTS_OF_TORCH = "import torch\ntorch.distributed.init_process_group('gloo')\n" + ONE_HOST


# Of each environment: what is installed with the wheel, what else is tried, and how agents are launched for
# which program.
ENVIRONMENTS: dict[str, tuple[list[str], str | None, list[str], str]] = {
    "NumPy": ([], None, [], ONE_HOST),
    "JAX": (["jax"], WITH_JAX, ["--jax", "--hosts", "2"], check_packages.TWO_HOSTS),
    "torch": (["torch"], WITH_TORCH + OF_DCP, ["--hosts", "2"], TWO_HOSTS_OF_TORCH),
    "oldest": (["jax", "torch"], WITH_JAX + WITH_TORCH + OF_DCP, ["--hosts", "2"], TWO_HOSTS_OF_TORCH),
}


def main() -> None:
    """Tries what the command line names, and prints a table of what was tried."""
    parser = argparse.ArgumentParser(prog="make test-wheels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=ROOT / "dist", help="the folder of the wheels")
    parser.add_argument("--pythons", nargs="*", default=VERSIONS, help=f"of {', '.join(VERSIONS)}")
    parser.add_argument("--environments", nargs="*", default=list(ENVIRONMENTS), help=", ".join(ENVIRONMENTS))
    parser.add_argument("--release", action="store_true", help="refuse what must not be published")
    arguments = parser.parse_args()
    wheels = sorted(arguments.directory.resolve().glob("waystation-*.whl"))
    if not wheels:
        parser.error(f"{arguments.directory} holds no wheel: run 'make wheels'")
    if arguments.release:
        refuse_reserved_addresses()
    run([PROGRAMS / "python", "-m", "twine", "check", "--strict", *wheels])
    tried: list[tuple[str, str]] = []
    for wheel in wheels:
        tried.append((wheel.name, audit(wheel)))
        for version in arguments.pythons:
            tried += [
                (f"  Python {version}", each) for each in try_python(wheel, version, arguments.environments)
            ]
    width = max(len(name) for name, _ in tried)
    print("\n".join(f"{name:{width}}  {outcome}" for name, outcome in tried))


def refuse_reserved_addresses() -> None:
    """Ends if `[project.urls]` has an address that nobody can reach."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    reserved = [url for url in project["urls"].values() if re.search(r"\.(example|invalid|test)(/|$)", url)]
    if reserved:
        raise SystemExit(
            f"[project.urls] in pyproject.toml has reserved addresses, which lead nowhere: "
            f"{', '.join(reserved)}. "
            "Name the project's own before a release"
        )


# ----------------------------------------------------------------------------------------------------
# What is in a wheel


def audit(wheel: Path) -> str:
    """Checks what a wheel holds against what its name promises, and says how large it is."""
    check_packages.check_content(wheel)
    if wheel.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {MOST_BYTES}")
    platform = platform_of(wheel)
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        programs = [Path(folder) / check_packages.EXTENSION, *Path(folder).glob("*.data/scripts/*")]
        for program in programs:
            check_program(program, platform)
    report = json.loads(run([PROGRAMS / "auditwheel", "show", "--json", wheel]))
    if not is_at_most(report["overall_tag"], platform.name) or report["unsupported_isa"]:
        raise SystemExit(f"{wheel.name}: auditwheel finds it to be {report['overall_tag']} only: {report}")
    run([PROGRAMS / "abi3audit", "--strict", "--assume-minimum-abi3", "3.11", wheel])
    return f"{wheel.stat().st_size / 1e6:.1f} MB, audited: fits {report['overall_tag']}, stable ABI of 3.11"


def platform_of(wheel: Path) -> Platform:
    """The platform that a wheel is named for."""
    found = [
        each for each in PLATFORMS if each.name in wheel.name.removesuffix(".whl").split("-")[-1].split(".")
    ]
    if not found:
        raise SystemExit(
            f"{wheel.name} is for none of {', '.join(each.name for each in PLATFORMS)}: see build_wheels.py"
        )
    return found[0]


def check_program(program: Path, platform: Platform) -> None:
    """Checks the processor, the libraries and the symbols that a program or an extension names."""
    with program.open("rb") as stream:
        elf = ELFFile(stream)
        if elf["e_machine"] != MACHINES[platform.processor]:
            raise SystemExit(f"{program.name} is for {elf['e_machine']}, and its wheel for {platform.name}")
        dynamic = elf.get_section_by_name(".dynamic")
        libraries = [tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"]
        if foreign := [name for name in libraries if not LIBRARIES[platform.is_musl].fullmatch(name)]:
            raise SystemExit(
                f"{program.name} needs {', '.join(foreign)}, which not every {platform.name} has"
            )
        versions = elf.get_section_by_name(".gnu.version_r")
        named = [each.name for _, group in versions.iter_versions() for each in group] if versions else []
        newest = tuple(int(part) for part in platform.tag.split("_")[1:])
        for name in named:
            found = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", name)
            if found and (int(found[1]), int(found[2])) > newest:
                raise SystemExit(f"{program.name} needs {name}, and its wheel promises {platform.tag}")


def is_at_most(found: str, promised: str) -> bool:
    """Whether a tag that auditwheel finds needs no newer C library than another of the same kind."""
    kinds, versions = [], []
    for tag in (found, promised):
        parts = re.fullmatch(r"(manylinux|musllinux)_(\d+)_(\d+)_(\w+)", tag)
        if parts is None:
            return False
        kinds.append((parts[1], parts[4]))
        versions.append((int(parts[2]), int(parts[3])))
    return kinds[0] == kinds[1] and versions[0] <= versions[1]


# ----------------------------------------------------------------------------------------------------
# Using it


@dataclass(frozen=True)
class Emulated:
    """A Python of another platform: a folder of Debian's packages, and the program that runs what is in it.

    Attributes:
        python: A script that runs it.
        emulator: The command that precedes any other program of the platform.
    """

    python: Path
    emulator: list[str]


def try_python(wheel: Path, version: str, environments: list[str]) -> Iterator[str]:
    """Uses a wheel with one Python, and yields what was done with it."""
    platform = platform_of(wheel)
    try:
        if platform.is_musl:
            yield "not tried: neither this machine nor Debian has a Python on musl"
        elif platform.processor == processor():
            python = native_python(version)
            for name in environments:
                if name == "oldest" and version != VERSIONS[0]:
                    continue
                yield try_environment(wheel, python, name)
        else:
            yield try_emulated(wheel, emulated_python(version, platform), version)
    except (NoPython, debian_packages.NoDebian) as error:
        yield f"not tried: {error}"


def try_environment(wheel: Path, python: Path, name: str) -> str:
    """Installs a wheel into a fresh environment, and does with it what a first user does."""
    needed, program, launch, hosts = ENVIRONMENTS[name]
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as folder:
        place, environment = Path(folder) / "work", Path(folder) / "environment"
        place.mkdir()
        run([UV, "venv", "--quiet", "--no-python-downloads", "--python", python, environment])
        programs = environment / "bin"
        if name == "oldest":
            run([UV, *INSTALL, "--python", programs / "python", wheel, *oldest(wheel, needed)])
        elif needed:
            run([UV, *INSTALL, "--python", programs / "python", wheel, *needed])
        else:
            pip = [PROGRAMS / "python", "-m", "pip", "--python", programs / "python"]
            run([*pip, "install", "--quiet", "--only-binary", ":all:", wheel])
        run([programs / "python", "-c", check_packages.SAVE_AND_LOAD], place)
        if program is not None:
            run([programs / "python", "-c", program], place)
        for command in (
            ["inspect", "run/step_7"],
            ["verify", "run/step_7"],
            ["ls", "run"],
            ["doctor"],
            ["--version"],
        ):
            run([programs / "waystation", *command], place)
        run([programs / "python", "-m", "waystation", "--help"], place)
        run([programs / "python", "-m", "waystation", "inspect", "--help"], place)
        check_packages.use_memory_tier(programs, place, launch, hosts)
        installed = run([UV, "pip", "list", "--quiet", "--format", "json", "--python", programs / "python"])
    versions = {each["name"]: each["version"] for each in json.loads(installed)}
    shown = ", ".join(f"{each} {versions[each]}" for each in ["numpy", *needed])
    return f"{shown}: save, load, command line, agents of {2 if needed else 1} emulated host(s)"


def oldest(wheel: Path, extras: list[str]) -> list[str]:
    """The oldest release of each package that a wheel takes, alone and with some extras."""
    with zipfile.ZipFile(wheel) as files:
        (metadata,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        lines = files.read(metadata).decode().splitlines()
    pattern = re.compile(r"Requires-Dist: ([\w-]+)>=([\w.]+)(?: ; extra == '([\w-]+)')?")
    found = [match.groups() for match in map(pattern.fullmatch, lines) if match]
    return [f"{name}=={version}" for name, version, extra in found if extra is None or extra in extras]


def try_emulated(wheel: Path, emulated: Emulated, version: str) -> str:
    """Uses a wheel of another processor: a program, the command line, and an agent, all emulated."""
    platform = platform_of(wheel)
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as folder:
        site, place = Path(folder) / "site", Path(folder) / "work"
        place.mkdir()
        # The newest that Debian's C library allows, whose version the release of Debian decides.
        target = ["--python-platform", f"{platform.processor}-manylinux_2_36", "--python-version", version]
        run([UV, *INSTALL, *target, "--python", PROGRAMS / "python", "--target", site, wheel])
        agent = write_script(
            Path(folder) / "waystation-agent", [*emulated.emulator, str(site / "bin" / "waystation-agent")]
        )
        variables = {"PYTHONPATH": str(site), "WAYSTATION_AGENT": str(agent)}
        command = [emulated.python, "-m", "waystation"]
        run([emulated.python, "-c", check_packages.SAVE_AND_LOAD], place, variables)
        for arguments in (
            ["inspect", "run/step_7"],
            ["verify", "run/step_7"],
            ["ls", "run"],
            ["doctor"],
            ["--version"],
        ):
            run([*command, *arguments], place, variables)
        # The launch only starts programs: it is of this machine, which cannot import what is in `site`.
        programs, paths = ROOT / ".venv" / "bin", f"PYTHONPATH={variables.pop('PYTHONPATH')}"
        python = write_script(Path(folder) / "python", ["env", paths, str(emulated.python)])
        check_packages.use_memory_tier(programs, place, [], ONE_HOST, variables, python)
    return "NumPy, emulated: save, load, command line, an agent"


def native_python(version: str) -> Path:
    """A Python of this machine, or one of Debian's packages that runs where it is unpacked."""
    found = subprocess.run(
        [ROOT / "tools" / "find-python", version],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
        text=True,
    )
    if found.returncode == 0:
        return Path(found.stdout.strip())
    folder = debian_python(version, processor())
    python = folder / "usr" / "bin" / f"python{version}"
    # It is linked against the C library of its Debian, which may be newer than this machine's.
    loader = next(folder.glob("usr/lib*/ld-linux-*.so.*"), None) or next(
        folder.glob("usr/lib/*/ld-linux-*.so.*")
    )
    libraries = [
        folder / "usr" / "lib" / f"{processor()}-linux-gnu",
        folder / "lib" / f"{processor()}-linux-gnu",
    ]
    patch = ["--set-interpreter", loader, "--force-rpath", "--set-rpath", ":".join(map(str, libraries))]
    run([PROGRAMS / "patchelf", *patch, python])
    return python


def emulated_python(version: str, platform: Platform) -> Emulated:
    """A Python of another processor, of Debian's packages, under qemu."""
    qemu = debian_packages.unpack(
        PLACE / "qemu",
        ["qemu-user-static"],
        "bookworm",
        DEBIAN_PROCESSORS[processor()],
        debian_packages.OF_THIS_MACHINE,
    )
    folder = debian_python(version, platform.processor)
    emulator = [str(qemu / "usr" / "bin" / f"qemu-{platform.processor}-static"), "-L", str(folder)]
    python = folder / "usr" / "bin" / f"python{version}"
    return Emulated(write_script(folder / "python", [*emulator, str(python)]), emulator)


def debian_python(version: str, processor: str) -> Path:
    """Unpacks a Python of Debian's with all that it needs, and returns the folder."""
    if version not in DEBIAN_PYTHONS:
        raise NoPython(f"neither this machine nor Debian has a Python {version} for {processor}")
    packages = [f"python{version}", *EXPECTED_LIBRARIES]
    suite, architecture = DEBIAN_PYTHONS[version], DEBIAN_PROCESSORS[processor]
    folder = debian_packages.unpack(PLACE / f"{version}-{processor}", packages, suite, architecture)
    for name in ("lib", "lib64"):  # Debian installs these links by a script
        if not (folder / name).exists() and (folder / "usr" / name).exists():
            (folder / name).symlink_to(f"usr/{name}")
    return folder


class NoPython(Exception):
    """There is no Python to try a wheel with; the message says why."""


def processor() -> str:
    """The processor of this machine, as tags of wheels name it."""
    return machine.machine()


def write_script(path: Path, command: list[str]) -> Path:
    """Writes a program that runs a command with what arguments it gets."""
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o755)
    return path


if __name__ == "__main__":
    main()
