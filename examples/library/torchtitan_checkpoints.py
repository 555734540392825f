"""torchtitan with `Checkpointer` instead of its own checkpoint manager.

In a configuration of torchtitan, replace `checkpoint=CheckpointManager.Config(...)` by::

    checkpoint=CheckpointerManager.Config(enable=True, interval=500, keep_latest_k=3)

`initial_load_path` may be a checkpoint of torchtitan's own manager. Not supported: several pipeline
chunks per rank, and Hugging Face files (`Checkpointer.to_safetensors` writes the weights).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torchtitan.components.checkpointer import BaseCheckpointManager

from megatron.checkpointer import Checkpointer


class CheckpointerManager(BaseCheckpointManager):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        pass

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        if len(model_parts) > 1:
            raise ValueError(f"{len(model_parts)} pipeline chunks per rank are not supported")
        self.config = config
        self.save_future = None  # Checkpointer waits for its own saves
        self.checkpointer = Checkpointer(
            Path(base_folder, config.folder),
            model_parts[0],
            optimizers.optimizers,
            dataloader=dataloader,
            # "train_state" contains the step and the number of tokens.
            objects={**states, "lr_scheduler": lr_schedulers},
            keep_last=config.keep_latest_k or None,
        )

    def _load(self, step: int = -1) -> bool:
        if step != -1:
            raise ValueError(f"load_step {step}: only the newest checkpoint can be continued")
        config = self.config
        first = self.checkpointer.load(
            config.initial_load_path,
            weights_only=config.initial_load_model_only,
            skip=config.exclude_from_loading,
        )
        return first > 0 or config.initial_load_path is not None

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        is_first = curr_step == 1 and self.config.enable_first_step_checkpoint
        is_due = curr_step % self.config.interval == 0 or last_step or is_first
        if self.config.load_only or not is_due:
            return False
        self.checkpointer.save(curr_step)
        return True

    def _maybe_wait_for_staging(self) -> None:
        self.checkpointer.wait_staged()

    def _wait_for_saving(self) -> None:
        self.checkpointer.finish()

    def _close(self) -> None:
        self.checkpointer.close()
