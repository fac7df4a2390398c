"""Pass: virtual devices become the physical ones that the resource manager has given their slices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from waystation.runtime.errors import InvalidProgram
from waystation.runtime.ir.program import Program
from waystation.runtime.ir.text import show
from waystation.runtime.resources import Placement


@dataclass(frozen=True, slots=True)
class PlacedProgram:
    """A program in the high form, and where its slices are.

    Attributes:
        program: The program, unchanged.
        placements: The placement of each of its slices, by number.
    """

    program: Program
    placements: tuple[tuple[int, Placement], ...]

    @property
    def by_slice(self) -> dict[int, Placement]:
        """The placements, to look up."""
        return dict(self.placements)


def place(program: Program, placements: Mapping[int, Placement]) -> PlacedProgram:
    """Places a program.

    Args:
        program: A program that has passed the passes before.
        placements: Where slices are; those that the program does not use are ignored.

    Raises:
        InvalidProgram: A slice of it has no placement, or one of another number of devices.
    """
    chosen = []
    for part in program.slices:
        found = placements.get(part.number)
        devices = 0 if found is None else len(found.devices)
        if found is None or devices != part.device_count:
            raise InvalidProgram(
                f"program '{program.name}' needs {part.device_count} devices for slice @{part.number}, "
                f"its placement has {devices}; place the slice, or trace the program for it"
            )
        chosen.append((part.number, found))
    return PlacedProgram(program, tuple(chosen))


def show_placed(placed: PlacedProgram) -> str:
    """The text of a placed program: its placements, then the program."""
    return show_placements(placed.placements) + show(placed.program)


def show_placements(placements: tuple[tuple[int, Placement], ...]) -> str:
    """A line for each placement."""
    return "".join(
        f"@{number} epoch {found.epoch} on {found.island}: {' '.join(map(str, found.devices))}\n"
        for number, found in placements
    )
