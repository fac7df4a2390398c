"""Plans of the engine, by the cases by which it takes them apart as well."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from waystation import _plans

PATH = Path(__file__).parents[2] / "crates/waystation-format/tests/vectors/plans.json"
CASES = json.loads(PATH.read_text())["cases"]
KINDS = {
    "host_copy": _plans.HOST_COPY,
    "array_copy": _plans.ARRAY_COPY,
    "offer": _plans.OFFER,
    "fetch": _plans.FETCH,
}
PART = ("item_bytes", "chunk_shape", "offset", "shape", "destination", "strides")


def part(record: dict[str, Any]) -> tuple[int, ...]:
    return _plans.part(*(record[field] for field in PART))


def read(record: dict[str, Any]) -> tuple[int, ...]:
    return _plans.read(record["file"], record["chunk_offset"], part(record))


def read_by_columns(record: dict[str, Any]) -> _plans.Words:
    made = _plans.reads(len(record["shape"]), **{field: [value] for field, value in record.items()})
    return made.ravel()


def decode(record: dict[str, Any]) -> tuple[int, ...]:
    flags = {flag: record[flag] for flag in ("is_compressed", "has_checksum")}
    return _plans.decode(record["source"], record["nbytes"], part(record), **flags)


def segment(record: dict[str, Any]) -> list[int]:
    blocks = [
        SimpleNamespace(
            **block | {"device": -1 if block["device"] is None else block["device"]},
            address=block["source"],
        )
        for block in record["blocks"]
    ]
    return _plans.segment(record["file_offset"], record["item_bytes"], record["shape"], blocks)


def one_by_one(encode: Callable[[dict[str, Any]], Any]) -> Callable[[list[dict[str, Any]]], list[int]]:
    return lambda records: list(itertools.chain.from_iterable(map(encode, records)))


def byte_reads(records: list[dict[str, Any]]) -> _plans.Words:
    fields = ("file", "chunk_offset", "item_bytes", "destination")
    return _plans.byte_reads(*([record[field] for record in records] for field in fields))


def byte_segment(record: dict[str, Any]) -> tuple[int, ...]:
    return _plans.byte_segment(record["file_offset"], record["item_bytes"], record["blocks"][0]["source"])


def byte_segments(records: list[dict[str, Any]]) -> _plans.Words:
    """With one that is empty before and behind, of which nothing is said."""
    lengths = [0, *(record["item_bytes"] for record in records), 0]
    sources = [1, *(record["blocks"][0]["source"] for record in records), 1]
    return _plans.byte_segments(records[0]["file_offset"], lengths, sources)


def encoders(case: dict[str, Any]) -> list[Callable[[list[dict[str, Any]]], Any]]:
    """Whatever can make the records of a case."""
    kind, records = case["kind"], case["records"]
    are_bytes = not any(record.get("shape") for record in records)
    if kind == "read":
        return [one_by_one(read), one_by_one(read_by_columns), *[byte_reads] * are_bytes]
    if kind == "decode":
        return [one_by_one(decode)]
    if kind == "segment":
        return [one_by_one(segment), *[one_by_one(byte_segment), byte_segments] * are_bytes]
    known = KINDS[kind]
    return [
        lambda records: _plans.of_rows(known, [tuple(record.values()) for record in records]),
        lambda records: _plans.of_columns(
            known, **{field: [record[field] for record in records] for field in records[0]}
        ),
    ]


@pytest.mark.parametrize("case", CASES, ids=[case["what"] for case in CASES])
def test_plans_are_made_of_the_words_that_the_engine_takes_apart(case: dict[str, Any]) -> None:
    for encode in encoders(case):
        assert np.asarray(encode(case["records"]), np.int64).tolist() == case["words"]


def test_there_are_plans_without_records() -> None:
    assert not len(_plans.of_rows(_plans.OFFER, []))
    assert not len(_plans.byte_reads([], [], [], []))
    assert not len(_plans.byte_segments(8, [], []))
    for axes in (0, 2):
        of_axes: np.ndarray = np.empty((0, axes), np.int64)
        columns = dict.fromkeys(
            ("file", "chunk_offset", "item_bytes", "destination"), of_axes[:, 0:0].ravel()
        )
        columns |= dict.fromkeys(("chunk_shape", "offset", "shape", "strides"), of_axes)
        assert _plans.reads(axes, **columns).shape == (0, 5 + 4 * axes)


def test_a_column_too_few_is_noticed() -> None:
    with pytest.raises(AssertionError):
        _plans.of_columns(_plans.HOST_COPY, destination=[1], source=[2])
