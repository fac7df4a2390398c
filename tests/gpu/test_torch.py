"""torch tensors in GPU memory: saved, loaded, and changed right after an asynchronous save has returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import waystation

BIG = 6 << 20


def plain(tensor: Any) -> bytes:
    """The bytes of a tensor, in C order."""
    torch = pytest.importorskip("torch")
    data = tensor.detach().cpu().resolve_conj().contiguous().reshape(-1)
    return bytes(data.view(torch.uint8).numpy().tobytes())


def dtypes_of(torch: Any) -> list[Any]:
    names = (
        "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 "
        "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    )
    return [getattr(torch, name) for name in names.split() if hasattr(torch, name)]


def state_of(torch: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    state: dict[str, Any] = {}
    for dtype in dtypes_of(torch):
        raw = torch.randint(0, 256, (3, 5, 16), generator=generator, dtype=torch.uint8)
        data = raw % 2 if dtype is torch.bool else raw
        state[str(dtype)] = data.to(dtype) if dtype is torch.bool else data.view(dtype).clone()
        state[str(dtype)] = state[str(dtype)].to("cuda")
    grid = torch.arange(BIG, dtype=torch.float32, device="cuda").reshape(2048, -1)
    state |= {"scalar": torch.tensor(2.5, device="cuda"), "empty": torch.empty(0, 4, device="cuda")}
    state |= {
        "transposed": grid.T,
        "slice": grid[::3, 5:77:2],
        "row": grid[7],
        "expanded": grid[:, :1].expand(-1, 9),
    }
    state |= {"conjugate": torch.randn(64, 3, dtype=torch.complex64, device="cuda").conj(), "grid": grid}
    state |= {"host": torch.arange(77.0), "parameter": torch.nn.Parameter(grid.clone())}
    return state


def same(torch: Any, loaded: dict[str, Any], state: dict[str, Any]) -> None:
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        found = loaded[name]
        assert (found.shape, found.dtype, found.device) == (tensor.shape, tensor.dtype, tensor.device), name
        assert plain(found) == plain(tensor), name
        assert found.requires_grad == tensor.requires_grad


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_dtype_and_stride_round_trips(cuda: Any, tmp_path: Path, asynchronous: bool) -> None:
    state = state_of(cuda)
    if asynchronous:
        waystation.save_async(tmp_path / "checkpoint", state).result()
    else:
        waystation.save(tmp_path / "checkpoint", state)
    same(cuda, waystation.load(tmp_path / "checkpoint"), state)
    same(cuda, waystation.load(tmp_path / "checkpoint", state), state)


@pytest.mark.parametrize("snapshot_bytes", [None, 0, 30 << 20], ids=["all copied", "drained", "some of each"])
def test_tensors_may_be_overwritten_at_once(cuda: Any, tmp_path: Path, snapshot_bytes: int | None) -> None:
    state = {f"t{i}": cuda.full((BIG,), float(i), device="cuda") for i in range(6)}
    state["transposed"] = cuda.arange(BIG, device="cuda", dtype=cuda.float32).reshape(2048, -1).T
    expected = {name: plain(tensor) for name, tensor in state.items()}
    context = waystation.Context()
    context.memory.snapshot_bytes = snapshot_bytes
    for attempt in range(2):  # the second finds pinned memory
        for number, name in enumerate(state):
            if name != "transposed":
                state[name].fill_(number)
        path = tmp_path / f"checkpoint-{attempt}"
        with context:
            response = waystation.save_async(path, state)
        for name, tensor in state.items():
            if name != "transposed":
                tensor.fill_(-1)
        response.result()
        loaded = waystation.load(path)
        assert {name: plain(tensor) for name, tensor in loaded.items()} == expected


def test_kernels_under_way_are_awaited(cuda: Any, tmp_path: Path) -> None:
    matrix = cuda.randn(4096, 4096, device="cuda")
    expected = plain(matrix * 2.0**20)
    with cuda.cuda.stream(cuda.cuda.Stream()):
        matrix = matrix.clone()
        for _ in range(20):
            matrix.mul_(2.0)
        waystation.save_async(tmp_path / "checkpoint", [matrix]).result()
    assert plain(waystation.load(tmp_path / "checkpoint")[0]) == expected


def test_what_a_gpu_saved_loads_elsewhere(cuda: Any, tmp_path: Path) -> None:
    tensor = cuda.randn(513, 77, device="cuda")
    waystation.save(tmp_path / "checkpoint", {"x": tensor})
    on_host = waystation.load(tmp_path / "checkpoint", {"x": cuda.empty(513, 77, device="meta")})["x"]
    assert on_host.device.type == "cpu"
    assert plain(on_host) == plain(tensor)
    waystation.save(tmp_path / "from-host", {"x": on_host})
    assert plain(waystation.load(tmp_path / "from-host", {"x": tensor})["x"]) == plain(tensor)


def test_an_optimizer_resumes(cuda: Any, tmp_path: Path) -> None:
    model = cuda.nn.Sequential(cuda.nn.Linear(300, 100), cuda.nn.Linear(100, 7)).to("cuda")
    optimizer = cuda.optim.AdamW(model.parameters())

    def step() -> Any:
        optimizer.zero_grad()
        loss = model(cuda.ones(4, 300, device="cuda")).square().sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    response = waystation.save_async(tmp_path / "checkpoint", state)
    wanted = [step() for _ in range(3)]
    response.result()
    loaded = waystation.load(tmp_path / "checkpoint")
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    assert [step() for _ in range(3)] == wanted
