"""Clients of two islands of four devices each, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from waystation import runtime


@pytest.fixture
def client() -> Iterator[runtime.Client]:
    with runtime.local({"left": 4, "right": 4}) as started:
        yield started
