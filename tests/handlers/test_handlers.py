"""Handlers: both their phases, what they know, and what their failures do."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.handlers.examples import (
    Counter,
    CounterHandler,
    Failing,
    Iterator,
    SubdirectoryHandler,
    TaskHandler,
)
from tests.handlers.states import same, state, with_handlers
from tests.support.places import names_in

import waystation
from waystation import errors
from waystation._options.in_effect import current_options
from waystation.handlers import PyTreeHandler
from waystation.storage import AnyPath

# ---- handlers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("phase", ["save", "save in the background"])
def test_a_handler_that_fails_takes_the_save_down(directory: AnyPath, phase: str, asynchronous: bool) -> None:
    failing = type("Failing", (Failing,), {"phase": phase})
    path, given = directory / "checkpoint", {"a": state(), "counter": Counter()}

    def save() -> None:
        if asynchronous:
            waystation.save_checkpointables_async(path, given).result()
        else:
            waystation.save_checkpointables(path, given)

    with with_handlers(failing), pytest.raises(errors.HandlerFailed, match="'counter'") as caught:
        save()
    assert "told to fail" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert names_in(directory) == []


def test_a_handler_that_fails_leaves_what_is_overwritten(saved: Path) -> None:
    failing = type("Failing", (Failing,), {"phase": "save in the background"})
    with with_handlers(failing), pytest.raises(errors.HandlerFailed):
        waystation.save_checkpointables(saved, {"counter": Counter(4)}, overwrite=True)
    with with_handlers(SubdirectoryHandler):
        assert waystation.load_checkpointables(saved, {"counter": None})["counter"] == Counter(3)
    assert os.listdir(saved.parent) == ["checkpoint"]


def test_a_first_phase_that_returns_nothing_to_await_is_told_of(directory: AnyPath) -> None:
    class Wrong(Iterator):
        async def save(self, directory: Any) -> Any:
            return None

    with pytest.raises(TypeError, match=r"'wrong'.* it returned None where an awaitable belongs"):
        waystation.save_checkpointables(directory / "c", {"wrong": Wrong()})
    assert names_in(directory) == []


def test_links_are_refused(directory: AnyPath) -> None:
    class Linking(CounterHandler):
        async def save(self, directory: Any, checkpointable: Counter) -> Any:
            async def write() -> None:
                ((await directory.await_creation()) / "link").symlink_to("/etc/hosts")

            return write()

    with with_handlers(Linking), pytest.raises(errors.Unsupported, match="link"):
        waystation.save_checkpointables(directory / "checkpoint", {"counter": Counter()})
    assert names_in(directory) == []


def test_the_name_of_the_record_is_reserved(directory: AnyPath) -> None:
    class Taking(CounterHandler):
        async def save(self, directory: Any, checkpointable: Counter) -> Any:
            async def write() -> None:
                ((await directory.await_creation()) / ".waystation-record.json").write_text("mine")

            return write()

    with (
        with_handlers(Taking),
        pytest.raises(errors.InvalidInput, match=r"'counter'.* reserved .* another name"),
    ):
        waystation.save_checkpointables(directory / "checkpoint", {"counter": Counter()})
    assert names_in(directory) == []


def test_what_was_begun_in_the_first_phase_goes_on(directory: AnyPath) -> None:
    path = directory / "checkpoint"
    counter = Counter(5)
    with with_handlers(TaskHandler):
        saving = waystation.save_checkpointables_async(path, {"counter": counter})
        counter.value = 6
        saving.result()
        assert waystation.load_checkpointables(path)["counter"] == Counter(5)


def test_inside_of_an_event_loop(directory: AnyPath) -> None:
    """As in a notebook: the caller's thread runs a loop already."""

    async def main() -> Any:
        waystation.save_checkpointables(directory / "a", {"counter": Counter(1)})
        await waystation.save_checkpointables_async(directory / "b", {"counter": Counter(2)})
        first = waystation.load_checkpointables(directory / "a")
        return first, await waystation.load_checkpointables_async(directory / "b")

    with with_handlers(CounterHandler):
        first, second = asyncio.run(main())
    assert (first, second) == ({"counter": Counter(1)}, {"counter": Counter(2)})


def test_both_phases_know_the_context(directory: AnyPath) -> None:
    seen: list[int] = []

    class Asking(CounterHandler):
        async def save(self, directory: Any, checkpointable: Counter) -> Any:
            seen.append(current_options().file.file_bytes_target)
            rest = await super().save(directory, checkpointable)

            async def write() -> None:
                seen.append(current_options().file.file_bytes_target)
                await rest

            return write()

    context = with_handlers(Asking)
    context.file.file_bytes_target = 12345
    with context:
        waystation.save_checkpointables_async(directory / "checkpoint", {"counter": Counter()}).result()
    assert seen == [12345, 12345]


def test_the_directory_is_there_in_the_first_phase(directory: AnyPath) -> None:
    class Eager(CounterHandler):
        async def save(self, directory: Any, checkpointable: Counter) -> Any:
            assert (await directory.await_creation()).is_dir()
            assert directory.path.is_dir()
            assert isinstance(directory, waystation.checkpoint.handlers.types.PathAwaitingCreation)
            return await super().save(directory, checkpointable)

    with with_handlers(Eager):
        waystation.save_checkpointables(directory / "checkpoint", {"counter": Counter(2)})
        assert waystation.load_checkpointables(directory / "checkpoint")["counter"] == Counter(2)


def test_a_state_says_itself_what_cannot_be_saved(directory: AnyPath) -> None:
    with pytest.raises(errors.Unsupported, match=r"leaf \['layers'\]\[1\] is a builtins.object") as caught:
        waystation.save_checkpointables(directory / "x", {"a": state(), "b": {"layers": [1, object()]}})
    assert caught.value.context["checkpointable"] == "b"
    assert names_in(directory) == []


def test_a_state_that_a_handler_keeps_among_its_files(directory: AnyPath) -> None:
    class Model:
        def __init__(self, weights: Any, name: str) -> None:
            self.weights, self.name = weights, name

    class ModelHandler:
        async def save(self, directory: Any, checkpointable: Model) -> Any:
            weights = directory / "weights"
            rest = await PyTreeHandler().save(weights, checkpointable.weights)
            name = checkpointable.name

            async def write() -> None:
                (await weights.await_creation()).mkdir()
                await rest
                ((await directory.await_creation()) / "name.txt").write_text(name)

            return write()

        async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
            rest = await PyTreeHandler().load(directory / "weights", abstract_checkpointable)

            async def read() -> Model:
                return Model(await rest, (directory / "name.txt").read_text())

            return read()

        async def metadata(self, directory: Any) -> Any:
            return await PyTreeHandler().metadata(directory / "weights")

        def is_handleable(self, checkpointable: Any) -> bool:
            return isinstance(checkpointable, Model)

        def is_abstract_handleable(self, abstract_checkpointable: Any) -> None:
            return None

    path = directory / "checkpoint"
    weights = {"x": np.arange(10.0), "y": [jnp.ones(3), "text"]}
    with with_handlers(ModelHandler):
        saving = waystation.save_checkpointables_async(path, {"model": Model(weights, "one")})
        weights["x"] += 1
        saving.result()
        found = waystation.load_checkpointables(path)["model"]
        abstract = waystation.checkpointables_metadata(path).metadata["model"]
    assert found.name == "one"
    assert found.weights["x"].tolist() == list(range(10))
    assert found.weights["y"][1] == "text"
    assert abstract["x"].shape == (10,)
    assert not waystation.checkpoint.verify(path).damages


def test_the_callback_of_the_background(directory: AnyPath) -> None:
    context = waystation.Context()
    seen: list[bool] = []
    path = directory / "checkpoint"
    context.asynchronous.post_finalization_callback = lambda: seen.append(waystation.is_checkpoint(path))
    with context:
        response = waystation.save_checkpointables_async(path, {"dataset": Iterator(1), "a": state()})
        response.result()
        waystation.save(directory / "another", {"x": 1})
    assert seen == [True]


def test_a_callback_that_fails_says_that_the_checkpoint_is_whole(directory: AnyPath) -> None:
    def callback() -> None:
        raise LookupError("no")

    context = waystation.Context()
    context.asynchronous.post_finalization_callback = callback
    with context:
        response = waystation.save_async(directory / "checkpoint", {"x": 1})
    with pytest.raises(LookupError) as caught:
        response.result()
    assert "is whole" in caught.value.__notes__[0]
    assert waystation.load(directory / "checkpoint") == {"x": 1}


def test_cancelling_stops_handlers(directory: AnyPath) -> None:
    begun = threading.Event()

    class Slow(CounterHandler):
        async def save(self, directory: Any, checkpointable: Counter) -> Any:
            async def write() -> None:
                begun.set()
                await asyncio.sleep(3600)

            return write()

    with with_handlers(Slow):
        response = waystation.save_checkpointables_async(directory / "checkpoint", {"counter": Counter()})
    assert begun.wait(60)
    response.cancel()
    with pytest.raises(errors.Cancelled):
        response.result()
    assert names_in(directory) == []


def test_states_are_safe_from_changes(directory: AnyPath) -> None:
    """What does not fit into the snapshot the caller waits for, of whatever state it is."""
    path = directory / "checkpoint"
    context = waystation.Context()
    context.memory.snapshot_bytes = 4 << 20
    given = {name: state(seed) for seed, name in enumerate("abcd")}
    with context:
        saving = waystation.save_checkpointables_async(path, given)
    for tree in given.values():
        tree["large"][:] = 0
        tree["small"][:] = 0
    saving.result()
    loaded = waystation.load_checkpointables(path)
    assert all(same(loaded[name], state(seed)) for seed, name in enumerate("abcd"))
