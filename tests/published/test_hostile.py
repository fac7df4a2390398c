"""Files that lie: each is refused by one error that names the file, before anything that it asks for.

`corpus.py` holds them. Nothing that the package `safetensors` refuses is accepted, by any reader.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.numpy
from hypothesis import example, given
from hypothesis import strategies as st
from tests.published import models, readers
from tests.published.corpus import CORPUS, SOUND, claims_of_much, many_tensors
from tests.published.models import entry, raw_file
from tests.support.long import only_long

import waystation.safetensors
from waystation import errors


def oracle_accepts(path: Path) -> bool:
    try:
        with safetensors.safe_open(path, "np"):
            return True
    except (safetensors.SafetensorError, OSError):
        return False


@pytest.mark.parametrize("case", CORPUS)
def test_the_corpus_is_refused(tmp_path: Path, case: str) -> None:
    content, is_accepted = CORPUS[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert oracle_accepts(path) is is_accepted
    with pytest.raises(errors.Corrupt) as caught:
        waystation.safetensors.open(path)
    assert caught.value.context["path"] == str(path)
    with pytest.raises(errors.Corrupt):
        waystation.safetensors.load(tmp_path, framework="numpy")


@pytest.mark.share(3)
@pytest.mark.parametrize("reader", [*readers.LOADING, *readers.SUMMING])
def test_the_corpus_is_refused_by_every_way_to_read(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "model.safetensors"
    read: Any = (readers.LOADING | readers.SUMMING)[reader]
    for case, (content, _) in CORPUS.items():
        path.write_bytes(content)
        with pytest.raises(errors.Corrupt) as caught:
            read(path)
        assert reader.endswith("bytes") or caught.value.context["path"] == str(path), case
        assert len(str(caught.value)) < 1000, f"{case}: the message is as long as what it is about"
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.share(2)
@pytest.mark.parametrize("command", ["sum", "verify"])
def test_the_corpus_is_refused_by_commands(tmp_path: Path, command: str) -> None:
    path = tmp_path / "model.safetensors"
    for case, (content, _) in CORPUS.items():
        path.write_bytes(content)
        assert "model.safetensors" in readers.refused_by_command(command, path), case


@pytest.mark.parametrize("case", SOUND)
def test_what_is_odd_and_sound_is_read(tmp_path: Path, case: str) -> None:
    content, expected = SOUND[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert oracle_accepts(path)
    for reader, read in readers.LOADING.items():
        found = read(path)
        assert {name: models.bits(array) for name, array in found.items()} == expected, reader


NAMED = ["a shape of another size", "an unknown dtype", "an unknown field", "a hole", "an offset of 4e0"]


@pytest.mark.parametrize("case", NAMED)
def test_the_error_names_the_tensor(tmp_path: Path, case: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(CORPUS[case][0])
    with pytest.raises(errors.Corrupt, match="tensor: w") as caught:
        waystation.safetensors.open(path)
    assert caught.value.context["tensor"] == "w"


def test_names_with_separators_are_names(tmp_path: Path) -> None:
    """They are never made into paths of files."""
    names = ["", ".", "a/b", "../../etc/passwd", "a\\b", "a\nb", "a.b", "é", "\U0001f600"]
    tensors = {name: entry("U8", [1], place, place + 1) for place, name in enumerate(names)}
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw_file(json.dumps(tensors)) + bytes(range(len(names))))
    for reader, read in readers.LOADING.items():
        assert {name: array.tolist() for name, array in read(path).items()} == {
            name: [place] for place, name in enumerate(names)
        }, reader
    assert os.listdir(tmp_path) == ["model.safetensors"]


def claimed(names: str, *paths: Path) -> dict[str, Any]:
    """What readers make of files, by `claims.py`."""
    command = [sys.executable, "-m", "tests.published.claims", names, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.long
@only_long
def test_nothing_is_allocated_for_what_a_file_claims(tmp_path: Path) -> None:
    """In a process that may have little memory more, and holds hardly any more at its peak."""
    paths = claims_of_much(tmp_path)
    for reader, report in claimed("all", *paths).items():
        assert report["kinds"] == ["Corrupt"] * len(paths), reader
        assert report["peak_bytes"] < 16 << 20, reader


@pytest.mark.long
@only_long
def test_the_longest_header_is_held_once(tmp_path: Path) -> None:
    """100 MB of white space after the object are sound."""
    text = b"{}".ljust(100_000_000)
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw_file(text))
    report = claimed("load", path)["load"]
    assert report["kinds"] == [None]
    assert report["peak_bytes"] < len(text) + (16 << 20)


@pytest.mark.long
@only_long
def test_more_tensors_than_a_file_may_have(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(many_tensors((1 << 20) + 1))
    assert oracle_accepts(path)
    with pytest.raises(errors.Unsupported, match=r"more than 1048576 entries, .* several files"):
        waystation.safetensors.open(path)


@pytest.mark.long
@only_long
def test_an_index_of_lists_in_lists_takes_no_memory(tmp_path: Path) -> None:
    """As objects of Python they would take twenty times as much as the text."""
    index = tmp_path / "model.safetensors.index.json"
    text = '{"metadata":[' + ",".join(["[]"] * 5_000_000) + '],"weight_map":{"w":"a.safetensors"}}'
    index.write_text(text)
    models.write_file(tmp_path / "a.safetensors", {})
    report = claimed("load", index)["load"]
    assert report["kinds"] == ["Corrupt"]  # the file does not hold the tensor
    assert report["peak_bytes"] < len(text) + (16 << 20)


VALID = json.dumps({"__metadata__": {"k": "v"}, "v": entry("F16", [2, 1], 0, 4), "w": entry("U8", [3], 4, 7)})


@given(
    place=st.integers(0, len(VALID) + 7 + 8),
    length=st.integers(0, 12),
    inserted=st.binary(max_size=12) | st.sampled_from([b'"', b"{", b"}", b",", b"0", b"\\u0000", b"1e3"]),
)
@example(place=0, length=0, inserted=b"")
def test_changed_files_are_refused_or_what_the_package_reads(
    tmp_path_factory: pytest.TempPathFactory, place: int, length: int, inserted: bytes
) -> None:
    """Whatever is accepted, the package accepts, and reads the same."""
    content = raw_file(VALID) + bytes(range(7))
    content = content[:place] + inserted + content[place + length :]
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(content)
    try:
        loaded = waystation.safetensors.load(path, framework="numpy")
    except errors.Corrupt:
        return
    with safetensors.safe_open(path, "np") as oracle:
        assert set(oracle.keys()) == loaded.keys()
        for name, array in loaded.items():
            theirs = oracle.get_tensor(name)
            assert (array.shape, array.dtype, array.tobytes()) == (
                theirs.shape,
                theirs.dtype,
                theirs.tobytes(),
            )
