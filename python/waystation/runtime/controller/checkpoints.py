"""Checkpoints of arrays of clients, on one island or several: planned here, written and read by hosts.

Where all arrays are on the same hosts, a save or a load is one work, in which these hosts are one program.
Else each *gang*, the hosts of one island that hold the same arrays, has a work of its own, and there is one
more on one host: before a save it begins the checkpoint of which each gang writes a part, and after it that
host makes the parts one checkpoint, in one act; before a load it says which checkpoint is there, and that it
has what is wanted, so that all load the same. All gangs are told of the whole state, in which leaves have
numbers; values that are no arrays of hosts go with those of the first gang. What needs arrays has its place
in the order of its island from the start, so that nothing that the client asks for later comes between.

Failure sequence of a save by several gangs: the checkpoint cannot be begun, or a part cannot be saved, or an
island is lost meanwhile: the parts are removed when all are done with theirs, and the caller is told the
first error. The host that has begun it is lost: nothing is there, and the next save to that path removes what
was written. Of a load: the checkpoint has something else, and no gang loads; then each gang for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from waystation._errors import InvalidInput, Unavailable, Unsupported, WaystationError
from waystation.checkpoint.joining import part_path
from waystation.runtime.controller.arrays import StoredArray, require_placed
from waystation.runtime.controller.works import Work
from waystation.runtime.host_options import DEFAULT_OPTIONS, LAYOUT, HostOptions, SaveManner
from waystation.runtime.ir import Value
from waystation.runtime.messages import (
    BeginJoining,
    EndJoining,
    Identify,
    Instruction,
    Load,
    Save,
)
from waystation.runtime.resources import Placement
from waystation.runtime.scheduling import RunKey
from waystation.runtime.state_trees import StateTree

if TYPE_CHECKING:
    from waystation.runtime.controller.controller import Controller

OnEnd: TypeAlias = Callable[[WaystationError | None], None]
OnLoaded: TypeAlias = Callable[[WaystationError | None, tuple[Any, ...]], None]
Placed: TypeAlias = tuple[int, StoredArray]  # with the number of the leaf
Wanted: TypeAlias = tuple[int, int, Value]  # number of the leaf, the client's handle, how it is to lie
Gang: TypeAlias = tuple[str, tuple[str, ...]]  # an island, and hosts of it


class Checkpoints:
    """See above.

    Args:
        controller: The controller.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def save(
        self,
        client: str,
        path: str,
        tree: StateTree,
        arrays: Sequence[tuple[int, int]],
        manner: SaveManner,
        on_end: OnEnd,
    ) -> None:
        """Has hosts save a state.

        Args:
            client: Whose arrays they are.
            path: Where the checkpoint goes.
            tree: The state without these.
            arrays: The number of the leaf and the client's handle of each; these and the values are all.
            manner: How it is saved.
            on_end: Is told how it has ended.

        Raises:
            WaystationError: An array is not there.
        """
        if not arrays:
            raise InvalidInput(f"no arrays are to be saved as '{path}'; give some")
        controller = self._controller
        placed = [
            (leaf, require_placed(controller.arrays.get(client, own), own, client)) for leaf, own in arrays
        ]
        parts = _by_gang(placed)
        if len(parts) > 1 and manner.options.has(LAYOUT):
            raise Unsupported(
                f"the arrays of '{path}' are on several sets of hosts, which save them together only in the "
                f"native layout; leave the option {LAYOUT} alone, or put them on one slice"
            )
        key = controller.new_key(client)
        controller.arrays.table.use([stored.handle for _, stored in placed], key)

        def end(error: WaystationError | None) -> None:
            controller.collect(controller.arrays.finish_run(key))
            on_end(error)

        if len(parts) > 1:
            _SpanningSave(controller, client, path, tree, parts, manner, end).start()
            return
        stored = [each for _, each in placed]
        save = save_of(path, tree, placed, processes_of(controller, stored), manner)
        controller.works.using(
            stored,
            controller.new_key(client),
            f"save '{path}'",
            "save",
            lambda: (save,),
            lambda work: end(work.error),
        )()

    def load(
        self,
        client: str,
        path: str,
        tree: StateTree,
        arrays: Sequence[Wanted],
        options: HostOptions = DEFAULT_OPTIONS,
        on_end: OnLoaded = lambda error, values: None,
    ) -> None:
        """Has hosts make arrays of a checkpoint. What keeps an array from being there is in its handle.

        Args:
            client: Whose arrays they will be.
            path: Where the checkpoint is.
            tree: The abstract state without these.
            arrays: The number of the leaf and the client's handle of each, and how it is to lie, with the
                number of a slice.
            options: How it is loaded.
            on_end: Is told what was loaded in the places of the tree's values, or why it was not.

        Raises:
            InvalidInput: There are no arrays.
        """
        if not arrays:
            raise InvalidInput(f"no arrays are to be loaded of '{path}'; give some")
        controller = self._controller
        try:
            for _, _, value in arrays:
                controller.own_slice(client, value.slice)
            gangs = [gang_of(controller.placement(value.slice)) for _, _, value in arrays]
        except WaystationError as error:
            self._fail(client, [own for _, own, _ in arrays], error)
            on_end(error, ())
            return
        parts = {
            gang: [each for each, there in zip(arrays, gangs, strict=True) if there == gang]
            for gang in dict.fromkeys(gangs)
        }
        if len(parts) > 1:
            _SpanningLoad(controller, client, path, tree, parts, options, on_end).start()
            return
        _Loading(controller, client, path, tree, arrays, options, on_end).submission(lambda: None)()

    def _fail(self, client: str, owns: Iterable[int], error: WaystationError) -> None:
        for own in owns:
            self._controller.arrays.fail(client, own, error, self._controller.new_key(client))
        self._controller.tell_waiters()


class _SpanningSave:
    """One save by several gangs."""

    def __init__(
        self,
        controller: Controller,
        client: str,
        path: str,
        tree: StateTree,
        parts: dict[Gang, list[Placed]],
        manner: SaveManner,
        on_end: OnEnd,
    ) -> None:
        self._controller = controller
        self._client = client
        self._path = path
        self._tree = tree
        self._parts = parts
        self._manner = manner
        self._on_end = on_end
        self._directory = ""
        self._error: WaystationError | None = None
        self._left = len(parts)
        self._submit_parts: list[Callable[..., None]] = []
        self._island, (self._host, *_) = next(iter(parts))
        self._numbers = controller.clients.numbers(client)
        self._epoch = controller.orders.epoch(self._island)

    def start(self) -> None:
        """Begins it, and gives each part its place."""
        begin = self._at_host(lambda: (BeginJoining(self._path, self._manner),), self._begun)
        for number, placed in enumerate(self._parts.values()):
            self._submit_parts.append(self._part(number, placed))
        begin()

    def _part(self, number: int, placed: list[Placed]) -> Callable[..., None]:
        stored = [each for _, each in placed]
        processes = processes_of(self._controller, stored)  # while the island is there
        manner = replace(self._manner, overwrite=False)
        tree = self._tree
        if number > 0:  # what is of no array is in the first part
            manner, tree = replace(manner, custom_metadata=None), replace(tree, values=())

        def tell() -> tuple[Instruction, ...]:
            return (save_of(part_path(self._directory, number), tree, placed, processes, manner),)

        key = self._controller.new_key(self._client)
        return self._controller.works.using(stored, key, self._name, "save", tell, self._part_ended)

    def _begun(self, work: Work) -> None:
        self._error = work.error
        self._directory = str(work.said.get(self._host, ""))
        for submit in self._submit_parts:
            submit(self._error)

    def _part_ended(self, work: Work) -> None:
        self._error = self._error or work.error
        self._left -= 1
        if self._left:
            return
        if self._controller.orders.epoch(self._island) != self._epoch:
            self._error = self._error or Unavailable(
                f"host '{self._host}' was lost, which was to make the parts of '{self._path}' one "
                "checkpoint; nothing was saved: save again",
                host=self._host,
            )
            self._directory = ""  # its own leftovers tell that it is dead
        if not self._directory:
            self._on_end(self._error)
            return
        end = EndJoining(self._directory, None)
        if self._error is None:
            end = EndJoining(self._directory, len(self._parts), self._owners())
        self._at_host(lambda: (end,), self._ended)()

    def _owners(self) -> tuple[int, ...]:
        owners = dict.fromkeys((leaf for leaf, _ in self._tree.values), 0)
        for number, placed in enumerate(self._parts.values()):
            owners.update((leaf, number) for leaf, _ in placed)
        return tuple(owners[leaf] for leaf in range(len(owners)))

    def _ended(self, work: Work) -> None:
        self._on_end(self._error or work.error)

    def _at_host(
        self, tell: Callable[[], tuple[Instruction, ...]], end: Callable[[Work], None]
    ) -> Callable[..., None]:
        key = RunKey(self._client, self._controller.new_number())
        return self._controller.works.at_host(
            self._island, self._host, key, self._numbers, self._name, "save", tell, end
        )

    @property
    def _name(self) -> str:
        return f"save '{self._path}'"


class _Loading:
    """The arrays of one gang that a load makes."""

    def __init__(
        self,
        controller: Controller,
        client: str,
        path: str,
        tree: StateTree,
        arrays: Sequence[Wanted],
        options: HostOptions,
        on_end: OnLoaded = lambda error, values: None,
    ) -> None:
        self._controller = controller
        self._path = path
        self._tree = tree
        self._options = options
        self._on_end = on_end
        self._key = controller.new_key(client)
        self._name = f"load '{path}'"
        self._placed: list[Placed] = []
        self._error: WaystationError | None = None
        for leaf, own, value in arrays:
            try:
                placement = controller.placement(value.slice)
                stored = controller.arrays.create(client, own, value, placement, self._key, self._name)
            except WaystationError as error:
                self._error = error
                controller.arrays.fail(client, own, error, self._key)
            else:
                self._placed.append((leaf, stored))

    def submission(self, identity: Callable[[], str | None]) -> Callable[..., None]:
        """What submits it; it has its place from now on."""
        stored = [each for _, each in self._placed]
        if self._error is not None or not stored:
            return self._refuse
        arrays, processes = arrays_of(self._placed), processes_of(self._controller, stored)

        def tell() -> tuple[Instruction, ...]:
            return (Load(self._path, self._tree, arrays, processes, identity(), self._options),)

        return self._controller.works.making(stored, self._key, self._name, tell, self._ended, is_load=True)

    def _ended(self, work: Work) -> None:
        values = next((said for said in work.said.values() if isinstance(said, tuple)), ())
        self._on_end(work.error, values)

    def _refuse(self, error: WaystationError | None = None) -> None:
        told = self._error or error
        assert told is not None
        self._controller.collect(self._controller.arrays.fail_run(self._key, told))
        self._controller.tell_waiters()
        self._on_end(told, ())


class _SpanningLoad:
    """One load by several gangs."""

    def __init__(
        self,
        controller: Controller,
        client: str,
        path: str,
        tree: StateTree,
        parts: dict[Gang, list[Wanted]],
        options: HostOptions,
        on_end: OnLoaded,
    ) -> None:
        self._controller = controller
        self._client = client
        wanted = tuple((leaf, value.shape, value.dtype) for part in parts.values() for leaf, _, value in part)
        self._identify = Identify(path, tree, wanted, options)
        self._island, (self._host, *_) = next(iter(parts))
        first, *others = parts.values()
        less = replace(tree, values=())
        self._loadings = [
            _Loading(controller, client, path, tree, first, options, on_end),
            *(_Loading(controller, client, path, less, part, options) for part in others),
        ]
        self._identity = ""
        self._submit_parts: list[Callable[..., None]] = []

    def start(self) -> None:
        """Asks which checkpoint is there, and gives each part its place."""
        controller = self._controller
        key = RunKey(self._client, controller.new_number())
        numbers = controller.clients.numbers(self._client)
        name, tell = f"load '{self._identify.path}'", lambda: (self._identify,)
        identify = controller.works.at_host(
            self._island, self._host, key, numbers, name, "load", tell, self._identified
        )
        self._submit_parts = [each.submission(lambda: self._identity) for each in self._loadings]
        identify()

    def _identified(self, work: Work) -> None:
        self._identity = str(work.said.get(self._host, ""))
        for submit in self._submit_parts:
            submit(work.error)


def save_of(
    path: str,
    tree: StateTree,
    placed: Sequence[Placed],
    processes: tuple[int, ...],
    manner: SaveManner,
) -> Save:
    """What the hosts of one gang are told, that save arrays."""
    arrays = tuple((leaf, int(each.handle)) for leaf, each in placed)
    return Save(path, tree, arrays, processes, manner)


def arrays_of(placed: Sequence[Placed]) -> tuple[tuple[int, int, Value, Placement], ...]:
    """What hosts are told of arrays that they load."""
    return tuple((leaf, int(each.handle), each.value, each.placement) for leaf, each in placed)


def processes_of(controller: Controller, stored: Sequence[StoredArray]) -> tuple[int, ...]:
    """The numbers of the hosts, of one gang, that hold arrays."""
    island, hosts = gang_of(stored[0].placement)
    return controller.numbers_of_hosts(island, hosts)


def gang_of(placement: Placement) -> Gang:
    """Who saves and loads what lies there."""
    return placement.island, placement.hosts


def _by_gang(placed: Sequence[Placed]) -> dict[Gang, list[Placed]]:
    found: dict[Gang, list[Placed]] = {}
    for leaf, stored in placed:
        found.setdefault(gang_of(stored.placement), []).append((leaf, stored))
    return found
