"""The callback for the Trainer of transformers: which checkpoint is the best, kept, and loaded at the end."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from shutil import disk_usage
from typing import Any

import pytest
import torch
from tests.support import disks
from tests.support.long import only_long

# What evaluations say after steps 1, 2, …: step 2 is the best, and the record of step 3 has to know it.
LOSSES = [3.0, 1.0, 2.0, 4.0, 5.0, 6.0]


class Model(torch.nn.Module):
    """One number that grows by one with each step, so that a model tells its step."""

    def __init__(self) -> None:
        super().__init__()
        self.step = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": -self.step.sum() + 0 * x.sum()}


def trained(directory: Path, steps: int, limit: int | None, *, ours: bool) -> tuple[Any, Any, set[str]]:
    """A run to a step, from where it was; what was seen at its end, and the steps that are there."""
    # Within, as the import takes each process of the tests seconds.
    import transformers

    from waystation.integrations.transformers import WaystationCallback

    class Seen(transformers.TrainerCallback):  # type: ignore[misc] # not typed
        """Writes down which model callbacks find when training has ended, as those that publish it do."""

        def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            self.step = objects["model"].step.item()

    class Trainer(transformers.Trainer):  # type: ignore[misc] # not typed
        def evaluate(self, *args: Any, **more: Any) -> dict[str, float]:
            metrics = {"eval_loss": LOSSES[self.state.global_step - 1]}
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    data = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 8
    arguments = transformers.TrainingArguments(
        str(directory),
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        save_total_limit=limit,
        load_best_model_at_end=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    seen, saves = Seen(), WaystationCallback()
    trainer = Trainer(
        Model(),
        arguments,
        train_dataset=data,
        eval_dataset=data,
        callbacks=[seen, saves] if ours else [seen],
    )
    resumed: Any = directory.exists() and transformers.trainer_utils.get_last_checkpoint(str(directory))
    trainer.train(resume_from_checkpoint=saves.resume() if ours else resumed)
    places = (directory / "checkpoints").iterdir() if ours else directory.iterdir()
    return trainer, seen, {place.name.rpartition("-")[2] for place in places if place.name[0] != "."}


@pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "accelerate"))), reason="transformers is not installed"
)
@pytest.mark.long
@pytest.mark.parametrize("limit", [pytest.param(1, marks=only_long), 2, pytest.param(None, marks=only_long)])
def test_the_best_model_is_kept_and_loaded_at_the_end(tmp_path: Path, limit: int | None) -> None:
    for steps in (3, 5):  # the run goes on, and the best of it is from before
        theirs, seen_theirs, _ = trained(tmp_path / "theirs", steps, limit, ours=False)
        ours, seen, there = trained(tmp_path / "ours", steps, limit, ours=True)
        assert seen.step == seen_theirs.step == 2, "also for callbacks that are told before this one"
        assert ours.model.step.item() == theirs.model.step.item() == 2
        assert ours.state.best_metric == theirs.state.best_metric == 1.0
        assert ours.state.best_global_step == theirs.state.best_global_step == 2
        assert Path(ours.state.best_model_checkpoint).name == "2"
        expected = {"2", str(steps)} if limit else set(map(str, range(1, steps + 1)))
        assert there == expected


def begun(directory: Path, steps: int, *, ours: bool = True, **options: Any) -> tuple[Any, Any]:
    """A Trainer that saves each step, and its callback."""
    import transformers

    from waystation.integrations.transformers import WaystationCallback

    arguments = transformers.TrainingArguments(
        str(directory),
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        save_strategy="steps",
        save_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    saves = WaystationCallback(**options)
    data = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 8
    callbacks = [saves] if ours else []
    return transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=callbacks), saves


def steps_in(directory: Path) -> list[int]:
    return sorted(int(place.name) for place in (directory / "checkpoints").iterdir() if place.name.isdigit())


@pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "accelerate"))), reason="transformers is not installed"
)
def test_a_run_goes_on_from_the_trainer_itself_and_goes_back(tmp_path: Path) -> None:
    from waystation.errors import InvalidInput, StepAlreadyExistsError, StepNotFoundError

    begun(tmp_path, 2, ours=False)[0].train()
    trainer, saves = begun(tmp_path, 4)
    assert saves.resume() == str(tmp_path / "checkpoint-2")
    trainer.train(resume_from_checkpoint=saves.resume())
    assert trainer.model.step.item() == 4
    assert steps_in(tmp_path) == [3, 4]

    trainer, saves = begun(tmp_path, 5)
    with pytest.raises(StepAlreadyExistsError, match="steps up to 4 have checkpoints already"):
        trainer.train()  # anew, over a run that is there
    with pytest.raises(InvalidInput, match=r"WaystationCallback\(overwrite=True\)"):
        saves.resume(3)
    with pytest.raises(StepNotFoundError, match="no checkpoint of step 7; there are: 3, 4"):
        saves.resume(7)

    trainer, saves = begun(tmp_path, 6, overwrite=True)
    trainer.train(resume_from_checkpoint=saves.resume(3))
    assert trainer.model.step.item() == 6
    assert steps_in(tmp_path) == [3, 4, 5, 6]

    trainer, saves = begun(tmp_path, 2, overwrite=True)
    trainer.train()
    assert steps_in(tmp_path) == [1, 2], "nothing is left with which a restart would go on"


@pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "accelerate"))), reason="transformers is not installed"
)
def test_a_run_that_cannot_take_the_place_of_another_leaves_it(tmp_path: Path) -> None:
    from waystation.errors import DiskFull

    with disks.mounted(tmp_path / "disk", "size=4m") as disk:
        begun(disk, 4)[0].train()
        there = steps_in(disk)
        (disk / "ballast").write_bytes(bytes(disk_usage(disk).free))
        with pytest.raises(DiskFull):
            begun(disk, 2, overwrite=True)[0].train()
        assert steps_in(disk) == there
