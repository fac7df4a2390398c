"""`load` and `load_async`: a checkpoint becomes a state, in the containers and kinds that are wanted.

First everything is decided: which stored leaf each wanted leaf takes, where its bytes go, what has to
be cast, and in a program of several processes whether one reads for others. Then one engine job reads all
that needs no cast; casts follow in bounded pieces. Last the frameworks make their arrays, in batches.
"""

from __future__ import annotations

import os
from typing import Any

from waystation import coordination
from waystation._errors import InvalidInput
from waystation._options import Options
from waystation.checkpoint import broadcast, fill, local_storage, wanted
from waystation.checkpoint.context import current_options
from waystation.checkpoint.exchange import Exchange
from waystation.checkpoint.handle import AsyncResponse, Progress
from waystation.checkpoint.metadata import CheckpointMetadata, choose_checkpointable
from waystation.checkpoint.paths import PathLike, naming_checkpoint, require_checkpoint, resolve
from waystation.checkpoint.turns import Turn
from waystation.layouts.native.read import (
    MetadataFiles,
    OpenCheckpointable,
    decode_checkpointable,
    open_checkpoint,
    read_files,
)
from waystation.layouts.native.records import LocalPart
from waystation.tree import unflatten

AUTO = "AUTO"


def load(path: PathLike, abstract_state: Any = None, *, checkpointable_name: str = AUTO) -> Any:
    """Loads a state.

    Args:
        path: The checkpoint.
        abstract_state: What is wanted: the same tree with abstract leaves (`jax.ShapeDtypeStruct`
            with or without a sharding, tensors on any device, NumPy arrays, types or values of
            scalars), or what `metadata` returned. Each leaf comes back as the kind of array that the
            abstract leaf is, with its dtype and sharding, in the given containers. Without it
            everything comes back as it was saved.
        checkpointable_name: Which checkpointable; by default the only one, or `state`.

    Returns:
        The state.

    Raises:
        NotFound: There is no checkpoint, or no such checkpointable.
        InvalidInput: The path is no checkpoint, or a leaf cannot be had as wanted.
        StructureMismatch: The checkpoint and the abstract state differ; the message shows how.
        Corrupt: Bytes are not what was written; names file and array.
        Unsupported: The checkpoint is of a newer format version.
    """
    loading = Loading(resolve(path), checkpointable_name, current_options())
    return loading.run(abstract_state, Progress())


def load_async(
    path: PathLike, abstract_state: Any = None, *, checkpointable_name: str = AUTO
) -> AsyncResponse[Any]:
    """Loads a state in the background; takes what `load` takes, and its handle raises what it raises.

    In a program of several processes, each reads what it needs: collectives from a thread in the background
    could come between those of the program. With the option `array.loading.load_and_broadcast = True` there
    are such; let the program have none of its own then until the handle is done.
    """
    loading = Loading(resolve(path), checkpointable_name, current_options(), is_in_background=True)
    loading.require_checkpoint()
    return AsyncResponse(
        f"loading '{loading.target}'", lambda progress: loading.run(abstract_state, progress)
    )


class Loading:
    """A load that all processes of the program make together: the primary reads the metadata (each process
    those of its own storage, where it has one), every process what it needs of the data; a failure of one is
    raised by all.

    Attributes:
        target: The checkpoint, resolved.
    """

    def __init__(self, target: str, name: str, options: Options, *, is_in_background: bool = False) -> None:
        self.target = target
        self._is_in_background = is_in_background
        self._name = name
        self._options = options
        multiprocessing = options.multiprocessing
        self._is_local = multiprocessing.primary_host is None
        self._is_settled = False
        self._session = coordination.current().open(
            "load from local storage" if self._is_local else f"load '{target}'",
            deadline_s=multiprocessing.deadline_s,
            primary=multiprocessing.primary_host or 0,
        )
        self._turn = Turn()

    def require_checkpoint(self) -> None:
        """Refuses a path that holds no checkpoint; ends the load then."""
        try:
            if self._is_local:
                self._settle()
            else:
                self._session.broadcast(self._require)
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        self._turn.end()
        self._session.close()

    def _settle(self) -> None:
        """Has all processes find parts of the same checkpoint."""
        if not self._is_settled:
            local_storage.settle(self._session, self.target, local_storage.require_agreement)
        self._is_settled = True

    def _require(self) -> bytes:
        require_checkpoint(self.target)
        return b""

    def run(self, abstract_state: Any, progress: Progress) -> Any:
        """Loads."""
        try:
            return self._run(abstract_state, progress)
        finally:
            self._close()

    def _run(self, abstract_state: Any, progress: Progress) -> Any:
        opened = self._open()
        prepared: list[tuple[wanted.Decided, fill.Filling, broadcast.Plan]] = []

        def prepare() -> bytes:
            self._turn.wait()  # what follows may make device meshes
            with naming_checkpoint(self.target):
                decided = self._decide(opened, abstract_state)
                filling = fill.Filling(opened, decided, self._options, progress)
                plan = broadcast.Plan.of(filling.resident, self._options.array.loading, self._wish())
            self._turn.end()
            prepared.append((decided, filling, plan))
            return plan.proposal()

        decision = self._session.round(prepare, broadcast.decide)
        ((decided, filling, plan),) = prepared
        received = Exchange(self._session, plan, filling.reading, self.target).run(decision)
        leaves: list[Any] = []

        def finish() -> bytes:
            with naming_checkpoint(self.target):
                leaves.append(unflatten(decided.structure, filling.finish(received)))
            return b""

        if self._is_local:
            local_storage.tell_holders(self._session, opened, finish)
        else:
            self._session.round(finish, lambda _: b"")
        return leaves[0]

    def _wish(self) -> bool | None:
        """Whether to broadcast; None: if it is faster."""
        loading = self._options.array.loading
        if self._session.process_count == 1 or self._is_local:
            return False  # nobody is there to send to, or each reads from its own disk
        if loading.load_and_broadcast is None and (loading.mmap or self._is_in_background):
            return False  # nothing is read that is mapped; collectives would come at any time
        return loading.load_and_broadcast

    def _open(self) -> OpenCheckpointable:
        if self._is_local:
            self._settle()
        if self._is_local or self._session.process_count == 1:
            return decode_checkpointable(self._read())
        return decode_checkpointable(
            MetadataFiles.unpack(self._session.broadcast(lambda: self._read().pack()))
        )

    def _read(self) -> MetadataFiles:
        require_checkpoint(self.target)
        record = open_checkpoint(self.target)
        if record.local is not None and not self._is_local:
            self._check_readable(record.local)
        directory, digest = record.checkpointables[choose_checkpointable(record, self._name, self.target)]
        return read_files(os.path.join(self.target, directory), digest)

    def _check_readable(self, part: LocalPart) -> None:
        """Refuses to have all processes read what one host holds."""
        if self._session.process_count > 1 and part.process_count > 1:
            raise InvalidInput(
                f"'{self.target}' is the part of process {part.process} of a checkpoint that "
                f"{part.process_count} processes saved to local storage; load it with "
                "multiprocessing.primary_host = None, so that each process reads its own part",
                path=self.target,
            )

    def _decide(self, opened: OpenCheckpointable, abstract_state: Any) -> wanted.Decided:
        loading = self._options.pytree.loading
        if isinstance(abstract_state, CheckpointMetadata):
            abstract_state = abstract_state.metadata
        if abstract_state is None:
            return wanted.as_saved(opened.tree, loading)
        return wanted.as_asked(opened.tree, abstract_state, loading)
