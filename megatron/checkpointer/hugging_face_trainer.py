"""Checkpoints of `transformers.Trainer`. Requires transformers and accelerate."""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput

from megatron.checkpointer.checkpointer import (
    Checkpointer,
    CheckpointerOptions,
)
from megatron.checkpointer.state import Stateful
from megatron.core.dist_checkpointing.generators import (
    GeneratorStates,
    check_generator_states,
    get_generator_states,
)
from megatron.core.safe_files.errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Unpack

_TRAINER = "trainer"  # key of the Trainer's state in a checkpoint


class CheckpointerCallback(TrainerCallback):
    """Saves and resumes a `transformers.Trainer` instead of the Trainer's own checkpoints.

        trainer = Trainer(model, TrainingArguments(save_strategy="no", ...), train_dataset=dataset)
        CheckpointerCallback("run", save_interval=1000, keep_last=3).train(trainer)

    `train` continues the run in `directory`, if there is one. Model, optimizer, scheduler, gradient
    scaler, random number generators and `trainer.state` are restored; the Trainer skips the batches
    of the steps before. At the same number of ranks the result is bitwise that of an uninterrupted
    run, unless the data collator draws random numbers. `options` are those of `Checkpointer`.

    A step is saved when the next one begins, after its evaluation and its logs; the last one is
    always saved. With `exit_signals`, training ends after the step that has begun.
    """

    def __init__(
        self, directory: str | os.PathLike[str], **options: Unpack[CheckpointerOptions]
    ) -> None:
        self._directory = directory
        self._options = options
        self._trainer: Trainer | None = None
        self._states: _TrainerStates | None = None
        self._checkpointer: Checkpointer | None = None
        self._generators: GeneratorStates | None = None  # to restore when training continues
        self._last_step = 0  # number of steps at the last save or load

    def train(self, trainer: Trainer) -> TrainOutput:
        """Run `trainer.train()` from the newest checkpoint of the run, or from the beginning."""
        _check_supported(trainer)
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        self._trainer = trainer
        self._states = _TrainerStates(trainer)
        try:
            if not self._read_states():
                return trainer.train()
            if self._states.are_final():
                return self._load_final_weights()
            with tempfile.TemporaryDirectory() as directory:
                self._states.loaded.save_to_json(str(Path(directory, TRAINER_STATE_NAME)))
                # The Trainer finds only its own state there; `on_train_begin` loads the rest.
                vars(trainer)["_load_from_checkpoint"] = _load_nothing
                return trainer.train(resume_from_checkpoint=directory)
        except BaseException as error:
            if self._checkpointer is not None:
                self._checkpointer.__exit__(type(error))
            raise
        finally:
            vars(trainer).pop("_load_from_checkpoint", None)
            self._checkpointer = None
            self._trainer = None

    def _read_states(self) -> bool:
        """Read the state of the Trainer, which it needs before the model is prepared.

        Returns whether there is a checkpoint.
        """
        assert self._states is not None
        # Without a model: only one object is read, and the directory is not taken over yet.
        with Checkpointer(self._directory, nn.Module(), **self._options) as checkpointer:
            trainer_state = checkpointer.read_object(_TRAINER)
        if trainer_state is None:
            return False
        self._states.load_state_dict(trainer_state)
        return True

    def _load_final_weights(self) -> TrainOutput:
        """Load the model of a run that has completed all steps."""
        assert self._trainer is not None and self._states is not None
        model = self._trainer.model
        assert model is not None
        with Checkpointer(self._directory, model, **self._options) as checkpointer:
            checkpointer.load(skip=["rng"])
        state = self._states.loaded
        self._trainer.state = state
        metrics = state.log_history[-1] if state.log_history else {}
        return TrainOutput(state.global_step, metrics.get("train_loss", 0.0), metrics)

    # ---- Events of the Trainer ----

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if self._trainer is None or self._states is None:
            raise ValueError(
                "CheckpointerCallback needs the Trainer to resume it: call callback.train(trainer) "
                "instead of trainer.train()"
            )
        trainer = self._trainer
        assert trainer.model is not None and trainer.optimizer is not None
        objects: dict[str, Stateful] = {_TRAINER: self._states}
        scaler = trainer.accelerator.scaler
        if scaler is not None:
            objects["scaler"] = scaler
        self._checkpointer = Checkpointer(
            self._directory,
            trainer.model,
            # inside of accelerate's wrapper
            getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            scheduler=trainer.lr_scheduler,
            objects=objects,
            **self._options,
        )
        # The order of the data depends on the generators as they are now.
        initial = check_generator_states(get_generator_states())
        step = self._checkpointer.load()
        if step != state.global_step:
            raise CheckpointError(
                f"{self._directory}: another launch of the run has saved step {step} after this "
                f"one has read the state of step {state.global_step}: start again"
            )
        # The Trainer now draws the data of the steps to skip from the initial generators; the
        # loaded ones are restored afterwards.
        self._last_step = step
        if step > 0:
            self._generators = check_generator_states(get_generator_states())
            initial.restore()

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        assert self._states is not None
        if not self._states.within_step and float(state.epoch).is_integer():
            self._restore_generators()

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        assert self._checkpointer is not None and self._states is not None
        self._restore_generators()
        if state.global_step == self._last_step:
            return
        self._last_step = state.global_step
        self._states.within_step = True
        # `global_step` counts completed steps, `step` expects the index of the last one.
        if self._checkpointer.step(state.global_step - 1):
            control.should_training_stop = True

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        assert self._checkpointer is not None and self._states is not None
        self._states.within_step = False
        self._checkpointer.save(state.global_step)
        self._checkpointer.close()

    def _restore_generators(self) -> None:
        if self._generators is not None:
            self._generators.restore()
            self._generators = None


class _TrainerStates:
    """State of a Trainer and its callbacks, as an object in a checkpoint."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.loaded = TrainerState()
        # Whether the generators are saved after the Trainer has drawn the data of the next step.
        self.within_step = False

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        # Add the operations counted since the last call to the state.
        trainer.store_flos()
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        exportable: list[Any] = [
            callback for callback in callbacks if isinstance(callback, ExportableState)
        ]
        state = dict(vars(trainer.state))
        state["stateful_callbacks"] = TrainerState(stateful_callbacks=exportable).stateful_callbacks
        return {"state": state, "within_step": self.within_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Fields of another version of transformers are ignored.
        names = {field.name for field in dataclasses.fields(TrainerState)}
        state = state_dict["state"]
        self.loaded = TrainerState(**{name: state[name] for name in state if name in names})
        self.within_step = state_dict["within_step"]

    def are_final(self) -> bool:
        """Return whether the loaded state is that of the last step of this run."""
        arguments = self._trainer.args
        if arguments.max_steps > 0:
            return self.loaded.global_step >= arguments.max_steps
        same_epochs = math.ceil(arguments.num_train_epochs) == self.loaded.num_train_epochs
        return same_epochs and self.loaded.global_step >= self.loaded.max_steps


def _check_supported(trainer: Trainer) -> None:
    if trainer.is_deepspeed_enabled:
        raise ValueError(
            "CheckpointerCallback does not support DeepSpeed, whose optimizer state is not made of "
            "DTensors: use FSDP2"
        )
    strategy = trainer.args.save_strategy
    if strategy != "no":
        raise ValueError(
            f'save_strategy="{strategy}" writes the Trainer\'s own checkpoints as well: set '
            'save_strategy="no" in TrainingArguments'
        )


def _load_nothing(*_: object) -> None:
    pass
