"""The seam between a client and what runs its programs: a cluster, or the devices of this process.

Calls are about whole arrays and programs, never about shards or single computations. A client names an array
by a *handle*, an integer that it chooses and never uses again, so it can go on before anything has been made.
Calls of one client take effect in the order in which they were made, and only `get`, `wait` and what the
resource manager decides have to be waited for. Failure sequence: a run that fails leaves its error in the
handles of its results; programs that take one of these as an argument fail with the same error, and the
client hears of it when it reads. Plain Python: nothing here needs Ray or JAX.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np

from waystation.runtime.ir import Program, Sharding, Value
from waystation.runtime.resources import Placement, SliceRequest


class Backend(Protocol):
    """Where the programs of one client run."""

    @property
    def client(self) -> str:
        """The name of the client, as it is shown to people."""
        ...

    # ---- slices --------------------------------------------------------------------------------

    def grant(self, request: SliceRequest) -> int:
        """Grants a slice and returns its number.

        Raises:
            NotEnoughDevices: No island has the devices free, and none that may is being rebuilt.
        """
        ...

    def release(self, slice_number: int) -> None:
        """Takes a slice back for good, when what was submitted before has run.

        Raises:
            NoSuchSlice: There is none of that number.
        """
        ...

    def remap(
        self, slice_number: int, *, island: str | None = None, without_hosts: Collection[str] = ()
    ) -> None:
        """Moves a slice to other devices; the next runs over it are lowered anew.

        Raises:
            NoSuchSlice: There is none of that number.
            SliceNotPlaced: It has no devices to move from.
            NotEnoughDevices: There are not enough others; it stays where it is.
        """
        ...

    def suspend(self) -> None:
        """Takes the devices of all slices of this client until `resume`, and keeps their arrays elsewhere.

        Raises:
            WaystationError: Arrays could not be brought elsewhere, and stay on devices for now.
        """
        ...

    def resume(self, without_hosts: Collection[str] = ()) -> None:
        """Gives all suspended slices devices again, and brings their arrays there.

        Args:
            without_hosts: Hosts that they are not to have devices of.

        Raises:
            NotEnoughDevices: They do not all fit, and no island that has them is being rebuilt; they stay
                suspended.
        """
        ...

    def placement(self, slice_number: int) -> Placement:
        """Where a slice is now.

        Raises:
            NoSuchSlice: There is none of that number.
            SliceNotPlaced: It has no devices.
        """
        ...

    def platform(self, slice_number: int) -> str:
        """What functions for a slice have to be exported for, in JAX's words: `cpu`, `cuda` or another."""
        ...

    # ---- programs ------------------------------------------------------------------------------

    def register(self, name: str, exported: bytes) -> str:
        """Makes a function known, which hosts then compile in the background.

        Args:
            name: Its name, for messages.
            exported: What `jax.export.Exported.serialize` gave, exported over an `AbstractMesh`. These
                bytes travel to each island once.

        Returns:
            The key that programs call it by: `messages.key_of(exported)`.
        """
        ...

    def forget_functions(self, keys: Sequence[str]) -> None:
        """Gives functions up, each once for each time that it was registered; what calls them keeps them.

        Never raises for what is unknown, or since a cluster is gone.
        """
        ...

    def install(self, program: Program) -> str:
        """Makes a program known.

        Args:
            program: What `ir.prepare` returned. Its bytes travel once.

        Returns:
            Its fingerprint.
        """
        ...

    def forget_programs(self, fingerprints: Sequence[str]) -> None:
        """Gives programs up, each once for each time that it was installed; runs of them go on.

        Never raises for what is unknown, or since a cluster is gone.
        """
        ...

    def prepare(self, fingerprint: str, slices: Sequence[int]) -> None:
        """Has hosts compile what a program calls, and waits for that; what runs meanwhile is not held up.

        Args:
            fingerprint: Of the program.
            slices: Its slices.

        Raises:
            WaystationError: It cannot be compiled, or the slices have no devices now.
        """
        ...

    def run(
        self,
        fingerprint: str,
        slices: Sequence[int],
        arguments: Sequence[int],
        results: Sequence[int],
        *,
        cost_seconds: float | None = None,
        priority: int = 0,
    ) -> None:
        """Runs a program; returns at once.

        Args:
            fingerprint: Of an installed program.
            slices: The granted slice for each of `Program.slices`, in order.
            arguments: A handle for each `Arg`, in order. Those of donated ones end.
            results: A new handle for each operand of the `Result`, in order. These are different values,
                and no arguments: a client that wants one twice keeps its handle twice.
            cost_seconds: How long its devices need for it, if that is known.
            priority: Runs of a higher one go first.

        Raises:
            NotFound: There is no such program.
        """
        ...

    # ---- arrays --------------------------------------------------------------------------------

    def put(self, handle: int, array: np.ndarray[Any, Any], slice_number: int, sharding: Sharding) -> None:
        """Makes an array of one of this process, of small or medium size; returns when it may be changed.

        Args:
            handle: Its new handle.
            array: Its elements.
            slice_number: The slice that it is to live on.
            sharding: How it is to lie there.
        """
        ...

    def get(self, handle: int, timeout_s: float | None = None) -> np.ndarray[Any, Any]:
        """Waits for an array and brings it here, whole.

        Raises:
            TimeoutError: It is not there after so many seconds.
            ObjectNotFound: Nothing has that handle.
            WaystationError: What kept it from being made; the context has `program`, `computation`,
                `host` and `device` where these are known.
        """
        ...

    def wait(self, handles: Sequence[int], timeout_s: float | None = None) -> None:
        """Waits until arrays have been made; raises as `get`."""
        ...

    def is_done(self, handle: int) -> bool:
        """Whether an array has been made, or will never be; does not wait."""
        ...

    def free(self, handles: Sequence[int]) -> None:
        """Gives arrays up, once what was submitted before has used them. Never waits, and never raises for
        an unknown handle: it is called from finalizers."""
        ...

    def share(self, handle: int, name: str) -> None:
        """Publishes an array under a name, for all clients to read; its bytes outlive this client.

        Raises:
            NameTaken: Another array has that name.
        """
        ...

    def named(self, name: str, handle: int) -> Value:
        """Takes a reference to a published array.

        Args:
            name: Its name.
            handle: The handle that it gets for this client.

        Returns:
            Its shape, dtype, sharding and the slice that it lives on; `number` is the handle.

        Raises:
            ObjectNotFound: No array has that name.
        """
        ...

    def close(self) -> None:
        """Ends this client: its slices are released and its arrays freed."""
        ...
