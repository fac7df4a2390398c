"""The connection of a program to the manager.

What a program asks and tells goes over one connection (`waystation.runtime.control`), in the order of its
calls, whichever thread makes them; what comes while a frame is being sent goes in the next one, all at once.
Where the manager does not keep up, calls wait. What is rare, such as to add an island, is asked by Ray
(`ask`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from waystation import _forks
from waystation._errors import Unavailable
from waystation.runtime.cluster.event_log import append
from waystation.runtime.control.connector import Connector
from waystation.runtime.control.packing import Packer, Unpacker
from waystation.runtime.control.program_messages import Call, pack_calls, unpack_answers
from waystation.runtime.hosts.answers import unwrap
from waystation.runtime.messages import host_function_key


def ask(reference: Any, timeout_s: float | None = None) -> Any:
    """What the manager answers.

    Raises:
        TimeoutError: It has not by then.
        Unavailable: It has died.
        WaystationError: What it has answered.
    """
    import ray

    try:
        answer = ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise TimeoutError(f"there is no answer after {timeout_s:g} s; the call goes on") from None
    except ray.exceptions.RayError as error:
        raise Unavailable(f"the cluster's manager has died, and all islands with it: {error}") from None
    return unwrap(answer)


def program_in_ray() -> str | None:
    """What Ray knows this program by as long as it is connected to one cluster; None if it is not."""
    import ray

    return str(ray.get_runtime_context().get_worker_id()) if ray.is_initialized() else None


class Connection:
    """Calls of one program, from any of its threads.

    Args:
        manager: The actor.
        client: What this program is known by there.
        connector: The connection.
        where: The manager's process and machine, for people.
        log_path: The log of the manager, on its machine; empty if it has none.
    """

    def __init__(
        self,
        manager: Any,
        client: str,
        connector: Connector,
        *,
        where: str = "",
        log_path: str = "",
    ) -> None:
        self.manager = manager
        self.client = client
        self._where = where
        self._log_path = log_path
        self._program = program_in_ray()
        self._is_leaving = False
        self._connector = connector
        self._packer = Packer()
        self._lock = threading.Lock()
        self._waiting: list[Call] = []
        self._is_sending = False
        self._answers: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._has_ended = False
        threading.Thread(target=self._hear, name="waystation: answers", daemon=True).start()
        self._owner = _forks.Owner()
        _forks.watch(self)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`."""
        self._lock = threading.Lock()
        self._is_sending, self._has_ended = False, True
        self._answers.clear()

    def require_owner(self) -> None:
        """Refuses a forked child.

        Raises:
            InvalidInput: This process is one.
        """
        self._owner.require(
            f"the connection of program '{self.client}' to the cluster", "connect in this one"
        )

    def require_manager(self) -> None:
        """Refuses to go on where the connection is known to have ended.

        Raises:
            Unavailable: It has.
        """
        with self._lock:
            if self._has_ended:
                raise self._gone()

    def ask_by_ray(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the manager's actor; returns the answer.

        Raises:
            Unavailable: The manager has died.
            WaystationError: What the manager answers.
        """
        import ray

        self.require_owner()
        if self._program != program_in_ray():  # Ray would begin, or be asked for a manager that it lacks
            raise self._gone()
        try:
            answer = ray.get(getattr(self.manager, method).remote(*arguments))
        except ray.exceptions.RayError:
            raise self._gone() from None
        return unwrap(answer)

    def ask(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Asks for something, after everything that was asked or told before; returns the answer.

        Raises:
            TimeoutError: There is none by then.
            Unavailable: The manager has died, or the connection is lost.
            WaystationError: What the manager answers.
        """
        return self.begin(method, *arguments)(timeout_s)

    def begin(self, method: str, *arguments: Any) -> Callable[[float | None], Any]:
        """Asks for something, in the order of calls; what it returns waits for the answer as `ask` does.

        Raises:
            Unavailable: The manager has died, or the connection is lost.
        """
        self.require_owner()
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._answers[number] = future
        self._send(Call(method, arguments, number))

        def answer(timeout_s: float | None) -> Any:
            self.require_owner()
            try:
                return unwrap(future.result(timeout_s))
            except TimeoutError:
                if future.done():
                    raise  # that was the answer
                raise TimeoutError(f"there is no answer after {timeout_s:g} s; the call goes on") from None

        return answer

    def tell(self, method: str, *arguments: Any) -> None:
        """Tells something, after everything that was asked or told before; waits for no answer.

        Raises:
            Unavailable: The manager has died, or the connection is lost.
        """
        self.require_owner()
        self._send(Call(method, arguments))

    def host_function(self, name: str, function: Callable[..., Any]) -> tuple[str, bytes]:
        """See `Calls`. The manager does not load it: what no host can load fails where it is called."""
        from ray import cloudpickle

        pickled: bytes = cloudpickle.dumps(function)
        return host_function_key(name, pickled), pickled

    def end(self) -> None:
        """See `Calls`."""
        self.ask("end")

    def leave(self) -> None:
        """The program is about to leave: that the connection ends is no loss."""
        self._is_leaving = True

    def close(self) -> None:
        """Ends it; a forked child leaves it to its parent."""
        if not self._owner.is_here:
            return
        self.leave()
        self._connector.close()

    def _send(self, call: Call) -> None:
        with self._lock:
            if self._has_ended:
                raise self._gone()
            self._waiting.append(call)
            if self._is_sending:
                return  # whoever sends takes it along
            self._is_sending = True
        try:
            self._send_all()
        except Unavailable:
            self._end()
            raise self._gone() from None
        except BaseException:  # Ctrl-C, say: nobody knows how much of a frame has gone, and others wait
            self._end()
            self._connector.close()
            raise

    def _send_all(self) -> None:
        """Sends what waits, until nothing does."""
        while True:
            with self._lock:
                calls, self._waiting = self._waiting, []
                if not calls:
                    self._is_sending = False
                    return
            self._connector.send(pack_calls(calls, self._packer))

    def _hear(self) -> None:
        """Takes answers until the connection ends."""
        unpacker = Unpacker()
        try:
            while (body := self._connector.receive()) is not None:
                for number, answer in unpack_answers(unpacker.open(body)):
                    with self._lock:
                        future = self._answers.pop(number, None)
                    if future is not None:
                        future.set_result(answer)
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            is_lost = not (self._has_ended or self._is_leaving)
            self._has_ended = True
            answers, self._answers = list(self._answers.values()), {}
        if is_lost and self._log_path:
            append(self._log_path, f"program '{self.client}' has lost its connection to the manager")
        for future in answers:
            future.set_exception(self._gone())

    def _gone(self) -> Unavailable:
        where = f" ({self._where})" if self._where else ""
        log = f"; the manager's log is '{self._log_path}', on its machine" if self._log_path else ""
        return Unavailable(
            f"the connection to the cluster's manager{where} has ended: the arrays of this program are lost, "
            "and where the manager has died, so are all islands. Connect again, add islands where there are "
            f"none, and make the arrays again or load them{log}"
        )
