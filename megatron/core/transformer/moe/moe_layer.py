"""MoE layer: routing, token dispatch, grouped experts, and the shared expert."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.module import (
    MegatronModule,
    Normal,
    ParamInfo,
    child_sharded_state_dict,
    make_parameter,
)
from megatron.core.parallel_state import ExpertAxes
from megatron.core.tensor_parallel import recompute_intermediate
from megatron.core.transformer.grouped_linear import GroupedLinear
from megatron.core.transformer.layer_spec import select_layer_spec
from megatron.core.transformer.mlp import MLP, get_activation
from megatron.core.transformer.moe.dispatch import DISPATCHERS
from megatron.core.transformer.moe.router import Routing, TopKRouter
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig


class MoELayer(MegatronModule):
    """`Y = sum_e p_e(X) expert_e(X)` over the top k experts, plus that of the shared expert.

    Experts are distributed over EP, and the inner width of each is split over ETP. It includes
    the norm of its output, if --norm-placement requires one.
    """

    def __init__(
        self, config: TransformerConfig, placement: Placement, *, layer_number: int
    ) -> None:
        super().__init__()
        assert config.num_experts is not None
        axes = placement.experts
        device = placement.device
        self.axes = axes
        self.num_local = config.num_experts // axes.ep.size  # experts of this rank
        dispatcher = config.moe_token_dispatcher_type
        if axes.all.size == 1:
            # Without an exchange all dispatchers do the same; "alltoall" needs fewer operations.
            dispatcher = "alltoall"
        self.dispatch = DISPATCHERS[dispatcher]
        self.router = TopKRouter(
            config,
            layer_number=layer_number,
            axes=axes,
            partial_grad=placement.sequence_parallel,
            device=device,
        )
        self.experts = GroupedExperts(config, axes=axes, device=device)
        self.averages = config.moe_average_shared_expert
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size:
            self.shared_experts = SharedExperts(config, placement)
        self.post_layernorm = None
        if config.norm_placement != "pre":
            self.post_layernorm = select_layer_spec(config).make_hidden_norm(config, placement)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the output of the branch, `[s, b, h]` (or `[s/tp, b, h]`) as its input."""
        _, batch, hidden_size = hidden_states.shape
        tokens = hidden_states.reshape(-1, hidden_size)  # [s * b, h]
        routing = self.router(tokens, batch)
        output = self.run_experts(tokens, routing)
        output = output.view_as(hidden_states)
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden_states)
            if self.averages:
                output = output / 2
        if self.post_layernorm is not None:
            output = self.post_layernorm(output)
        return output

    def run_experts(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Return the sum of the outputs of each token's experts `[t, h]`.

        Not traced with --compile: the numbers of rows depend on the data.
        """
        return self.dispatch(tokens, routing, self.experts, self.num_local, self.axes)


class SharedExperts(MLP):
    """An expert that processes every token, split over TP like any MLP.

    With --moe-shared-expert-gate its output is multiplied by a learned gate (Qwen2-MoE).
    """

    def __init__(self, config: TransformerConfig, placement: Placement) -> None:
        super().__init__(
            config,
            placement,
            ffn_size=config.moe_shared_expert_intermediate_size,
            shared_expert=True,
        )
        self.gate_weight = None
        if config.moe_shared_expert_gate:
            info = ParamInfo(
                Normal(config.hidden_init_std), partial_grad=placement.sequence_parallel
            )
            shape = (1, config.hidden_size)
            self.gate_weight = make_parameter(shape, config.params_dtype, placement.device, info)

    def forward(self, hidden_states: Tensor, *, is_normalized: bool = False) -> Tensor:
        output = super().forward(hidden_states, is_normalized=is_normalized)
        if self.gate_weight is None:
            return output
        gate = torch.sigmoid(F.linear(hidden_states, self.gate_weight))  # [s, b, 1]
        return gate * output


class GroupedExperts(MegatronModule):
    """The MLPs of a rank's experts.

    The weight of a token multiplies its inner activation, before the second projection.
    """

    def __init__(
        self, config: TransformerConfig, *, axes: ExpertAxes, device: torch.device | None = None
    ) -> None:
        super().__init__()
        make_linear: Callable[..., Any] = select_layer_spec(config).grouped or GroupedLinear
        # Recomputing the whole layer includes the activation.
        self.recompute = config.recomputes("moe_act") and not config.recomputes("moe")
        self.activation = get_activation(config)
        inner_size = config.moe_ffn_size
        # The rows of a gated layer are two stacked matrices: gate and up.
        num_blocks = 2 if config.gated else 1
        self.linear_fc1 = make_linear(
            config,
            config.hidden_size,
            num_blocks * inner_size,
            init=Normal(config.hidden_init_std),
            split_dim=1,
            num_blocks=num_blocks,
            axes=axes,
            bias=config.add_bias_linear,
            device=device,
        )
        self.linear_fc2 = make_linear(
            config,
            inner_size,
            config.hidden_size,
            init=Normal(config.output_init_std),
            split_dim=2,
            axes=axes,
            bias=config.add_bias_linear,
            device=device,
        )

    def forward(self, rows: Tensor, probs: Tensor, counts: Tensor) -> Tensor:
        """Apply the experts to `rows` `[n, h]`, which are sorted by expert.

        `counts` are the numbers of rows of each expert, `probs` `[n, 1]` the weights of the rows.
        """
        inner = self.linear_fc1(rows, counts)  # [n, ffn/etp], twice that when gated
        if not (self.recompute and self.training):
            return self.linear_fc2(self._activate(inner, probs), counts, probs)
        # Discard the activation after its use, and compute it again in the backward pass. It has no
        # dropout, so the state of the generators does not matter.
        activate = partial(
            torch_checkpoint,
            self._activate,
            probs=probs,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        project = partial(self.linear_fc2, counts=counts, probs=probs)
        return recompute_intermediate(activate, project, inner)

    def _activate(self, inner: Tensor, probs: Tensor) -> Tensor:
        """Return the weighted activation, `[n, ffn/etp]`."""
        activated = self.activation(inner)
        # The product is fp32 or fp64 if the router computes in that dtype (--moe-router-dtype).
        return (activated * probs).to(activated.dtype)

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Return the parameters under the keys of Megatron-core, which contain `experts` twice."""
        state: ShardedStateDict = {}
        for name, child in self.named_children():
            state.update(child_sharded_state_dict(child, f"{prefix}experts.{name}."))
        return state
