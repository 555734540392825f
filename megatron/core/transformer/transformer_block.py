"""One transformer layer, and the layers of one pipeline chunk."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.module import MegatronModule, child_sharded_state_dict
from megatron.core.tensor_parallel import recompute_intermediate
from megatron.core.transformer.attention.multi_head import Attention, SelfAttention
from megatron.core.transformer.layer_spec import select_layer_spec
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norm import Norm, NormColumnParallelLinear
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.wings import resolve

_LATENT_ATTENTION = "megatron.core.transformer.attention.latent:MultiLatentAttention"
_MOE_LAYER = "megatron.core.transformer.moe:MoELayer"  # imported if a layer has experts


class TransformerLayer(MegatronModule):
    """`x = x + attention(norm(x))`, then `x = x + mlp(norm(x))`, with dropout on both branches.

    With --parallel-residual both branches have the same input.
    Norms are part of the projections before or after them (--norm-placement). A norm with several
    consumers is a separate module: the one of the router and all experts, and the one of the first
    projections of latent attention. Its keys in checkpoints are the same.
    """

    def __init__(
        self, config: TransformerConfig, placement: Placement, *, layer_number: int = 0
    ) -> None:
        """Initialize layer `layer_number` of the model.

        The layers of multi-token prediction follow those of the model, and are like the last one.
        """
        super().__init__()
        like = min(layer_number, config.num_layers - 1)
        # The communication of context parallelism may differ between layers.
        placement = replace(placement, cp=placement.cp.layer(like))
        spec = select_layer_spec(config)
        self.config = config
        self.placement = placement

        self.shared_layernorm = None
        if config.share_parallel_norm:
            self.shared_layernorm = spec.make_hidden_norm(config, placement)

        # Attention
        self.input_layernorm = None
        self.self_attention: Attention
        if config.multi_latent_attention:
            if config.has_input_norms:
                self.input_layernorm = spec.make_hidden_norm(config, placement)
            self.self_attention = resolve(_LATENT_ATTENTION)(config, placement, layer_number=like)
        else:
            self.self_attention = SelfAttention(config, placement, layer_number=like)

        # MLP
        self.pre_mlp_layernorm = None
        self.mlp: MegatronModule
        self.has_experts = config.moe_layer_pattern[like]
        if self.has_experts:
            if config.has_input_norms:
                self.pre_mlp_layernorm = spec.make_hidden_norm(config, placement)
            self.mlp = resolve(_MOE_LAYER)(config, placement, layer_number=layer_number)
        else:
            self.mlp = MLP(config, placement)

    def forward(self, hidden_states: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the residual stream after the layer, `[s, b, h]` (or `[s/tp, b, h]`)."""
        # Each branch is a separate statement instead of one method with norm and branch as
        # arguments: --compile breaks the graph within the branches, and torch before 2.8 compiles
        # again for every bound method that is used on both sides of a break.
        if self.config.parallel_residual:
            return self._forward_parallel(hidden_states, documents)
        hidden_states, normed = self._add_and_normalize(hidden_states, None, self.attention_norm)
        attention = self._attend(hidden_states, documents, normed)
        branch = self._scale_and_drop(attention)
        hidden_states, normed = self._add_and_normalize(hidden_states, branch, self.mlp_norm)
        mlp = self._feed_forward(hidden_states, normed)
        return hidden_states + self._scale_and_drop(mlp)

    @property
    def attention_norm(self) -> MegatronModule | None:
        """The module with the norm of the attention branch's input, which may be a projection."""
        if self.input_layernorm is not None:
            return self.input_layernorm
        return getattr(self.self_attention, "linear_qkv", None)

    @property
    def mlp_norm(self) -> MegatronModule | None:
        """The module with the norm of the MLP branch's input, which may be a projection."""
        if self.pre_mlp_layernorm is not None:
            return self.pre_mlp_layernorm
        # Recomputation of the MLP begins with its norm, whose result is not kept.
        if self.config.recomputes("mlp"):
            return None
        return getattr(self.mlp, "linear_fc1", None)

    def _add_and_normalize(
        self,
        hidden_states: Tensor,
        branch: Tensor | None,
        norm: MegatronModule | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream with `branch`, and its norm if one kernel computes both.

        The kernel also adds their gradients; without a `branch` that is its only purpose.
        """
        if isinstance(norm, Norm | NormColumnParallelLinear) and not self._recomputes_norms():
            fused = norm.add_and_normalize(hidden_states, branch)
            if fused is not None:
                return fused
        if branch is not None:
            hidden_states = hidden_states + branch
        return hidden_states, None

    def _forward_parallel(self, hidden_states: Tensor, documents: Tensor | None) -> Tensor:
        """Return the residual stream after a layer whose branches have the same input."""
        inputs = hidden_states
        if self.shared_layernorm is not None:
            inputs = self.shared_layernorm(hidden_states)
        attention = self._attend(inputs, documents)
        mlp = self._feed_forward(inputs)
        return hidden_states + self._scale_and_drop(attention) + self._scale_and_drop(mlp)

    def _attend(
        self, hidden_states: Tensor, documents: Tensor | None, normed: Tensor | None = None
    ) -> Tensor:
        """Return the output of the attention branch before dropout.

        `normed` is the norm of `hidden_states` if it has been computed.
        """
        norm = self.input_layernorm
        if normed is not None:
            if norm is None:
                return self.self_attention(normed, documents, is_normalized=True)
            return self.self_attention(normed, documents)
        if norm is None:
            return self.self_attention(hidden_states, documents)
        if self._recomputes_norms():
            attention = partial(self.self_attention, documents=documents)
            return recompute_intermediate(norm, attention, hidden_states)
        return self.self_attention(norm(hidden_states), documents)

    def _feed_forward(self, hidden_states: Tensor, normed: Tensor | None = None) -> Tensor:
        """Return the output of the MLP branch before dropout.

        `normed` is the norm of `hidden_states` if it has been computed.
        """
        norm = self.pre_mlp_layernorm
        if normed is not None:
            if norm is None:
                return self.mlp(normed, is_normalized=True)
            return self._run_mlp(normed)
        if norm is None:
            return self._run_mlp(hidden_states)
        if self._recomputes_norms():
            return recompute_intermediate(norm, self._run_mlp, hidden_states)
        return self._run_mlp(norm(hidden_states))

    def _recomputes_norms(self) -> bool:
        return self.config.recomputes("layernorm") and self.training

    def _run_mlp(self, hidden_states: Tensor) -> Tensor:
        # The name of the branch in --recompute-modules
        module = "moe" if self.has_experts else "mlp"
        if self.config.recomputes(module) and self.training:
            spec = select_layer_spec(self.config)
            # Without a stream of random numbers, because an MLP does not have dropout.
            return spec.checkpoint(self.mlp, None, hidden_states)
        return self.mlp(hidden_states)

    def _scale_and_drop(self, branch: Tensor) -> Tensor:
        """Apply the multiplier of residual branches and dropout."""
        if self.config.residual_multiplier != 1.0:
            branch = branch * self.config.residual_multiplier
        if self.config.hidden_dropout == 0.0 or not self.training:
            return branch
        # Under sequence parallelism the TP ranks have different tokens, and draw different numbers.
        with self.placement.rng.fork_if(self.placement.sequence_parallel):
            return F.dropout(branch, self.config.hidden_dropout)


class LayerGroup(NamedTuple):
    """Consecutive layers of a chunk, by local index."""

    start: int
    stop: int
    recompute: bool


def list_layer_groups(config: TransformerConfig, num_layers: int) -> list[LayerGroup]:
    """Return the groups of a chunk's layers between which training keeps activations."""
    if config.recompute_granularity != "full":
        return [LayerGroup(0, num_layers, recompute=False)]
    size = config.recompute_num_layers
    assert size is not None
    groups = []
    if config.recompute_method == "uniform":
        # All layers in groups of `size`: only the input of a group is kept.
        for start in range(0, num_layers, size):
            stop = min(start + size, num_layers)
            groups.append(LayerGroup(start, stop, recompute=True))
        return groups
    # "block": the first layers are recomputed one by one, the others are not recomputed.
    num_recomputed = min(size, num_layers)
    for index in range(num_recomputed):
        groups.append(LayerGroup(index, index + 1, recompute=True))
    groups.append(LayerGroup(num_recomputed, num_layers, recompute=False))
    return groups


class TransformerBlock(MegatronModule):
    """The layers of a pipeline chunk; the last chunk also has the final norm.

    Keys contain the global number of a layer, so checkpoints do not depend on stages and chunks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        placement: Placement,
        *,
        layers: range,
        post_process: bool,
        stage: dist.ProcessGroup | None = None,
    ) -> None:
        """Initialize the `layers` with these global numbers.

        `stage` contains the ranks of this pipeline stage, which share fp8 scales; None is the
        world.
        """
        super().__init__()
        self.spec = select_layer_spec(config)
        self.config = config
        self.rng = placement.rng
        self.layer_numbers = layers  # global numbers by local index

        # Layers, and the precision of the chunk, which depends on them
        by_number: dict[int, TransformerLayer] = {}
        for layer_number in layers:
            by_number[layer_number] = TransformerLayer(config, placement, layer_number=layer_number)
        self._share_tables(by_number)
        self.layers = nn.ModuleList(by_number.values())
        self.precision = self.spec.precision(config, stage, by_number)

        # Final norm
        self.final_layernorm = None
        if post_process:
            self.final_layernorm = self.spec.make_hidden_norm(config, placement)

    def _share_tables(self, by_number: dict[int, TransformerLayer]) -> None:
        """Let all layers of a kind use the tables of the first one."""
        first_of_kind: dict[object, TransformerLayer] = {}
        for layer_number, layer in by_number.items():
            # Masks depend on the window, and on the heads of this rank (ALiBi).
            has_rope = layer.self_attention.rotary is not None
            table_key = (
                self.config.get_window(layer_number),
                layer.placement.cp.head_axis.size,
                has_rope,
            )
            first = first_of_kind.setdefault(table_key, layer)
            layer.self_attention.share_tables(first.self_attention)

    def forward(self, hidden_states: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the residual stream after the chunk, `[s, b, h]` (or `[s/tp, b, h]`)."""
        with self.precision.chunk():
            groups = [LayerGroup(0, len(self.layers), recompute=False)]
            if self.training:
                groups = list_layer_groups(self.config, len(self.layers))
            for start, stop, recompute in groups:
                # Keeps only the input of the group, and runs it again in the backward pass.
                if recompute:
                    hidden_states = self.spec.checkpoint(
                        self._run_layers, self.rng, hidden_states, documents, start, stop
                    )
                else:
                    hidden_states = self._run_layers(hidden_states, documents, start, stop)
        if self.final_layernorm is None:
            return hidden_states
        return self.final_layernorm(hidden_states)

    def _run_layers(
        self, hidden_states: Tensor, documents: Tensor | None, start: int, stop: int
    ) -> Tensor:
        """Apply the layers with the local indices from `start` to `stop`."""
        for index in range(start, stop):
            layer_number = self.layer_numbers[index]
            # Whether a layer computes in fp8 depends on its global number.
            with self.precision.layer(layer_number):
                hidden_states = self.layers[index](hidden_states, documents)
        return hidden_states

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Return the parameters, under keys with the global numbers of the layers."""
        state: ShardedStateDict = {}
        for layer_number, layer in zip(self.layer_numbers, self.layers, strict=True):
            state.update(child_sharded_state_dict(layer, f"{prefix}layers.{layer_number}."))
        if self.final_layernorm is not None:
            state.update(self.final_layernorm.sharded_state_dict(f"{prefix}final_layernorm."))
        return state
