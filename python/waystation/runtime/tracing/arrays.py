"""Arrays of the runtime, as a program holds them: futures, which hold no elements.

An `Array` knows its shape, dtype, slice and sharding from the start. What it stands for is one of: an array
that hosts have or will have (a `Reference`), a result of a call that has not been sent yet, or a value of a
program that is being traced, which has no elements at all. Reading one sends what has been recorded, and
waits. When the last reference is dropped, the hosts' memory is freed: later, with others, by a thread of the
client; dropping never waits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from waystation._errors import InvalidInput, WaystationError, WrongType
from waystation.frameworks.dtypes import numpy_dtype
from waystation.runtime.errors import TracedValueRead
from waystation.runtime.ir import Sharding
from waystation.runtime.tracing.pictures import picture, picture_html
from waystation.runtime.tracing.recorder import Kind
from waystation.runtime.tracing.releases import Freed

if TYPE_CHECKING:
    import jax

    from waystation.runtime.tracing.recordings import Recording

# Longer arrays are shown without their elements, which would have to be brought here.
SHOWN_ELEMENTS = 1000


class SliceLike(Protocol):
    """What an array says of its slice."""

    @property
    def number(self) -> int:
        """Its identity."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """How its devices lie."""
        ...


class Owner(Protocol):
    """What reads arrays: the client."""

    def flush(self) -> None:
        """Sends what has been recorded."""
        ...

    def read(self, reference: Reference, timeout_s: float | None) -> np.ndarray[Any, Any]:
        """Waits for an array and brings it here."""
        ...

    def await_all(self, references: list[Reference], timeout_s: float | None) -> None:
        """Waits until arrays have been made."""
        ...

    def is_done(self, reference: Reference) -> bool:
        """Whether an array has been made, or will never be."""
        ...


class Reference:
    """The client's hold on an array of the hosts; the last who drops it frees that.

    Args:
        handle: The handle.
        freed: Where to say that it is not needed any more.

    Attributes:
        ended: Why it cannot be used any more: it was donated, or never made; None while it can.
    """

    __slots__ = ("_freed", "ended", "handle")

    def __init__(self, handle: int, freed: Freed, ended: WaystationError | None = None) -> None:
        self.handle: int = handle
        self.ended: WaystationError | None = ended
        self._freed = freed

    def __del__(self) -> None:
        # Called at any time, in any thread, also within this very queue, which allows that.
        if self.ended is None:
            self._freed.put(self.handle)


class Array:
    """An array on the devices of a slice.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        slice: The slice that it lives on.
        kind: The same, and how it lies, as programs describe it.
    """

    __slots__ = ("__weakref__", "_owner", "kind", "number", "recording", "reference", "slice")

    def __init__(
        self,
        owner: Owner,
        kind: Kind,
        on: SliceLike,
        *,
        reference: Reference | None = None,
        recording: Recording | None = None,
        number: int = -1,
    ) -> None:
        self._owner = owner
        self.kind: Kind = kind
        self.slice: SliceLike = on
        self.reference: Reference | None = reference
        self.recording: Recording | None = recording
        self.number: int = number

    # ---- what is known without waiting ---------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.kind.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype."""
        return np.dtype(numpy_dtype(self.kind.dtype))

    @property
    def owner(self) -> Owner:
        """What reads it: its client."""
        return self._owner

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, each counted once."""
        return self.kind.nbytes

    @property
    def sharding(self) -> jax.sharding.NamedSharding:
        """How it lies on the devices of its slice."""
        return named_sharding(self.kind.sharding)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without axes has no length")
        return self.shape[0]

    # ---- reading -------------------------------------------------------------------------------

    def numpy(self, timeout_s: float | None = None) -> np.ndarray[Any, Any]:
        """Waits for it and brings it here, whole.

        Raises:
            TimeoutError: It is not there after so many seconds.
            TracedValueRead: It stands for a value of a program that is being traced.
            InvalidInput: It was donated.
            WaystationError: What kept it from being made; it names program, computation, host and device.
        """
        return self._owner.read(self.usable("read"), timeout_s)

    def result(self, timeout_s: float | None = None) -> np.ndarray[Any, Any]:
        """The same as `numpy`, as futures call it."""
        return self.numpy(timeout_s)

    def block_until_ready(self, timeout_s: float | None = None) -> Array:
        """Waits until it has been made, where it lives; raises as `numpy`."""
        self._owner.await_all([self.usable("waited for")], timeout_s)
        return self

    def is_ready(self) -> bool:
        """Whether it has been made, or will never be; sends what has been recorded, and does not wait."""
        return self._owner.is_done(self.usable("waited for"))

    def usable(self, use: str, by: Owner | None = None) -> Reference:
        """What the hosts know it by, once what makes it has been sent.

        Args:
            use: What is to be done with it, for messages.
            by: The client that does it, which must be its own.

        Raises:
            TracedValueRead: A program is being traced.
            InvalidInput: It was donated, or is of another client.
        """
        if by is not None and by is not self._owner:
            raise InvalidInput(
                f"this array is of another client, {self._owner!r}, and cannot be {use} by {by!r}; share it "
                "under a name (`share`, `named`), or read it here and put it on a slice of this client"
            )
        if self.recording is not None and self.recording.traces:
            raise TracedValueRead(
                f"a value of program '{self.recording.name}' cannot be {use} while the program is traced: it "
                "has a shape and a dtype, and no elements; return it and read it outside, make what depends "
                "on it a computation, or leave the function untraced: calls between two reads go together",
                program=self.recording.name,
            )
        if self.recording is not None:
            self._owner.flush()
        if self.reference is None:
            raise InvalidInput(f"this array cannot be {use}: nothing has made it")
        if self.reference.ended is not None:
            raise self.reference.ended.where()
        return self.reference

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, np.ndarray | np.generic):
            return NotImplemented  # NumPy then reads this one, and compares elements
        raise WrongType(
            "arrays of the runtime cannot be compared with ==, != or `in`; compare elements on the slice, by "
            "client.jit(lambda x, y: x == y, slice), or read them, x.numpy() == y.numpy(); `x is y` says "
            "whether both are one array"
        )

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __index__(self) -> int:
        return self.numpy().__index__()

    def item(self) -> Any:
        """Its only element."""
        return self.numpy().item()

    def tolist(self) -> Any:
        """Its elements, as lists."""
        return self.numpy().tolist()

    # ---- for people ----------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"Array({self._elements()}, dtype={self.dtype.name})"

    def __str__(self) -> str:
        return self._elements()

    def sharding_picture(self) -> str:
        """A picture, in text, of which devices of the slice hold which part."""
        return picture(self.shape, self.kind.sharding)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        del cycle
        printer.text(f"{self!r}\n{self._heading()}\n{self.sharding_picture()}")

    def _repr_html_(self) -> str:
        return picture_html(self._heading(), self.shape, self.kind.sharding)

    def _heading(self) -> str:
        return f"{self.dtype.name}{list(self.shape)} on slice @{self.slice.number}"

    def _elements(self) -> str:
        if self.recording is not None and self.recording.traces:
            return f"<traced {self._heading()}>"
        if self.size > SHOWN_ELEMENTS:
            return f"<{self._heading()}>"
        try:
            return np.array2string(self.numpy(), separator=", ", prefix="Array(")
        except WaystationError as error:
            return f"<cannot be read: {error}>"


def abstract_mesh(axes: tuple[tuple[str, int], ...]) -> jax.sharding.AbstractMesh:
    """A mesh without devices, over which JAX and not the function decides what lies how inside."""
    import jax

    sizes, names = tuple(size for _, size in axes), tuple(name for name, _ in axes)
    return jax.sharding.AbstractMesh(sizes, names, (jax.sharding.AxisType.Auto,) * len(axes))


def named_sharding(sharding: Sharding) -> jax.sharding.NamedSharding:
    """The same sharding for JAX, over a mesh without devices."""
    import jax

    parts = [part[0] if len(part) == 1 else (part or None) for part in sharding.spec]
    return jax.sharding.NamedSharding(abstract_mesh(sharding.axes), jax.sharding.PartitionSpec(*parts))
