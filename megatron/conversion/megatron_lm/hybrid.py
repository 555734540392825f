"""Checkpoints of Megatron-core's HybridModel whose layers alternate as in a GPT model.

HybridModel has one layer for each symbol of `--hybrid-layer-pattern`: `*` is attention, `+` latent
attention, `-` a dense MLP, and `E` experts. A layer of a GPT model is an attention layer and the
MLP after it, under the same names, so both directions rename the keys of layers. After the model's
layers, the pattern repeats `/` and the layers of one depth of multi-token prediction, e.g.
`*-*E/*E`. Other layers, e.g. Mamba, are not in GPT models.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.conversion.model_space.views import SourceView
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.run_checkpoint.keys import HYBRID_FINAL_NORM, is_weight
from megatron.core.run_checkpoint.source import Source

# The model or a depth of prediction, the layer of HybridModel, and a name in the layer
_LAYER = re.compile(
    r"\b(?:decoder|mtp\.layers\.(?P<depth>\d+)\.mtp_model_layer)"
    r"\.layers\.(?P<layer>\d+)\.(?P<name>[\w.]+)"
)
_GPT_LAYER = re.compile(
    r"\b(?:decoder\.layers\.(?P<layer>\d+)|mtp\.layers\.(?P<depth>\d+)\.transformer_layer)"
    r"\.(?P<name>[\w.]+)"
)
_GPT_FINAL_NORM = "decoder.final_layernorm."
_MLP_MODULES = ("mlp.", "pre_mlp_layernorm.", "post_mlp_layernorm.")
_EXPERTS = "E"
_LATENT = "+"
# Names in a layer -> its symbol. The first row with a name of the layer counts.
_SYMBOLS: dict[tuple[str, ...], str] = {
    ("mixer.",): "M",
    ("self_attention.core_attention.indexer.",): "D",
    ("self_attention.in_proj.",): "G",
    ("mlp.router.",): _EXPERTS,
    ("self_attention.linear_kv_down_proj.",): _LATENT,
    ("self_attention.", "input_layernorm.", "post_self_attn_layernorm."): "*",
    _MLP_MODULES: "-",
}
_OTHER_LAYERS = {"M": "Mamba", "D": "sparse attention", "G": "a gated delta net"}
_QK_NORM = re.compile(r"self_attention\.(?:[qk]_layernorm|linear_(?:q|kv)_up_proj\.layer_norm_)")
_LAYER_PATTERNS = ("window_attn_skip_freq", "no_rope_freq")  # arguments with an entry per layer
_LAYER_COUNTS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


def find_pattern(keys: Iterable[str], location: str) -> str:
    """Return the pattern of the layers, which their keys show.

    Raises CheckpointError for layers that do not alternate as in a GPT model.
    """
    # Depth of prediction (-1: the model) -> layer -> names in it
    stacks: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for key in keys:
        match = _LAYER.search(key)
        if match is not None:
            depth = int(match["depth"] or -1)
            stacks[depth][int(match["layer"])].add(match["name"])

    patterns = []
    for depth in sorted(stacks):
        layers = stacks[depth]
        pattern = "".join(_find_symbol(layer, layers[layer], location) for layer in sorted(layers))
        # A GPT layer is an attention layer followed by an MLP or by experts.
        is_contiguous = sorted(layers) == list(range(len(layers)))
        if not is_contiguous or not re.fullmatch(r"(?:\*[-E])+|(?:\+[-E])+", pattern):
            raise CheckpointError(
                f"{location}: the layers of HybridModel are {pattern}, and only attention (*, or + "
                "in all layers) followed by an MLP (-) or by experts (E) is a layer of a GPT model"
            )
        patterns.append(pattern)
    _check_prediction_layers(patterns, location)
    return "/".join(patterns)


def _find_symbol(layer: int, names: set[str], location: str) -> str:
    """Return the symbol of a layer of HybridModel with these names of tensors."""
    symbols = []
    for prefixes, symbol in _SYMBOLS.items():
        if any(name.startswith(prefixes) for name in names):
            symbols.append(symbol)
    is_mlp = {name.startswith(_MLP_MODULES) for name in names}
    if symbols and symbols[0] not in _OTHER_LAYERS and len(is_mlp) == 1:
        return symbols[0]
    content = ", ".join(sorted({name.partition(".")[0] for name in names}))
    if symbols and symbols[0] in _OTHER_LAYERS:
        content = f"{content}: {_OTHER_LAYERS[symbols[0]]} ({symbols[0]})"
    raise CheckpointError(
        f"{location}: layer {layer} of HybridModel has {content}, and only attention (* and +), "
        "MLP (-) and experts (E) are parts of a GPT model"
    )


def _check_prediction_layers(patterns: list[str], location: str) -> None:
    """Raise CheckpointError unless each depth of prediction has a layer like the model's last."""
    if not patterns:
        raise CheckpointError(f"{location}: HybridModel has no layers")
    last_layer = patterns[0][-2:]
    for depth, pattern in enumerate(patterns[1:]):
        if pattern != last_layer:
            raise CheckpointError(
                f"{location}: depth {depth} of multi-token prediction has the layers {pattern}, "
                f"but a GPT model predicts with a copy of its last layer ({last_layer})"
            )


def make_gpt_key(key: str) -> str:
    """Return the key of a GPT model for one of HybridModel."""

    def halve(match: re.Match[str]) -> str:
        if match["depth"] is not None:
            return f"mtp.layers.{match['depth']}.transformer_layer.{match['name']}"
        return f"decoder.layers.{int(match['layer']) // 2}.{match['name']}"

    return _LAYER.sub(halve, key.replace(HYBRID_FINAL_NORM, _GPT_FINAL_NORM))


def make_hybrid_key(key: str) -> str:
    """Return the key of HybridModel for one of a GPT model."""

    def double(match: re.Match[str]) -> str:
        # Layer i of the GPT model is layers 2 i (attention) and 2 i + 1 (MLP) of HybridModel.
        is_mlp = match["name"].startswith(_MLP_MODULES)
        if match["depth"] is not None:
            prefix = f"mtp.layers.{match['depth']}.mtp_model_layer.layers"
            return f"{prefix}.{int(is_mlp)}.{match['name']}"
        return f"decoder.layers.{2 * int(match['layer']) + is_mlp}.{match['name']}"

    return _GPT_LAYER.sub(double, key.replace(_GPT_FINAL_NORM, HYBRID_FINAL_NORM))


def make_gpt_arguments(
    args: argparse.Namespace, pattern: str, keys: Iterable[str]
) -> argparse.Namespace:
    """Return the arguments of the GPT model with the layers of `pattern` and the tensors `keys`."""
    values = dict(vars(args))
    main_pattern, *depths = pattern.split("/")
    mlps = main_pattern[1::2]
    values["num_layers"] = len(mlps)
    values["mtp_num_layers"] = len(depths) or None
    values["is_hybrid_model"] = False
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern"):
        values[name] = None
    if _EXPERTS in mlps:
        values["moe_layer_freq"] = [int(symbol == _EXPERTS) for symbol in mlps]
    # The pattern implies latent attention. Norms of q and k follow from the layers, not from flags.
    if _LATENT in pattern:
        values["multi_latent_attention"] = True
    if not any(map(_QK_NORM.search, keys)):
        values["qk_layernorm"] = False

    # Layer i of the GPT model attends in layer 2 i of HybridModel.
    for name in _LAYER_PATTERNS:
        entries = _expand_pattern(name, values.get(name), len(main_pattern))
        if entries is not None:
            values[name] = entries[::2]
            _check_prediction_pattern(name, values[name], len(depths))
    for name in _LAYER_COUNTS:
        if isinstance(values.get(name), int):
            values[name] //= 2
    return argparse.Namespace(**values)


def _expand_pattern(name: str, pattern: Any, num_layers: int) -> list[int] | None:
    """Return an entry for each layer of a pattern, which may be every n-th layer.

    None if there is no pattern, or one that the check of all arguments rejects.
    """
    if isinstance(pattern, list):
        return pattern
    if not isinstance(pattern, int) or pattern < 1:
        return None
    is_every_nth = [layer_number % pattern == 0 for layer_number in range(1, num_layers + 1)]
    # Every n-th layer has no window, or no RoPE: a 0 in the former pattern, a 1 in the latter.
    value = name == "no_rope_freq"
    return [int(is_nth == value) for is_nth in is_every_nth]


def _check_prediction_pattern(name: str, entries: list[int], num_depths: int) -> None:
    """Raise ValueError if a depth of prediction differs from the model's last layer.

    HybridModel counts the layers of each depth from the first entry of the pattern.
    """
    if num_depths and entries and entries[0] != entries[-1]:
        raise ValueError(
            f"{name} is {entries}: layers for multi-token prediction have its first entry in "
            "HybridModel and its last one in a GPT model, so both must be equal"
        )


class HybridLayers(SourceView):
    """A view of `source` with the keys of HybridModel."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.by_layer = source.tensors
        self.tensors = {make_hybrid_key(key): tensor for key, tensor in source.tensors.items()}
        self.pattern = find_pattern(filter(is_weight, self.tensors), source.description)

    def replace_arguments(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a run of HybridModel, given those of the GPT model."""
        values = dict(args)
        main_pattern, *depths = self.pattern.split("/")
        for name in _LAYER_PATTERNS:
            entries = _expand_pattern(name, values.get(name), len(main_pattern) // 2)
            if entries is not None:
                _check_prediction_pattern(name, entries, len(depths))
                values[name] = [entry for entry in entries for _ in range(2)]
        for name in _LAYER_COUNTS:
            if values.get(name):
                values[name] *= 2
        return values | {
            "num_layers": len(main_pattern),
            "pipeline_model_parallel_layout": None,  # of layers of the GPT model
            "is_hybrid_model": True,
            "hybrid_layer_pattern": self.pattern,
            "moe_layer_freq": 1,
        }
