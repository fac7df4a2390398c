"""Runs of the Trainer of `transformers`, saved by a callback in the place of the Trainer:
`WaystationCallback`.

The Trainer goes on saying when to save (`save_strategy`, `save_steps`) and how many checkpoints to keep
(`save_total_limit`). The callback sees that it wants to, saves, and takes the wish back. To resume, the
Trainer reads where the run was from a directory that `resume` makes: its own record of the run, and an index
of weights whose one file is empty. What the callback has saved is loaded once model and optimizer are where
they belong.

Failure sequence: a kill during a save leaves the checkpoint before it as the newest. Invariants: nothing of
the Trainer is overridden; generators of random numbers are set after the Trainer has passed over the batches
that were seen.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from waystation._errors import InvalidInput
from waystation._options import in_effect
from waystation.integrations import differing, state_dicts
from waystation.storage.scratch import ScratchDirectory
from waystation.training import Checkpointer
from waystation.training.preservation_policies import LatestN, PreserveAll

__all__ = ["WaystationCallback"]

_EMPTY, _EMPTY_SAFETENSORS = "empty.safetensors", (2).to_bytes(8, "little") + b"{}"


class WaystationCallback(TrainerCallback):  # type: ignore[misc] # transformers is not typed here
    """Saves and resumes a run of a `Trainer`.

    Example:
        ```python
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[saves := WaystationCallback()])
        trainer.train(resume_from_checkpoint=saves.resume())
        ```

    A checkpoint holds the model, the optimizer, the scheduler, the loss scale of float16, the Trainer's
    record of the run, and the generators of random numbers of each process. Models that FSDP2 has sharded
    load in any number of processes; then generators that nobody had begin anew.

    Args:
        directory: Where the checkpoints are, or a location in an object store; by default `checkpoints` in
            the
            `output_dir` of the Trainer.
        asynchronous: Go on training while a checkpoint is written.
        checkpointer: More arguments for the `waystation.training.Checkpointer` that saves: `remote`,
            `memory`, ….
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        asynchronous: bool = True,
        checkpointer: dict[str, Any] | None = None,
    ) -> None:
        self._directory = directory
        self._asynchronous = asynchronous
        self._more = dict(checkpointer or {})
        self._arguments: Any = None
        self._open: Checkpointer | None = None
        self._scratch = ScratchDirectory()
        self._model: Any = None
        self._resumed: int | None = None  # the step that `resume` has found
        self._newest: int | None = None  # the step that was saved last
        self._generators: dict[str, Any] | None = None  # to be set before the next step

    # ---- resuming ------------------------------------------------------------------------------

    def resume(self) -> str | None:
        """What to give `Trainer.train` as `resume_from_checkpoint`; None where there is no checkpoint yet.

        In a program of several processes all of them call this.

        Raises:
            InvalidInput: No Trainer has this callback yet.
            WaystationError: As `Checkpointer` raises it.
        """
        latest = self._checkpointer().latest
        if latest is None:
            return None
        with _partly():
            record = self._checkpointer().load(latest.step, {"trainer": str})["trainer"]
        self._resumed = self._newest = latest.step
        names = dict.fromkeys(self._model.state_dict(), _EMPTY)
        for name, content in (
            (TRAINER_STATE_NAME, record.encode()),
            (SAFE_WEIGHTS_INDEX_NAME, json.dumps({"metadata": {}, "weight_map": names}).encode()),
            (_EMPTY, _EMPTY_SAFETENSORS),
        ):
            self._scratch.write(name, content)
        return self._scratch.path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Loads what `resume` has found, into what the Trainer trains."""
        del args, control
        if self._resumed is None or state.global_step != self._resumed:
            return
        step, self._resumed = self._resumed, None
        checkpointer = self._checkpointer()
        found = checkpointer.metadata(step).metadata
        wanted = _state_of(objects)
        with _partly(in_place=True):
            asked = state_dicts.asked(wanted, found) | {"generators": found["generators"]}
            loaded = checkpointer.load(step, asked)
        own = loaded.pop("generators").get(state_dicts.this_process())
        _put(objects, state_dicts.put(wanted, loaded))
        self._generators = own

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Sets the generators where an epoch begins, whose loader takes from them."""
        del args, control, objects
        if float(state.epoch or 0).is_integer():
            self._set_generators()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Sets the generators within an epoch, once the batches that were seen are passed over."""
        del args, state, control, objects
        self._set_generators()

    def _set_generators(self) -> None:
        if self._generators is not None:
            state_dicts.set_generators(self._generators)
            self._generators = None

    # ---- saving --------------------------------------------------------------------------------

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Learns what the Trainer was given."""
        del state, control
        self._arguments, self._model = args, objects["model"]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Saves if the Trainer is about to, unless it is to log or evaluate before, as its record shows."""
        del args
        self._save(state, control, objects)

    on_epoch_end = on_log = on_evaluate = on_step_end

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Saves what the Trainer has decided to save at its own moment, beside its own checkpoint."""
        del args, control
        self._save_now(state, objects)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Waits until all is written."""
        del args, state, control, objects
        self._scratch.remove()
        self._scratch = ScratchDirectory()
        if self._open is not None:
            self._open.close()
            self._open = None

    def _save(self, state: TrainerState, control: TrainerControl, objects: dict[str, Any]) -> None:
        if not control.should_save or control.should_log or control.should_evaluate:
            return
        control.should_save = False
        self._save_now(state, objects)

    def _save_now(self, state: TrainerState, objects: dict[str, Any]) -> None:
        checkpointer = self._checkpointer()
        if state.global_step == self._newest:
            return  # the last step of an epoch, where both ends ask
        self._newest = state.global_step
        whole = _state_of(objects)
        whole["trainer"] = json.dumps(dataclasses.asdict(state), sort_keys=True)
        whole["generators"] = {state_dicts.this_process(): state_dicts.generators()}
        save = checkpointer.save_async if self._asynchronous else checkpointer.save
        save(
            state.global_step,
            differing.joined_by_all(state_dicts.plain(whole), "a run of the Trainer"),
            force=True,
        )

    def _checkpointer(self) -> Checkpointer:
        if self._arguments is None:
            raise InvalidInput("give this callback to a Trainer first: Trainer(..., callbacks=[callback])")
        if self._open is None:
            keep = self._arguments.save_total_limit
            policy = LatestN(keep) if keep else PreserveAll()
            directory = self._directory or os.path.join(self._arguments.output_dir, "checkpoints")
            self._open = Checkpointer(directory, **({"preservation_policy": policy} | self._more))
        return self._open


def _state_of(objects: dict[str, Any]) -> dict[str, Any]:
    """What the Trainer trains, as a state."""
    optimizer = objects["optimizer"]
    # accelerate wraps it, and keeps the loss scale there
    inner, scaler = getattr(optimizer, "optimizer", optimizer), getattr(optimizer, "scaler", None)
    model, moments = get_state_dict(objects["model"], inner)
    state = {"model": model, "optimizer": moments, "schedule": objects["lr_scheduler"].state_dict()}
    if scaler is not None:
        state["scaler"] = scaler.state_dict()
    return state


def _put(objects: dict[str, Any], state: dict[str, Any]) -> None:
    """Gives what the Trainer trains what was loaded."""
    optimizer = objects["optimizer"]
    set_state_dict(
        objects["model"],
        getattr(optimizer, "optimizer", optimizer),
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    objects["lr_scheduler"].load_state_dict(state["schedule"])
    if "scaler" in state:
        optimizer.scaler.load_state_dict(state["scaler"])


def _partly(*, in_place: bool = False) -> Any:
    """Options of a load of some of what a checkpoint has."""
    options = in_effect.current_options().thawed()
    options.pytree.loading.partial_load = True
    options.array.loading.in_place = in_place
    return state_dicts.having(options)
