"""`waystation program show`: programs of files and modules, as text and as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from waystation.cli.commands.program_show import layout
from waystation.runtime.ir import encode, parse

GOLDEN = Path(__file__).parents[1] / "runtime" / "golden"
TEXT = (GOLDEN / "pipeline.freed.txt").read_text()

MODULE = """
from waystation.runtime.ir import parse
from pathlib import Path
PROGRAM = parse(Path({path!r}).read_text())
NOTHING = 3

def made():
    return PROGRAM
"""


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.share(2)
def test_a_file_is_shown(as_bytes: bool, tmp_path: Path, script) -> None:
    path = tmp_path / "program"
    path.write_bytes(encode(parse(TEXT)) if as_bytes else TEXT.encode())
    outcome = script("program", "show", path)
    assert outcome.code == 0
    shown, _, counts = outcome.out.rstrip().rpartition("\n")
    assert shown == TEXT.rstrip()
    assert "result" in counts


def test_a_program_of_a_module_is_shown(tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "shown_program_of_a_test"
    (tmp_path / f"{name}.py").write_text(MODULE.format(path=str(GOLDEN / "pipeline.freed.txt")))
    monkeypatch.syspath_prepend(tmp_path)
    try:
        for attribute in ("PROGRAM", "made"):
            outcome = run("program", "show", f"{name}:{attribute}", "--json")
            assert (outcome.code, outcome.document["programs"][0]["text"]) == (0, TEXT)
        outcome = run("program", "show", f"{name}:NOTHING")
        assert outcome.code == 2
        assert "no program that was traced" in outcome.err
        assert "has no 'absent'" in run("program", "show", f"{name}:absent").err
    finally:
        sys.modules.pop(name, None)


def test_what_is_not_there(script) -> None:
    assert "there is no file 'absent'" in script("program", "show", "absent").err
    assert "cannot be imported" in script("program", "show", "no_such_module_here:f").err


FAULTY = """
def raises():
    raise ValueError("a reason")

def needs_jax():
    raise ModuleNotFoundError("No module named 'jax'", name="jax")

class Odd:
    programs = 3

class Odder:
    programs = (1,)

odd, odder = Odd(), Odder()
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("json:loads", "'json:loads' wants arguments (s); name a program that was traced, or a"),
        ("faulty:raises", "'faulty:raises' was called and raised ValueError: a reason"),
        ("faulty:needs_jax", "No module named 'jax'; pip install 'flatbuffers>=24.3'"),
        ("faulty:odd", "'faulty:odd' is no program that was traced"),
        ("faulty:odder", "'faulty:odder' is no program that was traced"),
        ("failing:f", "module 'failing' cannot be imported: ZeroDivisionError: division by zero"),
        ("unreadable:f", "module 'unreadable' cannot be imported: SyntaxError: "),
        ("without_jax:f", "cannot be imported: no jax; pip install 'flatbuffers>=24.3'"),
        (":f", "module '' cannot be imported"),
        ("text", "'text' is no text of a program: "),
        ("notes.md", "'notes.md' holds no program of the runtime: "),
    ],
)
def test_what_is_wrong_with_the_code_of_others_is_said(
    source: str, message: str, tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "failing.py").write_text("1 / 0")
    (tmp_path / "unreadable.py").write_text("f = = 3")
    (tmp_path / "without_jax.py").write_text("raise ModuleNotFoundError('no jax', name='jax.numpy')")
    (tmp_path / "text").write_bytes(b"program \xff")
    (tmp_path / "notes.md").write_text("# Notes\n")
    monkeypatch.chdir(tmp_path)
    try:
        outcome = run("program", "show", source)
    finally:
        sys.modules.pop("faulty", None)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert "report" not in outcome.err
    assert "verify" not in outcome.err


def test_a_picture_is_drawn(tmp_path: Path, script) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "program.png"
    outcome = script("program", "show", GOLDEN / "pipeline.freed.txt", "--picture", picture)
    assert outcome.code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_each_node_below_what_it_uses() -> None:
    program = parse(TEXT)
    places = layout(program)
    assert len(set(places.values())) == len(places)
    makers = {value.number: at for at, node in enumerate(program.nodes) for value in node.results}
    for at, (_, row) in places.items():
        for number in program.nodes[at].operands:
            assert places[makers[number]][1] < row
