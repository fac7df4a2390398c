"""The garbage collector is as it was after every pause."""

import gc

import pytest

from waystation._collection import paused_collection


def test_nested_pauses_and_errors() -> None:
    assert gc.isenabled()
    with paused_collection(), paused_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="x"), paused_collection():
        raise ValueError("x")
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
