"""What the processes of the tests do. Each function runs in every process; they return what they saw."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest
from tests.coordination.rounds import (
    DEADLINE_S,
    SHORT_DEADLINE_S,
    attempt,
    come_together,
    open_session,
    try_round,
)
from tests.coordination.scenarios_of_some import deadline_of_some, sessions_of_some
from tests.support import programs
from tests.support.programs import Place

from waystation import coordination
from waystation.coordination import torch_distributed
from waystation.errors import DiskFull, NotFound

LARGE_BYTES = 20 << 20


def hold_store(place: Place) -> None:
    """Holds a store of torch, and tells the port at which others reach it."""
    import torch.distributed

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    place.report(store.port)
    place.receive()


def left_in_store() -> list[str]:
    """The keys that sessions have left, but for numberings that ended because processes were out of step;
    those that count processes and their starts are meant to stay."""
    found: list[str]
    if "jax" in sys.modules and coordination.jax_private.distributed()[0] is not None:
        client = coordination.jax_private.distributed()[0]
        found = [key for key, _ in client.key_value_dir_get_bytes("waystation/")]
    else:
        import torch.distributed

        store = torch.distributed.group.WORLD.get_group_store()
        found = [key.rpartition("default_pg/")[2] for key in store.list_keys()]
        found = [key[key.index("waystation/") :] for key in found if "waystation/" in key]
    lasting = ("waystation/generation/", "/liveness/")
    ended = tuple(key.removesuffix("ended") for key in found if key.endswith("/ended"))
    return sorted(
        key for key in found if not key.startswith(ended) and not any(part in key for part in lasting)
    )


# All in one run ---------------------------------------------------------------------------------------------


def survivable(place: Place) -> dict[str, Any]:
    """Everything after which the processes go on, one session after the other."""
    # Nobody dies here: a store that takes long to answer is on a busy machine.
    torch_distributed.ANSWER_S = programs.HANG_S
    place.connect()
    seen: dict[str, Any] = {"index": coordination.current().process_index}
    for case in (
        rounds,
        other_primary,
        large_values,
        error_in_work,
        error_in_slow_company,
        error_in_decision,
        foreign_error,
        several_errors,
        interrupt,
        error_between_rounds,
        look,
        interrupt_after_the_decision,
        second_interrupt,
        closed_together,
        closed_together_after_the_others,
        out_of_step,
        out_of_step_primaries,
        named_sequences,
        sessions_of_some,
        deadline_of_some,
        deadline,
        slow_decision,
        concurrent_sessions,
        after_the_end,
        one_for_all_threads,
    ):
        seen[case.__name__] = attempt(lambda case=case: case(place))  # type: ignore[misc]
        # The processes leave the case together, or slow ones of one would be late for the next.
        try_round("the end of a case", lambda: b"")
    place.report("closed")
    place.receive()  # so has everybody
    seen["left"] = left_in_store()
    place.report("looked")
    place.receive()
    place.disconnect()
    return seen


def rounds(place: Place) -> Any:
    session = open_session("rounds")
    own = b"%d" % place.index
    seen = [session.round(lambda: own, b"+".join) for _ in range(12)]
    session.barrier()
    called = []

    def make() -> bytes:
        called.append(1)
        return b"from the primary"

    broadcast = session.broadcast(make)
    gathered = session.gather(own)
    session.close()
    session.close()
    return seen, broadcast, len(called), gathered


def other_primary(place: Place) -> Any:
    session = open_session("another primary", primary=place.count - 1)
    gathered = session.gather(b"%d" % place.index)
    decided = session.broadcast(lambda: b"made by %d" % place.index)
    session.close()
    return session.is_primary, gathered, decided


def large_values(place: Place) -> Any:
    session = open_session("large values")
    part = bytes([place.index]) * (LARGE_BYTES + place.index)
    gathered = session.gather(part)
    made = session.broadcast(lambda: b"\xab" * LARGE_BYTES)
    again = session.round(lambda: part[:20_000], b"".join)
    session.close()
    whole = gathered is None or gathered == [bytes([i]) * (LARGE_BYTES + i) for i in range(place.count)]
    expected = b"".join(bytes([i]) * 20_000 for i in range(place.count))
    return whole, made == b"\xab" * LARGE_BYTES, again == expected


def error_in_work(place: Place) -> Any:
    """Each process in turn fails; in its own second round, so that the first is known to have worked."""
    outcomes = []
    for failing in range(place.count):

        def work(failing: int = failing) -> bytes:
            if place.index == failing:
                raise DiskFull("no room on 'ß\udcff'", path="/x\udcff", errno=28, array="w")
            return b""

        session = open_session(f"save that fails in {failing}")
        session.barrier()
        outcomes.append(attempt(lambda session=session, work=work: session.round(work, lambda p: b"")))  # type: ignore[misc]
        session.close()
    return outcomes


def error_in_slow_company(place: Place) -> Any:
    """Process 1 fails at once; the primary works for as long as process 2 needs to hear of it."""
    heard = f"{place.ports[-1]}-heard"

    def work() -> bytes:
        if place.index == 1:
            raise NotFound("nothing there")
        until = time.monotonic() + DEADLINE_S
        while place.index == 0 and not (place.directory / heard).exists():
            assert time.monotonic() < until, "process 2 was not told before the primary was done"
            time.sleep(0.01)
        return b""

    def then() -> None:
        if place.index == place.count - 1:
            (place.directory / heard).touch()

    return try_round("a round with a slow primary", work, then=then)


def error_in_decision(place: Place) -> Any:
    def decide(parts: Any) -> bytes:
        raise NotFound("the primary finds nothing", step=3)

    return try_round("a bad decision", lambda: b"", decide)


def foreign_error(place: Place) -> Any:
    def work() -> bytes:
        return b"" if place.index != 1 else bytes({}["absent"])

    return try_round("a foreign error", work)


def several_errors(place: Place) -> Any:
    def work() -> bytes:
        raise NotFound(f"nothing in {place.index}")

    return try_round("many errors", work)


def interrupt(place: Place) -> Any:
    def work() -> bytes:
        if place.index == 1:
            raise KeyboardInterrupt
        return b""

    return try_round("an interrupt", work)


def error_between_rounds(place: Place) -> Any:
    def use() -> None:
        session = open_session("an error between rounds")
        try:
            session.barrier()
            if place.index == 1:
                raise NotFound("between rounds")
            session.barrier()
        finally:
            session.close()

    return attempt(use)


def look(place: Place) -> Any:
    def use() -> None:
        session = open_session("work beside rounds")
        try:
            session.look()  # nobody has come, or failed
            session.barrier()
            if place.index == 1:
                raise NotFound("while others look")
            until = time.monotonic() + programs.HANG_S
            while time.monotonic() < until:
                session.look()
                time.sleep(0.01)
        finally:
            session.close()

    return attempt(use)


def interrupt_after_the_decision(place: Place) -> Any:
    """The others go on to the next round."""

    def interrupt(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    def use() -> None:
        session = open_session("an interrupt after the decision")
        try:
            session.barrier()
            with pytest.MonkeyPatch.context() as patch:
                if place.index == 1:
                    patch.setattr(session, "_open_verdict", interrupt)
                session.barrier()
            session.barrier()
        finally:
            session.close()

    return attempt(use)


def second_interrupt(place: Place) -> Any:
    """One process is interrupted, and once more before it has told the others."""

    def interrupt(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    def work() -> bytes:
        if place.index == 1:
            raise KeyboardInterrupt
        return b""

    def use() -> None:
        session = open_session("a second interrupt")
        try:
            with pytest.MonkeyPatch.context() as patch:
                if place.index == 1:
                    patch.setattr(session, "_put_failure", interrupt)
                session.round(work, lambda parts: b"")
        finally:
            session.close()

    return attempt(use)


def closed_together(place: Place) -> Any:
    """One process fails; how many have stopped working when each has closed the session."""
    stopped = place.directory / f"{place.ports[-1]}-stopped-{place.index}"

    def work() -> bytes:
        if place.index == 1:
            raise NotFound("of one process")
        time.sleep(0.05 * place.index)
        return b""

    session = open_session("work that all end together")
    try:
        session.round(work, lambda parts: b"")
    except NotFound:
        stopped.touch()
        session.close_together()
    return len(list(place.directory.glob(f"{place.ports[-1]}-stopped-*")))


def closed_together_after_the_others(place: Place) -> Any:
    """One process fails after the last decision, when the others have left; it waits for none of them."""
    session = open_session("work that one ends later")
    session.barrier()
    if place.index != 1:
        session.close()
    try_round("the others have left", lambda: b"")
    begun = time.monotonic()
    if place.index == 1:
        session.close_together()
    return time.monotonic() - begun < programs.HANG_S / 2


def out_of_step(place: Place) -> Any:
    return try_round("save '/a'" if place.index != 1 else "load '/b'", lambda: b"")


def named_sequences(place: Place) -> Any:
    """Two sequences, in another order in every other process."""
    names = ["first", "other/ß"] if place.index % 2 else ["other/ß", "first"]
    opened = {name: open_session(f"work of {name}", sequence=name) for name in names}
    found: dict[str, Any] = {}

    def work(name: str) -> None:
        found[name] = attempt(lambda: opened[name].round(lambda: b"%d" % place.index, b" ".join))
        opened[name].close()

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def out_of_step_primaries(place: Place) -> Any:
    return try_round("save '/a'", lambda: b"", primary=int(place.index == 1))


def deadline(place: Place) -> Any:
    """Process 1 comes when the others have given up."""
    given_up = place.directory / f"{place.ports[-1]}-given-up"
    come_together()
    if place.index == 1:
        until = time.monotonic() + DEADLINE_S
        while not given_up.exists() and time.monotonic() < until:
            time.sleep(0.01)
    return try_round("a round with a deadline", lambda: b"", then=given_up.touch, deadline_s=SHORT_DEADLINE_S)


def slow_decision(place: Place) -> Any:
    given_up = place.directory / f"{place.ports[-1]}-undecided"
    come_together()

    def decide(parts: Any) -> bytes:
        until = time.monotonic() + DEADLINE_S
        while not given_up.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return b"too late"

    return try_round("a slow decision", lambda: b"", decide, given_up.touch, deadline_s=SHORT_DEADLINE_S)


def concurrent_sessions(place: Place) -> Any:
    """Many sessions at once, each in a thread of its own, some of them failing."""
    sessions = [open_session(f"session {number}") for number in range(6)]
    outcomes: dict[int, Any] = {}

    def use(number: int) -> None:
        session = sessions[number]
        for count in range(8):

            def work(count: int = count) -> bytes:
                if (number, count, place.index) == (3, 5, 1):
                    raise NotFound("in session 3")
                return b"%d-%d-%d" % (number, count, place.index)

            outcomes[number] = attempt(
                lambda work=work: session.round(work, b",".join)  # type: ignore[misc]
            )
            if not isinstance(outcomes[number], bytes):
                break
        session.close()

    threads = [threading.Thread(target=use, args=(number,)) for number in range(len(sessions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[number] for number in range(len(sessions))]


def after_the_end(place: Place) -> Any:
    session = open_session("a session that ended")
    session.barrier()
    session.close()
    return attempt(session.barrier)


def one_for_all_threads(place: Place) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(coordination.current()))
    thread.start()
    thread.join()
    return found[0] is coordination.current()


# By themselves ----------------------------------------------------------------------------------------------


def initialized_again(place: Place) -> Any:
    """Three times connected, each time with a coordinator that counts from the start."""
    seen = []
    for number in range(3):
        place.connect()
        coordinator = coordination.current()
        session = open_session(f"connected for the {number}. time")
        seen.append((session.gather(b"%d" % place.index), id(coordinator)))
        if number == 1:  # a session of which something stays behind must not confuse the next
            left_open = open_session("never closed")
            left_open.barrier()
        else:
            session.close()
        assert coordination.current() is coordinator
        place.disconnect()
        assert coordination.current().process_count == 1
    return [gathered for gathered, _ in seen], len({identity for _, identity in seen})


def fail_and_exit(place: Place, failing: int) -> Any:
    """The process that fails ends at once; the others hear of it although they are slow."""
    place.connect()
    session = open_session("a save before the end")
    session.barrier()

    def work() -> bytes:
        if place.index == failing:
            raise NotFound("fails and exits")
        return b""

    try:
        session.round(work, lambda parts: b"")
    finally:
        session.close()


def succeed_and_exit(place: Place) -> Any:
    """All leave as soon as they are done, the host of the store too."""
    place.connect()
    session = open_session("the last save")
    decided = session.round(lambda: b"%d" % place.index, b"".join)
    session.close()
    return decided
