"""Passes: each takes a program and returns another, and knows nothing of the rest.

`prepare` runs those that do not depend on where slices are, `lower` the others; after a slice has moved only
`lower` has to run again. What they return has been verified.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from waystation.runtime.ir.low import LowProgram
from waystation.runtime.ir.passes.chains import JoinedProgram, can_be_joined, join_chains
from waystation.runtime.ir.passes.donations import mark_donations
from waystation.runtime.ir.passes.expand import expand
from waystation.runtime.ir.passes.frees import insert_frees
from waystation.runtime.ir.passes.place import PlacedProgram, place, show_placed
from waystation.runtime.ir.passes.reshards import insert_reshards
from waystation.runtime.ir.passes.shapes import refine_shapes
from waystation.runtime.ir.program import Program
from waystation.runtime.ir.verify import Form, verify
from waystation.runtime.ir.verify_low import verify_low
from waystation.runtime.resources import Placement

__all__ = [
    "JoinedProgram",
    "PlacedProgram",
    "can_be_joined",
    "expand",
    "insert_frees",
    "insert_reshards",
    "join_chains",
    "lower",
    "mark_donations",
    "place",
    "prepare",
    "refine_shapes",
    "show_placed",
]


def prepare(program: Program) -> Program:
    """Makes a traced program ready to be lowered.

    Raises:
        InvalidProgram: It breaks a rule of the high form.
    """
    verify(program)
    resharded = insert_reshards(mark_donations(program))
    verify(resharded, Form.RESHARDED)
    freed = insert_frees(resharded)
    verify(freed, Form.FREED)
    return freed


def lower(
    program: Program, placements: Mapping[int, Placement], nodes: Collection[int] | None = None
) -> LowProgram:
    """Lowers a prepared program to the devices that its slices have now.

    Args:
        program: What `prepare` returned.
        placements: Where its slices are.
        nodes: The nodes of one of its `static_subgraphs`; None for all.

    Raises:
        InvalidProgram: A slice has no placement of its number of devices.
    """
    lowered = expand(place(program, placements), nodes)
    verify_low(lowered)
    return lowered
