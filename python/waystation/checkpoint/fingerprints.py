"""Fingerprints: what has to be the same in every process that saves, as lines for people to read.

Processes compare digests; only if these differ are the lines themselves sent, and an error shows where.
Invariant: what may differ between processes (values, and which devices hold what) is in no line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from waystation._errors import StructureMismatch
from waystation._options import ArraySavingOptions
from waystation.checkpoint import prepare
from waystation.layouts.native.records import Digest

_SHOWN_DIFFERENCES = 5


def of_save(
    states: Mapping[str, prepare.Described], handlers: Mapping[str, str], saving: ArraySavingOptions
) -> list[str]:
    """The lines of a save: of its states, who handles what is none, and who writes which arrays."""
    lines = [f"checkpointable '{name}': handled by {handler}" for name, handler in handlers.items()]
    if len(states) == 1 and not handlers:
        (name,) = states
        return [f"checkpointable '{name}'", *prepare.fingerprint(states[name]), *_of_sharing(saving)]
    for name, described in states.items():
        lines += [f"checkpointable '{name}', {line}" for line in prepare.fingerprint(described)]
    return [*lines, *_of_sharing(saving)]


def _of_sharing(saving: ArraySavingOptions) -> list[str]:
    """By which options each process decides what it writes of what several hold."""
    return [
        f"option array.saving.use_replica_parallel: {saving.use_replica_parallel is not False}",
        "option array.saving.min_slice_bytes_for_replica_parallel: "
        f"{saving.min_slice_bytes_for_replica_parallel or 'the default'}",
        f"option array.saving.max_replicas_for_replica_parallel: {saving.max_replicas_for_replica_parallel}",
    ]


def of_casts(name: str, labels: Sequence[str], cast: Mapping[int, str]) -> list[str]:
    """The lines about arrays of a state that are stored in other dtypes, given by number."""
    return [f"checkpointable '{name}', {labels[number]}: stored as {dtype}" for number, dtype in cast.items()]


def digest(lines: Sequence[str]) -> bytes:
    """What is compared."""
    return str(Digest.of("\n".join(lines).encode())).encode()


def explain_difference(parts: Sequence[bytes], processes: Sequence[int]) -> bytes:
    """Raises the error that shows where the first process that differs from the first of all does so.

    Args:
        parts: The lines of the processes.
        processes: Which processes of the program these are.
    """
    saves = [prepare.fingerprint_from_json(part) for part in parts]
    differing = next(number for number, lines in enumerate(saves) if lines != saves[0])
    shown = []
    for number, other in ((0, differing), (differing, 0)):
        present = set(saves[other])
        own = [line for line in saves[number] if line not in present]
        more = f"\n    and {len(own) - _SHOWN_DIFFERENCES} more" if len(own) > _SHOWN_DIFFERENCES else ""
        lines = "".join(f"\n    {line}" for line in own[:_SHOWN_DIFFERENCES]) or "\n    (nothing else)"
        shown.append(f"\n  only process {processes[number]}:{lines}{more}")
    raise StructureMismatch(
        "the processes of the program save different states; every process must give the same tree, "
        f"with the same shapes, dtypes and shardings, and the same options:{''.join(shown)}"
    )
