"""The transformer layers of one pipeline chunk."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.module import MegatronModule, child_sharded_state_dict
from megatron.core.transformer.layer_spec import layer_spec
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer


class TransformerBlock(MegatronModule):
    """Layers `layers` (global numbers) of the model; the last chunk also has the final norm.

    Keys carry the global number, so a checkpoint does not know which stage or chunk held a layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        place: Placement,
        *,
        layers: range,
        post_process: bool,
        stage: dist.ProcessGroup | None = None,
    ) -> None:
        """`stage`: the ranks of this pipeline stage, which must agree on the scales of fp8; None is the world."""
        super().__init__()
        self.spec = layer_spec(config)
        self.config, self.rng, self.layer_numbers = config, place.rng, layers
        by_number = {number: TransformerLayer(config, place, number=number) for number in layers}
        kinds: dict[object, TransformerLayer] = {}
        for number, layer in by_number.items():
            alike = kinds.setdefault((config.window_of(number), layer.place.cp.head_axis.size), layer)
            layer.self_attention.share_tables(alike.self_attention)
        self.layers = nn.ModuleList(by_number.values())
        self.precision = self.spec.precision(config, stage, by_number)
        self.final_layernorm = self.spec.hidden_norm(config, place) if post_process else None

    def forward(self, hidden_states: Tensor, documents: Tensor | None = None) -> Tensor:
        """`[s, b, h]` (or `[s/tp, b, h]`) to the same."""
        with self.precision.chunk():
            for start, stop, recompute in self._groups():
                group = (hidden_states, documents, start, stop)
                hidden_states = self.spec.checkpoint(self._run, self.rng, *group) if recompute else self._run(*group)
        return hidden_states if self.final_layernorm is None else self.final_layernorm(hidden_states)

    def _run(self, hidden_states: Tensor, documents: Tensor | None, start: int, stop: int) -> Tensor:
        for index in range(start, stop):
            with self.precision.layer(self.layer_numbers[index]):
                hidden_states = self.layers[index](hidden_states, documents)
        return hidden_states

    def _groups(self) -> list[tuple[int, int, bool]]:
        """(start, stop, recompute) of consecutive local layers."""
        count = len(self.layers)
        if self.config.recompute_granularity != "full" or not self.training:
            return [(0, count, False)]
        size = self.config.recompute_num_layers
        assert size is not None
        if self.config.recompute_method == "uniform":
            return [(start, min(start + size, count), True) for start in range(0, count, size)]
        size = min(size, count)
        return [(index, index + 1, True) for index in range(size)] + [(size, count, False)]

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        state: ShardedStateDict = {}
        for number, layer in zip(self.layer_numbers, self.layers, strict=True):
            state.update(child_sharded_state_dict(layer, f"{prefix}layers.{number}."))
        if self.final_layernorm is not None:
            state.update(self.final_layernorm.sharded_state_dict(f"{prefix}final_layernorm."))
        return state
