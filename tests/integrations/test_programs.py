"""Programs of torch's libraries with the lines changed that the documentation changes: killed, they resume
bit by bit."""

from __future__ import annotations

import random
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.support.long import amount, only_long
from tests.support.program_runs import run, run_some
from tests.support.programs import Programs, running

import waystation

PROGRAMS = Path(__file__).parent / "programs"
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "torch-programs.md"
STEPS = 8
MOST_CHANGES = 3
# What takes long to import is imported once.
TRAINER = ["accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama"]


def changed(name: str, directory: Path) -> Path:
    """A program with the lines changed that the page shows; those beside them have to be there, too."""
    program = (PROGRAMS / name).read_text()
    shown = re.search(rf'^```diff title="{name}"\n(.*?)^```', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert shown, f"{PAGE.name} shows no changes of {name}"
    for sign in "-+":
        assert len(re.findall(rf"^\{sign}", shown[1], re.MULTILINE)) <= MOST_CHANGES
    for hunk in shown[1].rstrip("\n").split("\n\n"):
        lines = hunk.split("\n")
        before = "\n".join(line[1:] for line in lines if line[0] != "+") + "\n"
        after = "\n".join(line[1:] for line in lines if line[0] != "-") + "\n"
        assert program.count(before) == 1, before
        program = program.replace(before, after)
    target = directory / f"changed_{name}"
    target.write_text(program)
    return target


@pytest.mark.parametrize(
    ("name", "modules", "first_kill"),
    [
        pytest.param("trainer.py", TRAINER, 9, marks=only_long),  # which prints two lines a step
        ("accelerated.py", ["accelerate"], 5),
        pytest.param("lightning_fit.py", ["pytorch_lightning", "torchdata"], 5, marks=only_long),
        ("loader.py", ["torchdata"], 3),
    ],
)
@pytest.mark.long
def test_a_killed_program_ends_with_the_bits_of_the_library_without_a_kill(
    name: str, modules: list[str], first_kill: int, tmp_path: Path
) -> None:
    for module in modules:
        if find_spec(module.partition(".")[0]) is None:
            pytest.skip(f"{module} is not installed")
    chance = random.Random(name)
    theirs, ours = [str(tmp_path / "theirs"), str(STEPS)], [str(tmp_path / "ours"), str(STEPS)]
    with_ours = changed(name, tmp_path)
    kills = [(with_ours, ours, first_kill + chance.randrange(2)) for _ in range(amount(1, 8))]
    runs = [(PROGRAMS / name, theirs, None), *kills, (with_ours, ours, None)]
    with running(run_some, modules, runs, count=1, framework="torch", directory=tmp_path) as programs:
        (ended,) = programs.end()
    assert isinstance(ended.value, list), ended.output
    expected, *_, last = ended.value
    assert expected[-1].startswith("digest")
    assert last[-1] == expected[-1], ended.output
    assert len(last) < len(expected), "it has resumed"


# ---- several processes -------------------------------------------------------------------------


def started(script: Path, count: int, arguments: list[str], directory: Path) -> Any:
    return running(run, script, arguments, count=count, framework="torch", directory=directory)


def line_of(programs: Programs) -> list[str]:
    """The next line that a program prints, which only its first process does."""
    try:
        return str(programs.report(0)).split()
    except AssertionError as error:
        error.add_note(str(programs.end()))
        raise


def to_the_end(programs: Programs) -> dict[tuple[str, ...], str]:
    """What a program says on its way."""
    said: dict[tuple[str, ...], str] = {}
    while ("end",) not in said:
        *words, digest = line_of(programs)
        said[tuple(words)] = digest
    programs.values()
    return said


def test_fsdp_with_asynchronous_saves_is_killed_and_resumed(tmp_path: Path) -> None:
    chance = random.Random(5)
    with started(PROGRAMS / "fsdp.py", 2, [str(tmp_path / "theirs"), "6", "1"], tmp_path) as programs:
        expected = to_the_end(programs)
    script, arguments = changed("fsdp.py", tmp_path), [str(tmp_path / "ours"), "6", "1"]
    for _ in range(amount(1, 12)):
        with started(script, 2, arguments, tmp_path) as programs:
            for _ in range(chance.randint(3, 5)):
                if line_of(programs)[0] == "end":
                    break
            programs.signal(chance.randrange(2))  # while a save is under way, perhaps
    with started(script, 2, arguments, tmp_path) as programs:
        said = to_the_end(programs)
    ((_, step), digest) = next(iter(said.items()))
    assert digest == expected["step", step], "it was loaded as it was"
    assert said["end",] == expected["end",]


@pytest.mark.long
@pytest.mark.parametrize(("count", "tensor_parallel"), [(2, 1), (4, 2), (1, 1), (3, 1)])
@pytest.mark.share(4)
def test_fsdp_of_two_axes_resumes_on_other_meshes(tmp_path: Path, count: int, tensor_parallel: int) -> None:
    script = changed("fsdp.py", tmp_path)
    said: dict[tuple[str, ...], str] = {}
    with started(script, 4, [str(tmp_path / "run"), "6", "2"], tmp_path) as programs:
        while ("step", "4") not in said:
            *words, digest = line_of(programs)
            said[tuple(words)] = digest
        programs.signal(3)
    arguments = [str(tmp_path / "run"), "8", str(tensor_parallel)]
    if (count, tensor_parallel) != (4, 2):
        arguments.append("dataloader")  # of other ranks
    with started(script, count, arguments, tmp_path) as programs:
        resumed = to_the_end(programs)
    ((word, step), digest) = next(iter(resumed.items()))
    assert word == "loaded"
    assert int(step) >= 3
    assert digest == said["step", step]


def digest_of(programs: Programs) -> str:
    """What a program says at its end."""
    while True:
        words = line_of(programs)
        if words[0] == "digest":
            programs.values()
            return words[1]


@only_long
@pytest.mark.long
@pytest.mark.parametrize(("name", "kill_after"), [("trainer.py", 9), ("accelerated.py", 5)])
def test_two_processes_of_data_parallelism_are_killed_and_resumed(
    tmp_path: Path, name: str, kill_after: int
) -> None:
    pytest.importorskip("accelerate")
    with started(PROGRAMS / name, 2, [str(tmp_path / "theirs"), "8"], tmp_path) as programs:
        expected = digest_of(programs)
    script, arguments = changed(name, tmp_path), [str(tmp_path / "ours"), "8"]
    with started(script, 2, arguments, tmp_path) as programs:
        for _ in range(kill_after):
            line_of(programs)
        programs.signal(1)
    with started(script, 2, arguments, tmp_path) as programs:
        assert digest_of(programs) == expected


@only_long
@pytest.mark.long
def test_a_strategy_of_lightning_that_calls_dcp_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    name = "lightning_parallel.py"
    with started(PROGRAMS / name, 2, [str(tmp_path / "theirs"), "8"], tmp_path) as programs:
        expected = digest_of(programs)
    script = changed(name, tmp_path)
    with started(script, 2, [str(tmp_path / "ours"), "4"], tmp_path) as programs:
        digest_of(programs)
    assert waystation.is_checkpoint(tmp_path / "ours" / "last.ckpt")
    with started(script, 2, [str(tmp_path / "ours"), "8"], tmp_path) as programs:
        assert line_of(programs) == ["step", "4"]
        assert digest_of(programs) == expected


# ---- FSDP2 inside of a library -----------------------------------------------------------------

SHARDED = [
    ("accelerated.py", "fsdp", ("epoch", "2")),
    pytest.param("trainer.py", "fsdp", ("step", "5"), marks=only_long),
    pytest.param("trainer.py", "loading", ("step", "5"), marks=only_long),
]


def told(programs: Programs, last: tuple[str, ...] = ("digest",)) -> dict[tuple[str, ...], str]:
    """The digests that a program tells on its way, until one of them."""
    found: dict[tuple[str, ...], str] = {}
    while last not in found:
        *words, digest = line_of(programs)
        if words and words[0] in ("loaded", "epoch", "step", "digest"):
            found[tuple(words)] = digest
    return found


@pytest.mark.parametrize(("name", "mode", "kill_after"), SHARDED)
@pytest.mark.long
def test_a_model_that_a_library_shards_is_killed_and_resumed(
    tmp_path: Path, name: str, mode: str, kill_after: tuple[str, ...]
) -> None:
    """In the same number of processes, to the bits of the library's own run; then on in other numbers."""
    for module in ("accelerate", "transformers") if name == "trainer.py" else ("accelerate",):
        pytest.importorskip(module)
    with started(PROGRAMS / name, 2, [str(tmp_path / "theirs"), "8", mode], tmp_path) as programs:
        expected = told(programs)
        programs.values()
    script, directory = changed(name, tmp_path), str(tmp_path / "ours")
    with started(script, 2, [directory, "8", mode], tmp_path) as programs:
        told(programs, kill_after)
        programs.signal(1)  # while a save is under way, perhaps
    with started(script, 2, [directory, "8", mode], tmp_path) as programs:
        resumed = told(programs)
        programs.values()
    (word, step), digest = next(iter(resumed.items()))
    assert int(step) > 0, "it has resumed"
    assert digest == expected["epoch" if word == "loaded" else word, step], "it was loaded as it was"
    assert resumed["digest",] == expected["digest",]
    for count in (3, 1)[: amount(1, 2)]:
        copy = shutil.copytree(tmp_path / "ours", tmp_path / f"on {count}")
        with started(script, count, [str(copy), "10", mode], tmp_path) as programs:
            elsewhere = told(programs)
            programs.values()
        (word, step), digest = next(iter(elsewhere.items()))
        assert step == ("4" if word == "loaded" else "8")
        assert digest == expected["digest",]
