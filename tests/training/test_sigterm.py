"""SIGTERM is noted, and handlers that were there before are called and put back."""

from __future__ import annotations

import os
import signal
import threading

from waystation import errors
from waystation.training import preemption
from waystation.training.preemption import handle_sigterm


def test_the_handler_that_was_there_is_called_and_put_back() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        with handle_sigterm() as handler:
            assert not preemption.was_received()
            os.kill(os.getpid(), signal.SIGTERM)
            assert handler.received.wait(60)
            assert preemption.was_received()
            assert called == [signal.SIGTERM]
        assert not preemption.is_handled()
        os.kill(os.getpid(), signal.SIGTERM)
        assert called == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handlers_may_be_nested() -> None:
    with handle_sigterm() as outer, handle_sigterm() as inner:
        os.kill(os.getpid(), signal.SIGTERM)
        assert outer.received.wait(60)
        assert inner.received.wait(60)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_only_the_main_thread_can_ask_for_it() -> None:
    raised: list[Exception] = []

    def ask() -> None:
        try:
            handle_sigterm()
        except errors.InvalidInput as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])
