"""The Chromium of this system without a screen, driven by Playwright, which downloads none."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ADVICE = "there is no Chromium to show pages in; on Debian: apt-get install chromium"


def chromium() -> str | None:
    """The program, if there is one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser, which ends with the block."""
    from playwright.sync_api import sync_playwright

    program = chromium()
    assert program is not None, ADVICE
    with sync_playwright() as driver:
        # Root has no sandbox; pages are our own.
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        browser = driver.chromium.launch(executable_path=program, args=arguments)
        try:
            yield browser
        finally:
            browser.close()
