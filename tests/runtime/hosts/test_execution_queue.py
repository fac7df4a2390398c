"""A execution begins messages in order, runs ahead of their results, and knows how far it is."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from waystation.errors import InvalidInput
from waystation.runtime.endings import Ending, TransferEnding
from waystation.runtime.hosts.execution_queue import ExecutionQueue, Moving, Report

WAIT_S = 60.0


class Devices:
    """Stand for devices: what is dispatched ends when the test says so."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.dispatched = threading.Semaphore(0)
        self.ends: dict[str, threading.Event] = {}
        self.now_s = 0.0

    def begin(self, message: str, note: Callable[[str], None]) -> Callable[[], Any]:
        self.begun.append(message)
        note(f"computation of {message}")
        end = self.ends.setdefault(message, threading.Event())
        self.dispatched.release()
        if message == "refused":
            raise InvalidInput("cannot be begun")

        def finish() -> str:
            assert end.wait(WAIT_S)
            if message == "failing":
                raise InvalidInput("does not end well")
            return f"result of {message}"

        return finish

    def clock(self) -> float:
        return self.now_s

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self.dispatched.acquire(timeout=WAIT_S)


@pytest.fixture
def devices() -> Devices:
    return Devices()


@pytest.fixture
def execution(devices: Devices) -> Iterator[ExecutionQueue[str]]:
    execution = ExecutionQueue(devices.begin, ahead=2, clock=devices.clock)
    yield execution
    for end in devices.ends.values():
        end.set()
    execution.close()


def test_what_comes_early_waits_for_its_turn(devices: Devices, execution: ExecutionQueue[str]) -> None:
    late = [execution.submit(2, "c"), execution.submit(1, "b")]
    assert execution.report() == Report(begun=0, ended=0, waiting=2, doing="", stalled_s=0.0)
    for name in "abc":
        devices.ends[name] = threading.Event()
        devices.ends[name].set()
    first = execution.submit(0, "a")
    assert [future.result(WAIT_S) for future in (first, *reversed(late))] == [
        "result of a",
        "result of b",
        "result of c",
    ]
    assert devices.begun == ["a", "b", "c"]
    assert execution.report() == Report(begun=3, ended=3, waiting=0, doing="", stalled_s=0.0)


def test_it_begins_messages_before_earlier_ones_have_ended(
    devices: Devices, execution: ExecutionQueue[str]
) -> None:
    futures = [execution.submit(number, name) for number, name in enumerate("ab")]
    devices.wait_for(2)
    assert not any(future.done() for future in futures)
    devices.ends["b"].set()
    assert not futures[1].done()  # results come in order
    devices.ends["a"].set()
    assert [future.result(WAIT_S) for future in futures] == ["result of a", "result of b"]


def test_a_failure_ends_its_own_message_only(devices: Devices, execution: ExecutionQueue[str]) -> None:
    names = ["refused", "failing", "good"]
    for name in names:
        devices.ends[name] = threading.Event()
        devices.ends[name].set()
    futures = [execution.submit(number, name) for number, name in enumerate(names)]
    assert failure_of(futures[0]) == "cannot be begun"
    assert failure_of(futures[1]) == "does not end well"
    assert futures[2].result(WAIT_S) == "result of good"


def failure_of(future: Future[Any]) -> str:
    error = future.exception(WAIT_S)
    assert isinstance(error, InvalidInput)
    return error.message


def test_it_is_stalled_from_when_it_had_something_to_do(
    devices: Devices, execution: ExecutionQueue[str]
) -> None:
    devices.now_s = 100.0
    assert execution.report().stalled_s == 0.0  # idle is not stalled
    first = execution.submit(0, "a")
    execution.submit(1, "b")
    devices.wait_for(2)
    devices.now_s = 107.0
    assert execution.report() == Report(begun=2, ended=0, waiting=0, doing="computation of a", stalled_s=7.0)
    devices.ends["a"].set()
    first.result(WAIT_S)
    devices.now_s = 110.0
    assert execution.report() == Report(begun=2, ended=1, waiting=0, doing="computation of b", stalled_s=3.0)
    execution.progress()
    assert execution.report().stalled_s == 0.0


def test_a_number_that_comes_twice_counts_once(devices: Devices, execution: ExecutionQueue[str]) -> None:
    execution.submit(0, "a")
    execution.submit(0, "again")
    devices.wait_for(1)
    assert devices.begun == ["a"]


def test_what_is_quick_is_begun_by_who_brings_it_unless_others_are_before_it() -> None:
    begun: list[tuple[str, int]] = []
    may_go_on = threading.Event()
    is_over = threading.Semaphore(0)

    def begin(message: str, note: Callable[[str], None]) -> Callable[[], Any]:
        begun.append((message, threading.get_ident()))
        if message == "slow":
            assert may_go_on.wait(WAIT_S)
        return lambda: message

    execution: ExecutionQueue[str] = ExecutionQueue(
        begin, is_quick=lambda message: message.startswith("quick")
    )
    own = threading.get_ident()
    for number, message in enumerate(["quick 0", "slow", "quick 2", "quick 3"]):
        execution.take(number, message, lambda result, failed: is_over.release())
    assert begun[0] == ("quick 0", own)
    may_go_on.set()
    for _ in range(4):
        assert is_over.acquire(timeout=WAIT_S)
    assert [message for message, _ in begun] == ["quick 0", "slow", "quick 2", "quick 3"]
    assert own not in {thread for message, thread in begun[1:3]}
    execution.close()


def test_at_most_so_many_have_begun_and_not_ended(devices: Devices) -> None:
    execution = ExecutionQueue(devices.begin, ahead=2, is_quick=lambda message: True)
    futures = [
        execution.submit(number, name) for number, name in enumerate("abcd")
    ]  # nobody has to wait here
    devices.wait_for(2)
    assert execution.report().begun == 2
    for name in "abcd":
        devices.ends.setdefault(name, threading.Event()).set()
    assert [future.result(WAIT_S) for future in futures] == [f"result of {name}" for name in "abcd"]
    assert devices.begun == list("abcd")
    execution.close()


def test_what_has_ended_is_told_before_the_next_is_waited_for() -> None:
    told: list[list[str]] = []
    ended: list[str] = []
    all_told = threading.Event()
    begin_waiting, may_end = threading.Event(), threading.Event()

    class Finish(Ending):
        def __init__(self, message: str) -> None:
            self.message = message

        def __call__(self) -> str:
            if self.message == "c":
                begin_waiting.set()
                assert may_end.wait(WAIT_S)
            return self.message

        def is_ready(self) -> bool:
            return self.message == "b"

    def pause() -> None:
        if ended:
            told.append(ended.copy())
            ended.clear()
        if sum(map(len, told)) == 3:
            all_told.set()

    gate = threading.Event()

    def begin(message: str, note: Callable[[str], None]) -> Callable[[], Any]:
        assert message != "a" or gate.wait(WAIT_S)
        return Finish(message)

    execution: ExecutionQueue[str] = ExecutionQueue(begin, on_pause=pause)
    for number, message in enumerate("abc"):
        execution.take(number, message, lambda result, failed: ended.append(result))
    gate.set()
    assert begin_waiting.wait(WAIT_S)
    assert [each for batch in told for each in batch] == ["a", "b"]  # and c is still waited for
    may_end.set()
    assert all_told.wait(WAIT_S)
    execution.close()


class Transfer(TransferEnding):
    """A save or a load: what moves bytes until the test says that it ends."""

    def __init__(self) -> None:
        self.moved = 0
        self.end = threading.Event()

    def __call__(self) -> str:
        assert self.end.wait(WAIT_S)
        return "moved"

    def progress(self) -> tuple[int, int]:
        return self.moved, 10


def transferring(devices: Devices, **options: Any) -> tuple[ExecutionQueue[str], dict[str, Transfer]]:
    transfers: dict[str, Transfer] = {}

    def begin(message: str, note: Callable[[str], None]) -> Callable[[], Any]:
        if not message.startswith("save"):
            return devices.begin(message, note)
        note(message)
        devices.dispatched.release()
        return transfers.setdefault(message, Transfer())

    execution: ExecutionQueue[str] = ExecutionQueue(
        begin, clock=devices.clock, is_transfer=lambda message: message.startswith("save"), **options
    )
    return execution, transfers


def test_nothing_waits_for_a_transfer_and_its_bytes_are_seen(devices: Devices) -> None:
    execution, transfers = transferring(devices, ahead=1)
    devices.ends["after"] = threading.Event()
    devices.ends["after"].set()
    save, after = execution.submit(0, "save"), execution.submit(1, "after")
    assert after.result(WAIT_S) == "result of after"
    assert not save.done()
    devices.now_s = 100.0
    report = execution.report()
    assert (report.begun, report.ended, report.stalled_s, report.doing) == (2, 1, 0.0, "")
    assert report.moving == (Moving("save", 0, 10, unchanged_s=100.0),)
    transfers["save"].moved = 7
    assert execution.report().moving == (Moving("save", 7, 10, unchanged_s=0.0),)
    devices.now_s = 103.0
    assert execution.report().moving == (Moving("save", 7, 10, unchanged_s=3.0),)
    transfers["save"].end.set()
    assert save.result(WAIT_S) == "moved"
    assert execution.report() == Report(begun=2, ended=2, waiting=0, doing="", stalled_s=0.0)
    execution.close()


def test_at_most_so_many_transfers_are_under_way(devices: Devices) -> None:
    execution, transfers = transferring(devices, transfers=2)
    futures = [execution.submit(number, f"save {number}") for number in range(3)]
    devices.wait_for(2)
    assert len(execution.report().moving) == 2
    transfers["save 1"].end.set()
    devices.wait_for(1)
    assert futures[1].result(WAIT_S) == "moved"
    assert not futures[0].done()
    for transfer in transfers.values():
        transfer.end.set()
    execution.close()
    assert [future.result(0) for future in futures] == ["moved"] * 3


def test_what_happens_to_say_how_far_it_is_is_no_transfer(devices: Devices) -> None:
    """The type decides: later messages of a queue that runs nothing ahead wait for what is no transfer."""

    class Computation:
        def __call__(self) -> str:
            assert may_end.wait(WAIT_S)
            return "computed"

        def progress(self) -> tuple[int, int]:
            return 1, 2

    def begin(message: str, note: Callable[[str], None]) -> Callable[[], Any]:
        return Computation() if message == "first" else devices.begin(message, note)

    may_end = threading.Event()
    execution: ExecutionQueue[str] = ExecutionQueue(begin, ahead=1)
    first, second = execution.submit(0, "first"), execution.submit(1, "second")
    assert execution.report().moving == ()
    assert devices.begun == []
    may_end.set()
    assert first.result(WAIT_S) == "computed"
    devices.wait_for(1)
    devices.ends["second"].set()
    assert second.result(WAIT_S) == "result of second"
    execution.close()


class Over(Ending):
    """What has ended already, or ends when the test says so."""

    def __init__(self, end: threading.Event) -> None:
        self.end = end

    def __call__(self) -> str:
        assert self.end.wait(WAIT_S)
        return threading.current_thread().name

    def is_ready(self) -> bool:
        return self.end.is_set()


def test_a_message_that_is_over_is_ended_by_who_brings_it_if_none_before_it_goes_on() -> None:
    ends = [threading.Event() for _ in range(4)]
    told: list[int] = []
    execution: ExecutionQueue[int] = ExecutionQueue(
        lambda number, note: Over(ends[number]), is_quick=lambda number: True, ends_at_once=True
    )
    here = threading.current_thread().name

    def bring(number: int) -> Future[Any]:
        future = execution.submit(number, number)
        future.add_done_callback(lambda _: told.append(number))
        return future

    for number in (0, 2, 3):
        ends[number].set()
    first, second, third = bring(0), bring(1), bring(2)
    assert first.result(0) == here
    assert not third.done()
    ends[1].set()
    for each in (second, third):
        assert each.result(WAIT_S) == "waystation: results"
    execution.close()
    assert told == [0, 1, 2]
