"""What a journal says, as a table and as a page."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

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


# Faults by the beginning of their names, in the order of the page: what they are called there, and what they
# do.
_FAMILIES = {
    "none": ("undisturbed", "Nothing is done: what the judge says then is its own mistake."),
    "kill": (
        "kill",
        "The process, or an agent beside it, is killed before each of its system calls.",
    ),
    "lose": (
        "host lost",
        "A host with its agent and all that it had is gone before a call; of five, two.",
    ),
    "EIO": ("failing call", ""),
    "ENOSPC": ("failing call", ""),
    "EINTR": ("failing call", ""),
    "short": ("failing call", "Each call fails with EIO, ENOSPC or EINTR, or moves less than it is told to."),
    "fuse EIO": ("failing disk", ""),
    "fuse ENOSPC": ("failing disk", ""),
    "fuse short": ("failing disk", "The same of each request to a file system, which io_uring makes, too."),
    "power cut": (
        "power cut",
        "Before each call; what was not made durable has reached the disk, or not, or in part.",
    ),
    "damage": ("damage", "Bits flip, blocks are zero or at another's place, files end early or are missing."),
    "damage slots": ("damage", ""),
    "together": (
        "meeting",
        "A second writer, reader or collector does all it does before each call of the first.",
    ),
    "fork": ("fork", "The program forks before each call of its save or load; the child saves and loads."),
    "sandbox": (
        "sandbox",
        "System calls are refused, or memory, descriptors, threads, space or rights are few.",
    ),
    "geometry": (
        "geometry",
        "JAX arrays of random shapes, saved in one sharding and loaded cold in another.",
    ),
    "in process/power cut": (
        "power cut, in process",
        "Disks that a power cut may leave at each call of a save, all looked at.",
    ),
    "in process/geometry": (
        "geometry, in process",
        "Arrays of random shapes, saved in random pieces and loaded in others.",
    ),
}


def _family(fault: str) -> str:
    """What faults of a kind are called together."""
    beginning = max(filter(fault.startswith, _FAMILIES), key=len)
    return _FAMILIES[beginning][0]


_OPENING = """# Reliability

What the torture bench found, written by `python -m torture report` from its journal; do not edit.

The law: **a committed state is loaded bit for bit, or an error says that it cannot be; a state that was never
finished is never seen.** In each run one process saves, overwrites, collects or loads a small state while one
fault is done to it, and a program that starts after it judges what is there. A run that breaks the law is:

"""

_READING = """
## Systems and faults

A cell says how many runs were made, and how many of them broke the law, if any did. *not tried*: no run was
made yet; a dash: the fault cannot be done to the system. Runs *in process* count what was looked at: disks,
or arrays. Systems of Waystation: its own layout, the same past the page cache by threads (*direct*) and by
io_uring (*ring*), the three layouts of Orbax, a safetensors file, and the memory tier with an agent that
ends with each program (*memory*), with one that stays (*agent*), and of three and five hosts. Others are
genuine Orbax, `torch.distributed.checkpoint` and the safetensors library.

A save to the memory tier waits a few seconds until other hosts have its copies, so that training goes on. On
a busy machine a step may therefore be left out, with a warning. It counts if the next step is left out, too.

Files of safetensors have no checksums, so a load of one by itself cannot tell that its data were damaged,
whichever library makes it. Waystation puts none into their `__metadata__`: other tools copy that to files
with other data, and a good file would then be refused. `waystation sum` writes them to a file beside the
model instead. Wherever that file is, a load refuses a block that has changed, and `waystation verify` names
the block and its tensors ([checksums of published models](guides/published-models.md#checksums)).

"""

_REPLAYING = """
## To make a run again

A run is a system, a fault and a seed, and is the same whenever it is made again:

```sh not-run: takes seconds for each run
python -m torture replay waystation kill/overwrite 61
make torture TORTURE_ARGUMENTS="--systems='waystation*' --faults='kill/*,power cut/*' --runs=50"
python -m torture planted        # whether the bench finds the bugs that are planted in a copy of the sources
```

The journal knows at which sources a run was made. Runs are made again once these have changed.

"""


def page(runs: Sequence[Run], cells: Sequence[tuple[str, str]]) -> str:
    """The page of the documentation.

    Args:
        runs: What it tells of.
        cells: The systems, and the faults that can be done to them.
    """
    made = [run for run in runs if run.outcome is not Outcome.MISSED]
    families = list(dict.fromkeys(name for name, _ in _FAMILIES.values()))
    systems = list(dict.fromkeys(system for system, _ in cells))
    possible = {(system, _family(fault)) for system, fault in cells}
    parts = [_OPENING]
    parts += [f"- **{outcome}**: {meaning}.\n" for outcome, meaning in MEANINGS.items()]
    parts.append(_READING)
    parts.append(
        _markdown(["fault", *systems], [[name, *_row(name, systems, made, possible)] for name in families])
    )
    parts.append("\n## What went wrong\n\n")
    headings = ["system", "fault", "what", "runs", "one of them", "what was seen"]
    in_order = sorted(filter(is_bad, made), key=lambda run: (systems.index(run.system), run.key))
    parts.append(_markdown(headings, _failures(in_order)) if in_order else "Nothing.\n")
    parts.append("\n## The faults\n\n")
    parts += [f"- **{name}**: {meaning}\n" for name, meaning in _FAMILIES.values() if meaning]
    parts.append("\n## The sources\n\n")
    parts.append(_markdown(["sources", "systems", "runs"], _sources(made)))
    parts.append(_REPLAYING.rstrip("\n") + "\n")
    return "".join(parts)


def _row(
    family: str, systems: Sequence[str], made: Sequence[Run], possible: Collection[tuple[str, str]]
) -> Iterator[str]:
    for system in systems:
        own = [run for run in made if run.system == system and _family(run.fault) == family]
        bad = sum(map(is_bad, own))
        told = f"{sum(run.count for run in own):,}" + f", {bad} bad" * bool(bad)
        yield told if own else "not tried" if (system, family) in possible else "-"


def _failures(bad: Sequence[Run]) -> Iterator[list[str]]:
    """What went wrong, that of one kind together."""
    kinds: dict[tuple[str, str, str], list[Run]] = {}
    for run in bad:
        kinds.setdefault((run.system, _family(run.fault), run.outcome), []).append(run)
    for kind, runs in kinds.items():
        one = runs[0]
        seen = re.sub(r"/[^ ']*/root(?=/)", "", one.detail).translate(str.maketrans("|`", "/'")).strip()
        seen = seen if len(seen) <= 120 else seen[:120].strip() + " …"
        yield [*kind, str(len(runs)), f"`{one.fault}` {one.seed}", f"`{seen}`"]


def _sources(made: Sequence[Run]) -> Iterator[list[str]]:
    found: dict[str, list[Run]] = {}
    for run in made:
        found.setdefault(run.revision, []).append(run)
    for revision, runs in found.items():
        real = [run for run in runs if not run.fault.startswith("in process")]
        inside = sum(run.count for run in runs) - len(real)
        told = f"{len(real):,}" + f", and {inside:,} in process" * bool(inside)
        yield [f"`{revision}`", ", ".join(dict.fromkeys(run.system for run in runs)), told]


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
