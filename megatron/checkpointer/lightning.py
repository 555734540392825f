"""Checkpoints of Lightning's Trainer. Requires lightning or pytorch_lightning."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from typing_extensions import Unpack
else:
    try:
        from lightning.pytorch import Callback, LightningModule, Trainer
    except ImportError:
        from pytorch_lightning import Callback, LightningModule, Trainer


class LightningCheckpointerCallback(Callback):
    """Saves and resumes a Lightning Trainer instead of Lightning's own checkpoints.

        callback = LightningCheckpointerCallback("run", save_interval=1000, keep_last=3)
        Trainer(callbacks=[callback], enable_checkpointing=False).fit(module, data)

    `fit` continues the run in `directory`, if there is one: module, optimizers, schedulers,
    gradient scaler, random number generators, the progress of the loops and the states of the other
    callbacks. Steps are those of the optimizer (`trainer.global_step`). `options` are those of
    `Checkpointer`; `exit_signals` end training after the next step.

    Within an epoch, Lightning continues with the right batch only if the data loader has
    `state_dict` and `load_state_dict` (e.g. torchdata's StatefulDataLoader), as with its own
    checkpoints. The result is then bitwise that of an uninterrupted run.
    """

    def __init__(
        self, directory: str | os.PathLike[str], **options: Unpack[CheckpointerOptions]
    ) -> None:
        self._directory = directory
        self._options = options
        self._checkpointer: Checkpointer | None = None
        self._generators: GeneratorStates | None = None  # to restore before the next batch
        self._last_step = 0

    # ---- Events of the Trainer ----

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check_supported(trainer)
        objects: dict[str, Stateful] = {
            "loops": _Loops(trainer),
            "callbacks": _Callbacks(trainer, self),
        }
        for index, config in enumerate(trainer.lr_scheduler_configs):
            objects[f"scheduler.{index}"] = config.scheduler
        if trainer.precision_plugin.state_dict():
            objects["precision"] = trainer.precision_plugin
        # By now Lightning has wrapped the model and moved it to its device.
        self._checkpointer = Checkpointer(
            self._directory,
            pl_module,
            trainer.optimizers,
            dataloader=_Loaders(trainer),
            objects=objects,
            **self._options,
        )
        self._last_step = self._checkpointer.load()
        # A new iterator over the data draws random numbers: restore the generators afterwards.
        if self._last_step > 0:
            self._generators = check_generator_states(get_generator_states())

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Within an epoch, the new iterator over the data has drawn random numbers, which the
        # uninterrupted run has not. At the begin of an epoch, both have.
        if self._generators is not None and batch_idx > 0:
            self._generators.restore()
        self._generators = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._checkpointer is not None
        if trainer.global_step == self._last_step:  # gradients are being accumulated
            return
        self._last_step = trainer.global_step
        # `global_step` counts completed steps, `step` expects the index of the last one.
        if self._checkpointer.step(trainer.global_step - 1):
            trainer.should_stop = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._checkpointer is not None
        self._checkpointer.close()
        self._checkpointer = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self._checkpointer is not None:
            self._checkpointer.__exit__(type(exception))
            self._checkpointer = None


class _Loops:
    """Progress of the training loops."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.fit_loop.state_dict()
        state["state_dict"].pop("combined_loader", None)  # saved for every rank
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._trainer.fit_loop.load_state_dict(state_dict)


class _Loaders:
    """Positions of this rank's data loaders, of those that have a state."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        states = self._trainer.fit_loop.on_save_checkpoint().get("combined_loader", [])
        return {"combined_loader": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._trainer.fit_loop.on_load_checkpoint(state_dict)


class _Callbacks:
    """States of the other callbacks."""

    def __init__(self, trainer: Trainer, checkpoint_callback: Callback) -> None:
        everyone: list[Callback] = vars(trainer)["callbacks"]
        self._callbacks = [callback for callback in everyone if callback is not checkpoint_callback]

    def state_dict(self) -> dict[str, Any]:
        states = {callback.state_key: callback.state_dict() for callback in self._callbacks}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for callback in self._callbacks:
            if callback.state_key in state_dict:
                callback.load_state_dict(state_dict[callback.state_key])


def _check_supported(trainer: Trainer) -> None:
    if trainer.checkpoint_callbacks:
        name = type(trainer.checkpoint_callbacks[0]).__name__
        raise ValueError(
            f"{name} writes Lightning's own checkpoints as well: create the Trainer with "
            "enable_checkpointing=False"
        )
