"""What every test runs under: this checkout, eight fake CPU devices for JAX, and Hypothesis without a clock.

The variables are read when a process starts or JAX is first imported, so they are set here, before any test
module is. A machine with a GPU runs the tests on it with `JAX_PLATFORMS=cuda make test`.
"""

import atexit
import gc
import inspect
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
DEVICES_FLAG = "--xla_force_host_platform_device_count"

# The tests that take longest, which begin first, so that no process has them to do when others are done.
# Those of one directory share a cluster of Ray, which takes ten seconds of CPU and more to start.
CLUSTER = "tests/runtime/cluster"
FIRST = (
    CLUSTER,
    "tests/demo/test_runtime_story.py",
    "tests/memory/test_memory_hosts.py",
    "tests/memory/test_damaged_slots.py",
    "tests/torture",
    "tests/docs/test_code_blocks.py",
    "tests/demo",
    "tests/surface/test_values.py",
    "tests/orbax/test_rules.py",
    "tests/coordination/test_out_of_step.py",
    "tests/checkpoint/test_kill_walk.py",
    "tests/distributed/test_local_storage_deaths.py",
    "tests/gpu/test_simulated",
    "tests/benchmarks/test_memory.py",
    "tests/memory/test_kill_schedules.py",
    "tests/distributed",
    "tests/memory",
    "tests/benchmarks",
    "tests/orbax",
    "tests/checkpoint",
    "tests/cli/test_launch",
)

# Tests and the programs that they start, wherever that is, import what lies beside these tests, also in an
# environment that another checkout has been installed into.
for directory in (str(ROOT), str(ROOT / "python")):
    sys.path.insert(0, directory)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [directory, os.environ.get("PYTHONPATH")]))

# A shell that runs this in the background has let it ignore Ctrl-C, as would all programs that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if DEVICES_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES_FLAG}=8".strip()

# XLA compiles in half the time what is only small. OpenBLAS has no threads that spin beside other tests.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# By itself Ray gives hosts of the runtime a niceness of 15: beside other tests they would hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")

# No deadlines: the machine may be busy, and no test is about time. In CI the examples are the same in
# every run, so that a red run points at the change; elsewhere, and in `make test-long`, each run looks at new
# ones. Where a test does not say how many examples it tries, `make test` tries 25 and `make test-long` 2,000.
settings.register_profile(
    "local", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True)
settings.register_profile("long", settings.get_profile("local"), max_examples=2000, print_blob=True)
settings.load_profile(
    "long" if os.environ.get("WAYSTATION_TEST_LONG") else "ci" if os.environ.get("CI") else "local"
)


def pytest_configure() -> None:
    """Gives this process a cache of its own.

    What was once measured of this machine's disks decides how large requests are, and tests count these.
    """
    os.environ["WAYSTATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="waystation-tests-cache-")
    atexit.register(shutil.rmtree, os.environ["WAYSTATION_CACHE_DIR"], ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Forks the processes that share the tests where these are imported, which takes 20 s of CPU."""
    from tests.support.warm_python import python_with_tests

    command = python_with_tests(config.args)
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = command


@pytest.hookimpl(tryfirst=True)  # before `-m long` asks for the mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what `share` leaves to `make test-long`, and puts the longest files first.

    The processes that share the tests know them by name, so no name may be another in each of them.
    """
    _leave_to_long(config, items)
    wrong = [item.nodeid for item in items if re.search(r" at 0x[0-9a-f]+", item.nodeid)]
    if wrong:
        raise pytest.UsageError("give these tests 'ids' without addresses of memory:\n" + "\n".join(wrong))
    items.sort(key=_rank)


def _leave_to_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves a share of the cases of each test that is marked `share`, and all in `make test-long`.

    Such tests have the mark `long`, too. What is named on the command line runs.
    """
    from tests.support.long import IS_LONG

    groups: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("share") is not None:
            item.add_marker("long")
            groups[item.nodeid.partition("[")[0]].append(item)
    if IS_LONG or any("[" in argument for argument in config.args):
        return
    left_out = {item for group in groups.values() for item in _left_out(group)}
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


def _left_out(cases: list[pytest.Function]) -> list[pytest.Function]:
    """All but each `every`-th case of a test.

    Of a test with several parameters those on each `every`-th diagonal are left, so that these have different
    values of all parameters.
    """
    mark = cases[0].get_closest_marker("share")
    assert mark is not None
    (every,) = mark.args
    indices = [case.callspec.indices for case in cases]
    # Those of names that are parametrized together are equal, and count once.
    columns = {tuple(each[name] for each in indices) for name in indices[0]}
    places = [{value: number for number, value in enumerate(dict.fromkeys(column))} for column in columns]
    diagonals = [
        sum(place[value] for place, value in zip(places, values, strict=True))
        for values in zip(*columns, strict=True)
    ]
    return [case for case, diagonal in zip(cases, diagonals, strict=True) if diagonal % every]


def _rank(item: pytest.Item) -> int:
    return next((rank for rank, start in enumerate(FIRST) if item.nodeid.startswith(start)), len(FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, each process takes the next whole file, or all of `CLUSTER`.

    What the tests of a file share is then made once.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return CLUSTER if nodeid.startswith(CLUSTER) else str(super()._split_scope(nodeid))

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_sessionstart() -> None:
    """Coroutines that genuine Orbax has not awaited are no failure of the test that frees them."""
    report = sys.unraisablehook

    def ignore_coroutines_of_orbax(unraisable: Any) -> None:
        coroutine = unraisable.object
        if not (inspect.iscoroutine(coroutine) and "/site-packages/orbax/" in coroutine.cr_code.co_filename):
            report(unraisable)

    sys.unraisablehook = ignore_coroutines_of_orbax


def pytest_collection_finish() -> None:
    """The garbage collector leaves alone what was there before the first test: JAX, torch and all tests.

    Looking through it takes most of a second, and tests collect garbage hundreds of times.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """After each file the garbage collector leaves alone what is still there, as before the first."""
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            gc.freeze()
