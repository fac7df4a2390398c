"""Random programs over the two islands of a cluster, compared with NumPy, as a process of its own.

    python -m tests.runtime.client.random_programs ADDRESS COUNT SEED

Calls go from island to island and back, over all devices of one and over the devices of one host of it, with
collectives and without, and take what any earlier call has made. Runs of a program overlap.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

import waystation.runtime as pw

Key = tuple[str, str, bool]  # slice, function, whether its arrays are divided
Plan = list[tuple[Key, list[int]]]

DEVICES = {"lower": 4, "half of lower": 2, "upper": 2}
OF_NUMPY: dict[str, Callable[..., Any]] = {
    "mix": lambda x, y: x * np.int32(3) + y[::-1] + y.sum(dtype=np.int32),
    "one": lambda x: x * np.int32(5) - x.max(),
    "two": lambda x: (x + np.int32(1), x * np.int32(7)),
}


def functions(client: pw.Client) -> dict[Key, Any]:
    """The functions that programs call."""
    found: dict[Key, Any] = {}
    for where, count in DEVICES.items():
        island = where.rpartition(" ")[2]
        own = client.make_virtual_device_set().add_slice(devices=count, island=island, shared=True)
        for is_divided in (True, False):
            lying, call = P("x") if is_divided else P(), {}
            call["mix"] = lambda x, y: x * 3 + y[::-1] + y.sum(dtype=x.dtype)
            call["one"] = lambda x: x * 5 - x.max()
            call["two"] = lambda x: (x + 1, x * 7)
            arguments = {"mix": (lying, lying), "one": lying, "two": lying}
            results = {"mix": lying, "one": lying, "two": (lying, lying)}
            for name, function in call.items():
                found[where, name, is_divided] = client.jit(
                    function, own, in_shardings=arguments[name], out_shardings=results[name], name=name
                )
    return found


def drawn(draw: random.Random, keys: list[Key]) -> tuple[Plan, list[int]]:
    """Calls, with the numbers of their arguments, and the numbers of the results."""
    plan: Plan = []
    count = 2
    for _ in range(draw.randrange(2, 12)):
        key = draw.choice(keys)
        plan.append((key, [draw.randrange(max(0, count - 4), count) for _ in range(1 + (key[1] == "mix"))]))
        count += 1 + (key[1] == "two")
    return plan, sorted({count - 1, draw.randrange(2, count)})


def followed(plan: Plan, results: list[int], call: Callable[[Key], Any], *arguments: Any) -> tuple[Any, ...]:
    """What a plan makes of two arguments."""
    values = list(arguments)
    for key, numbers in plan:
        made = call(key)(*(values[number] for number in numbers))
        values += made if key[1] == "two" else [made]
    return tuple(values[number] for number in results)


def main() -> None:
    """Runs the programs, each twice."""
    address, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with pw.connect(address) as cluster, cluster.start_client() as client:
        known = functions(client)
        for number in range(seed, seed + count):
            plan, results = drawn(random.Random(number), list(known))
            arguments = np.random.default_rng(number).integers(-50, 50, (2, 8)).astype(np.int32)

            @pw.program
            def program(x: Any, y: Any, plan: Plan = plan, results: list[int] = results) -> Any:
                return followed(plan, results, known.__getitem__, x, y)

            with np.errstate(over="ignore"):
                expected = followed(plan, results, lambda key: OF_NUMPY[key[1]], *arguments)
            runs = [program(*arguments) for _ in range(2)]
            for made in runs:
                for array, wanted in zip(made, expected, strict=True):
                    assert np.array_equal(np.asarray(array), wanted), (number, plan, results)


if __name__ == "__main__":
    main()
