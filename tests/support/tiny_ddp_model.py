"""A tiny model with every kind of parameter that data-parallel buffers distinguish, and a training
loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.core.dist_checkpointing.mapping import Box, ShardedStateDict, ShardedTensor
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.module import Constant, MegatronModule, Normal, ParamInfo, make_parameter
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.sharding import Sharding
from tests.support.boxes import index_box

HIDDEN = 32
VOCAB = 19
PADDED_VOCAB = 32
LAYERS = 3


class Embedding(MegatronModule):
    """Embedding whose rows are split over TP; rows from VOCAB on are padding."""

    def __init__(self, dtype: torch.dtype, tp: Axis) -> None:
        super().__init__()
        self.tp = tp
        sharding = Sharding(dim=0, axis=tp, num_rows=VOCAB)
        info = ParamInfo(Normal(0.5), sharding)
        self.weight = make_parameter((PADDED_VOCAB, HIDDEN), dtype, None, info)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Linear(MegatronModule):
    """Linear layer whose rows and bias are split over TP."""

    def __init__(self, dtype: torch.dtype, tp: Axis) -> None:
        super().__init__()
        self.tp = tp
        rows = Sharding(dim=0, axis=tp)
        weight_info = ParamInfo(Normal(0.2), rows)
        bias_info = ParamInfo(Normal(0.1), rows)
        self.weight = make_parameter((HIDDEN, HIDDEN), dtype, None, weight_info)
        self.bias = make_parameter((HIDDEN,), dtype, None, bias_info)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Layer(MegatronModule):
    """x + linear(norm * x), with a scale that is not reduced over TP."""

    def __init__(self, dtype: torch.dtype, tp: Axis) -> None:
        super().__init__()
        self.norm = make_parameter(
            (HIDDEN,),
            dtype,
            None,
            ParamInfo(Constant(1.0), partial_grad=True),
        )
        self.linear = Linear(dtype, tp)
        self.scale = make_parameter((HIDDEN,), dtype, None, ParamInfo(Constant(1.0)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(F.layer_norm(x, (HIDDEN,), self.norm)))


class Body(MegatronModule):
    def __init__(self, dtype: torch.dtype, tp: Axis, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dtype, tp) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TinyModel(MegatronModule):
    """Model that predicts `labels` from `tokens`; `forward` supports TP 1, other sizes only
    describe parameters.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        tp: Axis | None = None,
        tied: bool = True,
        layers: int = LAYERS,
    ) -> None:
        super().__init__()
        tp = tp or Axis()
        self.word_embeddings = Embedding(dtype, tp)
        self.decoder = Body(dtype, tp, layers)
        self.output_layer = None if tied else Embedding(dtype, tp)

    def forward(self, tokens: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        hidden = self.decoder(self.word_embeddings(tokens))
        output = self.word_embeddings if self.output_layer is None else self.output_layer
        logits = F.linear(hidden, output.weight)[..., :VOCAB].float()
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction=reduction)


def build(
    ps: ParallelState,
    ddp: DistributedDataParallelConfig | None = None,
    config: OptimizerConfig | None = None,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Return the wrapped tiny model and its optimizer."""
    if ddp is None:
        ddp = DistributedDataParallelConfig()
    if config is None:
        config = OptimizerConfig(lr=0.05, weight_decay=0.1)
    model = TinyModel(dtype, ps.tp, **kwargs)
    model.initialize(seed=7)
    chunk = DistributedDataParallel(model, ddp, ps.dp)
    optimizer = MegatronOptimizer([chunk], config, ps)
    return chunk, optimizer


def batch(step: int, sequences: int = 8, length: int = 6) -> tuple[Tensor, Tensor]:
    """Return the global batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, VOCAB, (sequences, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def microbatches(step: int, dp: Axis, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return this replica's share of the global batch as `count` micro-batches."""
    tokens, labels = batch(step)
    local_tokens = tokens.chunk(dp.size)[dp.rank]
    local_labels = labels.chunk(dp.size)[dp.rank]
    return list(zip(local_tokens.chunk(count), local_labels.chunk(count), strict=True))


def backward_pass(
    chunk: DistributedDataParallel, step: int, count: int = 2, loss_scale: float = 1.0
) -> float:
    """Run all micro-batches of a step; return this replica's mean loss."""
    chunk.zero_grad_buffer()
    *first, last = microbatches(step, chunk.dp, count)
    total = 0.0
    with chunk.no_sync():
        for tokens, labels in first:
            loss = chunk(tokens, labels)
            (loss * (loss_scale / count)).backward()
            total += loss.item() / count

    loss = chunk(*last)
    (loss * (loss_scale / count)).backward()
    return total + loss.item() / count


def train(
    rank: int,
    world_size: int,
    ddp: dict[str, Any],
    config: dict[str, Any],
    steps: int,
    count: int = 2,
    dtype: torch.dtype = torch.float32,
    tied: bool = True,
) -> dict[str, Any]:
    """Return losses, norms, final parameters, the boxes of the optimizer and the number of
    buckets.
    """
    if world_size > 1:
        ps = ParallelState.create(ParallelConfig())
    else:
        ps = ParallelState.for_rank(ParallelConfig())
    ddp_config = DistributedDataParallelConfig(**ddp)
    optimizer_config = OptimizerConfig(**config)
    chunk, optimizer = build(ps, ddp_config, optimizer_config, dtype, tied=tied)

    losses = []
    norms = []
    for step in range(steps):
        loss = backward_pass(chunk, step, count, optimizer.loss_scale)
        finalize_model_grads([chunk], ps)
        result = optimizer.step()
        losses.append(loss)
        norms.append(result.grad_norm.item())

    model_state = chunk.sharded_state_dict()  # waits for gathers of parameters
    params = {}
    for name, param in chunk.module.named_parameters():
        params[name] = param.detach().clone()
    return {
        "losses": losses,
        "norms": norms,
        "params": params,
        "state": boxes_of(optimizer.sharded_state_dict(model_state)),
        "plain": optimizer.state_dict(),
        "buckets": len(chunk.buckets),
    }


def boxes_of(
    state: ShardedStateDict,
) -> dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], Tensor]]]]:
    """Return key -> (global shape, [(offset, data)]), copied as a save stores them."""
    boxes = {}
    for key, entry in state.items():
        if isinstance(entry, ShardedTensor):
            copies = [(box.offset, copy_values(entry, box)) for box in entry.boxes]
            boxes[key] = (entry.global_shape, copies)
    return boxes


def copy_values(entry: ShardedTensor, box: Box) -> Tensor:
    """Return a copy of the values of a box as a checkpoint stores them."""
    values = box.tensor.to(entry.dtype, copy=True)
    return values if entry.scale is None else values * entry.scale


def assemble(states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return global tensors from the boxes of all ranks; assert coverage and equal replicas."""
    tensors: dict[str, Tensor] = {}
    is_covered: dict[str, Tensor] = {}
    for state in states:
        for key, (shape, boxes) in state.items():
            if key not in tensors:
                dtype = boxes[0][1].dtype if boxes else None
                tensors[key] = torch.zeros(shape, dtype=dtype)
                is_covered[key] = torch.zeros(shape, dtype=torch.bool)
            for offset, data in boxes:
                slices = index_box(offset, data.shape)
                overlap = is_covered[key][slices]
                assert torch.equal(tensors[key][slices][overlap], data[overlap]), key
                tensors[key][slices] = data
                is_covered[key][slices] = True

    for key, covered in is_covered.items():
        assert covered.all(), f"no box contains some elements of {key}"
    return tensors


def run(
    chunk: DistributedDataParallel, optimizer: MegatronOptimizer, steps: Iterable[int]
) -> list[tuple[float, Any]]:
    """Train one process; return (loss, StepResult) of every step."""
    results = []
    for step in steps:
        loss = backward_pass(chunk, step, loss_scale=optimizer.loss_scale)
        finalize_model_grads([chunk], ParallelState.for_rank(ParallelConfig()))
        results.append((loss, optimizer.step(count_zeros=True)))
    return results


def snapshot(chunk: DistributedDataParallel, optimizer: MegatronOptimizer) -> dict[str, Tensor]:
    """Copy the global tensors of a single-process run: parameters and optimizer."""
    model_state = chunk.sharded_state_dict()
    optimizer_state = optimizer.sharded_state_dict(model_state)
    return assemble([boxes_of(model_state), boxes_of(optimizer_state)])


def region(box: Box) -> tuple[slice, ...]:
    """Return the index of a box in its global tensor."""
    return index_box(box.offset, box.shape)


def fill(state: ShardedStateDict, whole: dict[str, Tensor]) -> None:
    """Copy global tensors into the boxes."""
    for key, entry in state.items():
        assert isinstance(entry, ShardedTensor)
        for box in entry.boxes:
            box.tensor.copy_(whole[key][region(box)])
