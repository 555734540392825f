"""What a run consists of once it is built, and its position."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.core.datasets import Dataset
from megatron.core.distributed import DistributedDataParallel
from megatron.core.module import MegatronModule
from megatron.core.optimizer import MegatronOptimizer, OptimizerParamScheduler
from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.training.checkpoint.saver import CheckpointSaver
from megatron.training.config.run_config import Config
from megatron.training.data.samplers import Batch, BatchSchedule
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.reporting.logging import Writer
from megatron.training.reporting.measurements import Timers


class Loss(NamedTuple):
    """What the last stage returns for a micro batch."""

    total: Tensor
    """Sum of the losses of all tokens that count; differentiable, fp32 scalar."""
    num_tokens: Tensor
    """How many that are; a scalar."""


ForwardStep = Callable[[MegatronModule, Batch, Tensor | None], Tensor | Loss]
"""(model chunk, micro batch, activation of the stage before) -> activation, or the `Loss` on the last stage.

The micro batch is empty on chunks that need no data.
"""


class DatasetsProvider(Protocol):
    """Builds (train, valid, test) with at least so many samples; None where none are wanted."""

    def __call__(
        self, config: Config, num_samples: tuple[int, int, int], tokenizer: Tokenizer
    ) -> tuple[Dataset | None, Dataset | None, Dataset | None]: ...


@dataclass
class TrainState:
    """How far the run is."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    num_floating_point_operations_so_far: float = 0.0


@dataclass
class Run:
    """Everything that training, evaluation and checkpoints work on."""

    config: Config
    ps: ParallelState
    device: torch.device
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    batches: BatchSchedule
    forward_step: ForwardStep
    timers: Timers
    rng: TensorParallelRng
    vocab_size: int  # of the model, without padding
    flops_per_token: float
    saver: CheckpointSaver
    clock: Callable[[], float] = time.monotonic  # that of --save-interval-secs and --exit-duration-in-mins
    started: float = field(default_factory=time.monotonic)  # when the program began, by `clock`
    loaded: str | None = None  # the checkpoint that it continues from
    loading_seconds: float = 0.0
    exit_reason: str | None = None  # why it ended early
    validated: tuple[int, float] | None = None  # iteration and loss of the last validation
    train_data_fingerprint: str | None = None  # decides the order of samples; None until the data is built or loaded
    state: TrainState = field(default_factory=TrainState)
    writers: list[Writer] = field(default_factory=list)  # where measurements go besides the log; empty but on rank 0

    @property
    def is_complete(self) -> bool:
        return self.state.iteration >= self.train_iters

    @property
    def train_iters(self) -> int:
        """The iteration at which the run is complete."""
        training = self.config.training
        if training.train_samples is not None:
            state = self.state  # earlier iterations may have had another batch size
            return state.iteration + self.batches.iterations_for(training.train_samples, state.consumed_train_samples)
        return training.train_iters or 0

    @property
    def eval_batch_size(self) -> int:
        """Samples of all replicas per batch of an evaluation."""
        return self.config.training.eval_global_batch_size or self.batches.global_batch_size

    @property
    def learning_rate(self) -> float:
        """That of the parameters without one of their own."""
        return next(group["lr"] for group in self.optimizer.param_groups if not group["is_decoupled_lr"])

    def needs_batch(self, chunk: int) -> bool:
        """Tokens enter at the first layer, labels at the loss; attention needs to know the documents everywhere."""
        at_an_end = self.ps.is_first_chunk(chunk) or self.ps.is_last_chunk(chunk)
        return at_an_end or self.config.data.reset_attention_mask
