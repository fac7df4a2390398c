"""Lists on a host: what goes wrong in one call is left in its results, and the list goes on to its end."""

import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from waystation.errors import InvalidInput, WaystationError
from waystation.runtime.devices import DeviceId
from waystation.runtime.errors import ComputationFailed
from waystation.runtime.execution import HostExecution, LocalExchange, Run
from waystation.runtime.ir import (
    Arg,
    Compute,
    HostCall,
    Program,
    Result,
    Sharding,
    SliceShape,
    Value,
    lower,
    prepare,
)
from waystation.runtime.resources import Placement

HOST = "left/0"
PLACEMENT = Placement(1, "left", (DeviceId(HOST, 0), DeviceId(HOST, 1)))
ROWS = Sharding((("d", 2),), (("d",),))
VALUES = np.arange(8, dtype=np.float32)


def value(number: int) -> Value:
    return Value(number, (8,), "float32", 0, ROWS)


def add_sum() -> bytes:
    """`x + sum(x)`, whose sum is a collective over both devices."""
    sharding = NamedSharding(AbstractMesh((2,), ("d",)), PartitionSpec("d"))
    jitted = jax.jit(lambda x: x + x.sum(), in_shardings=sharding, out_shardings=sharding)
    return bytes(jax.export.export(jitted)(jax.ShapeDtypeStruct((8,), np.float32)).serialize())


def run(function: Callable[..., Any]) -> tuple[HostExecution, Callable[[], None]]:
    """A call of a function of Python, and a collective that does not depend on it."""
    nodes = (
        Arg("x", value(0)),
        HostCall("call", "call", 0, (0,), (ROWS,), (value(1),)),
        Compute("add sum", "add sum", 0, (0,), (ROWS,), (value(2),)),
        Result((1, 2)),
    )
    low = lower(prepare(Program("both", (SliceShape(0, (2,)),), nodes)), {0: PLACEMENT})
    execution = HostExecution(
        HOST, lambda device: jax.devices()[device.index], LocalExchange(), {"call": function}
    )
    execution.functions.add("add sum", add_sum())
    execution.load("list", low)
    sharding = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",)), PartitionSpec("d"))
    execution.buffers.set(10, jax.device_put(VALUES, sharding))
    return execution, execution.begin(Run("list", 1, ((0, 10),), ((1, 11), (2, 12))), lambda doing: None)


def ends(*operands: Any) -> Any:
    sys.exit(3)


def returns_too_little(shards: list[tuple[Any, np.ndarray]]) -> list[list[np.ndarray]]:
    return [[block for _, block in shards[:1]]]


def returns_another_shape(shards: list[tuple[Any, np.ndarray]]) -> list[list[np.ndarray]]:
    return [[block[:1] for _, block in shards]]


def returns_another_kind(shards: list[tuple[Any, np.ndarray]]) -> list[list[np.ndarray]]:
    return [[block.astype(np.complex64) for _, block in shards]]


@pytest.mark.parametrize(
    ("function", "kind", "told"),
    [
        (ends, ComputationFailed, "computation 'call' failed: SystemExit: 3"),
        (returns_too_little, ComputationFailed, "computation 'call' failed: ValueError"),
        (returns_another_shape, InvalidInput, r"float32\(1,\).*the program says that each is float32\(4,\)"),
        (returns_another_kind, InvalidInput, "'call' has returned blocks complex64"),
    ],
)
def test_a_host_function_that_goes_wrong_keeps_no_later_call_from_its_collective(
    function: Callable[..., Any], kind: type[Exception], told: str
) -> None:
    execution, finish = run(function)
    with pytest.raises(kind, match=told):
        finish()
    with pytest.raises(kind, match=told):
        execution.buffers.get(11)
    np.testing.assert_array_equal(execution.buffers.get(12), VALUES + VALUES.sum())


def test_what_a_host_function_returns_is_rounded_to_what_the_program_says() -> None:
    execution, finish = run(lambda shards: [[block.astype(np.float64) / 3 for _, block in shards]])
    finish()
    made = execution.buffers.get(11)
    assert made.dtype == np.float32
    np.testing.assert_array_equal(made, (VALUES.astype(np.float64) / 3).astype(np.float32))


def test_who_waits_for_a_block_hears_that_its_run_was_abandoned() -> None:
    exchange, block = LocalExchange(), jax.device_put(np.ones(2))
    raised: queue.SimpleQueue[WaystationError] = queue.SimpleQueue()

    def receive() -> None:
        try:
            exchange.receive(1, 0)
        except WaystationError as error:
            raised.put(error)

    waiting = threading.Thread(target=receive)
    waiting.start()
    exchange.send(1, 1, HOST, block)  # of the same run, and nobody fetches it
    exchange.send(2, 0, HOST, block)
    exchange.abandon(1, InvalidInput("it has failed elsewhere"), has_ended=False)
    assert raised.get(timeout=60.0).message == "it has failed elsewhere"
    waiting.join()
    exchange.abandon(1, InvalidInput("it has failed elsewhere"), has_ended=True)
    np.testing.assert_array_equal(exchange.receive(2, 0), np.ones(2))
    assert not exchange._blocks
