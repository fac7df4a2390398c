"""The functions for Accelerate: what they find of an `Accelerator`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from waystation.errors import InvalidLayoutError, StructureMismatch, Unsupported


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize("kind", ["models", "optimizers", "schedulers", "dataloaders", "custom_objects"])
@pytest.mark.share(5)
def test_what_another_release_keeps_elsewhere_is_not_left_out(kind: str, tmp_path: Path) -> None:
    # Within, as the import takes each process of the tests seconds.
    import accelerate

    from waystation.integrations.accelerate import save_state

    accelerator: Any = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    save_state(accelerator, tmp_path / "whole")
    setattr(accelerator, f"_kept_{kind}", getattr(accelerator, f"_{kind}"))
    delattr(accelerator, f"_{kind}")
    with pytest.raises(Unsupported, match=rf"accelerate 1\..*Accelerator\._{kind}"):
        save_state(accelerator, tmp_path / "lacking")
    assert not (tmp_path / "lacking").exists()


class Part(torch.nn.Module):
    """A model with a parameter that no step uses, so that an optimizer has nothing of it to save."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(x)
        return result


class Counted:
    """An object of the program that is saved with the rest."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


SGD: Any = torch.optim.SGD
ADAMW: Any = torch.optim.AdamW


def prepared(kinds: list[Any], rate: float, *, models: int = 2, extra: tuple[str, ...] = ()) -> Any:
    """An accelerator with optimizers, one for each model, or all of them for the parts of one."""
    import accelerate

    accelerator: Any = accelerate.Accelerator(cpu=True)
    made: list[torch.nn.Module] = [Part() for _ in range(models)]
    parts: list[Any] = [made[0].used, made[0].unused] if models < len(kinds) else made
    optimizers = [kind(parts[n].parameters(), lr=rate + n) for n, kind in enumerate(kinds)]
    schedulers = [torch.optim.lr_scheduler.ConstantLR(optimizers[0])] if "schedulers" in extra else []
    accelerator.prepare(*made, *optimizers, *schedulers)
    if "registered" in extra:
        accelerator.register_for_checkpointing(Counted())
    return accelerator


def step(accelerator: Any) -> None:
    for model in accelerator._models:
        accelerator.backward(model(torch.ones(1, 2)).sum())
    for optimizer in accelerator._optimizers:
        optimizer.step()
        optimizer.zero_grad()


def contents(accelerator: Any) -> list[Any]:
    """What training has made of the models and the optimizers, in lists and numbers."""
    weights = [value.tolist() for model in accelerator._models for value in model.state_dict().values()]
    states = [optimizer.optimizer.state_dict() for optimizer in accelerator._optimizers]
    moments = [
        {key: value.tolist() for key, value in each.items()} for s in states for each in s["state"].values()
    ]
    return [weights, moments, [group["lr"] for state in states for group in state["param_groups"]]]


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize(
    ("kinds", "models"), [([SGD, SGD], 2), ([SGD, ADAMW], 2), ([ADAMW, ADAMW], 2), ([SGD, SGD], 1)]
)
def test_several_optimizers_are_loaded_with_and_without_states(
    kinds: list[Any], models: int, tmp_path: Path
) -> None:
    from waystation.integrations.accelerate import load_state, save_state

    saved = prepared(kinds, 1.0, models=models)
    step(saved)
    save_state(saved, tmp_path / "run")
    loaded = prepared(kinds, 5.0, models=models)
    load_state(loaded, tmp_path / "run")
    assert contents(loaded) == contents(saved)


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize(
    ("there", "here", "told"),
    [
        ({"extra": ("schedulers",)}, {}, "1 in the checkpoint and 0 here: schedulers"),
        ({}, {"extra": ("registered",)}, "0 in the checkpoint and 1 here: registered objects"),
        ({}, {"models": 1, "kinds": [SGD]}, "2 in the checkpoint and 1 here: models"),
        ({"models": 1}, {"models": 1, "kinds": [SGD]}, "2 in .* and 1 here: groups of parameters"),
        (
            {"models": 1, "kinds": [SGD]},
            {"models": 1, "kinds": [lambda p, lr: SGD([*p][:1], lr=lr)]},
            "no group of the optimizers in the checkpoint has the parameters 0.used.weight",
        ),
    ],
)
def test_what_was_saved_with_other_objects_changes_nothing(
    there: dict[str, Any], here: dict[str, Any], told: str, tmp_path: Path
) -> None:
    from waystation.integrations.accelerate import load_state, save_state

    both: dict[str, Any] = {"kinds": [SGD, SGD]}
    save_state(prepared(**(both | there), rate=1.0), tmp_path / "run")
    loaded = prepared(**(both | here), rate=5.0)
    before = contents(loaded)
    with pytest.raises(StructureMismatch, match=told):
        load_state(loaded, tmp_path / "run")
    assert contents(loaded) == before


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_what_accelerate_has_saved_is_told_as_such(tmp_path: Path) -> None:
    from waystation.integrations.accelerate import load_state

    accelerator = prepared([SGD, SGD], 1.0)
    accelerator.save_state(str(tmp_path / "theirs"))
    with pytest.raises(InvalidLayoutError, match=r"saved by Accelerate; 'accelerator\.load_state' loads it"):
        load_state(accelerator, tmp_path / "theirs")
