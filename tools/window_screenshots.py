"""Takes the pictures of the window in `docs/images` anew: `make screenshots`.

Everything that they show is real: a small run saved in the background, with the log that its program wrote; a
program on two hosts, and the timeline of it; agents that keep shards. Needs Chromium.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.memory import shards
from tests.support.agents import memory_directory, running_agent
from tests.support.browser import running_browser

import waystation
from waystation import _native, runtime
from waystation.cli.commands import top
from waystation.cli.commands.view import Commands
from waystation.view import server

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 150_000
WIDTH, HEIGHT = 1060, 640
STEPS = range(100, 2500, 100)
HIDDEN, LAYERS = 256, 12


def main() -> None:
    """Takes all pictures."""
    jax.config.update("jax_num_cpu_devices", 8)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="window-")))
        os.chdir(directory)
        save_run(directory)
        write_timeline(directory / "timeline.json")
        agents = stack.enter_context(memory_directory())
        stack.enter_context(running_agent(agents, options=["--versions=2"]))
        client = _native.AgentClient(str(agents))
        paths = [directory / "run", directory / "trainer.log", directory / "timeline.json"]
        url = stack.enter_context(shown(paths, [top.in_directory(agents)]))
        browser = stack.enter_context(running_browser())
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(f"{url}#/run/0")
        page.get_by_text("who waited longest").wait_for()
        take(page, "run")
        page.goto(f"{url}#/checkpoint/0/2400")
        page.get_by_label("search names").fill("attention")
        page.get_by_text("query", exact=True).first.click()
        page.get_by_role("button", name="Read the values").click()
        histogram = page.get_by_text("how many finite values lie where")
        histogram.wait_for()
        page.locator(".detail").evaluate("detail => detail.scrollTop = 170")
        take(page, "checkpoint")
        page.goto(f"{url}#/diff/0/2300/0/2400")
        page.get_by_label("order").select_option("norm of the difference")
        take(page, "difference")
        page.goto(f"{url}#/timeline/2")
        page.locator("canvas").wait_for()
        take(page, "timeline")
        page.goto(f"{url}#/agents")
        for step in (10, 20, 30, 40):
            shards.save(client, step)
            client.commit(shards.EPOCH, step)
            page.get_by_text(f"newest committed step: {step}").wait_for()
        take(page, "agents")


def save_run(directory: Path) -> None:
    """Saves a run in the background, as a program does that trains meanwhile, and writes its log."""
    handler = logging.FileHandler(directory / "trainer.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("waystation")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    random = np.random.default_rng(0)

    def layer() -> dict[str, Any]:
        wide = NamedSharding(mesh, P("data", "model"))
        return {
            "attention": {
                name: jax.device_put(random.normal(0, 0.02, (HIDDEN, HIDDEN)).astype(jnp.bfloat16), wide)
                for name in ("query", "key", "value", "output")
            },
            "norm": {"scale": np.ones(HIDDEN, np.float32)},
            "mlp": {"up": random.normal(0, 0.05, (HIDDEN, 2 * HIDDEN)).astype(np.float32)},
        }

    state: dict[str, Any] = {"params": {f"layer_{n:02}": layer() for n in range(LAYERS)}, "step": 0}
    for step in STEPS:
        state["step"] = step
        for each in state["params"].values():
            if random.random() < 0.7:
                each["mlp"]["up"] = each["mlp"]["up"] + random.normal(
                    0, 1e-3, each["mlp"]["up"].shape
                ).astype(np.float32)
            each["attention"]["query"] = each["attention"]["query"] * (1 + 1e-2 * random.random())
        waystation.save_async(
            directory / "run" / str(step), state, custom_metadata={"loss": 9 / step**0.3}
        ).result()
    log.removeHandler(handler)
    handler.close()


def write_timeline(path: Path) -> None:
    """Writes the timeline of a program on an island of two hosts on this machine."""
    with contextlib.closing(runtime.connect(hosts=0)) as cluster:
        cluster.add_island("left", hosts=2, devices_per_host=2)
        client = cluster.start_client()
        left = client.make_virtual_device_set().add_slice(devices=4, island="left")
        forward = client.jit(lambda x: x - x.mean(), left, in_shardings=P("x"), name="forward")
        backward = client.jit(
            lambda x: x / (1 + jnp.abs(x).max()), left, in_shardings=P("x"), name="backward"
        )

        @runtime.program
        def step(x: Any) -> Any:
            return backward(forward(backward(forward(x))))

        x = step(np.ones((64, 128), np.float32))
        x.block_until_ready()
        cluster.record_timeline()
        for _ in range(12):
            x = step(x)
        x.block_until_ready()
        cluster.write_timeline(path)


@contextlib.contextmanager
def shown(paths: list[Path], agents: list[top.Agent]) -> Iterator[str]:
    """A window, and its address."""
    sources = [server.source_at(str(path)) for path in paths]
    window = server.Window(sources, Commands(agents), server.listen(0), watches=True)
    thread = threading.Thread(target=window.run)
    thread.start()
    try:
        yield window.url
    finally:
        window.stop()
        thread.join(30)


def take(page: Any, name: str) -> None:
    """Takes one picture, of which the pages allow so many bytes."""
    page.wait_for_timeout(300)  # the last frame is drawn
    path = IMAGES / f"window-{name}.png"
    page.screenshot(path=path)
    nbytes = path.stat().st_size
    print(f"{path.relative_to(ROOT)}: {nbytes} bytes")
    if nbytes > MOST_BYTES:
        sys.exit(f"{path.relative_to(ROOT)} is too large: at most {MOST_BYTES} bytes")


if __name__ == "__main__":
    main()
