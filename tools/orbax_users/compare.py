"""Runs tests twice, with genuine Orbax and with Waystation in its place.

A package's own tests are run where its distribution has some. For the others, tests of this directory drive
the package's own code. Prints one table, and ends with status 1 where a test passes with genuine Orbax only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIME_LIMIT_S = 1800.0


@dataclass(frozen=True)
class Suite:
    """Some tests of one package.

    Attributes:
        package: The package.
        source: Whose tests these are.
        target: What pytest is given.
        plugin: What puts Waystation in the place of Orbax.
        environment: Variables that the package needs.
    """

    package: str
    source: str
    target: str
    plugin: str = "in_place_of_version_1"
    environment: tuple[tuple[str, str], ...] = ()


def suites() -> list[Suite]:
    """All that can be run here."""
    keras = find_spec("keras")
    assert keras is not None, "the environment has Keras"
    assert keras.origin is not None, "Keras is a package with a file of its own"
    own = Path(keras.origin).parent / "src" / "callbacks" / "orbax_checkpoint_test.py"
    return [
        Suite("keras", "its own", str(own), environment=(("KERAS_BACKEND", "jax"),)),
        *(
            Suite(
                package,
                "written here: its distribution has none",
                str(HERE / f"test_{package}.py"),
                # The one that saves by version 0. MaxText imports parts of that which are not here.
                "in_place_of_orbax" if package == "tunix" else "in_place_of_version_1",
            )
            for package in ("tunix", "maxtext", "grain", "flax")
        ),
    ]


def outcomes(suite: Suite, plugin: str) -> dict[str, str]:
    """What became of each test, by its name: `passed`, `failed` or `skipped`."""
    with tempfile.TemporaryDirectory(
        prefix="waystation-orbax-users-", ignore_cleanup_errors=True
    ) as directory:
        report = Path(directory) / "report.xml"
        command = [
            *(sys.executable, "-m", "pytest", suite.target, "-q", "-p", plugin, "-p", "no:cacheprovider"),
            *("-c", os.devnull, "--rootdir", directory, "--basetemp", f"{directory}/tests"),
            *("--import-mode=importlib", f"--junitxml={report}", "--tb=short"),
        ]
        environment = {
            **os.environ,
            **dict(suite.environment),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(HERE)]),
        }
        done = subprocess.run(
            command,
            check=False,  # failed tests are in the report
            env=environment,
            cwd=directory,
            timeout=TIME_LIMIT_S,
            capture_output=True,
            text=True,
        )
        (ROOT / "target").mkdir(exist_ok=True)
        log = ROOT / "target" / f"orbax-users-{suite.package}-{plugin}.log"
        log.write_text(done.stdout + done.stderr)
        if not report.exists():
            raise SystemExit(f"pytest ended with {done.returncode} before it ran a test; see {log}")
        return dict(_read(report))


def _read(report: Path) -> list[tuple[str, str]]:
    """Names and outcomes in a report of pytest."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found.append((f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}", outcome))
    return found


def main() -> int:
    """Runs what is asked for; returns the exit status."""
    known = suites()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", help=f"some of {', '.join(suite.package for suite in known)}")
    asked = parser.parse_args().packages
    unknown = set(asked) - {suite.package for suite in known}
    if unknown:
        parser.error(f"no such package: {', '.join(sorted(unknown))}")
    lost: list[str] = []
    print(f"{'package':<10} {'Orbax':>7} {'ours':>6} {'tests':>6}  whose tests", flush=True)
    for suite in known:
        if asked and suite.package not in asked:
            continue
        genuine, ours = outcomes(suite, "genuine"), outcomes(suite, suite.plugin)
        passed = [sum(outcome == "passed" for outcome in found.values()) for found in (genuine, ours)]
        print(
            f"{suite.package:<10} {passed[0]:>7} {passed[1]:>6} {len(genuine):>6}  {suite.source}", flush=True
        )
        lost += [
            f"{suite.package}: {name}"
            for name, outcome in genuine.items()
            if outcome == "passed" and ours.get(name) != "passed"
        ]
        if passed[0] == 0:
            lost.append(f"{suite.package}: no test passes with genuine Orbax, so that nothing is compared")
    if lost:
        print("\nwith genuine Orbax only (target/orbax-users-*.log tells why):", *lost, sep="\n  ")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
