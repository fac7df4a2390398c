"""What each pass makes of a program, as text; `python -m tests.runtime.ir.golden` writes it anew."""

from __future__ import annotations

import pytest
from tests.runtime.ir import golden

from waystation.runtime.ir import parse, prepare, show


@pytest.mark.parametrize("name", golden.names())
def test_each_pass_makes_what_is_kept(name: str) -> None:
    for stage, text in golden.stages(name).items():
        assert text == golden.path_of(name, stage).read_text(), stage


@pytest.mark.parametrize("name", golden.names())
def test_prepare_runs_the_passes_in_order(name: str) -> None:
    program = parse(golden.path_of(name, "traced").read_text())
    assert show(prepare(program)) == golden.path_of(name, "freed").read_text()
