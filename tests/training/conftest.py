"""The places of the tests of sequences."""

from tests.support.places import directory

__all__ = ["directory"]
