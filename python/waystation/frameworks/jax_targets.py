"""Where loaded JAX arrays go, and their making from filled host buffers.

On CPU the arrays alias the buffers, replicas of one box the same one: nobody else holds these buffers, and
XLA never reuses memory that it was lent, so donating such an array leaves its buffer as it was. Invariants:
settings of the calling thread (64-bit mode, default device) are read when targets are chosen, since arrays
may be made on another thread; no value is narrowed in silence.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding

from waystation._errors import Corrupt, InvalidInput, Unsupported, WaystationError
from waystation.coordination import jax_private
from waystation.frameworks import casts, dtypes
from waystation.frameworks.base import StoredArray, Target
from waystation.frameworks.jax_dtypes import WIDE, jax_dtype, logical_of, wide_enabled
from waystation.frameworks.jax_shardings import boxes_by_device, sharding_from_description
from waystation.frameworks.kinds import targets_by_kind
from waystation.frameworks.mesh_in_effect import mesh_in_effect
from waystation.grid import Box


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the boxes of one array go; shared by all arrays of one shape, dtype and sharding.

    Attributes:
        sharding: Of the array.
        devices: The devices of this process.
        box_numbers: For each of them, which box it gets.
        committed: Whether the array stays on its devices.
        layout: A `jax` Format where a memory layout was asked for.
        wide: Whether 64-bit dtypes are enabled.
    """

    sharding: Sharding
    devices: tuple[Any, ...]
    box_numbers: tuple[int, ...]
    committed: bool
    layout: Any
    wide: bool


class _Chooser:
    """Makes the targets of one batch; equal placements are made once."""

    def __init__(self) -> None:
        self._wide = wide_enabled()
        self._default: Sharding | None = None
        self._placements: dict[Any, tuple[Placement, list[Box]]] = {}
        self._allowed: set[str] = set()
        self._described: dict[tuple[int, tuple[int, ...]], Sharding | None] = {}
        self._asked: dict[Any, Target] = {}

    def target(
        self,
        shape: tuple[int, ...],
        dtype: str,
        sharding: Sharding | None,
        committed: bool,
        layout: Any = None,
    ) -> Target:
        if dtype not in self._allowed:
            self._allow(dtype)
        if sharding is None:
            sharding, committed = self._default_sharding(), False
        key = (shape, sharding, committed, layout)
        known = self._placements.get(key)
        if known is None:
            known = self._placements[key] = self._place(shape, sharding, committed, layout)
        return Target(shape, dtype, known[1], known[0])

    def asked(
        self,
        stored: StoredArray,
        shape: tuple[int, ...],
        asked_dtype: Any,
        sharding: Sharding | None,
        layout: Any,
        index: int,
    ) -> Target:
        """The target of a stored array for what is asked for; one for all that ask alike."""
        kind = id(stored), shape, asked_dtype, sharding, layout
        found = self._asked.get(kind)
        if found is None:
            dtypes.of_stored(stored)
            dtype = logical_of(asked_dtype).name
            casts.check_request(shape, dtype, stored, index)
            found = self._asked[kind] = self.target(shape, dtype, sharding, committed=True, layout=layout)
        return found

    def saved_sharding(self, stored: StoredArray) -> Sharding | None:
        """The sharding at save, where the present devices have it."""
        if stored.sharding is None:
            return None
        key = (id(stored.sharding), stored.shape)  # the descriptions outlive the batch
        if key not in self._described:
            self._described[key] = sharding_from_description(stored.sharding, stored.shape)
        return self._described[key]

    def _allow(self, dtype: str) -> None:
        jax_dtype(dtype)
        if dtype in ("float64", "complex128") and not self._wide:
            raise InvalidInput(
                f"JAX would narrow {dtype} to {WIDE[dtype]}; enable 64-bit mode "
                f"(jax.config.update('jax_enable_x64', True)), or give an abstract state with "
                f"{WIDE[dtype]} (to load a published model: dtype={{'{dtype}': '{WIDE[dtype]}'}})"
            )
        self._allowed.add(dtype)

    def _default_sharding(self) -> Sharding:
        if self._default is None:
            device = jax.config.jax_default_device
            if device is None or isinstance(device, str):
                device = jax.local_devices(backend=device)[0]
            self._default = SingleDeviceSharding(device)
        return self._default

    def _place(
        self, shape: tuple[int, ...], sharding: Sharding, committed: bool, layout: Any
    ) -> tuple[Placement, list[Box]]:
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
            sharding = _over_mesh_in_effect(sharding)
        try:
            by_device = boxes_by_device(sharding, shape)
        except (ValueError, IndexError, NotImplementedError) as error:
            spec = getattr(sharding, "spec", ())
            why = f"its spec has more than {len(shape)} entries" if len(spec) > len(shape) else str(error)
            raise InvalidInput(f"an array of shape {shape} cannot have {sharding}: {why}") from error
        if not by_device and jax.process_count() == 1:
            raise InvalidInput(f"{sharding} has no device of this process; shard over jax.devices()")
        numbers = {box: number for number, box in enumerate(dict.fromkeys(by_device.values()))}
        placement = Placement(
            sharding,
            tuple(by_device),
            tuple(numbers[box] for box in by_device.values()),
            committed,
            layout,
            self._wide,
        )
        return placement, list(numbers)


# ---- targets -----------------------------------------------------------------------------------


def _over_mesh_in_effect(sharding: NamedSharding) -> NamedSharding:
    """A sharding over an abstract mesh, on the devices of the mesh that the program has set."""
    mesh = mesh_in_effect()
    if mesh is None:
        raise InvalidInput(
            f"{sharding} has an abstract mesh, and no mesh is in effect; load within jax.set_mesh(mesh), or "
            "give a sharding over a mesh of devices"
        )
    try:
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    except ValueError as error:
        raise InvalidInput(f"{sharding} does not fit the mesh in effect ({mesh}): {error}") from error


def targets(abstracts: Sequence[Any], stored: Sequence[StoredArray]) -> list[Target]:
    """Where the arrays go by abstract or concrete leaves, see `Codec.targets`."""
    chooser = _Chooser()
    return [
        _indexed(index, _asked, chooser, abstract, array, index)
        for index, (abstract, array) in enumerate(zip(abstracts, stored, strict=True))
    ]


def default_targets(stored: Sequence[StoredArray]) -> list[Target]:
    """As saved, see `Codec.default_targets`. An array of one device that is not here goes to the default
    device: it fits any."""
    chooser = _Chooser()
    return [_indexed(index, _saved, chooser, array) for index, array in enumerate(stored)]


def place_of(place: Any) -> Sharding | None:
    """A sharding for what a user gives, see `Codec.place_of`."""
    if place is None or isinstance(place, Sharding):
        return place
    if isinstance(place, str):
        try:
            place = jax.local_devices(backend=place)[0]
        except RuntimeError as error:
            raise InvalidInput(f"JAX has no devices {place!r} here: {error}") from error
    if not isinstance(place, jax.Device):
        raise InvalidInput(
            f"{place!r:.200} is no place for JAX arrays; give a jax.sharding.Sharding, a jax.Device or the "
            "name of a platform"
        )
    return SingleDeviceSharding(place)


def placed(
    stored: Sequence[StoredArray], dtype_names: Sequence[str], places: Sequence[Sharding | None]
) -> list[Target]:
    """Where the arrays go by dtypes and shardings alone, see `Codec.placed`."""
    return targets_by_kind(functools.partial(_placed, _Chooser()), stored, dtype_names, places)


def _placed(
    chooser: _Chooser, stored: StoredArray, dtype: str, sharding: Sharding | None, index: int
) -> Target:
    if dtype != stored.dtype:
        casts.check_request(stored.shape, dtype, stored, index)
    return chooser.target(stored.shape, dtype, sharding, committed=True)


def _indexed(index: int, choose: Any, *arguments: Any) -> Target:
    try:
        target: Target = choose(*arguments)
    except WaystationError as error:
        raise error.where(index=index)
    return target


def _asked(chooser: _Chooser, abstract: Any, stored: StoredArray, index: int) -> Target:
    layout = None
    if isinstance(abstract, jax.Array):
        sharding = abstract.sharding if abstract.committed else None
    else:
        sharding, layout = abstract.sharding, _layout(abstract)
    return chooser.asked(stored, abstract.shape, abstract.dtype, sharding, layout, index)


def _layout(abstract: Any) -> Any:
    layout = getattr(abstract, "format", None)
    return layout if layout is not None and getattr(layout, "layout", None) is not None else None


def _saved(chooser: _Chooser, stored: StoredArray) -> Target:
    dtypes.of_stored(stored)
    description = stored.sharding
    sharding = chooser.saved_sharding(stored)
    if sharding is None and description is not None and description.get("kind") != "single":
        raise InvalidInput(_absent(description))
    committed = description is not None and description.get("committed", True) is True
    if description is not None and description.get("each_process") is True:
        committed = committed and sharding is not None and sharding.is_fully_addressable
    return chooser.target(stored.shape, stored.dtype, sharding if committed else None, committed)


def _absent(description: dict[str, Any]) -> str:
    advice = (
        "load(path, framework='numpy') gives NumPy arrays (so does array.loading.restore_on_host); "
        "an abstract state says where arrays go: jax.ShapeDtypeStruct(shape, dtype, sharding=...); the "
        "option array.loading.sharding_for chooses a sharding for each array"
    )
    if description.get("kind") != "named":
        return f"the array was saved with a sharding that cannot be rebuilt; {advice}"
    mesh = description["mesh"]
    platform = mesh["platform"] or "unnamed"
    present = ", ".join(sorted({f"{device.platform} {device.id}" for device in jax.devices()})[:8])
    return (
        f"the array was saved on a mesh of {len(mesh['devices'])} {platform} devices, not all of which "
        f"are here (here: {len(jax.devices())}, {present}); {advice}"
    )


# ---- assembly ----------------------------------------------------------------------------------


def assemble(targets: Sequence[Target], boxes: Sequence[list[Any]]) -> list[Any]:
    """Arrays of filled host buffers, see `Codec.assemble`."""
    fitting = [
        [narrowed(buffer, index) for buffer in own]
        if target.dtype in WIDE and not target.placement.wide
        else own
        for index, (target, own) in enumerate(zip(targets, boxes, strict=True))
    ]
    putting = jax_private.putting()
    made = _put_publicly(targets, fitting) if putting is None else _put_fast(putting, targets, fitting)
    for index, target in enumerate(targets):
        if dtypes.is_key(target.dtype):
            made[index] = _as_keys(made[index], target, index)
        if target.placement.layout is not None:
            made[index] = jax.device_put(made[index], target.placement.layout)
    return made


def narrowed(buffer: np.ndarray[Any, Any], index: int) -> np.ndarray[Any, Any]:
    """64-bit integers as the widest that JAX has without 64-bit mode. Raises InvalidInput if one does not
    fit; `index` is that of the array in its batch."""
    narrow = np.dtype(WIDE[buffer.dtype.name])
    limits = np.iinfo(narrow)
    if buffer.size and (buffer.min() < limits.min or buffer.max() > limits.max):
        raise InvalidInput(
            f"values of this {buffer.dtype} array do not fit {narrow}, the widest that JAX has now; enable "
            f"64-bit mode (jax.config.update('jax_enable_x64', True)), or give an abstract dtype "
            f"such as {narrow} (to load a published model: dtype={{'{buffer.dtype}': '{narrow}'}})",
            index=index,
        )
    return buffer.astype(narrow)


def _put_fast(
    putting: jax_private.Putting, targets: Sequence[Target], boxes: Sequence[list[Any]]
) -> list[Any]:
    made = []
    puts: dict[int, jax_private.Put] = {}  # by target: many arrays share few
    for target, own in zip(targets, boxes, strict=True):
        if not own:
            made.append(_elsewhere(target))
            continue
        put = puts.get(id(target))
        if put is None:
            place = target.placement
            shape = target.shape + own[0].shape[len(target.shape) :]
            put = puts[id(target)] = putting(
                shape, own[0].dtype, place.sharding, place.devices, place.committed, place.wide
            )
        numbers = target.placement.box_numbers
        made.append(put(own if len(numbers) == 1 else [own[number] for number in numbers]))
    return made


def _elsewhere(target: Target) -> Any:
    """An array of which this process holds nothing."""
    place = target.placement
    if dtypes.is_key(target.dtype):
        raise Unsupported(f"{place.sharding} has no device of this process, where keys cannot be made")
    dtype = jax_dtype(target.dtype)
    return jax.make_array_from_single_device_arrays(target.shape, place.sharding, [], dtype=dtype)


def _put_publicly(targets: Sequence[Target], boxes: Sequence[list[Any]]) -> list[Any]:
    if not targets:
        return []
    with wide_mode(targets[0].placement.wide):
        parts = _put_parts(targets, boxes)
        made = []
        for target, own in zip(targets, boxes, strict=True):
            place = target.placement
            if not own:
                made.append(_elsewhere(target))
                continue
            arrays = [next(parts) for _ in place.devices]
            shape = target.shape + own[0].shape[len(target.shape) :]
            if len(arrays) > 1 or place.sharding != arrays[0].sharding:
                arrays = [jax.make_array_from_single_device_arrays(shape, place.sharding, arrays)]
            made.append(arrays[0])
        return made


def _put_parts(targets: Sequence[Target], boxes: Sequence[list[Any]]) -> Any:
    """Every part on its device, in two calls: those that stay there and those that need not."""
    committed: list[tuple[Any, Any]] = []
    free: dict[Any, list[Any]] = {}
    order: list[tuple[Any, int]] = []
    for target, own in zip(targets, boxes, strict=True):
        place = target.placement
        for device, number in zip(place.devices, place.box_numbers, strict=True):
            if place.committed:
                order.append((None, len(committed)))
                kind = place.sharding.memory_kind
                committed.append((own[number], SingleDeviceSharding(device, memory_kind=kind)))
            else:
                own_free = free.setdefault(device, [])
                order.append((device, len(own_free)))
                own_free.append(own[number])
    put: dict[Any, Any] = {}
    if committed:
        put[None] = jax.device_put([part for part, _ in committed], [place for _, place in committed])
    for device, own_free in free.items():
        with jax.default_device(device):
            put[device] = jax.device_put(own_free)
    return iter([put[group][number] for group, number in order])


def wide_mode(wide: bool) -> AbstractContextManager[Any]:
    """Has JAX keep 64-bit dtypes, or narrow them, in this thread."""
    # JAX before 0.8 has it among the experiments only.
    owner: Any = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")
    mode: AbstractContextManager[Any] = owner.enable_x64(wide)
    return mode


def _as_keys(data: Any, target: Target, index: int) -> Any:
    try:
        return jax.random.wrap_key_data(data, impl=dtypes.key_implementation(target.dtype))
    except (TypeError, ValueError) as error:
        raise Corrupt(f"the data is not that of {target.dtype}: {error}", index=index) from error
