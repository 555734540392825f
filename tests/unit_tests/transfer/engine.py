"""Weights of one rank of an inference engine, with a loader as those of vLLM and SGLang.

Projections are fused, experts are packed, query groups are replicated if there are fewer than
ranks, and the vocabulary is padded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

PADDING = 64  # of the vocabulary


class Engine:
    """One rank: `tp` splits heads, features and vocabulary, `ep` experts."""

    def __init__(self, args: dict, tp_rank: int, tp: int, ep_rank: int = 0, ep: int = 1) -> None:
        self.args = args
        self.tp_rank = tp_rank
        self.tp = tp
        self.hidden = args["hidden_size"]
        self.head = args["hidden_size"] // args["num_attention_heads"]
        self.heads = args["num_attention_heads"] // tp
        self.groups = max(1, args["num_query_groups"] // tp)
        self.replicas = max(1, tp // args["num_query_groups"])
        self.features = args["ffn_hidden_size"] // tp
        num_experts = args.get("num_experts") or 0
        self.experts = range(
            ep_rank * num_experts // ep,
            (ep_rank + 1) * num_experts // ep,
        )
        self.parameters: dict[str, torch.Tensor] = {}
        vocabulary = PADDING // tp
        self._add("embed_tokens", vocabulary, self.hidden)
        self._add("lm_head", vocabulary, self.hidden)
        self._add("norm", self.hidden)
        for layer in range(args["num_layers"]):
            self._add(f"{layer}.input_layernorm", self.hidden)
            self._add(f"{layer}.post_attention_layernorm", self.hidden)
            rows = (self.heads + 2 * self.groups) * self.head
            self._add(f"{layer}.qkv_proj", rows, self.hidden)
            self._add(f"{layer}.o_proj", self.hidden, self.heads * self.head)
            if num_experts:
                self._add(f"{layer}.gate", num_experts, self.hidden)
                self._add(f"{layer}.w13", len(self.experts), 2 * self.features, self.hidden)
                self._add(f"{layer}.w2", len(self.experts), self.hidden, self.features)
            else:
                self._add(f"{layer}.gate_up_proj", 2 * self.features, self.hidden)
                self._add(f"{layer}.down_proj", self.hidden, self.features)

    def _add(self, name: str, *shape: int) -> None:
        self.parameters[name] = torch.full(shape, -1.0)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            layer_name = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
            if layer_name is None:
                self._load_outside(name, weight)
            elif "experts" in name:
                self._load_expert(layer_name[1], layer_name[2], weight)
            else:
                self._load_in_layer(layer_name[1], layer_name[2].split(".")[-1], weight)

    def _load_outside(self, name: str, weight: torch.Tensor) -> None:
        parameter = self.parameters[name.split(".")[-2]]
        if weight.dim() == 1:
            parameter.copy_(weight)
            return
        start = self.tp_rank * len(parameter)
        num_rows = min(len(parameter), max(0, weight.shape[0] - start))
        if num_rows > 0:
            parameter[:num_rows].copy_(weight.narrow(0, start, num_rows))
        parameter[num_rows:].fill_(0)

    def _load_in_layer(self, layer: str, name: str, weight: torch.Tensor) -> None:
        queries = self.heads * self.head
        keys = self.groups * self.head
        group_rank = self.tp_rank // self.replicas
        fused = {  # parameter, first row, number of rows, rank
            "q_proj": ("qkv_proj", 0, queries, self.tp_rank),
            "k_proj": ("qkv_proj", queries, keys, group_rank),
            "v_proj": ("qkv_proj", queries + keys, keys, group_rank),
            "gate_proj": ("gate_up_proj", 0, self.features, self.tp_rank),
            "up_proj": ("gate_up_proj", self.features, self.features, self.tp_rank),
        }
        if name in fused:
            parameter_name, first, rows, rank = fused[name]
            target = self.parameters[f"{layer}.{parameter_name}"].narrow(0, first, rows)
            # As on another device, and in another dtype for the time being
            source = weight.to(torch.float64).narrow(0, rank * rows, rows)
            target.data.copy_(source)
            return
        parameter = self.parameters[f"{layer}.{name}"]
        if name in ("o_proj", "down_proj"):
            weight = weight.chunk(self.tp, dim=1)[self.tp_rank]
        assert parameter.shape == weight.shape
        parameter.copy_(weight)

    def _load_expert(self, layer: str, name: str, weight: torch.Tensor) -> None:
        _, _, expert, projection = name.split(".")  # of Mixtral
        if int(expert) not in self.experts:
            return
        index = int(expert) - self.experts.start
        features = slice(self.tp_rank * self.features, (self.tp_rank + 1) * self.features)
        if projection == "w2":
            # In the transposed order of the other matrices
            columns = weight.t()[features]
            self.parameters[f"{layer}.w2"][index].t().copy_(columns)
            return
        first = self.features if projection == "w3" else 0
        w13 = self.parameters[f"{layer}.w13"][index]
        w13[first : first + self.features].copy_(weight[features])
