"""What an `Accelerator` has prepared, saved and loaded: `save_state(accelerator, path)`,
`load_state(accelerator, path)`.

They stand in the place of `accelerator.save_state(path)` and `accelerator.load_state(path)`, and save the
same: models, optimizers, schedulers, the loss scale, what `register_for_checkpointing` was given, and of each
process the generators of random numbers and stateful data loaders. Models and moments are saved as they are
sharded, by FSDP2 too, and load in any number of processes.

Failure sequence of a load: what an `Accelerator` has prepared is compared with the checkpoint; tensors are
filled; optimizers, schedulers and registered objects are given their parts. Only damage, and objects that
refuse their part, end a load after the first of these. Invariants: everything of a checkpoint is committed in
one act; what Accelerate does not keep where this module looks for it is an error, and nothing is left out of
a checkpoint.
"""

from __future__ import annotations

import importlib.metadata
import os
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict

from waystation._errors import StructureMismatch, Unsupported
from waystation.checkpoint import metadata
from waystation.integrations import dcp, state_dicts

__all__ = ["load_state", "save_state", "save_state_async"]


def save_state(accelerator: Any, path: str | os.PathLike[str]) -> None:
    """Saves what an `Accelerator` has prepared; all processes call it.

    Hooks of `register_save_state_pre_hook` are not called.

    Args:
        accelerator: The `accelerate.Accelerator`.
        path: The directory or location of the checkpoint; one of Waystation that is there is replaced.

    Raises:
        Unsupported: DeepSpeed or Megatron-LM keep the models, or this release of Accelerate keeps what it
            has prepared elsewhere than the known ones.
        WaystationError: As `waystation.save` raises it.
    """
    dcp.save(_saved(accelerator), checkpoint_id=path)


def save_state_async(accelerator: Any, path: str | os.PathLike[str]) -> Future[None]:
    """Saves what an `Accelerator` has prepared, in the background; takes what `save_state` takes.

    Returns:
        A future, whose result is None once the checkpoint is committed. Training goes on at once. A failure
        that nobody asks it for is logged at the end of the program, which ends with status 1 then.
    """
    future: Any = dcp.async_save(_saved(accelerator), checkpoint_id=path)
    given: Future[None] = future
    return given


def load_state(accelerator: Any, path: str | os.PathLike[str]) -> None:
    """Loads into what an `Accelerator` has prepared; all processes call it, after `prepare`.

    In another number of processes than saved it, the processes that are new begin with their own generators
    and at the start of their stateful data loaders.

    Args:
        accelerator: The `accelerate.Accelerator`.
        path: The checkpoint, which `save_state` has saved.

    Raises:
        CheckpointNotFound: There is none.
        StructureMismatch: It has other numbers of models, schedulers, registered objects or stateful data
            loaders, other parameters in the groups of the optimizers, or other keys. Nothing is changed then.
        WaystationError: As `waystation.load` raises it.
    """
    with state_dicts.taking_part():
        found = metadata(path).metadata
    state = _state(accelerator)
    order = _order_of_groups(state, found, len(_stateful_loaders(accelerator)), path)
    groups = state["optimizers"].get("param_groups", [])
    if groups:
        state["optimizers"] = {
            "state": state_dicts.moments_in(state["optimizers"]["state"], found["optimizers"]["state"]),
            "param_groups": [groups[order.index(place)] for place in range(len(groups))],
        }
    state["processes"] = None
    dcp.load(state, checkpoint_id=path)
    _put(accelerator, state, order)


def _put(accelerator: Any, state: dict[str, Any], order: list[int]) -> None:
    """Gives what an `Accelerator` has prepared what was loaded; `order` says where each group of parameters
    is."""
    models, optimizers = _modules(accelerator)
    set_model_state_dict(models, model_state_dict=state["models"])
    places = iter(order)
    for optimizer in optimizers:
        groups = [state["optimizers"]["param_groups"][next(places)] for _ in optimizer.param_groups]
        # One by one: torch gives each of several optimizers the groups of all where none has a state.
        state_dicts.set_moments(models, optimizer, {**state["optimizers"], "param_groups": groups})
    for name, objects in _others(accelerator).items():
        for each, loaded in zip(objects, state[name], strict=True):
            each.load_state_dict(loaded)
    accelerator.step = state["step"]
    own = state["processes"].get(state_dicts.this_process())
    if own is not None:
        for loader, loaded in zip(_stateful_loaders(accelerator), own["loaders"], strict=True):
            loader.load_state_dict(loaded)
        state_dicts.set_generators(own["generators"])


# ---- comparing ---------------------------------------------------------------------------------


def _order_of_groups(
    state: dict[str, Any], found: Any, loader_count: int, path: str | os.PathLike[str]
) -> list[int]:
    """The place in a checkpoint of each group of parameters.

    Raises:
        StructureMismatch: It was saved with other objects.
    """
    if not isinstance(found, dict) or not state.keys() | {"processes"} <= found.keys():
        raise StructureMismatch(
            f"'{path}' is a checkpoint, and none that save_state of this module has saved"
        )
    own = found["processes"].get(state_dicts.this_process())
    here, there = _counts(state), _counts(found)
    if own is not None:
        here["stateful data loaders"], there["stateful data loaders"] = loader_count, len(own["loaders"])
    differing = [
        f"{there[name]} in the checkpoint and {count} here: {name}"
        for name, count in here.items()
        if there[name] != count
    ]
    order: list[int] = []
    stored = [set(group["params"]) for group in found["optimizers"].get("param_groups", [])]
    for group in state["optimizers"].get("param_groups", []) if not differing else []:
        places = [at for at, names in enumerate(stored) if names == set(group["params"]) and at not in order]
        if not places:
            differing.append(f"no group of the optimizers in the checkpoint has {_shown(group['params'])}")
            break
        order.append(places[0])
    if differing:
        raise StructureMismatch(
            f"'{path}' was saved with other objects than this Accelerator has:\n"
            + "\n".join(differing)
            + "\ngive prepare and register_for_checkpointing the objects of before the save, in that order"
        )
    return order


def _counts(state: dict[str, Any]) -> dict[str, int]:
    """How many of each kind there are, as a state tells."""
    return {
        "models": len({name.partition(".")[0] for name in state["models"]}),
        "groups of parameters of optimizers": len(state["optimizers"].get("param_groups", [])),
        "schedulers": len(state["schedulers"]),
        "registered objects": len(state["registered"]),
        "loss scalers": len(state["scalers"]),
    }


def _shown(names: list[str]) -> str:
    """The parameters of a group; the first number is that of the model."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"the parameters {', '.join(names[:3])}{more}" if names else "no parameters"


# ---- what there is -----------------------------------------------------------------------------


def _saved(accelerator: Any) -> dict[str, Any]:
    own = {
        "loaders": [loader.state_dict() for loader in _stateful_loaders(accelerator)],
        "generators": state_dicts.generators(),
    }
    return _state(accelerator) | {"processes": {state_dicts.this_process(): own}}


def _state(accelerator: Any) -> dict[str, Any]:
    """What all processes have together."""
    models, optimizers = get_state_dict(*_modules(accelerator))
    others = {name: [each.state_dict() for each in found] for name, found in _others(accelerator).items()}
    return {"models": models, "optimizers": optimizers, **others, "step": accelerator.step}


def _modules(accelerator: Any) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    """The models as one, by their numbers, and the optimizers that accelerate has wrapped."""
    kind = getattr(accelerator.distributed_type, "value", "")
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise Unsupported(
            f"{kind} keeps models in a form of its own, which only its own functions save; call "
            "accelerator.save_state and accelerator.load_state"
        )
    prepared = enumerate(_kept(accelerator, "models"))
    models = torch.nn.ModuleDict({str(number): model for number, model in prepared})
    return models, [optimizer.optimizer for optimizer in _kept(accelerator, "optimizers")]


def _others(accelerator: Any) -> dict[str, list[Any]]:
    """What has a `state_dict()`, and is the same in all processes."""
    return {
        "schedulers": _kept(accelerator, "schedulers"),
        "registered": _kept(accelerator, "custom_objects"),
        "scalers": [] if accelerator.scaler is None else [accelerator.scaler],
    }


def _stateful_loaders(accelerator: Any) -> list[Any]:
    loaders = _kept(accelerator, "dataloaders")
    return [loader for loader in loaders if getattr(loader, "use_stateful_dataloader", False)]


def _kept(accelerator: Any, kind: str) -> list[Any]:
    """What `prepare` or `register_for_checkpointing` keeps of a kind, which has no public name."""
    kept = getattr(accelerator, f"_{kind}", None)
    if not isinstance(kept, list):
        release, what = importlib.metadata.version("accelerate"), kind.replace("_", " ")
        raise Unsupported(
            f"accelerate {release} keeps no list of its {what} as Accelerator._{kind}, which releases 1.10 "
            "to 1.15 do; use one of these, or save state dicts by waystation.integrations.dcp"
        )
    return kept
