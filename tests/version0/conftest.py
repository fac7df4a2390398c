"""What genuine Orbax warns of when it is used as it is meant to be is not our business."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "version0":
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax"))
            item.add_marker(pytest.mark.filterwarnings("ignore::UserWarning:orbax"))
            # Orbax leaves coroutines behind, which are found whenever garbage is collected.
            for category in ("pytest.PytestUnraisableExceptionWarning", "RuntimeWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:.*coroutine.*:{category}"))
