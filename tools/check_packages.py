"""Installs the built packages as users do, away from the checkout, and uses what they install.

`tools/check_packages.py DIRECTORY` takes the wheel and the sdist in the directory (`make wheel` writes both):

1. the wheel holds the extension and the agent, both stripped, the packages beside the library, and the
   licences;
2. pyright knows the types of all that the wheel exports (`--verifytypes`), beside the packages of the
   environment that this runs in;
3. the extras name distributions that the registry has (pip resolves `[all]` without installing it);
4. the wheel, and a wheel that pip builds from the sdist, each install into a fresh environment. There a
   program saves and loads, the command line reads the checkpoint, and two emulated hosts keep a state in
   memory.

It takes minutes and needs the registry, so the test suite does not run it. Uses the standard library alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
EXTENSION = "waystation/_native.abi3.so"
BESIDE = ("waystation_demo/train.py", "waystation_launch/launch.py")
LEAST_LICENSE_BYTES = 50_000
PYRIGHT = "pyright[nodejs]>=1.1.400"  # with the Node.js of PyPI; what it runs comes from npm

SAVE_AND_LOAD = """
import numpy, waystation
state = {"weights": numpy.arange(1000.0), "step": 7}
waystation.save("run/step_7", state)
loaded = waystation.load("run/step_7")
assert loaded["step"] == 7 and (loaded["weights"] == state["weights"]).all()
print(waystation.__file__)
"""

TWO_HOSTS = """
import os
import jax, numpy
from waystation.memory import MemoryTier
from waystation.training import Checkpointer, save_decision_policies

jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(
    num_processes=int(os.environ["WAYSTATION_PROCESS_COUNT"]),
    process_id=int(os.environ["WAYSTATION_PROCESS_INDEX"]),
)
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


def main() -> None:
    """Checks every package in the directory, and exits with an explanation if one is wrong."""
    directory = Path(sys.argv[1]).resolve()
    (wheel,), (source,) = directory.glob("waystation-*.whl"), directory.glob("waystation-*.tar.gz")
    check_content(wheel)
    with tempfile.TemporaryDirectory() as place:
        check_types(wheel, Path(place))
        first = fresh_environment(Path(place) / "wheel")
        run([first / "python", "-m", "pip", "install", "--quiet", "--dry-run", f"{wheel}[all]"])
        for package, environment in ((wheel, first), (source, None)):
            use(package, environment or fresh_environment(Path(place) / "sdist"), Path(place) / package.name)
            say(f"{package.name} works")


def check_content(wheel: Path) -> None:
    """Looks into the wheel: both programs are there and stripped, and the licences."""
    with zipfile.ZipFile(wheel) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        (agent,) = [name for name in entries if name.endswith(".data/scripts/waystation-agent")]
        if not entries[agent].external_attr >> 16 & 0o100:
            raise SystemExit(f"{wheel.name}: {agent} is not executable")
        for name in (EXTENSION, agent):
            if b"\0.symtab\0" in archive.read(name):  # the name of a section that stripping removes
                raise SystemExit(f"{wheel.name}: {name} is not stripped")
            say(f"{name}: {entries[name].file_size / 1e6:.1f} MB")
        for name in BESIDE:
            if name not in entries:
                raise SystemExit(f"{wheel.name}: {name} is missing")
        (licenses,) = [name for name in entries if name.endswith("/THIRD-PARTY-LICENSES.txt")]
        if entries[licenses].file_size < LEAST_LICENSE_BYTES:
            raise SystemExit(f"{wheel.name}: {licenses} is too short to hold the licences of all crates")


def check_types(wheel: Path, place: Path) -> None:
    """Checks that the checkers of those who use the wheel know the types of all that it exports."""
    programs = fresh_environment(place / "types")
    pip = [programs / "python", "-m", "pip", "install", "--quiet"]
    run([*pip, "--no-deps", wheel])
    run([*pip, PYRIGHT])
    (site,) = (place / "types").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # JAX, torch and the like
    if unknown := untyped(programs, place):
        raise SystemExit(
            f"{wheel.name}: pyright does not know all of the types of {len(unknown)} names; give them "
            f"annotations: {', '.join(unknown[:20])}"
        )


def untyped(programs: Path, place: Path) -> list[str]:
    """The names of the package whose types pyright knows in part, or not at all."""
    command = [programs / "pyright", "--verifytypes", "waystation", "--ignoreexternal", "--outputjson"]
    say(" ".join(map(str, command)))
    # It asks the Python on PATH where packages are; of one that it is told it finds none here.
    environment = {**os.environ, "PATH": os.pathsep.join([str(programs), os.environ["PATH"]])}
    done = subprocess.run(command, cwd=place, env=environment, stdout=subprocess.PIPE, check=False, text=True)
    try:
        found = json.loads(done.stdout)["typeCompleteness"]
    except (ValueError, KeyError):
        raise SystemExit(f"pyright did not check the types: {done.stdout[:2000]}") from None
    if not found.get("pyTypedPath"):
        raise SystemExit(f"pyright does not find the package, or its py.typed: {done.stdout[:2000]}")
    symbols = found["symbols"]
    return [each["name"] for each in symbols if not each["isTypeKnown"] or each["isTypeAmbiguous"]]


def fresh_environment(path: Path) -> Path:
    """Makes an environment with nothing but pip, and returns the folder of its programs."""
    run([sys.executable, "-m", "venv", path])
    return path / "bin"


def use(package: Path, programs: Path, place: Path) -> None:
    """Installs a package and does with it what a first user does."""
    place.mkdir()
    run([programs / "python", "-m", "pip", "install", "--quiet", f"{package}[jax,memory]"])
    run([programs / "python", "-c", SAVE_AND_LOAD], place)
    for command in ("inspect", "verify"):
        run([programs / "waystation", command, "run/step_7"], place)
    run([programs / "waystation", "ls", "run"], place)
    run([programs / "waystation", "doctor"], place)
    use_memory_tier(programs, place, ["--jax", "--hosts", "2"], TWO_HOSTS)


def use_memory_tier(
    programs: Path,
    place: Path,
    options: list[str],
    program: str,
    variables: Mapping[str, str] = MappingProxyType({}),
    python: Path | None = None,
) -> None:
    """Saves to the memory of emulated hosts, ends the program, and loads in the next one.

    Args:
        programs: The folder of the `waystation` that launches.
        place: The current directory.
        options: Options of `waystation launch`.
        program: What each process of the program runs; the second time it prints from where it loads.
        variables: What the environment has besides.
        python: What runs the program; None for that of the same folder.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        launch = [
            programs / "waystation",
            "launch",
            *options,
            "--agent",
            f"{memory}/agents",
            "--agent-memory",
        ]
        launch += ["64MiB", "--json", "--", python or programs / "python", "-c", program]
        report = json.loads(run(launch, place, variables))
        try:
            run(launch, place, variables)
        finally:
            for agent in report.get("agents") or [report["agent"]]:
                os.kill(agent["pid"], signal.SIGTERM)


def run(
    command: list[str | Path], place: Path | None = None, variables: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Runs a command away from the checkout, and returns what it prints; a failure ends this program."""
    # Crates that both builds need are compiled once.
    environment = {"CARGO_TARGET_DIR": str(ROOT / "target"), **os.environ}
    environment.pop("PYTHONPATH", None)
    environment.update(variables)
    say(" ".join(map(str, command))[:160].split("\n")[0])
    done = subprocess.run(
        command,
        cwd=place or tempfile.gettempdir(),
        env=environment,
        stdout=subprocess.PIPE,
        check=False,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\n'{command[0]}' exited with status {done.returncode}")
    return done.stdout


def say(text: str) -> None:
    """Tells the person at the terminal what happens now."""
    print(f"packages: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
