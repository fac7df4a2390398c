"""DTensors in real processes over gloo; `torch_program` is what they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch is built without torch.distributed", allow_module_level=True)

from tests.frameworks import torch_program  # noqa: E402  (it needs the distributed part)
from tests.support.programs import running  # noqa: E402


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """How the cases of a program of so many processes ended, in each; every program is run once."""
    known: dict[int, list[dict[str, str | None]]] = {}

    def run(count: int) -> list[dict[str, str | None]]:
        if count not in known:
            known[count] = _run(count, tmp_path_factory.mktemp("processes"))
        return known[count]

    return run


def _run(count: int, directory: Path) -> list[dict[str, str | None]]:
    with running(torch_program.run, count=count, framework="torch", directory=directory) as programs:
        ended = programs.end()
    return [
        process.value if isinstance(process.value, dict) else {"start": process.output} for process in ended
    ]


@pytest.mark.parametrize(
    ("count", "name"),
    [(count, name) for count, cases in torch_program.CASES.items() for name in cases],
)
@pytest.mark.share(2)
def test_in_processes(ended: Any, count: int, name: str) -> None:
    for rank, report in enumerate(ended(count)):
        failures = [text for text in report.values() if text]
        assert report.get(name, "not run") is None, f"process {rank}: {failures or 'it was stopped'}"


def test_one_process_saves_a_mesh_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.frameworks.store import load, save

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        tensor = torch.distributed.tensor.distribute_tensor(torch.arange(4.0), mesh)
        saved = save(tensor)
        assert save(torch.arange(3)).stored.sharding is None
        loaded = load(saved)
        assert loaded.device_mesh is mesh
    finally:
        torch.distributed.destroy_process_group()
    # Without torch.distributed it is a plain tensor, and so is what stands for it.
    for plain in (load(saved), load(saved, torch_program.codec().abstract(saved.stored))):
        assert type(plain) is torch.Tensor
        assert plain.tolist() == [0, 1, 2, 3]
    assert saved.stored.sharding is not None
    saved.stored.sharding["mesh"] |= {"ranks": [0, 1], "shape": [2], "process_count": 2}
    with pytest.raises(ValueError, match=r"no torch\.distributed; load with an abstract state"):
        load(saved)


def test_torch_without_its_distributed_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.frameworks.store import load, save

    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "is_initialized")
    assert load(save(torch.arange(3))).tolist() == [0, 1, 2]
