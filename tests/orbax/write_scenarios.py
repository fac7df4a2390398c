"""What processes that write Orbax's layouts do in the tests. Each function runs in every process."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tests.distributed.cases import KEY, Case, State
from tests.distributed.jax_scenarios import check, join, make, sharding_of
from tests.support.programs import Place

import waystation


def abstract_of(case: Case, *, as_saved: bool = False) -> jax.ShapeDtypeStruct:
    """What to ask for in order to get an array as it was saved, or as it is to be loaded."""
    dtype = jax.random.key(0).dtype if case.dtype == KEY else case.dtype
    placed = case.saved if as_saved else case.loaded
    return jax.ShapeDtypeStruct(case.shape, dtype, sharding=sharding_of(placed))


def save(place: Place, path: Path, state: State, layout: dict[str, Any]) -> None:
    """Saves arrays, and leaves of which only the primary's are kept."""
    from tests.orbax import writing

    context = writing.layout_of(layout, state.options.chunk_bytes)
    saving = context.array.saving
    saving.min_slice_bytes_for_replica_parallel = state.options.min_slice_bytes
    saving.use_replica_parallel = state.options.use_replica_parallel
    saving.ocdbt_target_data_file_size = state.options.file_bytes_target
    tree: dict[str, Any] = {str(number): make(case) for number, case in enumerate(state.cases)}
    tree |= {"step": state.step + place.index, "host": np.arange(10) + place.index, "name": f"p{place.index}"}
    with context:
        if state.options.asynchronous:
            waystation.save_async(path, tree).result()
        else:
            waystation.save(path, tree)


def load(place: Place, path: Path, state: State, layout: dict[str, Any]) -> None:
    """Loads with genuine Orbax, and by us with checksums, in all processes of the program that has saved."""
    from tests.orbax import oracle

    abstract: dict[str, Any] = {
        str(number): abstract_of(case, as_saved=True) for number, case in enumerate(state.cases)
    }
    abstract |= {"step": 0, "host": np.zeros(10, int), "name": ""}
    context = waystation.Context()
    context.array.loading.verify = True
    with context:
        ours = waystation.load(path, abstract)
    for loaded in (oracle.load(path, abstract), ours):
        for number, case in enumerate(state.cases):
            check(case, loaded[str(number)], case.saved)


ACTIONS = {"save": save, "load": load}


def serve(place: Place, devices: int) -> None:
    """Does what the test asks for, one thing after another, and reports how each ended: None is well."""
    join(place, devices)
    while (asked := place.receive()) is not None:
        action, *arguments = asked
        try:
            ACTIONS[action](place, *arguments)
        except BaseException:
            place.report(traceback.format_exc())
        else:
            place.report(None)


def save_with_torch(place: Place, path: Path, layout: dict[str, Any]) -> None:
    """Saves tensors over two processes, some of them in parts of uneven sizes."""
    from tests.distributed import torch_scenarios

    torch_scenarios.connect(place)
    with torch_scenarios.options(**layout):
        waystation.save(path, torch_scenarios.make_state(place))


def check_tensors(loaded: Any) -> None:
    """Checks what two processes of torch have saved."""
    table = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
    assert np.array_equal(loaded["rows"], table)
    assert np.array_equal(loaded["uneven"], table[:37, :5])
    assert np.array_equal(loaded["columns"].astype(np.float32), table.astype(loaded["columns"].dtype))
    assert np.array_equal(loaded["large"], np.arange(1 << 20, dtype=np.float32))
    assert loaded["empty"].shape == (0, 3)
    assert (loaded["step"], loaded["text"]) == (7, "words")
