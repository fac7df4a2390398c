"""One sequence of checkpoints by Waystation and one by genuine Orbax, of which the same calls are made.

`same` makes a call of both, and requires the same outcome: the same value, or an error that is caught by the
built-in that Orbax's is.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.training import oracle

import waystation


@dataclass(frozen=True)
class Policy:
    """A policy by its name and arguments, to be made in either library.

    Attributes:
        name: Of the class.
        values: Its arguments.
        parts: For a policy of several others: these.
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    parts: tuple[Policy, ...] = ()

    def of(self, policies: Any) -> Any:
        """The policy of one library."""
        made = getattr(policies, self.name)
        return made([part.of(policies) for part in self.parts]) if self.parts else made(**self.values)

    def names(self) -> set[str]:
        """The names of this policy and its parts."""
        return {self.name}.union(*(part.names() for part in self.parts))


class Pair:
    """Both sequences.

    Args:
        root: Where they are: in `ours` and `theirs`.
        save: The save-decision policy.
        keep: The preservation policy.
        prefix: Of the names of steps.
    """

    def __init__(self, root: Path, save: Policy, keep: Policy, prefix: str | None) -> None:
        self.root = root
        self._made_of = (save, keep, prefix)
        self.open()

    def open(self) -> None:
        """Opens both."""
        self.own = self._made(waystation, "ours")
        self.other = self._made(oracle.ocp, "theirs")

    def _made(self, library: Any, name: str) -> Any:
        save, keep, prefix = self._made_of
        return library.training.Checkpointer(
            self.root / name,
            save_decision_policy=save.of(library.training.save_decision_policies),
            preservation_policy=keep.of(library.training.preservation_policies),
            step_name_format=library.path.step.standard_name_format(
                step_prefix=prefix, step_format_fixed_length=3
            ),
        )

    def close(self) -> None:
        """Closes both."""
        self.own.close()
        self.other.close()

    def same(self, call: Callable[[Any], Any]) -> Any:
        """Makes a call of both; returns what it returned in both, or the class of Orbax's error."""
        wanted, found = _outcome(call, self.other), _outcome(call, self.own)
        if isinstance(wanted, Exception):
            built_in = next(base for base in type(wanted).__mro__ if base.__module__ == "builtins")
            assert isinstance(found, built_in), f"Orbax raises {wanted!r}, ours gives {found!r}"
            assert isinstance(found, waystation.errors.WaystationError), repr(found)
            return type(wanted)
        if isinstance(found, Exception):
            raise AssertionError(f"Orbax returns {wanted!r}") from found
        assert found == wanted
        return wanted

    @contextlib.contextmanager
    def behind(self) -> Iterator[Callable[[Callable[[Any], Any]], Any]]:
        """Other programs in the same directories, of whose calls these do not hear; gives their `same`."""
        others = Pair(self.root, *self._made_of)
        try:
            yield others.same
        finally:
            others.close()

    def remove_behind(self, step: int) -> None:
        """Removes the directory of a step without a call."""
        for info in (*self.own.checkpoints, *self.other.checkpoints):
            if info.step == step:
                shutil.rmtree(info.path)

    def listed(self) -> list[int]:
        """The steps that our sequence lists."""
        return [info.step for info in self.own.checkpoints]

    def require_same_state(self) -> None:
        """Both know of the same checkpoints, and have the same directories."""
        self.same(lambda checkpointer: [(info.step, info.metrics) for info in checkpointer.checkpoints])
        self.same(lambda checkpointer: getattr(checkpointer.latest, "step", None))
        self.same(lambda checkpointer: checkpointer.is_saving_in_progress())
        assert oracle.names_in(self.root / "ours") == oracle.names_in(self.root / "theirs")


def _outcome(call: Callable[[Any], Any], checkpointer: Any) -> Any:
    """What a call returns or raises."""
    try:
        return call(checkpointer)
    except Exception as error:
        return error
