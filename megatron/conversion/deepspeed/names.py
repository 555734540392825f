"""Parameter names of DeepSpeed universal checkpoints, in the three styles of the programs that train them.

A pipeline numbers its stages: Megatron-DeepSpeed has 0 cast, 1 embedding, 2.. layers, final norm, head; BigScience's
fork (BLOOM) has two transpositions around the layers. Without a pipeline the names are those of the module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.core.transformer.transformer_config import TransformerConfig

# Within a layer, and within the embedding: model space -> universal.
_IN_LAYER = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_qkv.": "self_attention.query_key_value.",
    "self_attention.q_layernorm.": "self_attention.q_layernorm.",
    "self_attention.k_layernorm.": "self_attention.k_layernorm.",
    "self_attention.linear_proj.": "self_attention.dense.",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
}
_IN_EMBEDDING = {
    "word_embeddings.": "word_embeddings.",
    "position_embeddings.": "position_embeddings.",
    "word_embeddings_layernorm.": "word_embeddings.norm.",
}
_POSITIONS = "embedding.position_embeddings.weight"


@dataclass(frozen=True)
class Style:
    """How one program names parameters; `{n}` is the number of a layer or of what comes after the layers."""

    name: str
    tied_embedding: str
    untied_embedding: str
    layer: str
    final_norm: str
    head: str
    first_layer: int  # number of layer 0
    gap: int  # numbers without parameters between the last layer and the final norm

    def of(self, key: str, config: TransformerConfig) -> str:
        """The universal name of model-space `key`; raises ValueError for a tensor that these programs do not have."""
        end = self.first_layer + config.num_layers + self.gap
        if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*?)(weight|bias)", key):
            number, module, kind = match.groups()
            if module in _IN_LAYER:
                return self.layer.format(n=self.first_layer + int(number)) + _IN_LAYER[module] + kind
        elif match := re.fullmatch(r"embedding\.(.*\.)(weight|bias)", key):
            tied = not config.untie_embeddings_and_output_weights
            return (self.tied_embedding if tied else self.untied_embedding) + _IN_EMBEDDING[match[1]] + match[2]
        elif match := re.fullmatch(r"decoder\.final_layernorm\.(weight|bias)", key):
            return self.final_norm.format(n=end) + match[1]
        elif key == "output_layer.weight":
            return self.head.format(n=end + 1)
        raise ValueError(f"DeepSpeed universal checkpoints have no place for {key}")


STYLES = {
    style.name: style
    for style in (
        Style("pipeline", "tied_modules.embed.", "1.", "{n}.", "{n}.", "{n}.lm_head.weight", 2, 0),
        Style("bigscience", "tied_modules.embed.", "1.", "{n}.", "{n}.", "{n}.lm_head.weight", 3, 1),
        Style(
            "no-pipeline",
            "language_model.embedding.",
            "language_model.embedding.",
            "language_model.encoder.layers.{n}.",
            "language_model.encoder.final_layernorm.",
            "language_model.output_layer.weight",
            0,
            0,
        ),
    )
}

_LAYER = re.compile(r"(?:language_model\.encoder\.layers\.)?(\d+)\.((?:\w+\.)*?(?:\w+\.))(weight|bias)")
_EMBEDDING = re.compile(
    r"(?:tied_modules\.embed|\d+|language_model\.embedding)\."
    r"(word_embeddings\.|position_embeddings\.|word_embeddings\.norm\.)(weight|bias)"
)
_FINAL_NORM = re.compile(r"(?:\d+|language_model\.encoder\.final_layernorm)\.(weight|bias)")
_HEAD = re.compile(r"(?:\d+\.lm_head|language_model\.output_layer)\.weight")


def model_space_names(names: Iterable[str], description: str) -> dict[str, str]:
    """Model-space key -> universal name; layers are counted from the smallest number that has an input norm.

    Raises ValueError for names of another kind of model, or layers with gaps.
    """
    names = list(names)
    layers = {int(m[1]) for m in map(_LAYER.fullmatch, names) if m and m[2] == "input_layernorm."}
    if not layers:
        raise ValueError(f"{description} has no layers with the names of Megatron-DeepSpeed (N.input_layernorm.weight)")
    first = min(layers)
    if layers != set(range(first, first + len(layers))):
        raise ValueError(f"{description}: layers {sorted(layers)} have gaps: the directory is incomplete")
    keys: dict[str, str] = {}
    unknown = []
    for name in names:
        key = _model_space_name(name.removeprefix("module."), first)
        if key is None:
            unknown.append(name)
        else:
            keys[key] = name
    if unknown:
        raise ValueError(f"{description}: {', '.join(unknown)} are not parameters of a GPT that is supported here")
    return keys


def _model_space_name(name: str, first_layer: int) -> str | None:
    in_layer = {universal: ours for ours, universal in _IN_LAYER.items()}
    in_embedding = {universal: ours for ours, universal in _IN_EMBEDDING.items()}
    if match := _EMBEDDING.fullmatch(name):
        return f"embedding.{in_embedding[match[1]]}{match[2]}"
    if _HEAD.fullmatch(name):
        return "output_layer.weight"
    if match := _FINAL_NORM.fullmatch(name):
        return f"decoder.final_layernorm.{match[1]}"
    match = _LAYER.fullmatch(name)
    if match and match[2] in in_layer:
        return f"decoder.layers.{int(match[1]) - first_layer}.{in_layer[match[2]]}{match[3]}"
    return None
