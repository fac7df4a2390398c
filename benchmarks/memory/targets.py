"""What the memory tier sets out to reach, and whether it does.

A save to memory counts once it is sealed: all of it verified by the agent. A recovery counts once all arrays
are there; the start of its process is stated apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.analysis import Series
from benchmarks.memory import checkpoints, replication, training, training_process
from benchmarks.memory.checkpoints import FIRST, INTO, INTO_WARM, MEMORY, RECOVER, RECOVER_WARM, SAVE, STORE
from benchmarks.rounds import Case, Results
from benchmarks.targets import Line, beside, compare

BASELINE = Case(checkpoints.NAME, "torch", "torch-save", SAVE)
LONG_STEP_S = 1.0
BLOCKED_SHARE = 0.03
COPIES = "plain copies"


def evaluate(results: Results) -> list[Line]:
    """The targets of all experiments that were run."""
    lines: list[Line] = []
    for framework in checkpoints.OURS:
        if results.runs(experiment=checkpoints.NAME, subject=framework):
            lines += _checkpoints(results, framework)
        if results.runs(experiment=training.NAME, subject=framework):
            lines.append(_blocked(results, framework))
    for subject in dict.fromkeys(run["subject"] for run in results.runs(experiment=replication.NAME)):
        lines += _replication(results, subject)
    return lines


def _checkpoints(results: Results, framework: str) -> Iterator[Line]:
    ours = {
        operation: results.series(Case(checkpoints.NAME, framework, MEMORY, operation))
        for operation in (SAVE, RECOVER)
    }
    baseline = {
        operation: results.series(replace(BASELINE, operation=operation))
        for operation in (SAVE, RECOVER, RECOVER_WARM)
    }
    store = {
        operation: results.series(Case(checkpoints.NAME, framework, STORE, operation))
        for operation in (SAVE, RECOVER)
    }
    beginning = f"{framework}, own memory"
    against = f"{BASELINE.system} to the local disk"
    text = f"{beginning}: save, sealed, against {against}"
    copies = _copies(results, checkpoints.TOUCHED)
    yield beside(compare(text, ours[SAVE], baseline[SAVE], 10.0), COPIES, copies, baseline[SAVE])
    first = results.series(Case(checkpoints.NAME, framework, FIRST, SAVE))
    text = f"{framework}, {FIRST}: save, sealed, against {against}"
    yield compare(text, first, baseline[SAVE], 10.0)
    for operation, how in ((RECOVER, "its file not cached"), (RECOVER_WARM, "its file in the page cache")):
        text = f"{beginning}: recovery against {BASELINE.system}, {how}"
        line = compare(text, ours[RECOVER], baseline[operation], 6.0)
        yield beside(line, COPIES, _copies(results, checkpoints.UNTOUCHED), baseline[operation])
    yield compare(f"{beginning}: save against a {STORE}", ours[SAVE], store[SAVE], 13.7)
    text = f"{beginning}: recovery against a {STORE}"
    yield compare(text, ours[RECOVER], store[RECOVER], 13.0, strict=True)
    if framework == "torch":
        yield from _into(results, beginning)


def _into(results: Results, beginning: str) -> Iterator[Line]:
    """Recoveries into tensors that the program has, against others into such."""

    def series(system: str, operation: str) -> Series | None:
        return results.series(Case(checkpoints.NAME, "torch", system, operation))

    ours, beginning = series(MEMORY, INTO), f"{beginning}: recovery into the program's tensors"
    for operation, how in ((INTO, "its file not cached"), (INTO_WARM, "its file in the page cache")):
        text = f"{beginning} against {BASELINE.system}, {how}"
        theirs = series(BASELINE.system, operation)
        yield beside(compare(text, ours, theirs, 6.0), COPIES, _copies(results, checkpoints.TOUCHED), theirs)
    yield compare(f"{beginning} against a {STORE}", ours, series(STORE, INTO), 13.0, strict=True)


def _copies(results: Results, operation: str) -> Series | None:
    """The fastest plain copies of as many bytes."""
    cases = [
        case
        for case in results.cases(checkpoints.NAME)
        if (case.subject, case.operation) == (checkpoints.LIMIT, operation)
    ]
    found = [series for series in map(results.series, cases) if series is not None]
    return min(found, key=lambda series: series.median, default=None)


def _replication(results: Results, subject: str) -> Iterator[Line]:
    """Against what the same program saves to the disk, and against `torch.save` of as many bytes."""

    def ours(system: str, operation: str) -> Series | None:
        return results.series(Case(replication.NAME, subject, system, operation))

    saved, recovered = ours(replication.MEMORY, SAVE), ours(replication.LOST_HOST, RECOVER)
    for name in replication.PEERS:
        text = f"{subject}: a save with every copy verified, against {name} to the disk"
        yield compare(text, saved, ours(name, SAVE), 1.0, strict=True)
    text = f"{subject}: a save with every copy verified, against {BASELINE.system} by one process"
    yield compare(text, saved, results.series(BASELINE), 1.0, strict=True)
    for name in replication.PEERS:
        text = f"{subject}: recovery of a lost host from a peer, against {name} from the disk"
        yield compare(text, recovered, ours(name, RECOVER), 4.0)
    baseline = results.series(replace(BASELINE, operation=RECOVER))
    text = f"{subject}: recovery of a lost host from a peer, against {BASELINE.system} by one process"
    yield compare(text, recovered, baseline, 4.0)


def _blocked(results: Results, framework: str) -> Line:
    """The share of the time for which saves of every iteration block a program with long steps."""
    case = Case(training.NAME, framework, training_process.MEMORY, "every 1")
    share, step_s = results.series(case, "blocked_share"), training.step_s(results, framework)
    text = f"{framework}: training is blocked by saves to memory at every iteration"
    needed = f"≤ {BLOCKED_SHARE:.0%}"
    if share is None or step_s is None:
        return Line(text, needed, "not measured", "", None)
    if step_s < LONG_STEP_S:
        return Line(f"{text} (asked of steps of 1 s; here {step_s:.2f} s)", needed, "", "", None)
    shown = f"{share.median:.1%}", f"{share.worst:.1%}"
    return Line(text, needed, *shown, share.median <= BLOCKED_SHARE)
