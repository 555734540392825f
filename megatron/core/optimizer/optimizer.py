"""The optimizer of mixed-precision, sharded training: a few flat fp32 tensors and one fused step.

Before it comes what is known of the gradients: their norm, clipping, and the loss scale, by which
the loss is multiplied so that small gradients do not vanish in fp16.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import Piece
from megatron.core.module import ParamInfo
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.flat_shard import FlatShard, cast_to_fp8, make_shard, make_update_rule
from megatron.core.optimizer.update_rules import MatrixLayout, apex_sum_of_squares, matrix_layouts
from megatron.core.parallel_state import Axis, ParallelState


class GradScaler:
    """What the loss is multiplied by: --loss-scale if it is given, a dynamic scale for fp16, else
    1.

    A dynamic scale is doubled after `loss_scale_window` steps without overflow, and halved by the
    `hysteresis`-th overflow and later ones. Overflows are counted since the scale last grew; a
    single good step does not forgive them (Megatron-LM's rule). A fixed one has no state.
    """

    def __init__(self, config: OptimizerConfig, fp16: bool) -> None:
        self.dynamic = fp16 and config.loss_scale is None
        self.scale = config.initial_loss_scale if self.dynamic else config.loss_scale or 1.0
        self._config = config
        self._good_steps = 0
        self._tolerated = config.hysteresis

    def update(self, found_inf: bool) -> None:
        """After every step."""
        if not self.dynamic:
            return
        if found_inf:
            self._good_steps = 0
            self._tolerated -= 1
            if self._tolerated <= 0:
                self.scale = max(self.scale / 2, self._config.min_loss_scale)
            return
        self._good_steps += 1
        if self._good_steps == self._config.loss_scale_window:
            self._good_steps = 0
            self._tolerated = self._config.hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, Any]:
        """In Megatron-LM's form."""
        if not self.dynamic:
            return {}
        return {
            "scale": torch.tensor([self.scale]),
            "growth_tracker": self._good_steps,
            "hysteresis_tracker": self._tolerated,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The empty state of a run without dynamic scaling changes nothing."""
        if not (state and self.dynamic):
            return
        missing = {"scale", "growth_tracker", "hysteresis_tracker"} - state.keys()
        if missing:
            raise ValueError(
                f"the checkpoint's loss scaling lacks {', '.join(sorted(missing))}: give --no-load-optim"
            )
        self.scale = float(state["scale"])
        self._good_steps = int(state["growth_tracker"])
        self._tolerated = int(state["hysteresis_tracker"])


_ROW = 1024


def sum_of_squares(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of the squares of flat fp32 tensors, a scalar in fp64.

    Rows are summed in fp32 and the rows' sums in fp64: as fast as one fp32 sum and as precise as an
    fp64 one. (A plain fp32 sum on a CPU is off by 1e-3 for 32 million elements.)
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        whole_rows = grad.numel() // _ROW * _ROW
        for rows in (grad[:whole_rows].view(-1, _ROW), grad[whole_rows:].view(1, -1)):
            total += torch.linalg.vector_norm(rows, dim=1).double().square().sum()
    return total


def count_zeros(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Number of zeros, a scalar in fp64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        total += grad.numel() - torch.count_nonzero(grad)
    return total


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of `norm` are multiplied by; `max_norm` 0 means no clipping."""
    if max_norm == 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


logger = logging.getLogger(__name__)

# Entries of a param group that are hyperparameters, as Megatron-LM stores them.
_HYPERPARAMETERS = (
    "wd_mult", "lr_mult", "is_decoupled_lr", "max_lr", "min_lr", "lr", "betas", "eps", "momentum", "weight_decay",
)  # fmt: skip
_CONSTANTS = {"is_expert_parallel": False, "default_config": True, "bias_correction": True}


@dataclass(frozen=True)
class StepResult:
    """Scalars on the device; nothing waits for the device until they are read."""

    grad_norm: torch.Tensor
    """Norm of the gradient of the global batch before clipping."""
    skipped: torch.Tensor
    """True when the norm was not finite: then parameters and state are as they were before the
    step.
    """
    held_back: bool
    """Skipped by the dynamic loss scale, which is known at once; Megatron-LM's schedule does not
    advance then.
    """
    num_zeros: torch.Tensor | None
    """Zeros in the gradient, padding of the vocabulary included, if they were to be counted."""


class MegatronOptimizer:
    """An update rule on the fp32 main parameters of this rank's shards, for any precision, sharded
    or not.

    The shard axis is that of `chunks`: the data-parallel one with the distributed optimizer, else
    one of size 1. A step with a gradient that is not finite changes nothing, in any precision.
    Norm, clipping and that decision stay on the device; only dynamic loss scaling waits for it.

    To resume, fill the tensors of `state_to_load`, then call `load_state_dict`. After loading the
    model's weights alone, call `reload_model_params`.
    """

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], config: OptimizerConfig, ps: ParallelState
    ) -> None:
        self.chunks = tuple(chunks)
        self.config = config
        self.shards = [make_shard(bucket, config) for chunk in chunks for bucket in chunk.buckets]
        self.device = self.shards[0].param.device
        fp16 = any(shard.bucket.param_data.dtype == torch.float16 for shard in self.shards)
        self.grad_scaler = GradScaler(config, fp16)
        layouts: dict[nn.Parameter, MatrixLayout] = {}
        if config.optimizer == "muon":
            of_shards = (s.bucket.params for s in self.shards if s.bucket.plan.group.is_matrix)
            matrices = {param for params in of_shards for param in params}
            for chunk in chunks:
                state = chunk.sharded_state_dict()
                layouts |= matrix_layouts(state, matrices, config.muon_split_qkv, ps.tp, ps.etp)
        self._rule = make_update_rule(self.shards, config, layouts)
        self._norm_axis = _norm_axis(self.chunks[0].shard, ps)
        self._counted_grads, self._num_gaps = self._find_counted_grads(ps)
        self._copy_from_model()
        for buffer in (
            buffer for chunk in chunks for buffer in chunk.flat_buffers if buffer.is_fp8
        ):
            buffer.quantize()
        self._cast_to_fp8(rescale=True)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Hyperparameters by group; the scheduler writes `lr` and `weight_decay`."""
        return self._rule.param_groups

    @property
    def loss_scale(self) -> float:
        """What the loss has to be multiplied by before backward."""
        return self.grad_scaler.scale

    @torch.no_grad()
    def step(self, count_zeros: bool = False) -> StepResult:
        """Update the parameters from the reduced gradients, after `finalize_model_grads`;
        collective over all ranks.

        Leaves the gathering of parameters under way with --overlap-param-gather, and `main_grad`
        scaled.
        """
        self._finish_param_sync()
        # Phase 1: the norm, one small reduction over all ranks
        divisor = self.chunks[0].grad_divisor * self.loss_scale
        squares, num_zeros = self._sum_over_model(count_zeros)
        norm = squares.sqrt() / divisor
        skipped = ~torch.isfinite(norm)
        # Phase 2: the update; the fused kernels divide the gradients by grad_scale, and do nothing
        # with found_inf
        grad_scale = divisor / clip_coefficient(norm, self.config.clip_grad)
        self._rule.grad_scale = grad_scale.float()
        self._rule.found_inf = skipped.float()
        self._rule.step()
        # Phase 3: the model
        self._copy_to_model()
        held_back = self.grad_scaler.dynamic and bool(skipped)
        self.grad_scaler.update(held_back)
        return StepResult(norm, skipped, held_back, num_zeros)

    def sharded_state_dict(self, model_state: ShardedStateDict) -> ShardedStateDict:
        """Main parameters and state as boxes of the parameters they belong to; nothing is copied or
        communicated.

        `model_state` is the sharded state of all chunks, merged.
        """
        state: ShardedStateDict = {}
        for shard, piece, entry in self._pieces(model_state):
            for name, data in shard.tensors.items():
                key = f"optimizer.state.{name}.{entry.key}"
                assert key not in state, f"two parameters of this rank have the key {entry.key}"
                part = entry.flat_range(key, piece.param_start, data[piece.start : piece.stop])
                if part.boxes:  # else it is padding of the vocabulary
                    state[key] = part
        return state

    def weights(self, model_state: ShardedStateDict, live: bool = False) -> ShardedStateDict:
        """`model_state` as checkpoints have it: parameters in fp8 are this rank's main ones, in the model's dtype.

        `live`: these main ones themselves, to be loaded into.
        """
        fp8 = {id(param) for s in self.shards if s.is_fp8 for param in s.bucket.params}
        if not fp8:
            return model_state
        state = {
            k: e
            for k, e in model_state.items()
            if not (isinstance(e, ShardedTensor) and id(e.local) in fp8)
        }
        for shard, piece, entry in self._pieces(model_state):
            if shard.is_fp8:
                main = shard.param[piece.start : piece.stop]
                state[entry.key] = entry.flat_range(
                    entry.key, piece.param_start, main if live else main.to(entry.dtype)
                )
        return state

    def _pieces(
        self, model_state: ShardedStateDict
    ) -> Iterator[tuple[FlatShard, Piece, ShardedTensor]]:
        """What lies in this rank's shards, with its entry."""
        entries = _entries_by_param(model_state)
        for shard in self.shards:
            for piece in shard.bucket.pieces():
                yield shard, piece, entries[id(piece.param)]

    def state_to_load(self, model_state: ShardedStateDict) -> ShardedStateDict:
        """What a load with optimizer state fills: that state, and weights that have no main
        parameter (frozen ones).

        `load_state_dict` makes the other weights from the main parameters. They must not be loaded, too: those of an
        fp32 model are the main parameters, the same memory, and a bf16 checkpoint has them in two
        precisions.
        """
        trained = {
            id(param)
            for chunk in self.chunks
            for bucket in chunk.buckets
            for param in bucket.params
        }
        frozen = {
            key: entry
            for key, entry in model_state.items()
            if not (isinstance(entry, ShardedTensor) and id(entry.local) in trained)
        }
        return frozen | self.sharded_state_dict(model_state)

    def state_dict(self) -> dict[str, Any]:
        """All but the tensors, in Megatron-LM's form, the same on every rank; waits for the device."""
        groups: list[dict[str, Any]] = []
        for group in self.param_groups:
            groups.append(
                _CONSTANTS | {name: group[name] for name in _HYPERPARAMETERS if name in group}
            )
            for step in self._steps()[:1]:
                groups[-1]["step"] = int(step)
        state = {
            "optimizer": {"param_groups": groups},
            "param_state_sharding_type": "fully_reshardable",
        }
        scaler = self.grad_scaler.state_dict()
        return {**state, "grad_scaler": scaler} if scaler else state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], model_state: ShardedStateDict) -> None:
        """Finish loading once the tensors have been filled: step, loss scale, and the model from
        the main parameters.

        Hyperparameters stay as configured; those that differ are logged. Collective over all ranks.
        Raises ValueError when the stored step is missing or ambiguous.
        """
        self._finish_param_sync()
        groups = (state.get("optimizer") or {}).get("param_groups") or []
        if self._steps():
            stored = {group.get("step") for group in groups}
            if len(stored) != 1 or None in stored:
                raise ValueError(
                    f"the checkpoint's optimizer must have the same step in all param_groups, got {stored}; give "
                    "--no-load-optim to start with a fresh one"
                )
            for step in self._steps():
                step.fill_(groups[0]["step"])
        self._log_differences(groups)
        self.grad_scaler.load_state_dict(state.get("grad_scaler", {}))
        self._zero_padding(model_state)
        self._copy_to_model(rescale=True)

    @torch.no_grad()
    def reload_model_params(self, model_state: ShardedStateDict) -> None:
        """Main parameters from the model's, after weights have been loaded without optimizer state."""
        self._finish_param_sync()
        self._zero_padding(model_state)
        self._copy_from_model()
        self._cast_to_fp8(rescale=True)

    @torch.no_grad()
    def requantize(self) -> None:
        """After the scales of fp8 have been loaded: the parameters by them. Collective."""
        self._finish_param_sync()
        self._cast_to_fp8(rescale=False)

    def _sum_over_model(self, with_zeros: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum of squares of the undivided gradient and its number of zeros, over TP x PP x DP."""
        squares = apex_sum_of_squares if self.config.optimizer_impl == "apex" else sum_of_squares
        sums = [squares(self._counted_grads, self.device)]
        if with_zeros:
            sums.append(count_zeros(self._counted_grads, self.device) - self._num_gaps)
        total = torch.stack(sums)
        if self._norm_axis.size > 1:
            dist.all_reduce(total, group=self._norm_axis.group)
        return total[0], total[1] if with_zeros else None

    def _find_counted_grads(self, ps: ParallelState) -> tuple[list[torch.Tensor], int]:
        """Gradients that this rank counts for the whole model, in few ranges, and how many elements
        are just gaps.
        """
        grads: list[torch.Tensor] = []
        num_elements = 0
        for shard in self.shards:
            counted = partial(counts_for_model, ps=ps, sharded=shard.bucket.is_sharded)
            grads += shard.bucket.grad_ranges(counted)
            num_elements += sum(p.stop - p.start for p in shard.bucket.pieces() if counted(p.info))
        return grads, sum(len(grad) for grad in grads) - num_elements

    def _finish_param_sync(self) -> None:
        for chunk in self.chunks:
            chunk.finish_param_sync()

    def _copy_from_model(self) -> None:
        for shard in self.shards:
            if not (shard.is_model or shard.is_fp8):
                shard.param.copy_(shard.bucket.param_shard)

    def _copy_to_model(self, rescale: bool = False) -> None:
        """`rescale`: the scales of fp8 are not of these main parameters."""
        for shard in self.shards:
            if not (shard.is_model or shard.is_fp8):
                shard.bucket.param_shard.copy_(shard.param)
        cast_to_fp8([shard for shard in self.shards if shard.is_fp8], rescale)
        for chunk in self.chunks:
            chunk.start_param_sync()

    def _cast_to_fp8(self, rescale: bool) -> None:
        if any(shard.is_fp8 for shard in self.shards):
            self._copy_to_model(rescale)

    def _zero_padding(self, model_state: ShardedStateDict) -> None:
        """Zero what is in no box, the rows that pad the vocabulary: with zero gradients they stay
        zero for ever.
        """
        entries = _entries_by_param(model_state)
        for entry in entries.values():
            assert entry.local is not None
            entry.local.detach().view(-1)[_numel_in_boxes(entry) :].zero_()
        for shard in self.shards:
            for piece in shard.bucket.pieces():
                padding = piece.start + max(
                    0, _numel_in_boxes(entries[id(piece.param)]) - piece.param_start
                )
                for data in shard.tensors.values():
                    data[min(padding, piece.stop) : piece.stop].zero_()

    def _steps(self) -> list[torch.Tensor]:
        """Adam's step counters, all equal; none for SGD."""
        return [state["step"] for state in self._rule.state.values() if "step" in state]

    def _log_differences(self, stored: Sequence[Mapping[str, Any]]) -> None:
        for name in ("betas", "eps", "momentum"):
            ours = {group.get(name) for group in self.param_groups}
            theirs = {tuple(g[name]) if name == "betas" else g[name] for g in stored if name in g}
            if theirs and ours != theirs:
                logger.warning(
                    "optimizer %s: the checkpoint has %s, continuing with %s", name, theirs, ours
                )


def counts_for_model(info: ParamInfo, ps: ParallelState, sharded: bool) -> bool:
    """Whether this rank counts its part of a parameter in a sum over the whole model, taken over
    `_norm_axis`.
    """
    if not ps.config.splits_experts:
        return info.counted and (info.tp_split or ps.tp.is_first)
    if info.expert:
        return (info.tp_split or ps.etp.is_first) and (sharded or ps.edp.is_first)
    return info.counted and (info.tp_split or ps.tp.is_first) and (sharded or ps.dp_cp.is_first)


def _norm_axis(shard: Axis, ps: ParallelState) -> Axis:
    """The ranks that hold different parts of the gradient: all, or those of one replica if each has
    a whole one.
    """
    if shard.size == 1 and not ps.config.splits_experts:
        return ps.model
    return Axis(ps.rank, ps.world_size, tuple(range(ps.world_size)), dist.group.WORLD)


def _entries_by_param(model_state: ShardedStateDict) -> dict[int, ShardedTensor]:
    """The entries that describe a whole local tensor, by its identity."""
    tensors = (entry for entry in model_state.values() if isinstance(entry, ShardedTensor))
    return {id(entry.local): entry for entry in tensors if entry.local is not None}


def _numel_in_boxes(entry: ShardedTensor) -> int:
    return sum(box.tensor.numel() for box in entry.boxes)
