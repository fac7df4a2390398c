"""What the benchmark asks of a library, and what all of one framework have in common.

A system is described by class attributes, so that it can be planned without being imported; its library
is imported by `prepare` alone, which is never timed. `save` and `load` hold only what a user of that
library would write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from benchmarks import states
from benchmarks.states import Leaf

Wait = Callable[[], object]
DEFAULT = "default"


class UnavailableError(Exception):
    """This machine cannot do that: it is reported as missing, with this reason."""


class System:
    """One library, used in one manner.

    Attributes:
        name: How it is called in the results.
        framework: Whose arrays it saves.
        distribution: The package whose version is reported.
        writer: The system whose checkpoints it loads: itself unless it cannot save.
        save_ways, load_ways: The manners of saving and loading that are measured, each by itself.
        stream_ways: The manners of handing over one array after another that are measured.
        mapped_ways: The manners of loading after which the bytes are not in memory yet.
        saves_async: Whether it has an asynchronous save.
        syncs: Whether what it has written is durable when its save returns, as far as it says.
        is_usual: Whether it is measured where nobody names systems.
    """

    name: ClassVar[str]
    framework: ClassVar[str]
    distribution: ClassVar[str]
    writer: ClassVar[str]
    save_ways: ClassVar[tuple[str, ...]] = (DEFAULT,)
    load_ways: ClassVar[tuple[str, ...]] = (DEFAULT,)
    stream_ways: ClassVar[tuple[str, ...]] = ()
    mapped_ways: ClassVar[frozenset[str]] = frozenset()
    saves_async: ClassVar[bool] = False
    syncs: ClassVar[bool] = True
    is_usual: ClassVar[bool] = True

    def prepare(self, way: str) -> None:
        """Imports the library and sets what `way` needs."""
        raise NotImplementedError

    def build(self, leaves: list[Leaf]) -> Any:
        """The state, as the framework's arrays in their own memory."""
        raise NotImplementedError

    def template(self, leaves: list[Leaf]) -> Any:
        """What `load` is given beside the path; made before the clock starts."""
        del leaves

    def save(self, path: Path, state: Any) -> float | None:
        """Saves; returns the seconds it took if it had to be timed elsewhere."""
        raise NotImplementedError

    def save_async(self, path: Path, state: Any) -> Wait:
        """Begins to save and returns what waits for the end."""
        raise NotImplementedError

    def load(self, path: Path, template: Any) -> Any:
        """Loads; the arrays are complete when it returns, unless they are mapped."""
        raise NotImplementedError

    def stream(self, path: Path) -> Iterator[tuple[str, Any]]:
        """Yields names and arrays as they become ready; what was handed out stays valid."""
        raise NotImplementedError

    def arrays(self, loaded: Any) -> dict[str, Any]:
        """The loaded arrays by their dotted names."""
        return states.flatten(loaded)

    def views(self, loaded: Any) -> dict[str, npt.NDArray[np.uint8]]:
        """The bytes of each array by its dotted name, without copying."""
        raise NotImplementedError

    def snapshot_limit_bytes(self) -> int | None:
        """The memory that an asynchronous save may take, where the library states a limit."""
        return None


class NumpySystem(System):
    """A system that saves NumPy arrays."""

    framework = "numpy"

    def build(self, leaves: list[Leaf]) -> Any:
        values = {leaf.name: states.expected(leaf).view(leaf.dtype).reshape(leaf.shape) for leaf in leaves}
        return states.nest({name: array.copy() for name, array in values.items()})

    def views(self, loaded: Any) -> dict[str, npt.NDArray[np.uint8]]:
        return {name: array.reshape(-1).view(np.uint8) for name, array in self.arrays(loaded).items()}


class JaxSystem(System):
    """A system that saves JAX arrays on the CPU."""

    framework = "jax"

    def build(self, leaves: list[Leaf]) -> Any:
        import jax
        import jax.numpy as jnp
        import ml_dtypes

        flat = {}
        for leaf in leaves:
            dtype = ml_dtypes.bfloat16 if leaf.dtype == "bfloat16" else leaf.dtype
            values = states.expected(leaf).view(dtype).reshape(leaf.shape)
            flat[leaf.name] = jnp.array(values, copy=True)
        return jax.block_until_ready(states.nest(flat))

    def template(self, leaves: list[Leaf]) -> Any:
        import jax

        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return states.nest(
            {leaf.name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for leaf in leaves}
        )

    def views(self, loaded: Any) -> dict[str, npt.NDArray[np.uint8]]:
        return {
            name: np.asarray(array).reshape(-1).view(np.uint8) for name, array in self.arrays(loaded).items()
        }


class TorchSystem(System):
    """A system that saves torch tensors on the CPU."""

    framework = "torch"

    def build(self, leaves: list[Leaf]) -> Any:
        flat = {}
        for leaf in leaves:
            tensor = _empty_tensor(leaf)
            states.fill(leaf, _tensor_bytes(tensor))
            flat[leaf.name] = tensor
        return states.nest(flat)

    def views(self, loaded: Any) -> dict[str, npt.NDArray[np.uint8]]:
        return {name: _tensor_bytes(tensor) for name, tensor in self.arrays(loaded).items()}

    def load_into(self, path: Path, own: Any) -> None:
        """Loads into tensors that the program has, as `load_state_dict` of a module needs it."""
        raise NotImplementedError

    def zeros(self, leaves: list[Leaf]) -> Any:
        """Tensors of the right shapes in memory that is there, as a program has them that has begun."""
        return states.nest({leaf.name: _empty_tensor(leaf).zero_() for leaf in leaves})

    def empty(self, leaves: list[Leaf]) -> Any:
        """Tensors of the right shapes in memory that nothing has touched yet."""
        return states.nest({leaf.name: _empty_tensor(leaf) for leaf in leaves})


def _empty_tensor(leaf: Leaf) -> Any:
    import torch

    return torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype))


def _tensor_bytes(tensor: Any) -> npt.NDArray[np.uint8]:
    import torch

    view: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return view
