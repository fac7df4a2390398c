"""`waystation diff`: in what two checkpoints differ."""

from __future__ import annotations

import dataclasses
from typing import Any

import typer

from waystation.checkpoint.compare import Comparison, Difference, compare
from waystation.checkpoint.differing_values import ValueDifference
from waystation.cli import formatting
from waystation.cli.output import Output

FOUND_DIFFERENCE = 1

_SHOWN = 100
_STYLES = {"only-in-first": "red", "only-in-second": "green"}


def run(output: Output, first: str, second: str, atol: float, rtol: float, *, structure_only: bool) -> None:
    """Compares, prints the differences, and exits with 1 if there are any."""
    with output.progress("comparing") as on_progress:
        found = compare(
            first,
            second,
            absolute_tolerance=atol,
            relative_tolerance=rtol,
            structure_only=structure_only,
            on_progress=on_progress,
        )
    if output.as_json:
        output.document(_document(found))
    else:
        _show(output, found, structure_only=structure_only, tolerant=atol > 0 or rtol > 0)
    if found.differences:
        raise typer.Exit(FOUND_DIFFERENCE)


def _document(found: Comparison) -> dict[str, Any]:
    return {
        "first": found.first,
        "second": found.second,
        "same": not found.differences,
        "leaves_compared": found.leaves,
        "bytes_compared": found.bytes_compared,
        "differences": [dataclasses.asdict(difference) for difference in found.differences],
    }


def _show(output: Output, found: Comparison, *, structure_only: bool, tolerant: bool) -> None:
    compared = formatting.count(found.leaves, "leaf", "leaves")
    if not structure_only:
        compared += f", {formatting.size(found.bytes_compared)} of arrays"
    if not found.differences:
        what = (
            "the same structure"
            if structure_only
            else "equal within the tolerance"
            if tolerant
            else "identical"
        )
        output.line(f"{what} ({compared} compared)")
        return
    output.line(f"A: {found.first}", style="dim")
    output.line(f"B: {found.second}", style="dim")
    several = len({difference.checkpointable for difference in found.differences}) > 1
    for difference in found.differences[:_SHOWN]:
        place = f"{difference.checkpointable}: " if several or not difference.key_path else ""
        style = _STYLES.get(difference.kind, "yellow")
        output.line(f"{place}{difference.key_path}{_text(difference)}", style=style)
    if len(found.differences) > _SHOWN:
        output.line(f"… and {len(found.differences) - _SHOWN} more; --json lists all")
    output.line(f"{formatting.count(len(found.differences), 'difference')} ({compared} compared)")


def _text(difference: Difference) -> str:
    lead = ": " if difference.key_path else ""
    if difference.kind == "only-in-first":
        return f"{lead}only in A"
    if difference.kind == "only-in-second":
        return f"{lead}only in B"
    if difference.kind == "value" and difference.values is not None:
        return f": {_values_text(difference.values)}"
    property_name = "" if difference.kind in ("leaf", "value") else f"{difference.kind} "
    text = f": {property_name}{difference.first} in A, {difference.second} in B"
    return text + (f"; {_values_text(difference.values)}" if difference.values is not None else "")


def _values_text(values: ValueDifference) -> str:
    index = ", ".join(map(str, values.first_index))
    parts = [f"{values.differing:,} of {formatting.count(values.elements, 'element')} differ"]
    if values.max_absolute:
        parts.append(f"by up to {values.max_absolute:.3g} (relative {values.max_relative:.3g})")
    elif values.max_absolute is not None and not values.unequal_nans:
        parts.append("only in the signs of zeros or the bits of NaNs")
    if values.unequal_nans:
        parts.append(f"{values.unequal_nans:,} NaN in one only")
    parts.append(f"first at [{index}]: {values.first_values[0]} in A, {values.first_values[1]} in B")
    return "; ".join(parts)
