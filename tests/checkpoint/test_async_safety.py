"""After `save_async` returns, nothing that happens to the state changes what is saved."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import waystation

MANY = 4 << 20


def limit_snapshot(snapshot_bytes: int | None) -> waystation.Context:
    context = waystation.Context()
    context.memory.snapshot_bytes = snapshot_bytes
    return context


@pytest.mark.parametrize("snapshot_bytes", [None, 0, 9 << 20], ids=["all copied", "drained", "some of each"])
def test_numpy_and_torch_leaves_may_be_overwritten(tmp_path: Path, snapshot_bytes: int | None) -> None:
    state: dict[str, Any] = {f"n{i}": np.full(MANY // 4, i, np.float32) for i in range(6)}
    state |= {f"t{i}": torch.full((MANY // 4,), i, dtype=torch.float32) for i in range(6)}
    state["strided"] = np.arange(1 << 20).reshape(1024, 1024).T
    expected = {name: np.asarray(leaf).copy() for name, leaf in state.items()}
    with limit_snapshot(snapshot_bytes):
        response = waystation.save_async(tmp_path / "checkpoint", state)
    for leaf in state.values():
        leaf[...] = -1
    response.result()
    for name, leaf in waystation.load(tmp_path / "checkpoint").items():
        np.testing.assert_array_equal(np.asarray(leaf), expected[name], err_msg=name)


def test_jax_leaves_may_be_donated_and_deleted(tmp_path: Path) -> None:
    state = {"donated": jnp.arange(MANY), "deleted": jnp.ones((64, 1024))}
    expected = {name: np.array(leaf, copy=True) for name, leaf in state.items()}
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    response = waystation.save_async(tmp_path / "checkpoint", state)
    result = step(state["donated"])
    state["deleted"].delete()
    for _ in range(5):
        result = step(result)
    response.result()
    for name, leaf in waystation.load(tmp_path / "checkpoint").items():
        np.testing.assert_array_equal(np.asarray(leaf), expected[name], err_msg=name)


def test_a_promise_to_keep_leaves_copies_nothing(tmp_path: Path) -> None:
    state = {"x": np.arange(1 << 20)}
    context = waystation.Context()
    context.memory.caller_keeps = True
    with context:
        waystation.save_async(tmp_path / "checkpoint", state).result()
    np.testing.assert_array_equal(waystation.load(tmp_path / "checkpoint")["x"], state["x"])


def test_errors_that_can_be_known_are_raised_at_once(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", [1])
    with pytest.raises(waystation.errors.Conflict, match="overwrite=True"):
        waystation.save_async(tmp_path / "checkpoint", [2])
    with pytest.raises(waystation.errors.Unsupported, match=r"\['x'\]\[0\]"):
        waystation.save_async(tmp_path / "other", {"x": [object()]})
    assert waystation.load(tmp_path / "checkpoint") == [1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_later_errors_are_raised_by_the_handle(tmp_path: Path) -> None:
    # JAX arrays on CPU are not copied, so the second starts while the first is still being written.
    state = {"x": jnp.zeros(1 << 26)}
    first = waystation.save_async(tmp_path / "checkpoint", state)
    second = waystation.save_async(tmp_path / "checkpoint", state)
    errors = [response.exception() for response in (first, second)]  # which waits, as a future's does
    assert [type(error) for error in errors] == [type(None), waystation.errors.Conflict]
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_exception_waits_as_long_as_it_is_told(tmp_path: Path) -> None:
    may_end = threading.Event()
    context = waystation.Context()
    context.array.saving.on_statistics = lambda _: may_end.wait(60)
    with context:
        response = waystation.save_async(tmp_path / "checkpoint", {"x": np.zeros(8)})
    with pytest.raises(TimeoutError, match=r"still runs after 0\.01 s"):
        response.exception(0.01)
    may_end.set()
    assert response.exception(60) is None


def test_handle(tmp_path: Path) -> None:
    calls: list[bool | None] = []
    response = waystation.save_async(tmp_path / "checkpoint", {"x": np.zeros(1 << 22)})
    response.on_end(lambda handle: calls.append(handle.done()))
    response.on_complete(calls.append)
    assert response.result() is None
    done, total = response.progress()
    assert done == total >= 8 << 22
    response.on_end(lambda handle: calls.append(handle.done()))
    response.on_complete(calls.append)
    loading = waystation.load_async(tmp_path / "checkpoint")
    assert loading.result()["x"].shape == (1 << 22,)
    assert calls == [True, None, True, None]


def test_a_handle_of_what_failed_tells_those_who_want_the_end(tmp_path: Path) -> None:
    response = waystation.save_async(tmp_path / "checkpoint", {"x": np.zeros(1 << 28, np.uint8)})
    ended = threading.Event()
    succeeded: list[None] = []
    response.on_complete(succeeded.append)
    response.on_end(lambda _: ended.set())
    response.cancel()
    with pytest.raises(waystation.errors.Cancelled):
        response.result()
    assert ended.wait(60)
    assert succeeded == []


def test_await(tmp_path: Path) -> None:
    async def main() -> Any:
        await waystation.save_async(tmp_path / "checkpoint", {"x": np.arange(5)})
        return await waystation.load_async(tmp_path / "checkpoint")

    np.testing.assert_array_equal(asyncio.run(main())["x"], np.arange(5))


def test_cancel_leaves_nothing(tmp_path: Path) -> None:
    response = waystation.save_async(tmp_path / "checkpoint", {"x": np.zeros(1 << 28, np.uint8)})
    response.cancel()
    with pytest.raises(waystation.errors.Cancelled):
        response.result()
    assert list(tmp_path.iterdir()) == []


def test_the_text_of_a_handle_says_how_it_stands(tmp_path: Path) -> None:
    response = waystation.save_async(tmp_path / "checkpoint", {"a": np.ones(3)})
    assert repr(response).startswith(f"<AsyncResponse: saving '{tmp_path}/checkpoint', ")
    response.result()
    assert repr(response) == f"<AsyncResponse: saving '{tmp_path}/checkpoint', done>"
    failed = waystation.AsyncResponse("counting", lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert repr(failed).startswith("<AsyncResponse: counting, failed with ZeroDivisionError: ")
