"""Runs of the training program inside the worker pool, with their measurements and final state."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron.training.checkpoint.contents import get_model_state
from megatron.training.config.checkpoint_args import read_checkpoint_args
from megatron.training.config.parsing import parse_args
from megatron.training.reporting.intervals import Interval
from megatron.training.run import ForwardStep
from megatron.training.training import pretrain
from pretrain_gpt import datasets_provider, forward_step, model_provider
from tests.support.boxes import index_box
from tests.support.config_server import use_config_server
from tests.support.tiny_ddp_model import copy_values

use_config_server()  # also of the processes that are forked from one with this module

COMMON = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 2e-3 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay "
    "0.1 --clip-grad 1.0 "
    "--init-method-std 0.05 "
    "--hidden-dropout 0 --attention-dropout 0 --num-workers 0 --num-threads 1 --log-interval 1 "
    "--eval-iters 0 "
    "--tokenizer-type NullTokenizer --vocab-size 60 --make-vocab-size-divisible-by 8 "
)
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--ffn-hidden-size 48 "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights "
)
GPT2 = "--position-embedding-type learned_absolute --normalization LayerNorm "
MODELS = {"llama": LLAMA, "gpt2": GPT2}

DISTRIBUTED_OPTIMIZER = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--ddp-bucket-size 3000 "
)
LAYOUTS = {  # name -> (processes, flags)
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2_sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2_interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2",
    ),
    "pp2_uneven": (2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"),
    "dp2": (2, ""),
    "dp2_distributed_optimizer": (2, DISTRIBUTED_OPTIMIZER),
    "tp2_pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "tp2_dp2": (4, f"--tensor-model-parallel-size 2 --sequence-parallel {DISTRIBUTED_OPTIMIZER}"),
    "cp2": (2, f"--context-parallel-size 2 {DISTRIBUTED_OPTIMIZER}"),
    "pp2_cp2": (4, "--pipeline-model-parallel-size 2 --context-parallel-size 2 --cp-comm-type a2a"),
    "pp2_dp2": (4, f"--pipeline-model-parallel-size 2 {DISTRIBUTED_OPTIMIZER}"),
}


@dataclass
class Measurements:
    """A writer of `pretrain` that stores everything."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    params_norms: list[float | None] = field(default_factory=list)
    metrics: list[list[float]] = field(default_factory=list)
    experts: list[dict[str, list[float]]] = field(default_factory=list)
    points: dict[tuple[str, int], float] = field(default_factory=dict)

    def interval(self, interval: Interval) -> None:
        self.losses += [it.lm_loss for it in interval.iterations]
        self.grad_norms += [it.grad_norm for it in interval.iterations]
        self.metrics += [list(it.metrics.values()) for it in interval.iterations]
        self.experts += [it.experts for it in interval.iterations]
        self.skipped += [it.skipped for it in interval.iterations]
        self.params_norms += [it.params_norm for it in interval.iterations]
        self.learning_rates += [it.learning_rate for it in interval.iterations]

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        self.points |= {(name, iteration): value for name, value in values.items()}

    def close(self) -> None:
        pass


@dataclass
class Outcome:
    """Final state of one rank: position, and boxes of weights and optimizer as (key, global shape,
    offset, values).
    """

    measured: Measurements
    iteration: int
    consumed_train_samples: int
    learning_rate: float
    boxes: list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]


def get_losses(outcomes: Sequence[Outcome]) -> list[float]:
    """Return the losses of the only rank that reports: the first one of the last stage."""
    (losses,) = (outcome.measured.losses for outcome in outcomes if outcome.measured.losses)
    return losses


def train(
    rank: int,
    world_size: int,
    flags: str,
    common: str = COMMON,
    forward_step: ForwardStep = forward_step,
) -> Outcome:
    """Run `pretrain_gpt.py COMMON FLAGS` as one rank of the existing group."""
    measured = Measurements()
    argv = shlex.split(common + flags)
    config = parse_args(argv, world_size, read_checkpoint_args(argv, world_size))
    run = pretrain(config, model_provider, datasets_provider, forward_step, writers=[measured])
    model = get_model_state(run)
    state = run.optimizer.weights(model) | run.optimizer.sharded_state_dict(model)
    state |= run.optimizer.average_state(model)
    boxes = [
        (key, entry.global_shape, box.offset, copy_values(entry, box))
        for key, entry in state.items()
        for box in entry.boxes
    ]
    return Outcome(
        measured, run.state.iteration, run.state.consumed_train_samples, run.learning_rate, boxes
    )


def whole(outcomes: list[Outcome]) -> dict[str, torch.Tensor]:
    """Return global tensors from the boxes of all ranks; assert coverage and equal overlaps."""
    tensors: dict[str, torch.Tensor] = {}
    is_covered: dict[str, torch.Tensor] = {}
    for outcome in outcomes:
        for key, shape, offset, values in outcome.boxes:
            if key not in tensors:
                tensors[key] = torch.zeros(shape, dtype=values.dtype)
                is_covered[key] = torch.zeros(shape, dtype=torch.bool)
            slices = index_box(offset, values.shape)
            overlap = is_covered[key][slices]
            current = tensors[key][slices]
            assert torch.equal(current[overlap], values[overlap]), f"replicas of {key} differ"
            tensors[key][slices] = values
            is_covered[key][slices] = True

    for key, covered in is_covered.items():
        assert covered.all(), f"no rank has some elements of {key}"
    return tensors
