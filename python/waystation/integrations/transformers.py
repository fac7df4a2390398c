"""Runs of the Trainer of `transformers`, saved by a callback in the place of the Trainer:
`WaystationCallback`.

The Trainer goes on saying when to save (`save_strategy`, `save_steps`) and how many checkpoints to keep
(`save_total_limit`). The callback sees that it wants to, saves, and takes the wish back. To resume, the
Trainer reads where the run was from a directory that `resume` makes: its own record of the run, and an index
of weights whose one file is empty. What the callback has saved is loaded once model and optimizer are where
they belong.

`load_best_model_at_end` needs more than that. The Trainer compares a metric only after the callback was told
of it, and loads only what it has saved itself. So the callback compares it as the Trainer is about to, for
the record that it saves; keeps the best checkpoint; and loads its model when the Trainer has ended its steps.

Failure sequence: a kill during a save leaves the checkpoint before it as the newest. Invariants: nothing of
the Trainer is overridden; generators of random numbers are set after the Trainer has passed over the batches
that were seen.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, get_last_checkpoint
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from waystation import storage
from waystation._errors import InvalidInput, StepAlreadyExistsError, StepNotFoundError
from waystation._options import in_effect
from waystation.integrations import differing, state_dicts
from waystation.storage.scratch import ScratchDirectory
from waystation.training import Checkpointer
from waystation.training.preservation_policies import Checkpoints, PreservationContext

__all__ = ["WaystationCallback"]

_log = logging.getLogger("waystation")

_BEST_STEP = "best_step"  # of the custom metadata of a checkpoint: the best one that was saved by then
_LOGGED_AT_THE_END = "train_runtime"  # what the Trainer logs last, before it loads the best model
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

    With `load_best_model_at_end` the best checkpoint is kept, and its model is loaded at the end, before
    other callbacks are told that training has ended. `best_model_checkpoint` of the Trainer's state names it
    then.

    Args:
        directory: Where the checkpoints are, or a location in an object store; by default `checkpoints` in
            the
            `output_dir` of the Trainer.
        asynchronous: Go on training while a checkpoint is written.
        overwrite: Replace the steps of an earlier run, where this one begins anew or goes back to a step. Its
            first save removes the later ones once it is committed: a restart would go on with them otherwise.
        checkpointer: More arguments for the `waystation.training.Checkpointer` that saves: `remote`,
            `memory`, ….
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        asynchronous: bool = True,
        overwrite: bool = False,
        checkpointer: dict[str, Any] | None = None,
    ) -> None:
        self._directory = directory
        self._asynchronous = asynchronous
        self._overwrite = overwrite
        self._more = dict(checkpointer or {})
        self._arguments: Any = None
        self._open: Checkpointer | None = None
        self._scratch = ScratchDirectory()
        self._model: Any = None
        self._resumed: int | None = None  # the step that `resume` has found
        self._newest: int | None = None  # the step that was saved last
        self._has_saved = False
        self._best: int | None = None  # the best step that was saved, if the Trainer compares
        self._metrics: dict[str, Any] | None = None  # that the Trainer has yet to compare
        self._generators: dict[str, Any] | None = None  # to be set before the next step

    # ---- resuming ------------------------------------------------------------------------------

    def resume(self, step: int | None = None) -> str | None:
        """What to give `Trainer.train` as `resume_from_checkpoint`; None where there is no checkpoint yet.

        A run that the Trainer has saved itself goes on from there, until this callback saves a later step.

        In a program of several processes all of them call this.

        Args:
            step: The step to go back to; by default the latest.

        Raises:
            InvalidInput: No Trainer has this callback yet; or there are steps after that one, and the
                callback was not given `overwrite`.
            StepNotFoundError: The step has no checkpoint.
            WaystationError: As `Checkpointer` raises it.
        """
        checkpoints = self._checkpointer().checkpoints
        chosen = [found for found in checkpoints if step in (None, found.step)]
        theirs = self._of_the_trainer(step)
        if theirs is not None and (not chosen or chosen[-1].step < theirs[0]):
            _log.info("the run goes on from '%s', which the Trainer has saved itself", theirs[1])
            return theirs[1]
        if not chosen and step is None:
            return None
        if not chosen:
            there = ", ".join(str(found.step) for found in checkpoints) or "none"
            raise StepNotFoundError(f"there is no checkpoint of step {step}; there are: {there}", step=step)
        latest = chosen[-1]
        if latest.step < checkpoints[-1].step and not self._overwrite:
            raise InvalidInput(
                f"steps up to {checkpoints[-1].step} are there, after step {latest.step}; to go back, have "
                "the first save remove them: WaystationCallback(overwrite=True)"
            )
        with _partly():
            record = self._checkpointer().load(latest.step, {"trainer": str})["trainer"]
        self._resumed = self._newest = latest.step
        self._best = (latest.custom_metadata or {}).get(_BEST_STEP)
        names = dict.fromkeys(self._model.state_dict(), _EMPTY)
        for name, content in (
            (TRAINER_STATE_NAME, record.encode()),
            (SAFE_WEIGHTS_INDEX_NAME, json.dumps({"metadata": {}, "weight_map": names}).encode()),
            (_EMPTY, _EMPTY_SAFETENSORS),
        ):
            self._scratch.write(name, content)
        return self._scratch.path

    def _of_the_trainer(self, step: int | None) -> tuple[int, str] | None:
        """The step and path of what the Trainer has saved itself, of a step or last."""
        directory = self._arguments.output_dir
        if not storage.is_directory(directory):
            return None
        found: str | None = get_last_checkpoint(directory)
        if step is not None:
            found = os.path.join(directory, f"{PREFIX_CHECKPOINT_DIR}-{step}")
        if found is None or not storage.is_directory(found):
            return None
        return int(found.rpartition("-")[2]), found

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Loads what `resume` has found, into what the Trainer trains.

        Raises:
            StepAlreadyExistsError: There are later steps than that at which training begins, and the callback
                was not given `overwrite`.
        """
        del control
        self._has_saved = False
        if args.save_strategy != SaveStrategy.NO and not self._overwrite:
            self._require_no_later(state.global_step)
        if self._resumed is None or state.global_step != self._resumed:
            return
        step, self._resumed = self._resumed, None
        checkpointer = self._checkpointer()
        found = checkpointer.metadata(step).metadata
        wanted = _state_of(objects)
        moments = wanted["optimizer"]
        moments["state"] = state_dicts.moments_in(moments["state"], found["optimizer"]["state"])
        with _partly(in_place=True):
            asked = state_dicts.asked(wanted, found) | {"generators": found["generators"]}
            loaded = checkpointer.load(step, asked)
        own = loaded.pop("generators").get(state_dicts.this_process())
        _put(objects, state_dicts.put(wanted, loaded))
        self._generators = own

    def _require_no_later(self, step: int) -> None:
        latest = self._checkpointer().latest
        if latest is not None and latest.step > step:
            raise StepAlreadyExistsError(
                f"steps up to {latest.step} have checkpoints already, and training begins at step {step}: "
                f"'{latest.path.parent}'; go on by train(resume_from_checkpoint=callback.resume()), or "
                "replace them by WaystationCallback(overwrite=True)",
                step=latest.step,
                path=str(latest.path),
            )

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

    on_epoch_end = on_step_end

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Saves as `on_step_end` does. Loads the best model where the Trainer would."""
        self._save(state, control, objects)
        if _LOGGED_AT_THE_END in (objects.get("logs") or {}):
            self._load_best(args, state, objects)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Saves as `on_step_end` does, with a record that knows these metrics."""
        del args
        self._metrics = objects.get("metrics")
        try:
            self._save(state, control, objects)
        finally:
            self._metrics = None

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
        del control, objects
        self._scratch.remove()
        self._scratch = ScratchDirectory()
        if self._open is not None:
            # Not earlier: the Trainer would load from there itself, and finds none of its files.
            if self._best is not None and args.save_strategy != SaveStrategy.BEST:
                steps = {checkpoint.step: checkpoint for checkpoint in self._open.checkpoints}
                if self._best in steps:
                    state.best_model_checkpoint = str(steps[self._best].path)
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
        record = self._compared(state)
        if record.best_global_step == state.global_step:
            self._best = state.global_step
        whole["trainer"] = json.dumps(dataclasses.asdict(record), sort_keys=True)
        whole["generators"] = {state_dicts.this_process(): state_dicts.generators()}
        replaced = self._replaced(state.global_step)
        # What it replaces goes once it is committed.
        save = checkpointer.save_async if self._asynchronous and not replaced else checkpointer.save
        with state_dicts.taking_part():
            save(
                state.global_step,
                differing.joined_by_all(state_dicts.plain(whole), "a run of the Trainer"),
                force=True,
                overwrite=self._overwrite,
                custom_metadata=None if self._best is None else {_BEST_STEP: self._best},
            )

        self._has_saved = True
        if replaced:
            with state_dicts.taking_part():
                for step in replaced:
                    checkpointer.delete(step, missing_ok=True)
            _log.warning("steps of an earlier run were removed: %s", ", ".join(map(str, replaced)))

    def _replaced(self, step: int) -> list[int]:
        """The steps of an earlier run that come after the first one that is saved, and give way to it."""
        if self._has_saved or not self._overwrite:
            return []
        return [found.step for found in self._checkpointer().checkpoints if found.step > step]

    def _compared(self, state: TrainerState) -> TrainerState:
        """The Trainer's record as it is once the Trainer has compared the metrics of an evaluation."""
        name, metrics = self._arguments.metric_for_best_model, self._metrics
        if metrics is None or name is None:
            return state
        value = metrics.get(name if name.startswith("eval_") else f"eval_{name}")
        if value is None:
            return state  # for which the Trainer raises
        is_more = self._arguments.greater_is_better
        best = state.best_metric
        if best is None:
            best = float("-inf") if is_more else float("inf")
        if not (value > best if is_more else value < best):
            return dataclasses.replace(state, best_metric=best)
        return dataclasses.replace(state, best_metric=float(value), best_global_step=state.global_step)

    def _load_best(self, args: TrainingArguments, state: TrainerState, objects: dict[str, Any]) -> None:
        """Loads the best model, unless the Trainer has saved it and does so."""
        if not args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST or self._best is None:
            return
        checkpointer = self._checkpointer()
        checkpointer.wait()
        if self._best != state.global_step:
            wanted = {"model": get_model_state_dict(objects["model"])}
            with _partly(in_place=True):
                found = checkpointer.metadata(self._best).metadata
                loaded = checkpointer.load(self._best, state_dicts.asked(wanted, found))
            set_model_state_dict(objects["model"], state_dicts.put(wanted, loaded)["model"])
        _log.info(
            "the model of step %d is loaded, which was best: %s of %s",
            self._best,
            state.best_metric,
            args.metric_for_best_model,
        )

    def _checkpointer(self) -> Checkpointer:
        if self._arguments is None:
            raise InvalidInput("give this callback to a Trainer first: Trainer(..., callbacks=[callback])")
        if self._open is None:
            policy = _AsTheTrainer(self._arguments.save_total_limit)
            directory = self._directory or os.path.join(self._arguments.output_dir, "checkpoints")
            self._open = Checkpointer(directory, **({"preservation_policy": policy} | self._more))
        return self._open


@dataclasses.dataclass
class _AsTheTrainer:
    """Keeps what the Trainer would: the newest, and the best among them.

    Attributes:
        limit: How many, at least the newest and the best; None or 0 keeps all.
    """

    limit: int | None

    def should_preserve(self, checkpoints: Checkpoints, *, context: PreservationContext) -> Sequence[bool]:
        """Keeps the best one and the newest ones."""
        del context
        if not self.limit or len(checkpoints) <= self.limit:
            return [True] * len(checkpoints)
        kept = set(range(len(checkpoints) - self.limit, len(checkpoints)))
        best = (checkpoints[-1].custom_metadata or {}).get(_BEST_STEP)
        places = [place for place, checkpoint in enumerate(checkpoints) if checkpoint.step == best]
        if places and places[0] not in kept:
            if self.limit > 1:
                kept.remove(min(kept))
            kept.add(places[0])
        return [place in kept for place in range(len(checkpoints))]


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
    set_model_state_dict(objects["model"], state["model"])
    inner = getattr(optimizer, "optimizer", optimizer)
    state_dicts.set_moments(objects["model"], inner, state["optimizer"])
    objects["lr_scheduler"].load_state_dict(state["schedule"])
    if "scaler" in state:
        optimizer.scaler.load_state_dict(state["scaler"])


def _partly(*, in_place: bool = False) -> Any:
    """Options of a load of some of what a checkpoint has."""
    options = in_effect.current_options().thawed()
    options.pytree.loading.partial_load = True
    options.array.loading.in_place = in_place
    return state_dicts.having(options)
