"""`pmap` on virtual devices: what `jax.pmap(f, devices=…)` does, on the devices of a slice.

JAX makes a mesh of the devices that it is given and asks them for their XLA client, so it cannot take those
of others. Two ways to the same function: `waystation.runtime.pmap`, and `jax.pmap` itself once
`accept_virtual_devices` was called, which a client does when it is made the current one: a call that names
virtual devices comes here, every other goes to JAX as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from waystation._errors import InvalidInput
from waystation.runtime.client.functions import PlacedFunction
from waystation.runtime.client.slices import Device, Slice
from waystation.runtime.tracing.arrays import abstract_mesh

P = jax.sharding.PartitionSpec
_AXIS = "devices"


def pmap(
    function: Callable[..., Any],
    axis_name: str | None = None,
    *,
    devices: Sequence[Device],
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
) -> PlacedFunction:
    """Maps a function over an axis of its arguments, one place for each device of a slice.

    Args:
        function: What each device calls; collectives over `axis_name` work.
        axis_name: The name of the mapped axis.
        devices: All devices of one slice, in order.
        in_axes: Of each argument, or branch of it, the axis that is mapped; None for all of it on each
            device. Arguments by name are mapped over their first axis.
        out_axes: Likewise of results.
        static_broadcasted_argnums: Arguments that are no arrays.
        donate_argnums: Arguments that are given up.

    Raises:
        InvalidInput: These are not all devices of one slice, in order.
    """
    on = slice_of(devices)
    axis = _AXIS if axis_name is None else axis_name
    static = (
        (static_broadcasted_argnums,)
        if isinstance(static_broadcasted_argnums, int)
        else tuple(static_broadcasted_argnums)
    )
    mesh = abstract_mesh(((axis, on.device_count),))

    def mapped(*args: Any, **kwargs: Any) -> Any:
        dynamic = [value for at, value in enumerate(args) if at not in static]
        axes = in_axes
        if isinstance(in_axes, list | tuple):
            axes = [each for at, each in enumerate(in_axes) if at not in static]
        axes = _spread(axes, dynamic), jax.tree.map(lambda _: 0, kwargs)
        out: list[Any] = []

        def one(values: Any, named: Any) -> Any:
            values = _each(_squeezed, axes[0], values)
            named = _each(_squeezed, axes[1], named)
            rest = iter(values)
            whole = [args[at] if at in static else next(rest) for at in range(len(args))]
            made = function(*whole, **named)
            out[:] = [_spread(out_axes, made)]
            return _each(_expanded, out[0], made)

        specs = tuple(_each(lambda at, _: _spec(at, axis), each, each) for each in axes)
        out_specs = jax.tree.map(lambda at: _spec(at, axis), out_axes, is_leaf=_is_axis)
        return jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)(
            dynamic, kwargs
        )

    def placed(at: Any) -> Any:
        return jax.sharding.NamedSharding(mesh, _spec(at, axis))

    return PlacedFunction(
        mapped,
        on,
        in_shardings=jax.tree.map(placed, in_axes, is_leaf=_is_axis),
        out_shardings=jax.tree.map(placed, out_axes, is_leaf=_is_axis),
        donate_argnums=donate_argnums,
        static_argnums=static,
        name=getattr(function, "__name__", type(function).__name__),
    )


def slice_of(devices: Sequence[Device]) -> Slice:
    """The slice whose devices these are.

    Raises:
        InvalidInput: They are not all devices of one slice, in order.
    """
    found = tuple(devices)
    if not found or not all(isinstance(device, Device) for device in found):
        raise InvalidInput("pmap needs the devices of a slice: devices=slice.devices")
    if found != found[0].slice.devices:
        raise InvalidInput(
            f"these are not all devices of {found[0].slice} in order; add a slice of as many as are needed"
        )
    return found[0].slice


def accept_virtual_devices() -> None:
    """Has `jax.pmap` take virtual devices. Once is enough."""
    original = jax.pmap
    if getattr(original, "_takes_virtual_devices", False):
        return

    @functools.wraps(original)
    def either(*args: Any, **kwargs: Any) -> Any:
        devices = kwargs.get("devices")
        first = next(iter(devices), None) if isinstance(devices, list | tuple) else None
        return pmap(*args, **kwargs) if isinstance(first, Device) else original(*args, **kwargs)

    either._takes_virtual_devices = True  # type: ignore[attr-defined]
    jax.pmap = either


def _is_axis(value: Any) -> bool:
    return value is None or isinstance(value, int)


def _spec(at: int | None, axis: str) -> P:
    return P() if at is None else P(*[None] * at, axis)


def _spread(axes: Any, values: Any) -> Any:
    """An axis, or -1 for none, for each leaf: axes may be given for whole branches."""
    return jax.tree.map(
        lambda at, branch: jax.tree.map(lambda _: -1 if at is None else at, branch),
        axes,
        values,
        is_leaf=_is_axis,
    )


def _each(apply: Callable[[Any, Any], Any], axes: Any, values: Any) -> Any:
    return jax.tree.map(lambda at, value: apply(None if at == -1 else at, value), axes, values)


def _squeezed(at: int | None, value: Any) -> Any:
    return value if at is None else jax.numpy.squeeze(value, at)


def _expanded(at: int | None, value: Any) -> Any:
    return value if at is None else jax.numpy.expand_dims(value, at)
