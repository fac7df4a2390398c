"""What a program asks of the manager, in the program's order.

Calls come over the program's connection, in the order in which they were made, and are taken one after the
other, as they come. What takes long, such as to wait for an array, is begun in its turn and holds nobody up;
but while the island of a slice is being rebuilt, the calls of the program that needs it wait, and keep their
order. So do those of a program that has many at a time, while others have their turn. A program that has more
calls waiting than `MOST_WAITING` is not read from until there are fewer. A program can call what `METHODS`
names, and nothing else of this object.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from waystation._errors import InvalidInput, WaystationError
from waystation.runtime.control.listener import End
from waystation.runtime.control.program_words import NO_ANSWER, Call, pack_answer, unpack_calls
from waystation.runtime.control.words import Packer, Unpacker
from waystation.runtime.controller import Controller, Dispatch, Work
from waystation.runtime.host_options import HostOptions, SaveManner
from waystation.runtime.hosts.answers import Failure, failure
from waystation.runtime.hosts.answers import Value as Answer
from waystation.runtime.ir import Sharding, Value, decode
from waystation.runtime.resources import Placement, SliceRequest
from waystation.runtime.state_trees import StateTree

# What a program may call; all of it is of `ClientCalls`, for the program itself.
METHODS = frozenset(
    {
        *("grant", "release", "remap", "suspend", "resume", "placement", "kind"),
        *("register", "register_host_function", "forget_functions", "forget_host_functions"),
        *("install", "forget_programs", "run", "prepare"),
        *("put", "get", "wait", "is_done", "free", "share", "named", "withdraw", "end"),
        *("save", "load"),
    }
)
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
        self._carry_out = carry_out
        self._settled = settled
        self._end: End | None = None
        self._packer = Packer()
        self._unpacker = Unpacker()
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
        try:
            if call.method not in METHODS:
                raise InvalidInput(f"programs cannot call '{call.method}' of the cluster's manager")
            given = getattr(self, call.method)(*call.arguments)
        except Exception as error:
            if call.answer != NO_ANSWER:
                self._answer(call.answer, failure(error, _PLACE))
            elif not isinstance(error, WaystationError):
                told = f"program '{self._client}' has told '{call.method}', which failed"
                self._loop.call_exception_handler({"message": told, "exception": error})
            return
        if isinstance(given, asyncio.Future):
            given.add_done_callback(functools.partial(self._answer_later, call.answer))
        elif call.answer != NO_ANSWER:
            self._answer(call.answer, Answer(given))

    def _end_turn(self) -> None:
        self._taken = 0
        self._carry_out()

    def _answer_later(self, number: int, given: asyncio.Future[Any]) -> None:
        if given.cancelled():
            return
        error = given.exception()
        if error is None:
            self._answer(number, Answer(given.result()))
        elif isinstance(error, Exception):
            self._answer(number, failure(error, _PLACE))

    def _answer(self, number: int, answer: Answer[Any] | Failure) -> None:
        if number != NO_ANSWER and self._end is not None:
            self._end.send(pack_answer(number, answer, self._packer))

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

    # ---- slices --------------------------------------------------------------------------------

    def grant(self, request: SliceRequest) -> int:
        """See `Backend`."""
        return self._controller.grant(self._client, request)

    def release(self, number: int) -> None:
        """See `Backend`."""
        self._controller.release(self._client, number)

    def remap(self, number: int, island: str | None, without_hosts: Collection[str]) -> None:
        """See `Backend`."""
        self._controller.remap(self._client, number, island, without_hosts)

    def suspend(self) -> asyncio.Future[None]:
        """See `Backend`."""
        answer, end = _answer_of_end()
        self._controller.suspensions.suspend(self._client, end)
        return answer

    def resume(self, without_hosts: Collection[str]) -> None:
        """See `Backend`."""
        self._controller.suspensions.resume(self._client, without_hosts)

    def placement(self, number: int) -> Placement:
        """See `Backend`."""
        return self._controller.placement(number)

    def kind(self, number: int) -> str:
        """What the devices of a slice are."""
        return self._controller.kind(number)

    # ---- programs ------------------------------------------------------------------------------

    def register(self, key: str, exported: bytes) -> None:
        """See `Backend`; hosts get a function with the first list that calls it."""
        functions = self._controller.programs.functions
        functions.hold(key, self._client)
        functions.set(key, exported)

    def register_host_function(self, key: str, function: bytes) -> None:
        """Makes a function of Python known that programs call on hosts by its key."""
        functions = self._controller.programs.host_functions
        functions.hold(key, self._client)
        functions.set(key, function)

    def forget_functions(self, keys: Sequence[str]) -> None:
        """See `Backend`."""
        for key in keys:
            self._controller.programs.functions.release(key, self._client)

    def forget_host_functions(self, keys: Sequence[str]) -> None:
        """Gives functions of Python up, each once for each time that it was made known."""
        for key in keys:
            self._controller.programs.host_functions.release(key, self._client)

    def install(self, encoded: bytes, dispatch: Dispatch) -> str:
        """See `Backend`."""
        return self._controller.install(self._client, decode(encoded), dispatch)

    def forget_programs(self, fingerprints: Sequence[str]) -> None:
        """See `Backend`."""
        for fingerprint in fingerprints:
            self._controller.programs.forget(fingerprint, self._client)

    def run(
        self,
        fingerprint: str,
        slices: Sequence[int],
        arguments: Sequence[int],
        results: Sequence[int],
        cost_seconds: float | None,
        priority: int,
    ) -> None:
        """See `Backend`."""
        self._controller.run(self._client, fingerprint, slices, arguments, results, cost_seconds, priority)

    def prepare(self, fingerprint: str, slices: Sequence[int]) -> asyncio.Future[None]:
        """Has hosts compile a program before it runs."""
        answer, end = _answer_of_end()
        self._controller.prepare(self._client, fingerprint, slices, end)
        return answer

    # ---- arrays --------------------------------------------------------------------------------

    def put(self, handle: int, array: Any, slice_number: int, sharding: Sharding) -> None:
        """See `Backend`."""
        value = Value(handle, array.shape, str(array.dtype), slice_number, sharding)
        self._controller.works.put(self._client, handle, array, value)

    def get(self, handle: int) -> asyncio.Future[Any]:
        """What hosts have of an array: an answer of each."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def end(work: Work) -> None:
            if answer.done():
                return
            if work.error is not None:
                answer.set_exception(work.error)
            else:
                answer.set_result([fetched[0] for fetched in work.fetched.values()])

        self._controller.works.get(self._client, handle, end)
        return answer

    def wait(self, handles: Sequence[int]) -> asyncio.Future[None]:
        """See `Backend`."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        left = len(handles)

        def made(handle: int) -> None:
            nonlocal left
            left -= 1
            if answer.done():
                return
            try:
                self._controller.arrays.check(self._client, handle)
            except WaystationError as error:
                answer.set_exception(error)
            else:
                if left == 0:
                    answer.set_result(None)

        if not handles:
            answer.set_result(None)
        for handle in handles:
            self._controller.when_made(self._client, handle, functools.partial(made, handle))
        return answer

    def is_done(self, handle: int) -> bool:
        """See `Backend`."""
        arrays = self._controller.arrays
        return arrays.is_made(arrays.handle(self._client, handle))

    def free(self, handles: Sequence[int]) -> None:
        """See `Backend`."""
        self._controller.free(self._client, handles)

    def share(self, handle: int, name: str) -> asyncio.Future[None]:
        """See `Backend`; an array that is not there yet is waited for."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        hold = self._controller.hold(self._client, handle)

        def made() -> None:
            try:
                self._controller.share(hold, name)
            except WaystationError as error:
                answer.set_exception(error)
            else:
                answer.set_result(None)

        self._controller.when_made(self._client, handle, made)
        return answer

    def named(self, name: str, handle: int) -> Value:
        """See `Backend`."""
        stored = self._controller.arrays.attach(self._client, name, handle)
        return replace(stored.value, number=handle)

    def withdraw(self, name: str) -> None:
        """Takes a name back."""
        self._controller.withdraw(name)

    def end(self) -> None:
        """Frees everything of this program, and releases its slices."""
        self._controller.collect(self._controller.arrays.drop_client(self._client))
        self._controller.arrays.add_client(self._client)
        self._controller.release_slices(self._client)

    # ---- checkpoints ---------------------------------------------------------------------------

    def save(
        self, path: str, tree: StateTree, arrays: Sequence[tuple[int, int]], manner: SaveManner
    ) -> asyncio.Future[None]:
        """Has hosts save a state."""
        answer, end = _answer_of_end()
        self._controller.checkpoints.save(self._client, path, tree, arrays, manner, end)
        return answer

    def load(
        self,
        path: str,
        tree: StateTree,
        arrays: Sequence[tuple[int, int, Value]],
        options: HostOptions,
    ) -> asyncio.Future[tuple[Any, ...]]:
        """Has hosts make arrays of a checkpoint; answers with the values that are wanted."""
        answer, end = _answer_of_end()
        self._controller.checkpoints.load(self._client, path, tree, arrays, options, end)
        return answer


def _answer_of_end() -> tuple[asyncio.Future[Any], Callable[..., None]]:
    """An answer, and what gives it: an error, or None and the result, if there is one."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def end(error: WaystationError | None, result: Any = None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    return answer, end
