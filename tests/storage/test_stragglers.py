"""Second requests for parts of files whose first request takes far longer than others."""

from __future__ import annotations

import time

import numpy as np
import pytest
import safetensors.numpy
from tests.support import s3
from tests.support.long import only_long
from tests.support.s3 import PASS, SLOW, STUCK, STUCK_S

import waystation
from waystation.errors import Unavailable
from waystation.safetensors import load

MIB = 1 << 20
# Of 1 MiB each.
UNITS = 48


def published(place: s3.Bucket) -> tuple[str, np.ndarray]:
    """A model in one file, and the tensor in it."""
    values = np.arange(UNITS * MIB // 4, dtype=np.float32)
    path = s3.folder_of(f"{place.location}/model.safetensors")
    safetensors.numpy.save_file({"w": values}, path)
    return f"{place.location}/model.safetensors", values


def in_small_units(
    endpoint: str, **given: float
) -> tuple[waystation.Context, list[waystation.LoadStatistics]]:
    """Options by which a server is reached and each request is for 1 MiB, and what loads have moved."""
    found: list[waystation.LoadStatistics] = []
    context = s3.context(endpoint, **given)
    context.engine.block_bytes, context.engine.depth = MIB, 4
    context.array.loading.on_statistics = found.append
    return context, found


def test_a_load_does_not_wait_for_stragglers() -> None:
    place = s3.bucket()
    location, values = published(place)
    stuck: list[int] = []

    def on_request(number: int) -> str:
        if number in (20, 35):
            stuck.append(number)
            return STUCK
        return PASS

    with s3.proxy(place.endpoint, on_request) as between:
        context, found = in_small_units(between.endpoint)
        begun = time.monotonic()
        with context:
            loaded = load(location, framework="numpy")
        assert time.monotonic() - begun < STUCK_S / 2
    np.testing.assert_array_equal(loaded["w"], values)
    assert len(stuck) == 2
    assert found[0].repeated_requests == 2
    assert found[0].bytes_read >= values.nbytes


@pytest.mark.long
@only_long
def test_a_server_that_is_equally_slow_gets_no_request_twice() -> None:
    place = s3.bucket()
    location, values = published(place)
    for decision in (PASS, SLOW):
        with s3.proxy(place.endpoint, lambda _, decision=decision: decision) as between:  # type: ignore[misc]
            context, found = in_small_units(between.endpoint)
            with context:
                loaded = load(location, framework="numpy")
        np.testing.assert_array_equal(loaded["w"], values)
        assert between.sent_bytes < values.nbytes + MIB, "each byte comes once"
        assert found[0].repeated_requests == 0


def test_few_requests_are_repeated_of_a_server_that_stops_answering() -> None:
    place = s3.bucket()
    location, _ = published(place)
    with s3.proxy(place.endpoint, lambda number: PASS if number < 20 else STUCK) as between:
        context, _ = in_small_units(between.endpoint, deadline_s=3.0)
        with context, pytest.raises(Unavailable, match="within 3"):
            load(location, framework="numpy")
        # Four at a time, and of twenty one more.
        assert len(between.requests) <= 20 + 4 + 2
