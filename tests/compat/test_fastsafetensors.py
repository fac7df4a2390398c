"""fastsafetensors' classes in one process: beside the genuine ones where these run without a GPU."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastsafetensors as genuine
import fastsafetensors.st_types
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.compat.comparing import outcome
from tests.compat.group_scenarios import digest
from tests.compat.hostile import DAMAGED

from waystation import errors
from waystation.compat import fastsafetensors as own
from waystation.compat.fastsafetensors import st_types

BOTH = [genuine, own]
STATE = {
    "one.experts.0.w": torch.arange(24.0).reshape(4, 6),
    "one.experts.1.w": torch.arange(24, dtype=torch.int16).reshape(6, 4),
    "two.bias": torch.ones(7, dtype=torch.bfloat16),
    "two.scalar": torch.tensor(3.5),
    "two.none": torch.zeros(0, 2),
    "two.narrow": torch.arange(6.0).to(torch.float8_e4m3fn),
    "two.scale": torch.ones(4).to(torch.float8_e8m0fnu),
    "two.packed": torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(torch.float4_e2m1fn_x2),
}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [str(tmp_path / f"model-{number}.safetensors") for number in range(3)]
    for number, path in enumerate(paths):
        save_file({f"{number}.{name}": tensor for name, tensor in STATE.items()}, path, {"n": str(number)})
    return paths


def loader_of(module: Any, **options: Any) -> Any:
    return module.SafeTensorsFileLoader(module.SingleGroup(), "cpu", nogds=True, framework="pt", **options)


def assert_same(ours: Any, expected: Any) -> None:
    """Equal values; or an error of ours that whoever catches that of the genuine package catches."""
    if isinstance(expected, Exception):
        assert isinstance(ours, type(expected)), ours
        assert isinstance(ours, errors.WaystationError)
    else:
        assert digest(ours) == digest(expected)


# ---- the loader --------------------------------------------------------------------------------


def test_everything_is_loaded(files: list[str]) -> None:
    found = []
    for module in BOTH:
        loader = loader_of(module)
        loader.add_filenames({0: files})
        buffer = loader.copy_files_to_device()
        names = loader.get_keys()
        found.append(
            (
                names,
                buffer.key_to_rank_lidx,
                [buffer.get_tensor(name) for name in names],
                [buffer.get_tensor_wrapped(name) for name in names],
                [buffer.get_shape(name) for name in names] + [loader.get_shape(name) for name in names],
                [buffer.get_filename(name) for name in names],
                list(buffer.iter_local_tensors(names)),
                [buffer.get_sharded(name, 0) for name in names],
                buffer.as_dict(dict.fromkeys(names, -1)),
                buffer.push_tensor(names[0], 0),
                buffer.get_multi_cols(["0.one.experts.0.w", "1.one.experts.0.w"], 0),
                buffer.get_tensor(names[0], dtype=type(buffer.get_tensor_wrapped(names[0]).dtype).F16),
            )
        )
        buffer.close()
        buffer.close()
        loader.close()
        loader.close()
    assert digest(found[1]) == digest(found[0])


def test_tensors_outlive_their_buffer(files: list[str]) -> None:
    with own.fastsafe_open(files, nogds=True) as opened:
        tensor = opened.get_tensor("0.one.experts.0.w")
    gc.collect()
    assert torch.equal(tensor, STATE["one.experts.0.w"])


def test_an_open_file_is_like_theirs(files: list[str]) -> None:
    for given_files in (files[0], files, {0: files[1:]}):
        found = []
        for module in BOTH:
            with module.fastsafe_open(given_files, framework="pytorch", nogds=True) as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                found.append((opened.metadata(), tensors))
        assert digest(found[1]) == digest(found[0])


def test_dtypes_can_be_narrowed(files: list[str], tmp_path: Path) -> None:
    path = str(tmp_path / "wide")
    save_file({"a": torch.arange(6.0), "b": torch.arange(4, dtype=torch.float32).reshape(2, 2)}, path)
    found = []
    for module, types in ((genuine, fastsafetensors.st_types), (own, st_types)):
        loader = loader_of(module)
        loader.add_filenames({0: [path]})
        buffer = loader.copy_files_to_device(dtype=types.DType.BF16)
        found.append([buffer.get_tensor("a"), buffer.get_tensor_wrapped("b")])
        buffer.close()
    assert digest(found[1]) == digest(found[0])
    loader = loader_of(own)
    loader.add_filenames({0: files})
    with pytest.raises(errors.InvalidInput, match="wider"):
        loader.copy_files_to_device(dtype=st_types.DType.F32)


def test_filters_leave_out_what_they_refuse(files: list[str]) -> None:
    found = []
    for module in BOTH:
        loader = loader_of(module)
        loader.set_tensor_filter(module.expert_parallel_filter(2, 2, 1))
        loader.add_filenames({0: files})
        buffer = loader.copy_files_to_device()
        names = loader.get_keys()
        found.append(
            (names, {name: buffer.get_tensor(name) for name in names}, list(buffer.key_to_rank_lidx))
        )
        for call in (buffer.get_tensor, buffer.get_shape, buffer.get_filename, loader.get_shape):
            with pytest.raises(ValueError, match="experts"):
                call("0.one.experts.0.w")
        buffer.close()
    assert digest(found[1]) == digest(found[0])


BAD_CALLS: dict[str, Callable[[Any, list[str]], Any]] = {
    "no file": lambda module, files: loader_of(module).add_filenames({0: [files[0] + ".not"]}),
    "borrowed in a group": lambda module, files: module.ParallelLoader(
        None, files, nogds=True, borrowed_tensors=True
    ),
    "two producers": lambda module, files: module.ParallelLoader(
        None, files, nogds=True, max_concurrent_producers=2
    ),
    "no bound": lambda module, files: module.ParallelLoader(
        None, files, nogds=True, use_chunk_budget_as_allocation_size=True
    ),
    "resident and not": lambda module, files: module.ParallelLoader(
        None, files, nogds=True, accumulate_resident=False, resident_tensor=bool
    ),
    "negative runs": lambda module, files: module.ParallelLoader(
        None, files, nogds=True, broadcast_run_bytes=-1
    ),
    "small parts": lambda module, files: module.ParallelLoader(None, files, nogds=True, max_batch_bytes=10),
    "small budget": lambda module, files: module.ParallelLoader(
        None, files, nogds=True, device_memory_budget=100
    ),
    "no budget": lambda module, files: module.ParallelLoader(None, files, nogds=True, device_memory_budget=0),
    "no process": lambda module, _: module.owned_expert_range(8, 4, 4),
    "no processes": lambda module, _: module.owned_expert_range(8, 0, 0),
    "no device": lambda module, _: module.SafeTensorsFileLoader(None, "meta"),
    "no files": lambda module, _: module.ParallelSaver(num_shards=0),
    "no threads": lambda module, _: module.ParallelSaver(num_threads=0),
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_calls_raise_what_theirs_raise(files: list[str], call: str) -> None:
    expected = outcome(lambda: BAD_CALLS[call](genuine, files))
    assert isinstance(expected, Exception)
    builtin = next(cls for cls in type(expected).__mro__ if cls.__module__ == "builtins")
    ours = outcome(lambda: BAD_CALLS[call](own, files))
    assert isinstance(ours, builtin), ours
    assert isinstance(ours, errors.WaystationError)


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_files_are_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DAMAGED[damage])
    with pytest.raises(errors.Corrupt):
        loader_of(own).add_filenames({0: [str(path)]})


def test_a_tensor_in_two_files_is_refused(files: list[str], tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(Path(files[0]).read_bytes())
    for module in BOTH:
        loader = loader_of(module)
        loader.add_filenames({0: [files[0], str(copy)]})
        with pytest.raises(Exception, match=r"unique|in this file and in"):
            loader.copy_files_to_device()


def test_a_file_that_changes_is_noticed(files: list[str]) -> None:
    loader = loader_of(own)
    loader.add_filenames({0: files})
    Path(files[1]).write_bytes(Path(files[0]).read_bytes())
    with pytest.raises((errors.Conflict, errors.Corrupt)):
        loader.copy_files_to_device()


# ---- iterating ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"queue_size": -1},
        {"queue_size": 3},
        {"max_batch_bytes": 130},
        {"max_batch_bytes": 130, "use_chunk_budget_as_allocation_size": True},
        {"device_memory_budget": 3000},
        {"device_memory_budget": 500, "accumulate_resident": False},
        {"device_memory_budget": 800, "resident_tensor": lambda name: "experts" not in name},
        {"tensor_filter": lambda name: "experts" in name, "all_local": True},
        {"borrowed_tensors": True, "accumulate_resident": False},
    ],
    ids=lambda options: "-".join(options) or "none",
)
def test_iterators_give_the_same(files: list[str], options: dict[str, Any]) -> None:
    found = []
    for module in BOTH:
        loader = module.ParallelLoader(None, files, use_tqdm_on_load=False, nogds=True, **options)
        found.append([(name, digest(tensor)) for name, tensor in loader.iterate_weights()])
        loader.close()
    assert found[1] == found[0]


@given(
    budget=st.integers(1, 2000),
    queue_size=st.integers(-1, 4),
    part=st.none() | st.integers(60, 400),
    accumulates=st.booleans(),
)
def test_budgets_are_as_tight_as_theirs(
    tmp_path_factory: pytest.TempPathFactory,
    budget: int,
    queue_size: int,
    part: int | None,
    accumulates: bool,
) -> None:
    directory = tmp_path_factory.getbasetemp() / "budgets"
    directory.mkdir(exist_ok=True)
    paths = [str(directory / f"{number}.safetensors") for number in range(3)]
    for number, path in enumerate(paths):
        if not Path(path).exists():
            save_file(
                {f"{number}.{size}": torch.zeros(size, dtype=torch.uint8) for size in (7, 60, 31)}, path
            )
    options = {
        "queue_size": queue_size,
        "device_memory_budget": budget,
        "max_batch_bytes": part,
        # Theirs keeps a copy beside what does not stay, so that it needs more then.
        **({} if accumulates else {"accumulate_resident": False, "borrowed_tensors": True}),
    }
    with contextlib.redirect_stdout(None):
        found = [
            outcome(lambda module=module: module.ParallelLoader(None, paths, nogds=True, **options))
            for module in BOTH
        ]
    if isinstance(found[0], Exception):
        assert isinstance(found[1], own.BudgetInfeasibleError)
        return
    assert found[1].queue_size == found[0].queue_size
    batches = [[entry and set(entry[1]) for entry in batch] for batch in found[1].weight_files_batches]
    assert batches == [[entry and entry[1] for entry in batch] for batch in found[0].weight_files_batches]


def test_an_iterator_can_be_left(files: list[str]) -> None:
    loader = own.ParallelLoader(None, files, queue_size=1)
    with contextlib.closing(loader.iterate_weights()) as weights:
        name, tensor = next(weights)
    loader.close()
    assert torch.equal(tensor, STATE[name.partition(".")[2]])


def test_a_server_can_be_given_ours_for_theirs(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM imports and calls it."""
    for module in ("", ".parallel_loader"):
        ours = importlib.import_module(f"waystation.compat.fastsafetensors{module}")
        monkeypatch.setitem(sys.modules, f"fastsafetensors{module}", ours)
    from fastsafetensors import SingleGroup
    from fastsafetensors.parallel_loader import ParallelLoader

    assert ParallelLoader is own.ParallelLoader
    loader = ParallelLoader(
        pg=SingleGroup(),
        hf_weights_files=files,
        queue_size=0,
        use_tqdm_on_load=False,
        device=str(torch.device("cpu")),
        nogds=False,
    )
    found = {name: digest(tensor) for name, tensor in loader.iterate_weights()}
    loader.close()
    assert found == {f"{number}.{name}": digest(STATE[name]) for number in range(3) for name in STATE}


# ---- headers -----------------------------------------------------------------------------------

frames = st.lists(st.integers(0, 5), max_size=3)
indices = st.one_of(
    st.integers(-6, 6), st.slices(6).map(lambda part: slice(part.start, part.stop, part.step or 1))
)


@given(frames, st.lists(indices, max_size=4))
def test_parts_of_headers_are_theirs(shape: list[int], index: list[Any]) -> None:
    count = 1
    for extent in shape:
        count *= extent
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * count]}
    parts = []
    for module in BOTH:
        frame = module.TensorFrame.from_buffer(entry)
        part = outcome(lambda frame=frame: frame[tuple(index)])
        if not isinstance(part, Exception):
            part = (part.dtype.value, part.shape, part.strides, part.offsets, part.data_offsets, part.sliced)
        parts.append(part)
    if isinstance(parts[0], Exception):
        assert isinstance(parts[1], IndexError)
    else:
        assert parts[1] == parts[0]


def test_headers_are_theirs(files: list[str]) -> None:
    from fastsafetensors.frameworks import get_framework_op

    framework = get_framework_op("pt")
    found = []
    for module in BOTH:
        metadata = module.SafeTensorsMetadata.from_file(files[1], framework)
        with open(files[1], "rb") as file:
            again = module.SafeTensorsMetadata.from_fd(file.fileno(), files[1], framework)
        for own_metadata in (metadata, again):
            tensors = [
                (name, frame.dtype.value, frame.shape, frame.data_offsets)
                for name, frame in own_metadata.tensors.items()
            ]
            ranges = own_metadata.select_byte_ranges(lambda name: "two" in name, 2)
            size = own_metadata.header_length, own_metadata.size_bytes, own_metadata.metadata
            found.append((own_metadata.src, tensors, ranges, size))
    assert found[0] == found[1] == found[2] == found[3]


def test_memory_is_counted(files: list[str]) -> None:
    before = own.live_allocation_bytes()
    with own.fastsafe_open(files) as opened:
        tensor = opened.get_tensor("0.one.experts.0.w")
        assert own.live_allocation_bytes() > before
        del tensor
    del opened
    gc.collect()
    assert own.live_allocation_bytes() <= before
    assert own.get_device_numa_node(None) is None
