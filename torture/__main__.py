"""The command line of the torture bench."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torture.bench import Session

ROOT = Path(__file__).resolve().parents[1]
JOURNAL = ROOT / "target" / "torture" / "journal.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    options = _parser().parse_args(arguments)
    code: int = options.command(options)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m torture", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: object, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(command=function)
        return added

    def chosen(added: argparse.ArgumentParser) -> None:
        added.add_argument("--systems", default="", help="a pattern; several are divided by commas")
        added.add_argument("--faults", default="", help="the same")
        added.add_argument("--journal", type=Path, default=JOURNAL)

    run = command("run", _run, "make runs that the journal has not, and print the table")
    chosen(run)
    run.add_argument(
        "--runs", type=int, default=None, help="most runs of each cell; by default every seed once"
    )
    run.add_argument("--seconds", type=float, default=None, help="begin no run after so many seconds")
    run.add_argument("--again", action="store_true", help="also runs that the journal has for these sources")
    run.add_argument("--stop", action="store_true", help="end at the first run that goes wrong")
    run.add_argument("--directory", help="where runs are made; by default the system's for temporary files")
    run.add_argument("--quiet", action="store_true", help="print the table only")
    replay = command("replay", _replay, "make one run again, and say what came of it")
    replay.add_argument("--directory", help="as for `run`")
    replay.add_argument("system")
    replay.add_argument("fault")
    replay.add_argument("seed", type=int)
    show = command("table", _table, "print the table of the journal")
    chosen(show)
    show.add_argument("--bad", action="store_true", help="also each run that was not ok")
    report = command("report", _report, "write docs/reliability.md from the journal")
    report.add_argument("--journal", type=Path, default=JOURNAL)
    report.add_argument("--output", type=Path, default=ROOT / "docs" / "reliability.md")
    planted = command("planted", _planted, "look for planted bugs, each in a copy of the sources")
    planted.add_argument("names", nargs="*", help="of patches; by default all")
    planted.add_argument("--directory", help="as for `run`")
    planted.add_argument("--runs", type=int, default=60, help="most runs of each cell")
    command("list", _list, "print the systems and faults")
    return parser


def _prepare_environment(base: Path) -> None:
    """What libraries read when they are imported: the same in every run."""
    os.environ["WAYSTATION_CACHE_DIR"] = str(base / "cache")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # One thread for each library that would start as many as there are cores, before anybody forks.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@contextlib.contextmanager
def _session(options: argparse.Namespace, journal: Path | None) -> Iterator[Session]:
    """A session in a directory of its own, where its journal is, too, unless another is named."""
    from torture import bench

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # and cleans up
    with tempfile.TemporaryDirectory(prefix="torture-", dir=options.directory) as name:
        base = Path(name)
        _prepare_environment(base)
        with bench.Session(base, journal or base / "journal.jsonl", revision()) as session:
            yield session


def _run(options: argparse.Namespace) -> int:
    from torture import bench, tables

    with _session(options, options.journal) as session:
        until = None if options.seconds is None else time.monotonic() + options.seconds
        cells = bench.cells(options.systems, options.faults)
        made = []
        for run in session.runs(cells, most=options.runs, until=until, again=options.again):
            made.append(run)
            if not options.quiet and run.outcome != "ok":
                sys.stdout.write(tables.line_of(run) + "\n")
                sys.stdout.flush()
            if options.stop and tables.is_bad(run):
                break
        sys.stdout.write(f"{len(made)} runs\n\n{tables.table(session.journal.runs(), cells)}\n")
    return tables.EXIT_BAD if any(map(tables.is_bad, made)) else 0


def _replay(options: argparse.Namespace) -> int:
    from torture import tables

    with _session(options, None) as session:
        run = session.make(options.system, options.fault, options.seed)
    sys.stdout.write(tables.line_of(run) + "\n")
    return tables.EXIT_BAD if tables.is_bad(run) else 0


def _table(options: argparse.Namespace) -> int:
    from torture import bench, outcomes, tables

    runs = outcomes.Journal(options.journal).runs()
    cells = bench.cells(options.systems, options.faults)
    shown = [run for run in runs if (run.system, run.fault) in cells]
    if options.bad:
        for run in filter(tables.is_bad, shown):
            sys.stdout.write(tables.line_of(run) + "\n")
    sys.stdout.write(tables.table(shown, cells) + "\n")
    return 0


def _report(options: argparse.Namespace) -> int:
    from torture import bench, outcomes, tables

    cells = bench.cells()
    runs = [run for run in outcomes.Journal(options.journal).runs() if (run.system, run.fault) in cells]
    options.output.write_text(tables.page(runs, cells))
    return 0


def _planted(options: argparse.Namespace) -> int:
    from torture import planted

    return int(not planted.look_for_all(options.names, options.runs, options.directory))


def _list(_: argparse.Namespace) -> int:
    from torture.faults import FAULTS
    from torture.systems import SYSTEMS

    for name in itertools.chain(SYSTEMS, FAULTS):
        sys.stdout.write(f"{name}\n")
    return 0


# What saves and loads; the rest may change and the runs stay.
_TESTED = [
    *("python", "crates", "Cargo.lock"),
    *(f":(exclude)python/waystation/{name}" for name in ("runtime", "cli", "demo")),
    ":(exclude)crates/waystation-transport",
]


def revision() -> str:
    """The last that has changed the sources that are tortured; with a mark where files were changed since."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", *_TESTED)
    return (git("log", "-1", "--format=%h", "--abbrev=12", "--", *_TESTED) or "unknown") + "+" * bool(changed)


if __name__ == "__main__":
    sys.exit(main())
