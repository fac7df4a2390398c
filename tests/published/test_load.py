"""`load`: frameworks, choices, names, casts, mappings, the background, progress, statistics."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.published import models
from tests.support.long import amount

import waystation
import waystation.safetensors
from waystation import errors
from waystation.safetensors import load, load_async, stream


@pytest.fixture(scope="module")
def every_dtype(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dtypes") / "model.safetensors"
    safetensors.torch.save_file(models.every_dtype(), path)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    models.write_set(tmp_path / "model", models.numbers(6), 3)
    return tmp_path / "model"


# ---- against the package -----------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_is_what_the_package_loads(every_dtype: Path, mmap: bool) -> None:
    ours = load(every_dtype, framework="torch", mmap=mmap)
    theirs = safetensors.torch.load_file(every_dtype)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape)
        assert models.bits(ours[name]) == models.bits(tensor)
        assert not ours[name].requires_grad


@pytest.mark.parametrize("mmap", [False, True])
def test_jax_is_what_the_package_loads_and_more(every_dtype: Path, mmap: bool) -> None:
    with jax.enable_x64(True):
        ours = load(every_dtype, framework="jax", mmap=mmap)
    for name, tensor in models.every_dtype().items():
        assert models.bits(ours[name]) == models.bits(tensor), name
    common = [name for name in ours if name not in models.NAMES or name == "BF16"]
    path = every_dtype.with_name("common.safetensors")
    safetensors.torch.save_file({name: models.every_dtype()[name] for name in common}, path)
    with jax.enable_x64(True):
        for name, theirs in safetensors.flax.load_file(path).items():
            assert (ours[name].dtype, ours[name].shape) == (theirs.dtype, theirs.shape)
            assert models.bits(ours[name]) == models.bits(theirs)


def test_what_jax_would_narrow_can_be_had_by_an_argument(every_dtype: Path) -> None:
    with pytest.raises(errors.InvalidInput) as caught:
        load(every_dtype, framework="jax", select=["F64"])
    advice = re.search(r"dtype=(\{.*\})", str(caught.value))
    assert advice is not None
    dtype = ast.literal_eval(advice[1])
    assert load(every_dtype, framework="jax", select=["F64"], dtype=dtype)["F64"].dtype == "float32"


def test_bytes_are_no_path(every_dtype: Path) -> None:
    with pytest.raises(errors.WrongType, match=r"not bytes; use os\.fsdecode"):
        load(os.fsencode(every_dtype), framework="numpy")  # type: ignore[arg-type]


NUMPY_DTYPES = st.sampled_from(models.NUMPY_DTYPES)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
ARRAYS = st.dictionaries(
    TEXTS.filter(lambda name: name != "__metadata__"), st.tuples(NUMPY_DTYPES, SHAPES), max_size=6
)


def array_of(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return (np.arange(np.prod(shape, dtype=int)) % 2).astype(dtype).reshape(shape)


@given(described=ARRAYS, metadata=st.dictionaries(TEXTS, TEXTS, max_size=3), mmap=st.booleans())
def test_what_the_package_writes_is_loaded(
    tmp_path_factory: pytest.TempPathFactory,
    described: dict[str, tuple[str, tuple[int, ...]]],
    metadata: dict[str, str],
    mmap: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "theirs.safetensors"
    path.unlink(missing_ok=True)  # a mapped file may not be written over
    arrays = {name: array_of(*one) for name, one in described.items()}
    safetensors.numpy.save_file(arrays, path, metadata or None)
    loaded = load(path, framework="numpy", mmap=mmap)
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        assert loaded[name].tobytes() == array.tobytes()
    assert waystation.safetensors.open(path).metadata() == metadata


# Few kinds of tensors, so that many are of one: what is decided once for all of a kind.
KINDS = [
    ("float32", (3,)),
    ("float32", (2, 2)),
    ("bfloat16", (3,)),
    ("int32", ()),
    ("uint8", (0, 4)),
    ("bool", (5,)),
]


@settings(max_examples=amount(10))
@given(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=12), data=st.data())
@pytest.mark.parametrize("framework", ["jax", "torch", "numpy"])
def test_many_at_once_are_what_each_is_alone(
    framework: Any,
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[tuple[str, tuple[int, ...]]],
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.getbasetemp() / f"many-{framework}.safetensors"
    written = {
        f"tensor.{number}": models.tensor_of(getattr(torch, dtype), shape, seed=number)
        for number, (dtype, shape) in enumerate(kinds)
    }
    safetensors.torch.save_file(written, path)
    chosen = data.draw(st.none() | st.lists(st.sampled_from(sorted(written)), min_size=1))
    dtype = data.draw(st.sampled_from([None, "float16", {"bfloat16": "float32"}]))
    together = load(path, framework=framework, select=chosen, dtype=dtype)
    assert together.keys() == set(written if chosen is None else chosen)
    for name, array in together.items():
        (alone,) = load(path, framework=framework, select=[name], dtype=dtype).values()
        assert (array.dtype, array.shape) == (alone.dtype, alone.shape)
        assert models.bits(array) == models.bits(alone)
        if dtype is None:
            assert models.bits(array) == models.bits(written[name])


def test_the_order_is_that_of_the_files(model: Path) -> None:
    order = [f"layers.{number}.weight" for number in (0, 3, 1, 4, 2, 5)]
    assert list(load(model, framework="numpy")) == order
    with waystation.safetensors.open(model) as tensors:
        assert list(load(tensors, framework="torch")) == order


# ---- memory ------------------------------------------------------------------------------------


def address(array: Any) -> int:
    if isinstance(array, torch.Tensor):
        return array.data_ptr()
    if isinstance(array, jax.Array):
        return array.unsafe_buffer_pointer()
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_arrays_are_aligned_and_writable_ones_are(every_dtype: Path, framework: Any) -> None:
    with jax.enable_x64(True):
        loaded = load(every_dtype, framework=framework)
    assert all(address(array) % 256 == 0 for array in loaded.values())
    if framework != "jax":
        loaded["I32"][...] = 7
        assert loaded["I32"].tolist() == [[7] * 4] * 3


@pytest.mark.parametrize(("framework", "mapped"), [("numpy", "abc"), ("torch", "abc"), ("jax", "ab")])
def test_what_is_aligned_in_the_file_is_mapped(tmp_path: Path, framework: Any, mapped: str) -> None:
    arrays = {
        "a": np.ones(16, np.float32),
        "b": np.ones(4, np.int8),
        "c": np.ones(5, np.int16),
        "d": np.ones(5, np.int32),
    }
    header = {
        "a": models.entry("F32", [16], 0, 64),
        "b": models.entry("I8", [4], 64, 68),
        "c": models.entry("I16", [5], 68, 78),
        "d": models.entry("I32", [5], 78, 98),
    }
    text = json.dumps(header).ljust(4096 - 8)
    path = tmp_path / "model.safetensors"
    path.write_bytes(models.raw_file(text) + b"".join(array.tobytes() for array in arrays.values()))
    loaded = load(path, framework=framework, mmap=True)
    regions = [
        range(*(int(bound, 16) for bound in line.split()[0].split("-")))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(path))
    ]
    inside = [name for name, array in loaded.items() if any(address(array) in region for region in regions)]
    assert inside == list(mapped)
    for name, array in arrays.items():
        assert models.bits(loaded[name]) == array.tobytes()
    if framework == "numpy":
        loaded["a"][0] = 5
        assert path.read_bytes()[4096:4100] == np.float32(1).tobytes(), "a write stays private"


def sparse_model(path: Path, nbytes: int) -> Path:
    """A model of one tensor of so many bytes, of which none is on the disk."""
    path.write_bytes(models.raw_file(json.dumps({"w": models.entry("U8", [nbytes], 0, nbytes)})))
    os.truncate(path, path.stat().st_size + nbytes)
    return path


@pytest.mark.skipif(
    Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2", reason="the system promises no memory"
)
def test_a_file_larger_than_the_memory_is_mapped(tmp_path: Path) -> None:
    status = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    memory_bytes = 1024 * sum(int(status[name].split()[0]) for name in ("MemTotal", "SwapTotal"))
    path = sparse_model(tmp_path / "model.safetensors", 2 * memory_bytes)
    mapped = load(path, framework="numpy", mmap=True)["w"]
    assert mapped[memory_bytes] == 0
    mapped[memory_bytes] = 1
    assert mapped[memory_bytes] == 1


def test_a_mapping_that_the_process_may_not_have_says_what_to_do(tmp_path: Path) -> None:
    path = sparse_model(tmp_path / "model.safetensors", 1 << 40)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (1 << 39), hard))
    try:
        with pytest.raises(errors.OutOfMemory, match="load without mmap") as caught:
            load(path, framework="numpy", mmap=True)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert caught.value.context["path"] == str(path)


# ---- dtypes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_a_value_that_a_cast_would_lose_names_tensor_and_file(tmp_path: Path, framework: Any) -> None:
    path = models.write_file(tmp_path / "model.safetensors", {"a": np.ones(3), "b": np.array([1e300])})
    calls: list[Callable[[], Any]] = [
        lambda: load(path, framework=framework, dtype="float16"),
        lambda: list(stream(path, framework=framework, dtype="float16")),
    ]
    for call in calls:
        with pytest.raises(errors.LossyCast) as caught:
            call()
        assert (caught.value.context["tensor"], caught.value.context["path"]) == ("b", str(path))


CASTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a name": (
        "bfloat16",
        {"F32": "bfloat16", "F64": "bfloat16", "F16": "bfloat16", "F8_E4M3": None, "I32": None},
    ),
    "of JAX": (jnp.float16, {"F32": "float16", "BF16": "float16", "U8": None}),
    "of torch": (torch.float64, {"F32": "float64", "F8_E5M2": None, "C64": None, "BOOL": None}),
    "of NumPy": (np.dtype(np.uint64), {"I8": "uint64", "I64": "uint64", "F32": None, "BOOL": None}),
    "a mapping": (
        {"float8_e4m3fn": np.float32, torch.int8: "int16"},
        {"F8_E4M3": "float32", "I8": "int16", "U8": None},
    ),
    "a function": (
        lambda name, dtype: torch.float32 if name == "F8_E8M0" and dtype == "float8_e8m0fnu" else None,
        {"F8_E8M0": "float32", "F8_E4M3": None},
    ),
}


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("case", CASTS)
def test_casts(every_dtype: Path, case: str, framework: Any) -> None:
    dtype, expected = CASTS[case]
    with jax.enable_x64(True):
        loaded = load(every_dtype, framework=framework, dtype=dtype)
        plain = load(every_dtype, framework="numpy")
    for name, wanted in expected.items():
        found = str(loaded[name].dtype).removeprefix("torch.")
        assert found == (wanted or plain[name].dtype.name), name
        if wanted is not None:
            by_numpy = plain[name].astype(getattr(ml_dtypes, wanted, wanted))
            assert models.bits(loaded[name]) == by_numpy.tobytes(), name


@pytest.mark.parametrize("dtype", ["float33", object, 3, {"float32": "no"}, lambda name, dtype: "no"])
def test_what_is_no_dtype(every_dtype: Path, dtype: Any) -> None:
    with pytest.raises(errors.InvalidInput):
        load(every_dtype, framework="numpy", dtype=dtype)


def test_impossible_casts_name_the_tensor(every_dtype: Path) -> None:
    with pytest.raises(errors.InvalidInput, match="imaginary") as caught:
        load(every_dtype, framework="numpy", dtype={"complex64": "float32"})
    assert caught.value.context["tensor"] == "C64"


def test_jax_narrows_nothing_in_silence(tmp_path: Path) -> None:
    path = models.write_file(
        tmp_path / "a.safetensors", {"small": np.arange(3), "large": np.array([1 << 40])}
    )
    small = load(path, framework="jax", select=["small"])["small"]
    assert (small.dtype, small.tolist()) == (jnp.int32, [0, 1, 2])
    with pytest.raises(errors.InvalidInput, match="do not fit int32") as caught:
        load(path, framework="jax")
    assert caught.value.context["tensor"] == "large"


# ---- places ------------------------------------------------------------------------------------


def test_devices(model: Path) -> None:
    device = jax.devices()[3]
    assert all(array.devices() == {device} for array in load(model, framework="jax", device=device).values())
    assert all(array.devices() == {jax.devices()[0]} for array in load(model, framework="jax").values())
    for where in ("cpu", torch.device("cpu")):
        assert all(
            array.device.type == "cpu" for array in load(model, framework="torch", device=where).values()
        )


def test_places_that_contradict(model: Path) -> None:
    with pytest.raises(errors.InvalidInput, match="device and sharding both"):
        load(
            model, framework="jax", device="cpu", sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
        )
    with pytest.raises(errors.InvalidInput, match="for JAX arrays"):
        load(model, framework="torch", sharding_fn=lambda name, abstract: None)


# ---- in the background -------------------------------------------------------------------------


def test_what_says_no_place_is_refused(model: Path) -> None:
    with pytest.raises(errors.InvalidInput, match="sharding is for JAX arrays, and torch ones"):
        load(model, framework="torch", sharding=0)
    with pytest.raises(errors.WrongType, match="mmap must be True or False, not 'no'"):
        load(model, framework="torch", mmap="no")  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidInput, match="no place for JAX arrays") as caught:
        load(model, framework="jax", sharding_fn=lambda name, array: 7)
    assert "tensor" in caught.value.context


def test_load_async(model: Path) -> None:
    response = load_async(model, framework="torch")
    loaded = response.result(60)
    assert {name: models.bits(array) for name, array in loaded.items()} == {
        name: array.tobytes() for name, array in models.numbers(6).items()
    }
    assert response.progress() == (6 * 512, 6 * 512)

    async def awaited() -> dict[str, Any]:
        return await load_async(model, framework="jax")

    assert asyncio.run(awaited()).keys() == loaded.keys()
    with pytest.raises(errors.NotFound):
        load_async(model / "absent", framework="torch")


def test_progress_is_told_to_the_end(model: Path) -> None:
    seen: list[tuple[int, int, threading.Thread]] = []
    load(model, framework="numpy", progress=lambda *now: seen.append((*now, threading.current_thread())))
    assert seen[-1] == (6 * 512, 6 * 512, threading.current_thread())


def test_what_progress_raises_ends_the_load(model: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(model, framework="numpy", progress=fail)


def test_what_a_signal_handler_raises_ends_a_load_with_progress(model: Path) -> None:
    """Also where it raises what a wait for the load would raise."""
    is_handled = threading.Event()

    def handle(*_: object) -> None:
        is_handled.set()
        raise TimeoutError("of the program")

    def interrupt(_: object) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert is_handled.wait(60)

    context = waystation.Context()
    context.array.loading.on_statistics = interrupt  # called in the background, while the load is waited for
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with context, pytest.raises(TimeoutError, match="of the program"):
            load(model, framework="numpy", progress=lambda *_: None)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_twenty_thousand_small_tensors_are_not_made_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of calls of JAX and of engine jobs does not grow with that of tensors."""
    from waystation.frameworks.jax_arrays import JaxCodec
    from waystation.safetensors.open_files import OpenFiles

    calls: list[str] = []

    def counting(cls: type, name: str) -> None:
        original: Callable[..., Any] = getattr(cls, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            calls.append(name)
            return original(*arguments, **keywords)

        monkeypatch.setattr(cls, name, counted)

    arrays = {f"t{number}": np.full((3,), number, np.float32) for number in range(20_000)}
    path = models.write_file(tmp_path / "model.safetensors", arrays)
    counting(JaxCodec, "assemble")
    counting(JaxCodec, "placed")
    counting(OpenFiles, "_start")
    loaded = load(path, framework="jax")
    assert sorted(calls) == ["_start", "assemble", "placed"]
    assert all(loaded[f"t{number}"][0] == number for number in range(0, 20_000, 997))


def test_an_integer_that_does_not_fit_names_the_tensor(tmp_path: Path) -> None:
    """Also where another tensor is one that nobody can load."""
    header = {"w": models.entry("I64", [1], 0, 8), "six": models.entry("F6_E2M3", [4], 8, 11)}
    path = tmp_path / "model.safetensors"
    path.write_bytes(models.raw_file(json.dumps(header)) + (1 << 40).to_bytes(8, "little") + bytes(3))
    arguments: dict[str, Any] = {"framework": "torch", "dtype": "int8", "select": ["w"]}
    for read in (lambda: load(path, **arguments), lambda: dict(stream(path, **arguments))):
        with pytest.raises(errors.InvalidInput, match="int8 holds -128 to 127") as caught:
            read()
        assert caught.value.context == {"tensor": "w", "path": str(path)}


@pytest.mark.parametrize("limit", [0, -1, "1", 1.5, True])
def test_a_memory_limit_that_is_none(tmp_path: Path, limit: Any) -> None:
    waystation.safetensors.save({"w": np.ones(3)}, tmp_path / "model")
    with pytest.raises(errors.InvalidInput, match="memory_limit must be a positive integer or None, in b"):
        load(tmp_path / "model", framework="numpy", memory_limit=limit)
