"""Every cell of Orbax's guide to performance runs with only its import changed, and shows what it shows with
genuine Orbax, on as many devices as the guide has."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from tests.guide.notebook import LIBRARIES, OUR_IMPORT, Cell, Shown, cells_of, run_page
from tests.support.programs import Raised, running

import waystation

orbax = pytest.importorskip("orbax.checkpoint.experimental.v1")

PAGE = Path(__file__).parent / "performance.md"
CELLS = {cell.name: cell for cell in cells_of(PAGE)}
OWN_WORDS = "documentation"  # the cell that shows text which each library has its own of


class Ran(NamedTuple):
    """What the page showed and left.

    Attributes:
        shown: By library, then by cell.
        root: Where the checkpoints are, by library.
    """

    shown: dict[str, dict[str, Shown]]
    root: Path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The page, run with each library in a program of its own."""
    root = tmp_path_factory.mktemp("guide")
    with contextlib.ExitStack() as stack:
        programs = {}
        for library in LIBRARIES:
            page = (PAGE, library, root / library)
            started = running(run_page, *page, count=1, framework="jax", directory=root)
            programs[library] = stack.enter_context(started)
        values = {library: program.values()[0] for library, program in programs.items()}
    for library, value in values.items():
        assert not isinstance(value, Raised), f"with {library}: {value}"
    shown = {library: dict(zip(CELLS, value, strict=True)) for library, value in values.items()}
    return Ran(shown, root)


def test_all_cells_of_the_guide_are_there() -> None:
    assert len(CELLS) == 13
    assert sum(OUR_IMPORT in cell.code for cell in CELLS.values()) == 1


@pytest.mark.share(12)
@pytest.mark.parametrize(
    "cell", [cell for cell in CELLS.values() if cell.name != OWN_WORDS], ids=lambda cell: cell.name
)
def test_a_cell_shows_what_it_shows_with_orbax(ran: Ran, cell: Cell) -> None:
    native, asked, genuine = (ran.shown[library][cell.name] for library in LIBRARIES)
    if cell.differs is None:
        assert native == asked == genuine
    else:
        assert native.value == asked.value == cell.differs != genuine.value


def test_cells_that_show_something_were_seen(ran: Ran) -> None:
    values = {name for name, shown in ran.shown["orbax"].items() if shown.value}
    assert values == {"whole", "chunks", "saved-sharding", "loaded-sharding", "chunks-along-an-axis"}
    printed = {name for name, shown in ran.shown["orbax"].items() if shown.printed}
    assert printed == {OWN_WORDS, "replicas", "replicas-loaded"}


def test_the_documentation_has_every_option_of_orbax(ran: Ran) -> None:
    printed = ran.shown["native"][OWN_WORDS].printed
    for option in dataclasses.fields(orbax.options.ArrayOptions.Saving.StorageOptions):
        assert option.name in printed


@pytest.mark.parametrize("name", ["ckpt_ocdbt", "ckpt_non_ocdbt"])
def test_either_library_loads_the_formats_that_the_other_wrote(ran: Ran, name: str) -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {"a": jax.ShapeDtypeStruct((8,), np.int32, sharding=sharding)}
    assert np.array_equal(orbax.load(ran.root / "native" / name, wanted)["a"], np.arange(8))
    assert np.array_equal(waystation.load(ran.root / "orbax" / name, wanted)["a"], np.arange(8))
