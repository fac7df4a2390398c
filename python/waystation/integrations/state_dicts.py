"""What programs of torch pass around, as states: `state_dict()`s, generators of random numbers, who takes
part.

A state dict drives a load: tensors are filled where they are, and other values are replaced by what is
stored, as `torch.distributed.checkpoint` does it. Invariants: nothing that was given is replaced where it can
be filled; a value that the checkpoint lacks is asked for as it is, so that the load says what is missing.
"""

from __future__ import annotations

import contextlib
import random
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

from waystation._options import in_effect
from waystation.tree import flatten, is_registered, unflatten

# ---- saving ------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A value with plain dicts and tuples for subclasses of these that no program can have registered.

    The milestones of a `MultiStepLR` are a `Counter`. A load puts the entries into what it is given.
    """
    kind = type(value)
    if kind in (dict, OrderedDict, defaultdict) or (isinstance(value, dict) and not is_registered(kind)):
        pairs = [(key, plain(child)) for key, child in value.items()]
        if kind is defaultdict:
            return defaultdict(value.default_factory, pairs)
        return OrderedDict(pairs) if kind is OrderedDict else dict(pairs)
    if kind is list or kind is tuple or kind is torch.Size:
        children = [plain(child) for child in value]
        return children if kind is list else tuple(children)
    return value


# ---- loading -----------------------------------------------------------------------------------


def is_of_tensors(value: Any) -> bool:
    """Whether there is nothing but tensors in dicts."""
    if isinstance(value, dict):
        return all(map(is_of_tensors, value.values()))
    return isinstance(value, Tensor)


def asked(given: Any, stored: Any) -> Any:
    """What to ask for in the place of a value, where `stored` describes what the checkpoint has there."""
    if isinstance(given, dict):
        known = stored if isinstance(stored, dict) else {}
        return {key: asked(child, known[key]) if key in known else child for key, child in given.items()}
    if _is_open(given):
        kept = list(stored) if isinstance(stored, list | tuple) else []
        return _like(
            given, [asked(*both) for both in zip(given, kept, strict=False)] + list(given[len(kept) :])
        )
    if isinstance(given, Tensor):
        return None if stored is None else given
    leaves, structure = flatten(given)
    if given is None or isinstance(given, list | tuple) or (len(leaves) == 1 and leaves[0] is given):
        return stored  # a single value, and of any kind
    stored_leaves, stored_structure = flatten(stored)
    by_path = dict(zip(stored_structure.key_paths(), stored_leaves, strict=True))
    paths = structure.key_paths()
    return unflatten(
        structure,
        [
            leaf if isinstance(leaf, Tensor) else by_path.get(path, leaf)
            for leaf, path in zip(leaves, paths, strict=True)
        ],
    )


def put(given: Any, loaded: Any) -> Any:
    """The loaded value, in the dicts and lists that were given."""
    if isinstance(given, dict) and isinstance(loaded, dict):
        for key, value in loaded.items():
            given[key] = put(given[key], value)
        return given
    if _is_open(given) and isinstance(loaded, list | tuple):
        children = [put(own, value) for own, value in zip(given, loaded, strict=True)]
        if not isinstance(given, list):
            return _like(given, children)
        given[:] = children
        return given
    return loaded


def _is_open(value: Any) -> bool:
    """Whether a list or tuple is loaded element by element, as torch does: another one is a single value."""
    return isinstance(value, list | tuple) and any(
        isinstance(child, Tensor) or _is_open(child) or (isinstance(value, list) and isinstance(child, dict))
        for child in value
    )


def _like(given: Any, children: list[Any]) -> Any:
    """A list, tuple or named tuple of the class of another one."""
    if isinstance(given, list):
        return children
    make = getattr(type(given), "_make", tuple)
    return make(children)


# ---- optimizers --------------------------------------------------------------------------------


def moments_in(moments: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """The moments for which a checkpoint has some, by parameter.

    A parameter that never had a gradient has none when it is saved. torch makes them before a load.
    """
    return {name: value for name, value in moments.items() if name in stored}


def set_moments(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Gives an optimizer its state, which may lack moments, and have those of others."""
    names = {name for group in state["param_groups"] for name in group["params"]}
    own = {**state, "state": {name: value for name, value in state["state"].items() if name in names}}
    set_optimizer_state_dict(model, optimizer, optim_state_dict=own, options=StateDictOptions(strict=False))


# ---- options -----------------------------------------------------------------------------------


@contextlib.contextmanager
def taking_part(group: dist.ProcessGroup | None = None, *, no_dist: bool = False) -> Iterator[Any]:
    """Has the processes of a group take part, or this one alone; gives the options, for more of them.

    What several processes have is written whole by one of them, not a slice by each, unless the caller's
    options say so. Programs of torch have tensors that differ from process to process at one key, such as the
    statistics of a BatchNorm: slices would be put together to a tensor that no process ever had.
    """
    options = in_effect.current_options().thawed()
    if options.array.saving.use_replica_parallel is None:
        options.array.saving.use_replica_parallel = False
    if dist.is_available() and dist.is_initialized():
        ranks: Collection[int] | None = None
        if no_dist:
            ranks = {dist.get_rank()}
        elif group is not None:
            ranks = dist.get_process_group_ranks(group)
        if ranks is not None and len(ranks) < dist.get_world_size():
            options.multiprocessing.active_processes = set(ranks)
            options.multiprocessing.primary_host = min(ranks)
    with having(options):
        yield options


@contextlib.contextmanager
def having(options: Any) -> Iterator[None]:
    """Has options in effect."""
    in_effect.enter(options.frozen())
    try:
        yield
    finally:
        in_effect.leave()


@contextlib.contextmanager
def filling(options: Any, *, keep_missing: bool = False) -> Iterator[None]:
    """Has loads fill what they are given, and leave what else a checkpoint has."""
    options.pytree.loading.partial_load = True
    options.pytree.loading.keep_missing = keep_missing
    options.array.loading.in_place = True
    with having(options):
        yield


# ---- generators of random numbers --------------------------------------------------------------


def generators() -> dict[str, Any]:
    """The states of the generators of this process: Python's, NumPy's, torch's and those of its GPUs."""
    version, words, gauss = random.getstate()
    found = {
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_used:
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def set_generators(states: dict[str, Any]) -> None:
    """Sets the generators of this process, those of as many GPUs as there are."""
    python = states["python"]
    random.setstate((python["version"], tuple(map(int, python["words"])), python["gauss"]))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"].cpu())
    if torch.cuda.is_available():
        for ordinal, state in enumerate(states.get("cuda", [])[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state.cpu(), ordinal)


def this_process() -> str:
    """The key of what each process has of its own."""
    return str(dist.get_rank() if dist.is_available() and dist.is_initialized() else 0)
