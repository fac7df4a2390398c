"""The page in a real browser: what people see; hostile names are text; nothing is fetched from elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pytest
from tests.memory import shards
from tests.support import s3
from tests.support.agents import memory_directory, running_agent
from tests.support.browser import ADVICE, chromium, running_browser
from tests.support.long import only_long

import waystation
from waystation import _native
from waystation.cli.commands import top

from . import sparse
from .conftest import Open
from .test_server import LIKE_OTHERS, ended, started

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.skipif(chromium() is None, reason=ADVICE)

HOSTILE = (
    "<img src=x onerror='window.attacked=1'>",
    '"><script>window.attacked=1</script>',
    "javascript:window.attacked=1",
    "\u202egnp.exe",
    "line\nbreak\x00\x1b[31m",
    "{{constructor.constructor('window.attacked=1')()}}",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as made:
        yield made


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page on which nothing may go wrong unseen."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    made = context.new_page()
    made.set_default_timeout(30_000)
    problems: list[str] = []
    addresses: set[str] = set()
    made.on("pageerror", lambda error: problems.append(str(error)))

    def said(message: Any) -> None:
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            problems.append(message.text)

    made.on("console", said)
    made.on("request", lambda request: addresses.add(request.url))
    yield made
    assert made.evaluate("window.attacked") is None
    origin = re.match(r"http://127\.0\.0\.1:\d+/[\w-]+/", made.url)
    context.close()
    assert problems == []
    assert origin is not None
    assert all(address.startswith(origin.group()) for address in addresses), addresses


def facts(page: Page, within: str) -> dict[str, str]:
    """What a list of facts says."""
    names = page.locator(f"{within} dl dt").all_inner_texts()
    return dict(zip(names, page.locator(f"{within} dl dd").all_inner_texts(), strict=True))


def hostile_run(path: Path) -> Path:
    state: dict[str, Any] = {name: {"w": np.arange(4.0)} for name in HOSTILE}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    weights = jax.device_put(
        np.arange(2048.0, dtype=np.float32).reshape(64, 32), jax.NamedSharding(mesh, jax.P("data"))
    )
    state["layer"] = {"kernel": weights, "text": HOSTILE[0]}
    waystation.save(path / "step_1", state, custom_metadata={HOSTILE[0]: HOSTILE[1]})
    state["layer"]["kernel"] = weights + 1.0
    waystation.save(path / "step_2", state)
    return path


def test_a_run_its_checkpoints_and_their_difference(page: Page, tmp_path: Path, window: Open) -> None:
    client = window(hostile_run(tmp_path / "run"))
    page.goto(client.url)
    page.get_by_role("link", name="step_2", exact=True).wait_for()
    assert page.locator(".steps .room .row").count() == 2
    assert page.locator("svg .bar").count() >= 2

    page.get_by_role("link", name="step_1", exact=True).click()
    page.get_by_text("kernel", exact=True).wait_for()
    shown = page.locator(".tree .room").inner_text()
    assert "<img src=x onerror=" in shown
    assert "\u202e" not in shown
    page.get_by_label("search names").fill("kern")
    assert page.locator(".tree .room .row").count() == 3
    page.get_by_text("kernel", exact=True).click()
    page.get_by_text(re.compile("2 . 1 parts on 8 devices, each on 4")).wait_for()
    page.get_by_role("button", name="Read the values").click()
    page.get_by_text("how many finite values lie where").wait_for()
    found = facts(page, ".detail")
    assert found["shape"] == "[64, 32]"
    assert (found["minimum"], found["maximum"], found["mean"]) == ("0", "2,047", "1023.5")
    page.get_by_role("button", name="Verify").click()
    page.get_by_text("intact").wait_for()

    page.go_back()
    page.get_by_label("mark step_1").check()
    page.get_by_label("mark step_2").check()
    page.get_by_role("button", name="Compare the two").click()
    page.locator(".differences .room .row").wait_for()
    row = page.locator(".differences .room .row").inner_text()
    assert "['layer']['kernel']" in row
    assert "100 %" in row
    assert "45.2548" in row, "the norm of 2048 ones"
    page.goto(client.url + "#/checkpoint/0/absent")
    page.get_by_role("alert").get_by_text("NotFound").wait_for()


def test_keys_reach_everything(page: Page, tmp_path: Path, window: Open) -> None:
    page.goto(window(hostile_run(tmp_path / "run")).url)
    rows = page.get_by_role("grid", name="checkpoints").get_by_role("row")
    rows.nth(2).wait_for()
    press(page, "ArrowDown", "Space", "ArrowDown", "Space")
    assert rows.nth(2).get_attribute("aria-selected") == "true"
    assert page.get_by_role("checkbox", checked=True).count() == 2
    assert page.get_by_role("button", name="Compare the two").is_enabled()
    press(page, "Enter")
    tree = page.get_by_role("treegrid", name="tree")
    tree.get_by_role("row", name="(root)").wait_for()
    assert page.title().endswith("step_2 - Waystation")

    page.get_by_label("search names").focus()
    page.keyboard.type("kern")
    press(page, "Enter")
    page.get_by_text(re.compile("2 . 1 parts on 8 devices, each on 4")).wait_for()
    picked = tree.locator(f"#{tree.get_attribute('aria-activedescendant')}")
    assert (picked.get_attribute("aria-level"), picked.get_attribute("aria-selected")) == ("3", "true")
    press(page, "ArrowLeft")
    layer = page.locator(f"#{tree.get_attribute('aria-activedescendant')}")
    assert layer.get_attribute("aria-expanded") == "true"
    press(page, "ArrowRight", "Enter")
    assert page.get_by_role("button", name="Read the values").evaluate("it => it === document.activeElement")
    press(page, "Enter")
    page.get_by_text("how many finite values lie where").wait_for()
    press(page, "Escape")
    assert tree.evaluate("it => it === document.activeElement")
    page.get_by_label("search names").focus()
    press(page, "Escape")
    assert page.get_by_label("search names").input_value() == ""
    press(page, "ArrowDown", "End", "Home", "ArrowLeft")
    root = page.locator(f"#{tree.get_attribute('aria-activedescendant')}")
    assert root.get_attribute("aria-expanded") == "false"
    assert tree.get_by_role("row").count() == 2, "the headings, and the root"

    nameless = (
        "it => [...it.querySelectorAll('button, input, select, a, [tabindex=\"0\"], canvas, progress')]"
    )
    nameless += ".filter(each => !(each.ariaLabel || each.textContent.trim())).map(each => each.outerHTML)"
    assert page.locator("body").evaluate(nameless) == []
    press(page, "Escape")
    rows.nth(2).wait_for()
    page.wait_for_function("() => document.querySelector('.steps')?.getAttribute('aria-activedescendant')")
    assert rows.nth(2).get_attribute("aria-selected") == "true", "whoever comes back is where it was"


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def test_a_store_is_shown_and_so_is_what_cannot_be_read(page: Page, runs: Path) -> None:
    place = s3.bucket()
    with place.context():
        waystation.save(f"{place.location}/run/7", {"w": np.arange(4.0)})
    settings = {name.upper(): value for name, value in place.settings(place.endpoint).items()}
    runs.chmod(0)
    process, client = started(f"{place.location}/run", runs, within=LIKE_OTHERS, environment=settings)
    try:
        page.goto(f"{client.url}#/run/0")
        page.get_by_role("link", name="7", exact=True).click()
        page.get_by_role("row", name="w float64").click()
        page.get_by_role("button", name="Read the values").click()
        page.get_by_text("how many finite values lie where").wait_for()
        page.get_by_role("button", name="Verify").click()
        page.get_by_text("intact").wait_for()
        assert s3.SECRET_KEY not in page.content()
        page.get_by_role("link", name=str(runs)).click()
        page.get_by_role("alert").get_by_text("Permission denied").wait_for()
        assert str(runs) in page.get_by_role("heading").inner_text()
        assert "Traceback" not in page.content()
        runs.chmod(0o755)
        page.reload()
        page.get_by_role("link", name="step_2", exact=True).wait_for()
    finally:
        runs.chmod(0o755)
        assert ended(process) == (0, "", "")


@pytest.mark.long
@only_long
def test_a_large_tree_shows_the_rows_that_can_be_seen(page: Page, tmp_path: Path, window: Open) -> None:
    state = {
        f"block{block:03}": {f"w{number:03}": np.float32(number) for number in range(100)}
        for block in range(1000)
    }
    waystation.save(tmp_path / "c", state)
    client = window(tmp_path / "c")
    page.goto(client.url)
    page.get_by_text(re.compile(r"^101,001 rows$")).wait_for()
    assert page.locator(".tree .room .row").count() < 100
    page.get_by_role("button", name="Open all").click()
    page.locator(".tree .list").evaluate("list => { list.scrollTop = list.scrollHeight; }")
    page.get_by_text("w099", exact=True).last.wait_for()
    assert page.locator(".tree .room .row").count() < 100
    page.get_by_label("search names").fill("block500 w007")
    page.get_by_text(re.compile("^1 of 101,001 rows$")).wait_for()
    page.get_by_role("treegrid").focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    page.get_by_text("['block500']['w007']").wait_for()
    page.get_by_label("search names").fill("")
    page.get_by_role("button", name="Close all").click()
    page.get_by_role("treegrid").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.get_by_text("w000", exact=True).first.wait_for()


@pytest.mark.long
@only_long
def test_a_sample_says_that_it_is_one_and_long_work_can_be_stopped(
    page: Page, tmp_path: Path, window: Open
) -> None:
    sparse.write(tmp_path / "huge", [(20_000, 20_000)] * 63)
    page.goto(window(tmp_path / "huge").url)
    page.get_by_label("search names").fill("[9]")
    page.locator(".tree .room .row").last.click()
    page.get_by_role("button", name="Read a sample, at most 16.0 MiB").click()
    page.get_by_text(re.compile("A sample: .* of 400,000,000 elements")).wait_for()
    page.get_by_role("button", name="Verify").click()
    page.get_by_text(re.compile("of 93.9 GiB")).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("stopped").wait_for()


@pytest.mark.long
@only_long
def test_a_timeline_is_drawn_and_its_events_are_told(page: Page, tmp_path: Path, window: Open) -> None:
    events: list[dict[str, Any]] = [
        {
            "ph": "X",
            "name": f"step {HOSTILE[0]}",
            "ts": 1000 * n,
            "dur": 900,
            "pid": 1,
            "tid": 1,
            "args": {"n": n},
        }
        for n in range(10)
    ]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    page.goto(window(tmp_path / "t.json").url)
    page.get_by_text("10 on 1 track").wait_for()
    canvas = page.locator("canvas")
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] * 0.52, box["y"] + 26 + 18 + 6)
    page.locator(".detail h2").wait_for()
    assert "<img src=x" in page.locator(".detail h2").inner_text()
    canvas.focus()
    for key in ("+", "+", "ArrowLeft", "-", "0"):
        page.keyboard.press(key)
    page.mouse.move(box["x"] + 200, box["y"] + 50)
    page.mouse.wheel(0, -300)
    pixels = "canvas => new Set(canvas.getContext('2d').getImageData(0, 0, canvas.width, 60).data).size"
    assert canvas.evaluate(pixels) > 10


@pytest.mark.long
@only_long
def test_agents_are_watched_as_they_are(page: Page, window: Open, tmp_path: Path) -> None:
    waystation.save(tmp_path / "c", {"a": 1})
    with memory_directory() as directory, running_agent(directory, options=["--versions=1"]):
        client = _native.AgentClient(str(directory))
        watched = [top.in_directory(directory), top.at_address("127.0.0.1:1", "absent")]
        page.goto(window(tmp_path / "c", agents=watched).url + "#/agents")
        page.get_by_text(re.compile("silent: no agent answers")).wait_for()
        shards.save(client, 10)
        client.commit(shards.EPOCH, 10)
        row = page.locator("tbody tr").first
        row.get_by_role("cell", name="10", exact=True).first.wait_for()
        page.get_by_text(re.compile("newest committed step: 10")).wait_for()
