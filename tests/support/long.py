"""What is long by nature, such as walks through every step, thousands of seeds, and random examples.

`make test` does a share of it. `make test-long` sets `WAYSTATION_TEST_LONG` and does the whole. Tests that do
more there have the mark `long`; property tests, which have the mark `hypothesis`, try more examples.
"""

import os

import pytest

IS_LONG = bool(os.environ.get("WAYSTATION_TEST_LONG"))

# What takes long and shows little that the rest of its file does not show.
only_long = pytest.mark.skipif(not IS_LONG, reason="done in `make test-long`")


def amount(usual: int, whole: int | None = None) -> int:
    """How many of something a test does: `usual`, or `whole`, which is by default twenty times as many."""
    if IS_LONG:
        return 20 * usual if whole is None else whole
    return usual
