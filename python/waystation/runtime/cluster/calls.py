"""What a program asks of the manager, in the program's order.

Calls come over the program's connection, in the order in which they were made, and are taken one after the
other, as they come. What takes long, such as to wait for an array, is begun in its turn and holds nobody up;
but while the island of a slice is being rebuilt, the calls of the program that needs it wait, and keep their
order. So do those of a program that has many at a time, while others have their turn. A program that has more
calls waiting than `MOST_WAITING` is not read from until there are fewer. What a program can call is in
`controller.methods`.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from waystation._errors import WaystationError
from waystation.runtime.control.listener import End
from waystation.runtime.control.packing import Packer, Unpacker
from waystation.runtime.control.program_messages import NO_ANSWER, Call, pack_answer, unpack_calls
from waystation.runtime.controller import Controller
from waystation.runtime.controller.methods import ClientMethods
from waystation.runtime.hosts.answers import Value as Answer
from waystation.runtime.hosts.answers import failure

MOST_WAITING = 4096
_PLACE = "the manager"
_AT_ONCE = 64  # calls that are taken before it is the turn of others


class ClientCalls:
    """The calls of one program.

    Args:
        client: What it is known by.
        controller: Decides.
        carry_out: Carries out what the controller has decided.
        settled: Returns when no island is being built, or one has been.
    """

    def __init__(
        self,
        client: str,
        controller: Controller,
        carry_out: Callable[[], None],
        settled: Callable[[], asyncio.Future[None] | None],
    ) -> None:
        self._client = client
        self._controller = controller
        self._methods = ClientMethods(client, controller)
        self._carry_out = carry_out
        self._settled = settled
        self._end: End | None = None
        self._packer = Packer()
        self._unpacker = Unpacker(client)
        self._loop = asyncio.get_running_loop()
        self._taken = 0  # calls, in this turn of the loop
        self._waiting: deque[Call] = deque()
        self._worker: asyncio.Task[None] | None = None  # takes what waits
        self._is_paused = False

    def connect(self, end: End, on_lost: Callable[[], None]) -> None:
        """The program has its connection.

        Args:
            end: It.
            on_lost: Is told of its end.
        """
        self._end = end
        end.attend(self._hear, on_lost)

    def close(self) -> None:
        """The program is gone."""
        if self._worker is not None:
            self._worker.cancel()
        if self._end is not None:
            self._end.close()

    def _hear(self, body: bytes) -> None:
        for call in unpack_calls(self._unpacker.open(body)):
            if self._worker is None and self._taken < _AT_ONCE and self._awaited(call) is None:
                self._take(call)
                continue
            self._waiting.append(call)
            if self._worker is None:
                self._worker = self._loop.create_task(self._work())
        if len(self._waiting) > MOST_WAITING:
            self._pause(True)

    def _pause(self, is_paused: bool) -> None:
        if is_paused is not self._is_paused and self._end is not None:
            self._is_paused = is_paused
            self._end.pause(is_paused)

    async def _work(self) -> None:
        while self._waiting:
            if self._taken >= _AT_ONCE:
                await asyncio.sleep(0)  # it is the turn of others
            while (change := self._awaited(self._waiting[0])) is not None:
                await change
            self._take(self._waiting.popleft())
            if len(self._waiting) < MOST_WAITING // 2:
                self._pause(False)
        self._worker = None

    def _take(self, call: Call) -> None:
        if self._taken == 0:
            self._loop.call_soon(self._end_turn)
        self._taken += 1
        self._methods.call(call.method, call.arguments, functools.partial(self._answer, call))

    def _end_turn(self) -> None:
        self._taken = 0
        self._carry_out()

    def _answer(self, call: Call, error: Exception | None, result: Any = None) -> None:
        if call.answer != NO_ANSWER:
            answer = Answer(result) if error is None else failure(error, _PLACE)
            if self._end is not None:
                self._end.send(pack_answer(call.answer, answer, self._packer))
        elif error is not None and not isinstance(error, WaystationError):
            told = f"program '{self._client}' has told '{call.method}', which failed"
            self._loop.call_exception_handler({"message": told, "exception": error})

    def _awaited(self, call: Call) -> asyncio.Future[None] | None:
        """What a call has to wait for: an island that it needs and that is being built."""
        try:
            return self._needed(call)
        except Exception:  # whatever is wrong with its arguments, it is told so when it is taken
            return None

    def _needed(self, call: Call) -> asyncio.Future[None] | None:
        if call.method == "grant":
            return self._settled() if self._controller.is_to_wait(call.arguments[0]) else None
        if call.method == "resume":
            is_missing = self._controller.is_to_wait_for_resuming(self._client, call.arguments[0])
            return self._settled() if is_missing else None
        slices: Sequence[int] = ()
        if call.method == "run":
            slices = call.arguments[1]
        elif call.method == "put":
            slices = (call.arguments[2],)
        elif call.method == "load":
            slices = [value.slice for _, _, value in call.arguments[2]]
        return self._settled() if slices and self._controller.is_waiting(slices) else None
