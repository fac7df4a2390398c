"""Programs that are written for `orbax.checkpoint` run with two lines before them. Killed again and again,
they end with the bits that they end with on genuine Orbax without a kill.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.support.long import amount
from tests.support.program_runs import run
from tests.support.programs import Programs, running

PROGRAMS = Path(__file__).parent / "programs"
CHANGE = "import waystation.compat.orbax\nwaystation.compat.orbax.install()\n"  # that is all
STEPS = 6


def reported(programs: Programs) -> str:
    """The next line that a program prints."""
    try:
        return str(programs.report(0))
    except AssertionError as error:
        error.add_note(str(programs.end()))
        raise


def digest_of(programs: Programs) -> str:
    """What a program says at its end."""
    while True:
        words = reported(programs).split()
        if words[:1] == ["digest"]:
            programs.values()
            return words[1]


def started(script: Path, run_directory: Path, directory: Path) -> Any:
    arguments = [str(run_directory), str(STEPS)]
    return running(run, script, arguments, count=1, framework="torch", directory=directory)


@pytest.mark.parametrize("name", ["linen", "nnx", "composite", "equinox_loop", "haiku_loop", "keras_fit"])
@pytest.mark.share(6)
def test_a_program_is_killed_and_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    with started(PROGRAMS / f"{name}.py", tmp_path / "theirs", tmp_path) as programs:
        expected = digest_of(programs)
    ours = tmp_path / f"{name}.py"
    ours.write_text(CHANGE + (PROGRAMS / f"{name}.py").read_text())
    chance = random.Random(name)
    for _ in range(amount(1, 12)):
        with started(ours, tmp_path / "ours", tmp_path) as programs:
            for _ in range(chance.randint(1, 3)):
                if reported(programs).startswith("digest"):
                    break
            programs.signal(0)  # while the last step is being saved, perhaps
    with started(ours, tmp_path / "ours", tmp_path) as programs:
        assert digest_of(programs) == expected
