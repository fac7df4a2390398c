"""Runs what is long by nature, part by part, and prints what it ran and how it ended: `make test-long`.

    python tools/test_long.py               # each part to its end: hours
    python tools/test_long.py --seconds 3600  # each part gets an equal share of what is left of the time
    python tools/test_long.py --parts 7 10    # these parts alone, by their numbers (--list shows them)

A part that its share ends has still tested what it came to. Exits with 1 if a part fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE_TEST = ("cargo", "test", "--locked", "--release")
ASAN = {"RUSTFLAGS": "-Zsanitizer=address", "CARGO_TARGET_DIR": str(ROOT / "target" / "asan")}
END_S = 60.0  # as long as a part that is interrupted may take to end


@dataclass(frozen=True)
class Part:
    """One command, and what it needs.

    Attributes:
        what: What it tests, for people.
        command: Its words.
        environment: What it finds there besides what is in this program's own.
        need: A command that succeeds where this can be run.
        in_share: More words where the part has a share of the time, so that it ends by itself, or at the
            first failure, which is then not lost.
    """

    what: str
    command: tuple[str, ...]
    environment: dict[str, str] | None = None
    need: tuple[str, ...] = ("true",)
    in_share: tuple[str, ...] = ()


def parts(processes: str) -> list[Part]:
    """All parts, in the order in which they run."""
    agent = (*RELEASE_TEST, "-p", "waystation-agent")
    pytest = (sys.executable, "-m", "pytest", "--quiet", "--numprocesses", processes, "--dist", "worksteal")
    asan = ("cargo", "+nightly", "test", "--locked", "--quiet", "--target", "x86_64-unknown-linux-gnu")
    torture = (sys.executable, "-W", "ignore", "-m", "torture", "run", "--quiet", "--systems=waystation*")
    return [
        Part("the agents' protocol simulated", (*agent, "--test", "simulation", "--", "--nocapture")),
        Part("every order of the agents' protocol", (*agent, "--test", "model", "--", "--nocapture")),
        Part("every order of threads at a slot", (*agent, "--lib", "--features=loom", "slots::hold")),
        Part("random geometries of reads", (*RELEASE_TEST, "-p", "waystation-io", "--lib", "geometr")),
        Part(
            "random files written",
            (*RELEASE_TEST, "-p", "waystation-io", "--test", "engine", "naive_reference"),
        ),
        Part(
            "waystation-format and waystation-io with the address sanitizer",
            (*asan, "-p", "waystation-format", "-p", "waystation-io", "--lib", "--tests"),
            ASAN,
            ("cargo", "+nightly", "--version"),
        ),
        Part(
            "every step of kill walks, kill schedules, random examples",
            (*pytest, "-m", "long or hypothesis", "--timeout=7200"),
            in_share=("--exitfirst",),
        ),
        Part(
            "a million damaged models",
            (sys.executable, "-m", "fuzz.open_path", "--executions=1000000"),
            in_share=("--seconds={seconds}",),
        ),
        Part("fuzzers of Rust, 10 minutes each", ("tools/fuzz", "600"), need=("cargo", "fuzz", "--version")),
        Part(
            "torture, up to 50 runs of each fault",
            (*torture, "--directory=/dev/shm", "--runs=50"),
            in_share=("--seconds={seconds}",),
        ),
    ]


def run(part: Part, limit_s: float | None) -> str:
    """Runs a part; returns how it ended."""
    if subprocess.run(part.need, check=False, capture_output=True).returncode != 0:
        return f"not run: '{' '.join(part.need)}' fails"
    command = list(part.command)
    if limit_s is not None:
        command += [word.format(seconds=int(limit_s)) for word in part.in_share]
    environment = {**os.environ, "WAYSTATION_TEST_LONG": "1", **(part.environment or {})}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, process_group=0)
    try:
        status = process.wait(None if limit_s is None else limit_s + END_S * bool(part.in_share))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        return "ended at its share of the time"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return "passed" if status == 0 else f"FAILED with status {status}"


def main() -> None:
    """Runs all parts, and prints a table of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, help="how long all parts together may take, about")
    parser.add_argument("--processes", default="auto", help="of pytest")
    parser.add_argument("--parts", type=int, nargs="+", metavar="NUMBER", help="run these alone")
    parser.add_argument("--list", action="store_true", help="print the parts and run nothing")
    options = parser.parse_args()
    begin_s = time.monotonic()
    known = dict(enumerate(parts(options.processes), start=1))
    unknown = set(options.parts or ()) - known.keys()
    if unknown:
        parser.error(f"there is no part {min(unknown)}; the parts are 1 to {len(known)}")
    if options.list:
        for number, part in known.items():
            print(f"{number:2}  {part.what}: {' '.join(part.command)}")
        return
    left = [part for number, part in known.items() if number in (options.parts or known)]
    rows = []
    while left:
        part = left.pop(0)
        begun_s = time.monotonic()
        limit_s = None
        if options.seconds is not None:
            limit_s = max(0.0, begin_s + options.seconds - begun_s) / (len(left) + 1)
        print(f"test-long: {part.what}: {' '.join(part.command)}", flush=True)
        outcome = run(part, limit_s)
        rows.append((part.what, time.monotonic() - begun_s, outcome))
    print("\ntest-long ran:")
    for what, took_s, outcome in rows:
        print(f"{took_s:8.0f} s  {what}: {outcome}")
    if any(outcome.startswith("FAILED") for _, _, outcome in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
