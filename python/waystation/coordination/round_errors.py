"""What is said when a round cannot go on: who wanted what, who has died, who has not come.

However many processes there are, messages stay of a size that people read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from waystation._errors import InvalidInput, Unavailable

_MOST_TOLD_SINGLY = 4
_MOST_GROUPS = 8

# What to do where somebody does not come to the first round of a call.
EVERY_PROCESS = (
    "Every process of the program has to make this call: see whether it stands within an 'if rank == 0', or "
    "whether a process has ended before it. To have some of the processes make it, name them in "
    "multiprocessing.active_processes and primary_host"
)

Describe = Callable[[int], str]


def disagreement(wanted: dict[int, tuple[str, int]]) -> InvalidInput | None:
    """The error of processes that are out of step; None if they agree.

    Args:
        wanted: What each process believes the session is for, and which process is to decide.
    """
    groups: dict[tuple[str, int], list[int]] = {}
    for index, said in sorted(wanted.items()):
        groups.setdefault(said, []).append(index)
    if len(groups) == 1:
        return None
    same_work = len({what for what, _ in groups}) == 1
    told = [
        f"{named(indices)}: {what}" + (f" with primary {primary}" if same_work else "")
        for (what, primary), indices in groups.items()
    ]
    if len(told) > _MOST_GROUPS:
        told[_MOST_GROUPS:] = [f"and {len(told) - _MOST_GROUPS} others"]
    return InvalidInput(
        f"the processes are out of step. {'; '.join(told)}. Every process has to make the same calls, in the "
        "same order and with the same paths and options"
    )


def deaths(round_name: str, dead: dict[int, str], describe: Describe) -> Unavailable:
    """The error of a round some of whose processes have died.

    Args:
        round_name: Which round of what.
        dead: Who, and how that is known.
        describe: Names a process for people.
    """
    shown = sorted(dead.items())[:_MOST_TOLD_SINGLY]
    told = [f"{describe(index)} {how}" for index, how in shown]
    if len(dead) > len(shown):
        told.append(f"and so have others, in all {named(list(dead))}")
    return Unavailable(
        f"{round_name} cannot go on: {'; '.join(told)}. See the output of "
        f"{'that process' if len(dead) == 1 else 'those processes'}, and restart the program",
        process=_as_context(list(dead)),
    )


def lateness(
    round_name: str,
    late: Sequence[int],
    primary: int,
    deadline_s: float,
    describe: Describe,
    *,
    in_first_round: bool = False,
) -> Unavailable:
    """The error of a round whose deadline has passed.

    Args:
        round_name: Which round of what.
        late: Who has not come; nobody, if all are there and the primary has not decided.
        primary: Who decides.
        deadline_s: How long was waited.
        describe: Names a process for people.
        in_first_round: Whether who has not come may not have made the call at all.
    """
    advice = f"\n{EVERY_PROCESS}" if late and in_first_round else ""
    failing = "come to" if late else "decided in"
    late = late or [primary]
    has, it = ("has", "it") if len(late) == 1 else ("have", "them")
    return Unavailable(
        f"{described(late, describe)} {has} not {failing} {round_name} within {deadline_s:g} s; see what "
        f"keeps {it}, or allow more time (multiprocessing.deadline_s){advice}",
        process=_as_context(late),
    )


def described(processes: Sequence[int], describe: Describe) -> str:
    """Processes for people, a few of them with all that is known."""
    if len(processes) > _MOST_TOLD_SINGLY:
        return named(processes)
    return " and ".join(map(describe, processes))


def named(processes: Sequence[int]) -> str:
    """Processes for people: `process 3`, or `processes 0, 2 to 7`."""
    return f"{'process' if len(processes) == 1 else 'processes'} {_spans(processes)}"


def _spans(processes: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for index in sorted(processes):
        if spans and spans[-1][-1] == index - 1:
            spans[-1].append(index)
        else:
            spans.append([index])
    return ", ".join(
        f"{span[0]} to {span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans
    )


def _as_context(processes: Sequence[int]) -> int | str:
    return processes[0] if len(processes) == 1 else _spans(processes)
