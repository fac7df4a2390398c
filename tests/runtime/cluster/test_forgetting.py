"""A program that goes on for long and calls what it never calls again: manager and hosts stay as they are.

`make test` keeps fewer programs than clients do and calls 200 more, `make test-long` 1,500.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.cluster.driving import manager_of, visiting, wait_until
from tests.support.long import amount, only_long

from waystation.errors import NotFound
from waystation.runtime.client import client as client_module
from waystation.runtime.client.client import Client

CALLS = 20
# What a program that is kept costs is three times that, in the manager and in each host.
LEAST_BYTES = 10_000
# By which a process may grow once, whatever it runs.
ALLOCATORS_BYTES = 2 << 20
SLACK = 8  # programs that are on their way out


def resident_bytes(process_id: int) -> int:
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


def different_programs(client: Client, functions: list[Any], start: int, count: int, x: Any) -> None:
    """Runs programs that differ in which of two functions each of their calls is of."""
    for number in range(start, start + count):
        made = x
        for bit in range(CALLS):
            made = functions[number >> bit & 1](made)
        made.block_until_ready()


@pytest.mark.long
@pytest.mark.timeout(900)
@only_long
def test_thousands_of_programs_take_no_more_than_the_last_ones(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = amount(16, client_module.KEPT_PROGRAMS)
    monkeypatch.setattr(client_module, "KEPT_PROGRAMS", kept)
    with visiting(address) as cluster:
        cluster.add_island("forgetting", hosts=2)
        with cluster.start_client() as client:
            on = client.make_virtual_device_set().add_slice(devices=2, island="forgetting")
            functions = [client.jit(lambda x: x + 1, on), client.jit(lambda x: x - 1, on)]
            x = client.put(np.zeros(4, np.float32), on)
            processes = [manager_of(cluster)]
            processes += [host.process_id for host in cluster.island("forgetting").status().hosts]
            first, more = 2 * kept, amount(200, 1500)
            different_programs(client, functions, 0, first, x)
            before = list(map(resident_bytes, processes))
            different_programs(client, functions, first, more, x)
            grown = [after - then for after, then in zip(map(resident_bytes, processes), before, strict=True)]
            assert all(each < ALLOCATORS_BYTES + more * LEAST_BYTES for each in grown), grown

            def sizes() -> list[int]:
                status = cluster.status()
                hosts = cluster.island("forgetting").status().hosts
                return [status.programs, *(host.programs for host in hosts)]

            wait_until(lambda: max(sizes()) <= kept + SLACK)
            # Programs that were forgotten long ago are known again, and do what they did.
            different_programs(client, functions, 0, 3, x)
            assert functions[0](functions[1](x)).numpy().tolist() == [0] * 4
        wait_until(lambda: cluster.status().programs == cluster.status().functions == 0)
        wait_until(lambda: not any(host.programs for host in cluster.island("forgetting").status().hosts))


@pytest.mark.long
@only_long
def test_functions_are_forgotten_when_the_program_drops_them(address: str) -> None:
    with visiting(address) as cluster:
        cluster.add_island("dropping")
        with cluster.start_client() as client:
            on = client.make_virtual_device_set().add_slice(devices=1, island="dropping")
            x = client.put(np.arange(4, dtype=np.float32), on)

            def hosts_functions() -> int:
                return cluster.island("dropping").status().hosts[0].functions

            for number in range(100):
                made = client.jit(lambda x, number=number: x * number, on)(x).numpy()
                np.testing.assert_array_equal(made, np.arange(4) * number)
            # Some are still here, for garbage is collected when Python likes to.
            wait_until(lambda: cluster.status().functions <= 10, cluster.status())
            wait_until(lambda: hosts_functions() <= 10)


def test_what_one_client_forgets_another_goes_on_with(address: str) -> None:
    with visiting(address, "first") as cluster, visiting(address, "second") as other:
        cluster.add_island("shared")
        with other.start_client() as client:
            on = client.make_virtual_device_set().add_slice(devices=1, island="shared", shared=True)
            double = client.jit(lambda x: x * 2, on)
            x = client.put(np.ones(2, np.float32), on)
            assert double(x).numpy().tolist() == [2, 2]
            with cluster.start_client() as leaving:
                same = leaving.make_virtual_device_set().add_slice(devices=1, island="shared", shared=True)
                again = leaving.jit(lambda x: x * 2, same)
                assert again(leaving.put(np.ones(2, np.float32), same)).numpy().tolist() == [2, 2]
            for _ in range(3):
                assert double(x).numpy().tolist() == [2, 2]


def test_a_program_that_was_given_up_is_unknown(address: str) -> None:
    with visiting(address) as cluster:
        backend = cluster.backend()
        backend.forget_programs(["nothing"])
        backend.forget_functions(["nothing"])
        with pytest.raises(NotFound, match="install it"):
            backend.prepare("nothing", [])
