"""Several saves in flight, failures in the background, several threads."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from tests.support.places import names_in, steps_in
from tests.training.gates import Gate

import waystation
from waystation import errors
from waystation.storage import AnyPath
from waystation.training import Checkpointer, preservation_policies, save_decision_policies
from waystation.training.in_flight import StepResponse
from waystation.training.logger import save_calls_in_log

EVERY_STEP = save_decision_policies.FixedIntervalPolicy(1)
LONG_S = 0.2


def gated(step: int, gate: Gate) -> dict[str, Any]:
    return {"state": {"step": step, "a": np.full(5, step)}, "gate": gate}


def steps_of(checkpointer: Checkpointer) -> list[int]:
    return [info.step for info in checkpointer.checkpoints]


def test_several_saves_are_in_flight_and_only_commits_are_listed(directory: AnyPath) -> None:
    gates = [Gate() for _ in range(3)]
    with Checkpointer(directory, save_decision_policy=EVERY_STEP, max_saves_in_flight=3) as checkpointer:
        responses = []
        for step, gate in enumerate(gates):
            response = checkpointer.save_checkpointables_async(step, gated(step, gate))
            assert response is not None
            responses.append(response)
        assert all(gate.began.wait(60) for gate in gates), "all are being written at once"
        assert checkpointer.latest is None
        with pytest.raises(errors.StepAlreadyExistsError):
            checkpointer.save(1, {"a": 1})
        gates[2].open()
        assert responses[2].result()
        assert steps_of(checkpointer) == [2], "the last one is the first to be committed"
        gates[0].open()
        assert responses[0].result()
        assert steps_of(checkpointer) == [0, 2]
        gates[1].open()
    assert steps_of(checkpointer) == [0, 1, 2]


def test_what_is_being_saved_may_be_freed(directory: AnyPath) -> None:
    gate = Gate()
    array = np.arange(1000)
    held = weakref.ref(array)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save_checkpointables_async(0, {"state": {"a": array}, "gate": gate})
        del array
        gc.collect()
        assert held() is None, "a copy is being written"
        gate.open()
    assert np.array_equal(checkpointer.load()["a"], np.arange(1000))


def test_a_save_waits_until_there_is_room_and_the_log_says_for_how_long(
    directory: AnyPath, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "waystation")
    first, second = Gate(), Gate()
    with Checkpointer(directory, save_decision_policy=EVERY_STEP) as checkpointer:
        checkpointer.save_checkpointables_async(0, gated(0, first))
        begun, begun_s = threading.Event(), time.monotonic()

        def save() -> None:
            begun.set()
            checkpointer.save_checkpointables_async(1, gated(1, second))

        thread = threading.Thread(target=save)
        thread.start()
        begun.wait(60)
        assert not second.began.is_set(), "one save at a time, unless more are asked for"
        assert not waystation.is_checkpoint(directory / "0")
        time.sleep(LONG_S)
        first.open()
        thread.join()
        took_s = time.monotonic() - begun_s
        assert steps_of(checkpointer)[:1] == [0], "it waited for that"
        second.open()
    assert steps_of(checkpointer) == [0, 1]
    calls = list(save_calls_in_log(f"12:00 INFO {record.getMessage()}" for record in caplog.records))
    assert [(call.step, call.directory) for call in calls] == [(0, str(directory)), (1, str(directory))]
    assert calls[0].waited_s < LONG_S / 2
    assert LONG_S / 2 < calls[1].waited_s <= calls[1].blocking_s <= took_s


def test_lines_that_are_no_calls_are_passed_over() -> None:
    line = (
        "{'event_type': 'save', 'step': %s, 'directory': %s, 'synchronous': True, 'blocking_s': %s, "
        "'waited_s': %s}"
    )
    names = ["/a", "/it's", '/"it\'s"', "/a\nb"]
    whole = [line % (3, repr(name), "1e-05", "0.0") for name in names]
    wrong = [(3, "'/a'", "1.0.0", "0.0"), ("03", "'/a'", "1.0", "0.0"), (3, "'\\x'", "1.0", "0")]
    others = ["", "{'event_type': 'save'}", line]
    found = list(save_calls_in_log([*whole, *(line % each for each in wrong), *others]))
    assert [call.directory for call in found] == names
    assert {(call.step, call.blocking_s, call.waited_s) for call in found} == {(3, 1e-05, 0.0)}


def test_collections_of_saves_that_end_out_of_order(directory: AnyPath) -> None:
    gates = [Gate() for _ in range(4)]
    policy = preservation_policies.LatestN(2)
    with Checkpointer(
        directory, save_decision_policy=EVERY_STEP, preservation_policy=policy, max_saves_in_flight=4
    ) as checkpointer:
        for step, gate in enumerate(gates):
            checkpointer.save_checkpointables_async(step, gated(step, gate))
        for gate in reversed(gates):
            gate.open()
    assert steps_of(checkpointer) == [2, 3]
    assert steps_in(directory) == ["2", "3"]


@pytest.mark.parametrize("how", ["save", "save_async", "wait", "close", "delete", "reload"])
def test_a_failure_is_raised_once_by_what_comes_next(directory: AnyPath, how: str) -> None:
    gate = Gate(RuntimeError("the disk is on fire"))
    checkpointer = Checkpointer(directory, save_decision_policy=EVERY_STEP)
    checkpointer.save(0, {"a": 0})
    response = checkpointer.save_checkpointables_async(1, gated(1, gate))
    assert isinstance(response, StepResponse)
    gate.open()
    response.wait()
    calls = {
        "save": lambda: checkpointer.save(2, {"a": 2}),
        "save_async": lambda: checkpointer.save_async(2, {"a": 2}),
        "wait": checkpointer.wait,
        "close": checkpointer.close,
        "delete": lambda: checkpointer.delete(0),
        "reload": checkpointer.reload,
    }
    with pytest.raises(errors.HandlerFailed, match="the disk is on fire"):
        calls[how]()
    calls[how]()
    checkpointer.close()
    assert 1 not in steps_of(checkpointer)


def test_a_failure_that_the_handle_has_told_is_not_raised_again(directory: AnyPath) -> None:
    gate = Gate(RuntimeError("the disk is on fire"))
    with Checkpointer(directory, save_decision_policy=EVERY_STEP) as checkpointer:
        response = checkpointer.save_checkpointables_async(0, gated(0, gate))
        assert response is not None
        gate.open()
        for _ in range(2):
            with pytest.raises(errors.HandlerFailed, match="the disk is on fire"):
                response.result()
        assert checkpointer.save(0, {"a": 0}), "the step is free again"


def test_of_several_failures_the_first_is_raised_with_the_others_as_notes(directory: AnyPath) -> None:
    gates = [Gate(RuntimeError(f"fire {number}")) for number in range(2)]
    checkpointer = Checkpointer(directory, save_decision_policy=EVERY_STEP, max_saves_in_flight=2)
    for step, gate in enumerate(gates):
        checkpointer.save_checkpointables_async(step, gated(step, gate))
        gate.open()
    with pytest.raises(errors.HandlerFailed, match="fire 0") as caught:
        checkpointer.close()
    assert any("fire 1" in note for note in caught.value.__notes__)
    checkpointer.close()


def test_an_error_of_the_program_is_not_hidden_by_that_of_a_save(directory: AnyPath) -> None:
    gate = Gate(RuntimeError("the disk is on fire"))

    def program() -> None:
        with Checkpointer(directory) as checkpointer:
            checkpointer.save_checkpointables_async(0, gated(0, gate))
            gate.open()
            raise KeyError("the program's own")

    with pytest.raises(KeyError, match="own") as caught:
        program()
    assert any("the disk is on fire" in note for note in caught.value.__notes__)


def test_a_cancelled_save_leaves_nothing(directory: AnyPath) -> None:
    gate = Gate()
    with Checkpointer(directory, save_decision_policy=EVERY_STEP) as checkpointer:
        checkpointer.save(0, {"a": 0})
        response = checkpointer.save_checkpointables_async(1, gated(1, gate))
        assert response is not None
        assert gate.began.wait(60)
        checkpointer.cancel()
        with pytest.raises(errors.Cancelled):
            response.result()
        assert steps_of(checkpointer) == [0]
        assert names_in(directory) == ["0"]
        checkpointer.cancel(0)
        assert steps_of(checkpointer) == []
        assert checkpointer.save(1, {"a": 1})


def test_a_policy_that_fails_does_not_lose_the_checkpoint(
    directory: AnyPath, caplog: pytest.LogCaptureFixture
) -> None:
    policy = preservation_policies.BestN(get_metric_fn=lambda found: found["missing"], n=1)
    with Checkpointer(directory, save_decision_policy=EVERY_STEP, preservation_policy=policy) as checkpointer:
        checkpointer.save(0, {"a": 0}, metrics={"loss": 1.0})
        with pytest.raises(errors.InvalidInput, match="KeyError: 'missing'"), caplog.at_level(logging.ERROR):
            checkpointer.save(1, {"a": 1}, metrics={"loss": 1.0})
        assert steps_of(checkpointer) == [0, 1]
        assert checkpointer.load(1) == {"a": 1}


def test_many_threads_save_load_and_look(directory: AnyPath) -> None:
    failures: list[BaseException] = []
    policy = preservation_policies.LatestN(4)
    with Checkpointer(
        directory, save_decision_policy=EVERY_STEP, preservation_policy=policy, max_saves_in_flight=3
    ) as checkpointer:
        checkpointer.save(0, {"step": 0, "a": np.full(1000, 0)})
        done = threading.Event()

        def save() -> None:
            for step in range(1, 25):
                checkpointer.save_async(step, {"step": step, "a": np.full(1000, step)})

        def read() -> None:
            while not done.is_set():
                found = checkpointer.load()
                assert (found["a"] == found["step"]).all()
                assert steps_of(checkpointer) == sorted(steps_of(checkpointer))
                checkpointer.is_saving_in_progress()
                checkpointer.should_save(10**6)

        def guarded(work: Any) -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)
                done.set()

        readers = [threading.Thread(target=guarded, args=(read,)) for _ in range(3)]
        for reader in readers:
            reader.start()
        guarded(save)
        checkpointer.wait()
        done.set()
        for reader in readers:
            reader.join()
    assert failures == []
    assert checkpointer.latest is not None
    assert checkpointer.latest.step == 24
