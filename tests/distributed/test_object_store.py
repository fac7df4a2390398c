"""Several processes save to one object store, and load from it."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.object_store_scenarios import save_and_load
from tests.support.programs import running
from tests.support.s3 import bucket


def test_processes_save_together_and_load_with_another_sharding(tmp_path: Path) -> None:
    place = bucket()
    path = f"{place.location}/ckpt"
    with running(
        save_and_load, place.endpoint, path, count=2, framework="jax", directory=tmp_path
    ) as programs:
        assert programs.values() == [True, True]
    assert not any(name.endswith(".part") for name in place.names())
    assert len({name.split("/")[1] for name in place.names()}) == 2
