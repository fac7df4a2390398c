"""The texts of a program before and after each pass; `python -m tests.runtime.ir.golden` writes them anew."""

from __future__ import annotations

from pathlib import Path

from waystation.runtime.devices import DeviceId
from waystation.runtime.ir import (
    expand,
    insert_frees,
    insert_reshards,
    mark_donations,
    parse,
    place,
    show,
    show_low,
    show_placed,
)
from waystation.runtime.resources import Placement

FOLDER = Path(__file__).parents[1] / "golden"

# The second slice has its devices on one host, in an order of its own.
PLACEMENTS = {
    0: Placement(1, "a", tuple(map(DeviceId.parse, ["a0:0", "a0:1", "a1:0", "a1:1"]))),
    1: Placement(3, "b", tuple(map(DeviceId.parse, ["b0:3", "b0:2", "b1:0", "b0:0"]))),
}


def path_of(name: str, stage: str) -> Path:
    """Where the text of a program after a stage is."""
    return FOLDER / f"{name}.{stage}.txt"


def stages(name: str) -> dict[str, str]:
    """The texts after each pass, of a program that is there as its tracer made it."""
    program = parse(path_of(name, "traced").read_text())
    found = {"traced": show(program)}
    for stage, apply in (("marked", mark_donations), ("resharded", insert_reshards), ("freed", insert_frees)):
        program = apply(program)
        found[stage] = show(program)
    placed = place(program, PLACEMENTS)
    return {**found, "placed": show_placed(placed), "low": show_low(expand(placed))}


def names() -> list[str]:
    """The programs of which there are texts."""
    return sorted(path.name.split(".")[0] for path in FOLDER.glob("*.traced.txt"))


def write() -> None:
    """Writes all texts but those of the traced programs."""
    for name in names():
        for stage, text in stages(name).items():
            path_of(name, stage).write_text(text)


if __name__ == "__main__":
    write()
