"""The rounds that loads of several processes have in common, whoever reads and whatever carries the bytes.

Where one process reads what others receive, each failure must end the load in all of them, before any waits
for bytes that never come. Invariants: of several processes that make a load together, all return or all raise
one error, which names the process that failed; a process that was killed is named by all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from waystation._errors import InvalidInput, Unavailable
from waystation.coordination import error_codec
from waystation.coordination.base import Session

T = TypeVar("T")

_DONE, _FAILED = b"+", b"-"


def nothing(_: object) -> bytes:
    """What there is to say, or to decide, where a round only makes sure that all processes succeed."""
    return b""


def attempt(
    session: Session,
    work: Callable[[], T],
    describe: Callable[[T], bytes] = nothing,
    decide: Callable[[Sequence[bytes]], bytes] = nothing,
    *,
    carries: bool = False,
) -> tuple[T, bytes]:
    """Does something in a round that can fail in one process and not in others; then all go on, or none.

    Args:
        session: Of the processes.
        work: This process's part.
        describe: What of its result the primary has to know.
        decide: What the primary makes of that.
        carries: Whether the work is collectives, which are Unavailable where another process has died: then
            that death is what all raise.

    Returns:
        The result of `work`, and the decision.

    Raises:
        WaystationError: As `Session.round`.
    """
    results: list[T] = []

    def part() -> bytes:
        try:
            results.append(work())
        except Unavailable as error:
            if not carries:
                raise
            # Not raised before the primary has waited for all, and so learned of deaths.
            return _FAILED + error_codec.encode(error, session.processes[session.process_index])
        return _DONE + describe(results[0])

    def decide_on_results(parts: Sequence[bytes]) -> bytes:
        failed = next((part for part in parts if part.startswith(_FAILED)), None)
        if failed is not None:
            raise error_codec.decode(failed.removeprefix(_FAILED))
        return decide([part.removeprefix(_DONE) for part in parts])

    decision = session.round(part, decide_on_results)
    return results[0], decision


def require_same(
    parts: Sequence[bytes], remedy: str, aspects: Sequence[Mapping[str, object]] | None = None
) -> None:
    """Refuses that processes which load together say different things.

    Args:
        parts: What each says.
        remedy: What the error ends with.
        aspects: Of each what it was given, by the name of the argument; the first that differs is named.

    Raises:
        InvalidInput: They do; it ends with the remedy.
    """
    other = next((index for index, part in enumerate(parts) if part != parts[0]), None)
    if other is not None:
        differ = "files or arguments"
        if aspects is not None:
            own, others = aspects[0], aspects[other]
            differ = next((name for name in own if own[name] != others[name]), differ)
        raise InvalidInput(
            f"processes 0 and {other} of those that load together were given different {differ}; "
            f"give all of them the same{remedy}"
        )
