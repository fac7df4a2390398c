"""Several processes save to one object store, and load from it."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.object_store_scenarios import save_and_load, save_beside
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


def test_each_process_shares_its_files_with_an_earlier_step(tmp_path: Path) -> None:
    place = bucket()
    run = f"{place.location}/run"
    with running(save_beside, place.endpoint, run, count=2, framework="jax", directory=tmp_path) as programs:
        # Half of the first files and their headers is not half of them, so those are written apart once.
        assert programs.values() == [[0, 0, (1 << 18) // 2]] * 2
    data = [name.split("/")[1] for name in place.names() if name.endswith(".safetensors")]
    assert sorted(set(data)) == ["2", "3"], "the frozen array is where step 2 has written it"
    references = [name for name in place.names() if "reference" in name]
    assert len(references) == 2, "one of each process"
