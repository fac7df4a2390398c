"""Fingerprints: what has to be the same in every process that saves, as lines for people to read.

Processes compare digests; only if these differ are the lines themselves sent, and an error shows where.
Invariant: what may differ between processes (values, and which devices hold what) is in no line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from waystation._errors import StructureMismatch
from waystation.checkpoint import prepare
from waystation.layouts.native.records import Digest

_SHOWN_DIFFERENCES = 5


def of_save(states: Mapping[str, prepare.Described], handlers: Mapping[str, str]) -> list[str]:
    """The lines of a save: of its states, and who handles what is none."""
    lines = [f"checkpointable '{name}': handled by {handler}" for name, handler in handlers.items()]
    if len(states) == 1 and not handlers:
        (name,) = states
        return [f"checkpointable '{name}'", *prepare.fingerprint(states[name])]
    for name, described in states.items():
        lines += [f"checkpointable '{name}', {line}" for line in prepare.fingerprint(described)]
    return lines


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
        f"with the same shapes, dtypes and shardings:{''.join(shown)}"
    )
