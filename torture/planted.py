"""Planted bugs: patches of the library, each applied to a copy of the sources, in which the bench has to
find it.

A patch begins with a line that says what is wrong, and one that names the cells of the table in which it
shows. A bug counts as found if a run there goes wrong which is well without the patch.
"""

from __future__ import annotations

import fcntl
import filecmp
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torture.outcomes import Journal, Run
from torture.tables import EXIT_BAD, is_bad, line_of

ROOT = Path(__file__).resolve().parents[1]
PATCHES = Path(__file__).parent / "planted"
_EXTENSION = Path("python") / "waystation" / "_native.abi3.so"
_AGENT = "waystation-agent"
_BUILDS = ROOT / "target" / "planted"
_LONGEST_S = 1800.0


@dataclass(frozen=True)
class Planted:
    """A planted bug.

    Attributes:
        name: Of its patch.
        what: What is wrong.
        cells: Systems and faults that show it.
        needs_build: Whether it is in Rust.
        is_in_agent: Whether the agent has to be built, too.
        runs: How many runs of each cell it takes, if that are more than usual.
    """

    name: str
    what: str
    cells: list[tuple[str, str]]
    needs_build: bool
    is_in_agent: bool
    runs: int | None = None

    @classmethod
    def read(cls, patch: Path) -> Planted:
        """The bug of a patch."""
        content = patch.read_text()
        what, cells, told, *_ = content.splitlines()
        runs = int(told.removeprefix("Runs: ")) if told.startswith("Runs: ") else None
        named = [cell.strip().split(" ", 1) for cell in cells.removeprefix("Cells: ").split(",")]
        found = [(system, fault) for system, fault in named]
        needs_build, is_in_agent = (f"+++ b/crates/{crate}" in content for crate in ("", _AGENT))
        return cls(patch.stem, what, found, needs_build, is_in_agent, runs)


def all_planted() -> list[Planted]:
    """All of them, those that need no compiler first."""
    found = [Planted.read(patch) for patch in sorted(PATCHES.glob("*.patch"))]
    return sorted(found, key=lambda planted: planted.needs_build)


def look_for(planted: Planted, runs: int, directory: str | None) -> Run | None:
    """Plants a bug in a copy of the sources, and has the bench look for it; returns the run that shows it.

    Args:
        planted: The bug.
        runs: Most runs of each cell.
        directory: Where runs are made.
    """
    where = [] if directory is None else [f"--directory={directory}"]
    with tempfile.TemporaryDirectory(prefix="torture-planted-") as name:
        copy = Path(name)
        _copy(copy)
        patch = PATCHES / f"{planted.name}.patch"
        subprocess.run(["git", "apply", "--whitespace=nowarn", patch], cwd=copy, check=True)
        if planted.needs_build:
            _build(copy, planted)
        for run in _bad_runs(copy, planted, planted.runs or runs, where):
            if not _is_bad_without(run, where):
                return run
    return None


def _copy(copy: Path) -> None:
    """The sources as they are here, and the extension that was built of them."""
    listed = subprocess.run(
        [
            "git",
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
            "python",
            "crates",
            "torture",
            "tests/support",
            "tests/memory/damages.py",
            "Cargo*",
        ],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    with io.BytesIO() as content:
        with tarfile.open(fileobj=content, mode="w") as archive:
            for path in map(os.fsdecode, filter(None, listed.stdout.split(b"\0"))):
                if (ROOT / path).is_file():
                    archive.add(ROOT / path, path)
        content.seek(0)
        with tarfile.open(fileobj=content) as archive:
            archive.extractall(copy, filter="data")
    shutil.copy(ROOT / _EXTENSION, copy / _EXTENSION)


def _build(copy: Path, planted: Planted) -> None:
    """Compiles the extension, and the agent where the bug is there.

    That is done at one place, for one bug at a time, where no file is written again that is as it was for the
    bug before: only what the two bugs change is compiled.
    """
    _BUILDS.mkdir(parents=True, exist_ok=True)
    with (_BUILDS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _build_at(_BUILDS / "sources", copy, planted)


def _build_at(sources: Path, copy: Path, planted: Planted) -> None:
    for path in [*copy.glob("Cargo*"), *copy.glob("crates/**/*")]:
        there = sources / path.relative_to(copy)
        if path.is_file() and not (there.is_file() and filecmp.cmp(path, there, shallow=False)):
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, there)
    told = {
        "CARGO_PROFILE_RELEASE_LTO": "off",
        "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "16",
        "CARGO_PROFILE_RELEASE_DEBUG": "0",
        "CARGO_INCREMENTAL": "1",
        "PYO3_PYTHON": sys.executable,
        "PYO3_BUILD_EXTENSION_MODULE": "1",
        "CARGO_TARGET_DIR": str(_BUILDS),
    }
    command = ["cargo", "build", "--release", "--quiet", "--offline", "--package", "waystation-python"]
    command += ["--package", _AGENT] * planted.is_in_agent
    subprocess.run(command, cwd=sources, check=True, env=os.environ | told)
    (built,) = (_BUILDS / "release").glob("lib*native*.so")
    shutil.copy(built, copy / _EXTENSION)
    if planted.is_in_agent:
        shutil.copy(_BUILDS / "release" / _AGENT, copy / _AGENT)


def _bad_runs(copy: Path, planted: Planted, runs: int, where: list[str]) -> Iterator[Run]:
    """The runs that go wrong in the copy, one after another."""
    journal = copy / "journal.jsonl"
    seen: set[tuple[str, str, int]] = set()
    for system, fault in planted.cells:
        while True:
            # Each call goes on after the run at which the one before has stopped.
            options = [f"--systems={system}", f"--faults={fault}", f"--runs={runs}", f"--journal={journal}"]
            done = _torture(copy, "run", *options, "--stop", "--quiet", *where)
            if done.returncode not in (0, EXIT_BAD):
                raise RuntimeError(
                    f"the bench does not run with '{planted.name}': {done.stdout}{done.stderr}"
                )
            bad = [run for run in Journal(journal).runs() if is_bad(run) and run.key not in seen]
            seen |= {run.key for run in bad}
            yield from bad
            if not bad:
                break


def _is_bad_without(run: Run, where: list[str]) -> bool:
    """Whether the same run goes wrong here, too."""
    return _torture(ROOT, "replay", *where, run.system, run.fault, str(run.seed)).returncode != 0


def _torture(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    told = {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "python")])}
    if (tree / _AGENT).exists():
        told["WAYSTATION_AGENT"] = str(tree / _AGENT)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "torture", *arguments],
        cwd=tree,
        env=os.environ | told,
        capture_output=True,
        text=True,
        check=False,
        timeout=_LONGEST_S,
    )


def look_for_all(names: list[str], runs: int, directory: str | None) -> bool:
    """Looks for each, and tells what was found; returns whether nearly all were."""
    wanted = [planted for planted in all_planted() if not names or planted.name in names]
    missed = []
    for planted in wanted:
        run = look_for(planted, runs, directory)
        if run is None:
            missed.append(planted.name)
        told = "NOT FOUND" if run is None else f"found: {line_of(run)[:200]}"
        sys.stdout.write(f"{planted.name}: {told}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(wanted) - len(missed)} of {len(wanted)} planted bugs were found\n")
    return len(missed) <= len(wanted) // 20
