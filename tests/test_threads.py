"""Work in threads, also while the program ends."""

from __future__ import annotations

import contextvars
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from waystation import safetensors
from waystation._threads import Threads


def test_results_come_in_the_order_of_the_arguments() -> None:
    with Threads(4, "test") as threads:
        assert list(threads.map(lambda number: number * number, range(100))) == [n * n for n in range(100)]


def test_no_more_threads_than_asked_for_work_at_a_time() -> None:
    most, inside, lock = 0, 0, threading.Lock()

    def work(_: int) -> None:
        nonlocal most, inside
        with lock:
            inside += 1
            most = max(most, inside)
        with lock:
            inside -= 1

    with Threads(3, "test") as threads:
        list(threads.map(work, range(1000)))
    assert 1 <= most <= 3
    assert not [thread for thread in threading.enumerate() if thread.name == "waystation: test"]


def test_what_work_raises_is_raised_and_the_rest_is_left() -> None:
    done = []

    def work(number: int) -> None:
        if number == 2:
            raise ValueError(number)
        done.append(number)

    with Threads(1, "test") as threads, pytest.raises(ValueError, match="2"):
        list(threads.map(work, range(10_000)))
    assert len(done) < 10_000
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(work, 1)


def test_work_sees_the_context_of_its_call() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(5)
    with Threads(1, "test") as threads:
        assert threads.submit(variable.get).result() == 5


def test_where_no_thread_can_be_started_the_caller_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with Threads(2, "test") as threads:
        assert (
            list(threads.map(lambda _: threading.current_thread(), range(5)))
            == [threading.current_thread()] * 5
        )


def test_what_a_signal_handler_raises_while_a_thread_starts_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("DataLoader worker is killed")

    monkeypatch.setattr(threading.Thread, "start", start)
    with Threads(2, "test") as threads, pytest.raises(RuntimeError, match="worker"):
        threads.submit(print)


SERVER = """
import concurrent.futures.thread, sys, threading
import numpy as np
import waystation
from waystation import safetensors

directory = sys.argv[1]

def serve():
    threading.main_thread().join()
    loaded = safetensors.load(f"{directory}/model", framework="numpy", dtype="float32")
    assert [float(array.sum()) for array in loaded.values()] == [1 << 23, 1000, 2000]
    assert len(list(safetensors.stream(f"{directory}/model", framework="numpy", dtype="float32"))) == 3
    wanted = {"a": np.empty(1 << 23, np.float32), "b": np.empty(3, np.float32)}
    assert float(waystation.load(f"{directory}/checkpoint", wanted)["a"].sum()) == 1 << 23
    safetensors.write_checksums(f"{directory}/model")
    safetensors.verify_files(f"{directory}/model")
    safetensors.spread(f"{directory}/model", [f"{directory}/one", f"{directory}/two"])
    print("served")

threading.Thread(target=serve).start()
"""


def test_threads_load_after_the_main_thread_has_ended(tmp_path: Path) -> None:
    import waystation

    large = np.ones(1 << 23, np.float16)
    model = {"a": large, "b": np.ones(1000, np.float16), "c": np.full(1000, 2, np.float16)}
    safetensors.save(model, tmp_path / "model", max_file_bytes=1 << 24)
    waystation.save(tmp_path / "checkpoint", {"a": large, "b": np.ones(3, np.float16)})
    server = subprocess.run(
        [sys.executable, "-c", SERVER, tmp_path], capture_output=True, text=True, check=False, timeout=120
    )
    assert (server.returncode, server.stdout) == (0, "served\n"), server.stderr
