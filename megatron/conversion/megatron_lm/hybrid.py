"""Checkpoints of Megatron-core's HybridModel whose layers alternate as in a GPT model.

HybridModel has one layer for each symbol of `--hybrid-layer-pattern`: `*` is attention, `-` a dense
MLP, and `E` experts. A layer of a GPT model is a `*` and the `-` or `E` after it, under the same
names, so both directions rename the keys of layers. Other layers, e.g. Mamba, are not in GPT
models.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.conversion.model_space.views import SourceView
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.run_checkpoint.keys import HYBRID_FINAL_NORM, is_weight
from megatron.core.run_checkpoint.source import Source

_LAYER = re.compile(r"\bdecoder\.layers\.(\d+)\.(\w+)")
_ATTENTION = "*"
_MLP = "-"
_EXPERTS = "E"
_GPT_FINAL_NORM = "decoder.final_layernorm."
_ATTENTION_MODULES = ("self_attention", "input_layernorm", "post_self_attn_layernorm")
_MLP_MODULES = ("mlp", "pre_mlp_layernorm", "post_mlp_layernorm")


def find_pattern(keys: Iterable[str], location: str) -> str:
    """Return the pattern of the layers, which their keys show.

    Raises CheckpointError for layers that do not alternate as in a GPT model.
    """
    # Number of the layer -> its symbol
    symbols: dict[int, str] = {}
    for key in keys:
        match = _LAYER.search(key)
        if match is None:
            continue
        layer = int(match[1])
        if match[2] in _ATTENTION_MODULES:
            symbol = _ATTENTION
        elif match[2] in _MLP_MODULES:
            symbol = _MLP
        else:
            raise CheckpointError(
                f"{location}: layer {layer} of HybridModel has {match[2]}, and only attention (*), "
                "MLP (-) and experts (E) are parts of a GPT model"
            )
        # Only a router distinguishes experts from an MLP.
        if ".mlp.router." in key or symbols.get(layer) == _EXPERTS:
            symbol = _EXPERTS
        symbols[layer] = symbol
    # A GPT layer is an attention layer followed by an MLP or by experts.
    pattern = "".join(symbols[layer] for layer in sorted(symbols))
    is_contiguous = sorted(symbols) == list(range(len(symbols)))
    if not is_contiguous or not re.fullmatch(r"(?:\*[-E])+", pattern):
        raise CheckpointError(
            f"{location}: the layers of HybridModel are {pattern}, and only attention followed by "
            "an MLP (*-) or by experts (*E) is a layer of a GPT model"
        )
    return pattern


def make_gpt_key(key: str) -> str:
    """Return the key of a GPT model for one of HybridModel."""

    def halve(match: re.Match[str]) -> str:
        layer = int(match[1]) // 2
        return f"decoder.layers.{layer}.{match[2]}"

    return _LAYER.sub(halve, key.replace(HYBRID_FINAL_NORM, _GPT_FINAL_NORM))


def make_hybrid_key(key: str) -> str:
    """Return the key of HybridModel for one of a GPT model."""

    def double(match: re.Match[str]) -> str:
        # Layer i of the GPT model is layers 2 i (attention) and 2 i + 1 (MLP) of HybridModel.
        is_mlp = match[2] in _MLP_MODULES
        layer = 2 * int(match[1]) + is_mlp
        return f"decoder.layers.{layer}.{match[2]}"

    return _LAYER.sub(double, key.replace(_GPT_FINAL_NORM, HYBRID_FINAL_NORM))


def make_gpt_arguments(args: argparse.Namespace, pattern: str) -> argparse.Namespace:
    """Return the arguments of the GPT model with the layers of `pattern`."""
    values = dict(vars(args))
    if values.get("mtp_num_layers"):
        raise ValueError(
            f"mtp_num_layers is {values['mtp_num_layers']}: the layers for multi-token prediction "
            "of HybridModel are not supported"
        )
    # Every second symbol: `-` or `E`
    mlps = pattern[1::2]
    values["num_layers"] = len(mlps)
    values["is_hybrid_model"] = False
    values["hybrid_layer_pattern"] = None
    values["hybrid_override_pattern"] = None
    if _EXPERTS in mlps:
        values["moe_layer_freq"] = [int(symbol == _EXPERTS) for symbol in mlps]
    return argparse.Namespace(**values)


class HybridLayers(SourceView):
    """A view of `source` with the keys of HybridModel."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        if source.args.get("mtp_num_layers"):
            raise ValueError(
                f"{source.description} has {source.args['mtp_num_layers']} layers for multi-token "
                "prediction, which HybridModel stores in another form: leave out --hybrid-layers"
            )
        self.by_layer = source.tensors
        self.tensors = {make_hybrid_key(key): tensor for key, tensor in source.tensors.items()}
        self.pattern = find_pattern(filter(is_weight, self.tensors), source.description)

    def replace_arguments(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a run of HybridModel, given those of the GPT model."""
        return dict(args) | {
            "num_layers": len(self.pattern),
            "is_hybrid_model": True,
            "hybrid_layer_pattern": self.pattern,
            "moe_layer_freq": 1,
        }
