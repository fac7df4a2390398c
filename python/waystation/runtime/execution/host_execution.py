"""Does what lists say, with JAX: the lists of one host, one run after the other.

`begin` dispatches all of a list, ahead of the devices, and returns what waits for its end (`running.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from waystation.runtime.errors import FunctionNotFound
from waystation.runtime.execution.assembly import Block
from waystation.runtime.execution.buffers import Buffers
from waystation.runtime.execution.exchange import Exchange
from waystation.runtime.execution.functions import Functions
from waystation.runtime.execution.lists import FindDevice, LoadedList, Run
from waystation.runtime.execution.running import Note, RunningList
from waystation.runtime.ir import LowProgram
from waystation.runtime.timeline import HostRecorder

# Takes for each operand the local shards and where they begin; gives for each result one block a device.
HostFunction = Callable[..., Sequence[Sequence[Block]]]


class HostExecution:
    """The arrays, functions and lists of a host.

    Args:
        host: Its name.
        find_device: The JAX device of each device of its slices, those of other hosts of the island too.
        exchange: How blocks come from other hosts and go there.
        host_functions: What host calls can call, by name.
        on_compiled: Called when a function has been waited for.
        recorder: Stamps what devices do; by default nobody does.

    Attributes:
        is_elsewhere: Whether what is begun now runs on no device: a function of Python, or storage.
    """

    def __init__(
        self,
        host: str,
        find_device: FindDevice,
        exchange: Exchange,
        host_functions: Mapping[str, HostFunction] | None = None,
        on_compiled: Callable[[], None] = lambda: None,
        recorder: HostRecorder | None = None,
    ) -> None:
        self.host = host
        self.recorder: HostRecorder = HostRecorder() if recorder is None else recorder
        self.functions: Functions = Functions()
        self.buffers: Buffers = Buffers()
        self.exchange = exchange
        self.host_functions: Mapping[str, HostFunction] = {} if host_functions is None else host_functions
        self.on_compiled = on_compiled
        self.is_elsewhere = False
        self._find_device = find_device
        self._lists: dict[str, LoadedList] = {}

    def load(self, key: str, program: LowProgram) -> None:
        """Takes a list, and begins to compile what it calls; one that is known stays."""
        if key not in self._lists:
            self._lists[key] = LoadedList(program, self.host, self._find_device, self.functions)

    def wait_until_compiled(self, key: str) -> None:
        """Waits until everything that a list calls is compiled.

        Raises:
            FunctionNotFound: No list of that key was loaded, or a function was not registered.
            ComputationFailed: A function cannot be compiled.
        """
        for place in self._list(key).places:
            self.functions.get(*place)

    def unload(self, key: str) -> None:
        """Forgets a list; a run of it that has begun goes on."""
        loaded = self._lists.pop(key, None)
        if loaded is not None:
            self.functions.release(loaded.places)

    def is_quick(self, key: str) -> bool:
        """Whether to begin a list waits neither for other hosts nor for functions of programs."""
        loaded = self._lists.get(key)
        return loaded is not None and loaded.is_quick

    def begin(self, run: Run, note: Note) -> RunningList:
        """Dispatches a list; what it returns waits until all is done.

        Returns:
            Waits, and raises the first error of the run, which its results have too; says whether it has to.

        Raises:
            FunctionNotFound: No list of that key was loaded.
        """
        running = RunningList(self, self._list(run.list), run, note)
        try:
            running.dispatch()
        except Exception as error:  # nobody may ever wait for this run itself
            running.fail(error)
            raise
        return running

    def _list(self, key: str) -> LoadedList:
        found = self._lists.get(key)
        if found is None:
            raise FunctionNotFound(f"host '{self.host}' has no list '{key}'; load it before it is run")
        return found
