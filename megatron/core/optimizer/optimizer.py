"""Optimizer of mixed-precision, sharded training: a few flat tensors and one fused step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from megatron.core.deferred import start_copy
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import Piece
from megatron.core.optimizer.flat_shard import (
    AVERAGE_PREFIX,
    OPTIMIZER_PREFIX,
    FlatShard,
    allocate_shard,
    cast_to_fp8,
    store_with_new_scale,
)
from megatron.core.optimizer.grad_norm import GradNorm, compute_clip_coefficient
from megatron.core.optimizer.grad_scaler import GradScaler
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.update_rules import (
    OptimizerGroup,
    make_update_rule,
    select_states,
)
from megatron.core.parallel_state import ParallelState

logger = logging.getLogger(__name__)

# Entries of a parameter group that are hyperparameters, as Megatron-LM stores them.
_HYPERPARAMETERS = (
    "wd_mult",
    "lr_mult",
    "is_decoupled_lr",
    "max_lr",
    "min_lr",
    "lr",
    "betas",
    "eps",
    "momentum",
    "weight_decay",
)
_CONSTANTS = {"is_expert_parallel": False, "default_config": True, "bias_correction": True}


@dataclass(frozen=True)
class StepResult:
    """Scalars on the device; reading one waits for the device."""

    grad_norm: torch.Tensor
    """Norm of the gradient of the global batch before clipping."""
    skipped: torch.Tensor
    """True if the norm was not finite; parameters and state are then unchanged."""
    held_back: bool
    """True if dynamic loss scaling skipped the step, which is known without reading the device. The
    schedule does not advance then, as in Megatron-LM.
    """
    num_zeros: torch.Tensor | None
    """Zeros in the gradient, including padding of the vocabulary, if they were counted."""


class _RoundedPart(NamedTuple):
    """Part of a tensor that is not fp32, and the fp32 tensor that a load fills."""

    rounded: torch.Tensor
    scale: torch.Tensor | None
    values: torch.Tensor


class MegatronOptimizer:
    """An update rule on the main parameters of this rank's shards, in any precision.

    The shard axis is that of `chunks`: data parallelism with the distributed optimizer, otherwise
    an axis of size 1. A step with a nonfinite gradient is skipped, in any precision.
    The norm, clipping and that decision stay on the device; only dynamic loss scaling waits for it.

    To resume, fill the tensors of `state_to_load`, then call `load_state_dict`. After loading only
    the weights of the model, call `reload_model_params`. The average of --ema-decay is loaded
    separately: fill `average_state`, or call `reset_average` at the end.
    """

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], config: OptimizerConfig, ps: ParallelState
    ) -> None:
        self.chunks = tuple(chunks)
        self.config = config
        self.shards: list[FlatShard] = []
        for chunk in chunks:
            for bucket in chunk.buckets:
                # The rule decides which state tensors the parameters of this bucket have.
                dtypes = {}
                for name in select_states(config, bucket.plan.group):
                    dtypes[name] = config.get_state_dtype(name)
                main_dtype = config.get_state_dtype("param")
                self.shards.append(allocate_shard(bucket, main_dtype, dtypes, self.has_average))
        self._rounded_parts: list[_RoundedPart] = []  # while a checkpoint is loaded
        self.device = self.shards[0].param.device
        # fp16 gradients underflow without loss scaling.
        has_fp16 = any(shard.bucket.param_data.dtype == torch.float16 for shard in self.shards)
        self.grad_scaler = GradScaler(config, has_fp16)
        self._rule = make_update_rule(config, self.shards)
        use_apex = config.optimizer_impl == "apex"
        self._grad_norm = GradNorm(self.shards, self.chunks[0].shard, ps, use_apex)

        # Main parameters get the model's values before these are quantized.
        self._copy_from_model()
        for chunk in chunks:
            for buffer in chunk.flat_buffers:
                if buffer.is_fp8:
                    buffer.quantize()
        self._cast_to_fp8(rescale=True)
        self.reset_average()

    @property
    def has_average(self) -> bool:
        """True if an average of the main parameters is kept (--ema-decay)."""
        return self.config.ema_decay is not None

    @property
    def param_groups(self) -> list[OptimizerGroup]:
        """Hyperparameters by group; the scheduler writes `lr` and `weight_decay`."""
        return self._rule.param_groups

    @property
    def loss_scale(self) -> float:
        """Factor of the loss in the backward pass."""
        return self.grad_scaler.scale

    @torch.no_grad()
    def step(self, count_zeros: bool = False) -> StepResult:
        """Update the parameters from the gradients that `finalize_model_grads` reduced.

        With --overlap-param-gather, the gathering of parameters is still in flight on return.
        `main_grad` stays scaled. Collective over all ranks.
        """
        self._finish_param_sync()

        # Phase 1: the norm; a small reduction over all ranks
        # Gradients are sums over data parallelism of the scaled loss.
        divisor = self.chunks[0].grad_divisor * self.loss_scale
        squares, num_zeros = self._grad_norm.compute(count_zeros)
        norm = squares.sqrt() / divisor
        skipped = ~torch.isfinite(norm)

        # Phase 2: the update; the fused kernels divide gradients by grad_scale, and skip the step
        # if found_inf is 1
        grad_scale = divisor / compute_clip_coefficient(norm, self.config.clip_grad)
        self._rule.grad_scale = grad_scale.float()
        self._rule.found_inf = skipped.float()
        self._rule.step()

        # Phase 3: the average and the model's parameters
        self._update_average()
        self._copy_to_model(is_written=self._rule.WRITES_MODEL)

        # Phase 4: the loss scale of the next step.
        # Only a dynamic loss scale needs the outcome on the host, which waits for the device.
        held_back = self.grad_scaler.dynamic and bool(skipped)
        self.grad_scaler.update(held_back)
        return StepResult(norm, skipped, held_back, num_zeros)

    def sharded_state_dict(self, model_state: ShardedStateDict) -> ShardedStateDict:
        """Return main parameters and state as boxes of the parameters that they belong to.

        `model_state` is the sharded state of all chunks, merged. Without communication or copies: a
        save casts states that are not fp32.
        """
        return self._collect_state(model_state, OPTIMIZER_PREFIX)

    def average_state(self, model_state: ShardedStateDict) -> ShardedStateDict:
        """Return the average of the main parameters as boxes; empty without --ema-decay."""
        return self._collect_state(model_state, AVERAGE_PREFIX)

    def _collect_state(
        self,
        model_state: ShardedStateDict,
        state_name: str,
        rounded_parts: list[_RoundedPart] | None = None,
    ) -> ShardedStateDict:
        """Return the tensors of all shards whose keys start with `state_name`, as boxes.

        With `rounded_parts` all boxes are in fp32: tensors of another dtype and their copies are
        appended to it.
        """
        state: ShardedStateDict = {}
        for shard, param_index, param_slice, entry in self._iterate_pieces(model_state):
            for prefix, data in shard.tensors.items():
                if not prefix.startswith(state_name):
                    continue
                key = prefix + entry.key
                assert key not in state, f"two parameters of this rank have the key {entry.key}"
                # A range of the flat parameter is a set of boxes of the global tensor.
                values = data[param_slice.start : param_slice.stop]
                scale = shard.get_scale(prefix, param_index)
                if values.dtype != torch.float32 and rounded_parts is not None:
                    rounded_parts.append(_RoundedPart(values, scale, values.float()))
                    values = rounded_parts[-1].values
                    scale = None
                sharded = entry.flat_range(key, param_slice.param_start, values)
                if sharded.boxes:  # without boxes it is padding of the vocabulary
                    is_cast = values.dtype != torch.float32
                    state[key] = replace(sharded, dtype=torch.float32, is_cast=is_cast, scale=scale)
        return state

    def weights(self, model_state: ShardedStateDict, live: bool = False) -> ShardedStateDict:
        """Return `model_state` in the form of checkpoints, which do not contain fp8.

        Parameters in fp8 are represented by this rank's main parameters, which a save casts to the
        model's dtype, and a load fills if `live`.
        """
        # Compared by identity: `==` of tensors is elementwise.
        fp8_params: set[int] = set()
        for shard in self.shards:
            if shard.is_fp8:
                fp8_params.update(id(param) for param in shard.bucket.params)
        if not fp8_params:
            return model_state
        state = _exclude_parameters(model_state, fp8_params)
        for shard, _, param_slice, entry in self._iterate_pieces(model_state):
            if shard.is_fp8:
                data = shard.param[param_slice.start : param_slice.stop]
                sharded = entry.flat_range(entry.key, param_slice.param_start, data)
                if not live:
                    sharded = replace(sharded, dtype=entry.dtype, is_cast=True)
                state[entry.key] = sharded
        return state

    def _iterate_pieces(
        self, model_state: ShardedStateDict
    ) -> Iterator[tuple[FlatShard, int, Piece, ShardedTensor]]:
        """Yield each numbered piece of a parameter in this rank's shards with its sharded
        tensor.
        """
        entries = _index_by_param(model_state)
        for shard in self.shards:
            for param_index, param_slice in enumerate(shard.bucket.pieces()):
                yield shard, param_index, param_slice, entries[id(param_slice.param)]

    def state_to_load(self, model_state: ShardedStateDict) -> ShardedStateDict:
        """Return the tensors that a load with optimizer state fills.

        These are the optimizer state and the weights without a main parameter (frozen ones). The
        other weights are not loaded: `load_state_dict` computes them from the main parameters,
        which in an fp32 model share their memory, and in a bf16 checkpoint are more precise.
        """
        trained: set[int] = set()
        for shard in self.shards:
            trained.update(id(param) for param in shard.bucket.params)
        frozen = _exclude_parameters(model_state, trained)
        self._rounded_parts = []
        return frozen | self._collect_state(model_state, OPTIMIZER_PREFIX, self._rounded_parts)

    def state_dict(self) -> dict[str, Any]:
        """Return all state except tensors, in Megatron-LM's form; identical on all ranks.

        Waits for the device.
        """
        return self.start_state_dict()()

    def start_state_dict(self) -> Callable[[], dict[str, Any]]:
        """Begin to copy the present `state_dict` from the device.

        Returns a function that waits for the copy and returns the state, in any thread.
        """
        # Start the only copy from the device; everything else is on the host already.
        steps = self._collect_steps()
        step = start_copy(steps[0].clone()) if steps else None
        groups: list[OptimizerGroup] = []
        for group in self.param_groups:
            options: dict[str, Any] = dict(_CONSTANTS)
            for name in _HYPERPARAMETERS:
                if name in group:
                    options[name] = group[name]
            groups.append(options)
        # The loss scale changes with the next step: take its value now.
        scaler = self.grad_scaler.state_dict()

        # The caller's thread goes on training while another one waits for the copy.
        def finish() -> dict[str, Any]:
            if step is not None:
                for group in groups:
                    group["step"] = int(step())
            state: dict[str, Any] = {
                "optimizer": {"param_groups": groups},
                "param_state_sharding_type": "fully_reshardable",
            }
            if scaler:
                state["grad_scaler"] = scaler
            return state

        return finish

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], model_state: ShardedStateDict) -> None:
        """Finish a load after the tensors of `state_to_load` have been filled.

        Restores the step and the loss scale, and computes the weights from the main parameters.
        Hyperparameters stay as configured; differences are logged. Biases and norms get weight
        decay if they had it, e.g. in DeepSpeed. Collective over all ranks. Raises ValueError when
        the stored step is missing or ambiguous.
        """
        self._finish_param_sync()
        # Step and hyperparameters
        stored_optimizer = state.get("optimizer") or {}
        groups = stored_optimizer.get("param_groups") or []
        steps = self._collect_steps()
        if steps:
            stored_steps = {group.get("step") for group in groups}
            if len(stored_steps) != 1 or None in stored_steps:
                raise ValueError(
                    "the checkpoint's optimizer must have the same step in all param_groups, got "
                    f"{stored_steps}; use --no-load-optim to start with a fresh optimizer"
                )
            # Shards of all groups have taken the same number of steps.
            for step in steps:
                step.fill_(groups[0]["step"])
        if len(groups) > 1 and all(group.get("wd_mult") for group in groups):
            for group in self.param_groups:
                group["wd_mult"] = 1.0
                group["weight_decay"] = self.param_groups[0]["weight_decay"]
        self._log_differences(groups)
        self.grad_scaler.load_state_dict(state.get("grad_scaler", {}))

        # States that are not fp32, main parameters, then the weights
        for rounded_part in self._rounded_parts:
            store_with_new_scale(rounded_part.rounded, rounded_part.values, rounded_part.scale)
        self._rounded_parts = []
        self._zero_padding(model_state)
        self._copy_to_model(rescale=True)

    @torch.no_grad()
    def reload_model_params(self, model_state: ShardedStateDict) -> None:
        """Reset the main parameters from the weights after a load without optimizer state."""
        self._finish_param_sync()
        self._zero_padding(model_state)
        self._copy_from_model()
        self._cast_to_fp8(rescale=True)

    @torch.no_grad()
    def requantize(self) -> None:
        """Quantize fp8 parameters again, with the scales that have just been loaded. Collective."""
        self._finish_param_sync()
        self._cast_to_fp8(rescale=False)

    @torch.no_grad()
    def reset_average(self) -> None:
        """Start the average, if there is one, from the present main parameters."""
        for shard in self.shards:
            if shard.average is not None:
                shard.average.copy_(shard.param)

    def _update_average(self) -> None:
        """Move the average towards the main parameters, unless the step was skipped."""
        if self.config.ema_decay is None:
            return
        # 0 leaves it unchanged without waiting for the device.
        rate = (1.0 - self._rule.found_inf) * (1.0 - self.config.ema_decay)
        for shard in self.shards:
            assert shard.average is not None
            shard.average.lerp_(shard.param, rate)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give the model the averaged weights inside the block, then its own bitwise. Collective.

        An error inside the block leaves the averaged weights in the model. Parameters in fp8 are
        not supported.
        """
        self._exchange_average(enter=True)
        yield
        self._exchange_average(enter=False)

    @torch.no_grad()
    def _exchange_average(self, enter: bool) -> None:
        """Set the model's parameters to the average (`enter`) or to the main parameters."""
        self._finish_param_sync()
        for shard in self.shards:
            assert shard.average is not None and not shard.is_fp8
            if shard.is_model:
                # The only copy of the weights: the average's memory keeps it in the meantime.
                weights = shard.param.clone()
                shard.param.copy_(shard.average)
                shard.average.copy_(weights)
            else:
                # The main parameters keep the run's own weights, from which they are restored.
                shard.bucket.param_shard.copy_(shard.average if enter else shard.param)
        for chunk in self.chunks:
            chunk.start_param_sync()

    def _finish_param_sync(self) -> None:
        for chunk in self.chunks:
            chunk.finish_param_sync()

    def _copy_from_model(self) -> None:
        """Set the main parameters from the model's, except for shared memory and fp8."""
        for shard in self.shards:
            if not (shard.is_model or shard.is_fp8):
                shard.set_main_parameters(shard.bucket.param_shard)

    def _copy_to_model(self, rescale: bool = False, is_written: bool = False) -> None:
        """Set the model's parameters from the main parameters, and start to gather them.

        `rescale`: the stored fp8 scales do not belong to these main parameters. `is_written`: the
        update has written all parameters that are not in fp8.
        """
        for shard in self.shards:
            if not (is_written or shard.is_model or shard.is_fp8):
                shard.copy_main_parameters(shard.bucket.param_shard)
        cast_to_fp8([shard for shard in self.shards if shard.is_fp8], rescale)
        for chunk in self.chunks:
            chunk.start_param_sync()

    def _cast_to_fp8(self, rescale: bool) -> None:
        if any(shard.is_fp8 for shard in self.shards):
            self._copy_to_model(rescale)

    def _zero_padding(self, model_state: ShardedStateDict) -> None:
        """Zero the elements that are in no box: rows that pad the vocabulary.

        As their gradients are zero, they stay zero for the whole run.
        """
        # The model's parameters: the padding follows the boxes.
        for entry in _index_by_param(model_state).values():
            assert entry.local is not None
            flat = entry.local.detach().view(-1)
            flat[_count_elements(entry) :].zero_()

        # Main parameters and state, of which this rank may have any part
        for shard, _, param_slice, entry in self._iterate_pieces(model_state):
            num_in_boxes = max(0, _count_elements(entry) - param_slice.param_start)
            padding_start = min(param_slice.start + num_in_boxes, param_slice.stop)
            for data in shard.tensors.values():
                data[padding_start : param_slice.stop].zero_()

    def _collect_steps(self) -> list[torch.Tensor]:
        """Return the step counters of parameters, all equal; SGD does not have any."""
        steps = []
        for state in self._rule.state.values():
            if "step" in state:
                steps.append(state["step"])
        return steps

    def _log_differences(self, saved_groups: Sequence[Mapping[str, Any]]) -> None:
        """Warn about each hyperparameter with other values than in `saved_groups`."""
        for name in ("betas", "eps", "momentum"):
            old = _collect_values(saved_groups, name)
            new = _collect_values(self.param_groups, name)
            if old and old != new:
                logger.warning(
                    "optimizer %s: the checkpoint has %s, continuing with %s", name, old, new
                )


def _collect_values(groups: Sequence[Mapping[str, Any]], name: str) -> set[Any]:
    """Return the values of a hyperparameter in the groups that have it."""
    values = set()
    for group in groups:
        if name in group:
            value = group[name]
            if isinstance(value, list):
                value = tuple(value)
            values.add(value)
    return values


def _exclude_parameters(state: ShardedStateDict, params: set[int]) -> ShardedStateDict:
    """Return the entries of `state` except those of parameters with the given identities."""
    kept: ShardedStateDict = {}
    for key, entry in state.items():
        if not isinstance(entry, ShardedTensor) or id(entry.local) not in params:
            kept[key] = entry
    return kept


def _index_by_param(model_state: ShardedStateDict) -> dict[int, ShardedTensor]:
    """Return the entries that describe a whole local tensor, by the identity of that tensor."""
    entries = {}
    for entry in model_state.values():
        if isinstance(entry, ShardedTensor) and entry.local is not None:
            entries[id(entry.local)] = entry
    return entries


def _count_elements(entry: ShardedTensor) -> int:
    """Return the number of local elements that are part of the global tensor, without padding."""
    return sum(box.tensor.numel() for box in entry.boxes)
