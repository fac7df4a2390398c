"""What a journal says, as a table and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torture.outcomes import MEANINGS, Outcome, Run, counts

COLUMNS = (Outcome.LOST, Outcome.TORN, Outcome.SILENTLY_WRONG, Outcome.HUNG, Outcome.REFUSED_WRONGLY)

# What the commands end with where a run went wrong, so that it is no failure of the bench itself.
EXIT_BAD = 3


def is_bad(run: Run) -> bool:
    """Whether a run is one that the tables count against the system."""
    return run.outcome in COLUMNS


def line_of(run: Run) -> str:
    """A run in one line."""
    return f"{run.system} {run.fault} {run.seed}: {run.outcome}; at '{run.at}'; {run.detail}"


def table(runs: Iterable[Run], cells: Sequence[tuple[str, str]]) -> str:
    """Systems and faults, with how many runs came to what."""
    found = counts(runs)
    rows = [
        [system, fault, _made(cell), *(cell[column] for column in COLUMNS), cell[Outcome.MISSED]]
        for system, fault in cells
        if (cell := found.get((system, fault)))
    ]
    return _aligned([["system", "fault", "runs", *COLUMNS, "missed"], *rows])


def _made(cell: dict[Outcome, int]) -> int:
    return sum(cell.values()) - cell[Outcome.MISSED]


def _aligned(rows: Sequence[Sequence[object]]) -> str:
    texts = [["" if value == 0 else str(value) for value in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    lines = []
    for row in texts:
        padded = [
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


_OPENING = """# Reliability

What the torture bench found, written by `python -m torture report` from its journal; do not edit. Each run
has one process save, overwrite, collect or load a small state while one fault is done to it, and judges
from a clean process what is there afterwards. `python -m torture replay SYSTEM FAULT SEED` makes any run
again.

The columns count runs that broke the law that a committed state is loaded bit for bit, or an error says
that it cannot be:

"""


def page(runs: Sequence[Run]) -> str:
    """The page of the documentation."""
    parts = [_OPENING]
    parts += [f"- **{outcome}**: {meaning}.\n" for outcome, meaning in MEANINGS.items()]
    made = [run for run in runs if run.outcome is not Outcome.MISSED]
    revisions = sorted({run.revision for run in made})
    parts.append(f"\n{sum(run.count for run in made)} runs, of the sources at {', '.join(revisions)}.\n")
    parts.append("\n## By system\n\n" + _markdown("system", made, lambda run: run.system))
    for system in dict.fromkeys(run.system for run in made):
        own = [run for run in made if run.system == system]
        parts.append(f"\n## {system}\n\n" + _markdown("fault", own, lambda run: run.fault))
    return "".join(parts)


def _markdown(first: str, runs: Sequence[Run], name_of: object) -> str:
    assert callable(name_of)
    lines = [f"| {first} | runs | " + " | ".join(COLUMNS) + " |", "|---|" + "--:|" * (len(COLUMNS) + 1)]
    for name in dict.fromkeys(map(name_of, runs)):
        here = [run for run in runs if name_of(run) == name]
        outcomes = [run.outcome for run in here]
        cells = [sum(run.count for run in here), *(outcomes.count(column) for column in COLUMNS)]
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"
