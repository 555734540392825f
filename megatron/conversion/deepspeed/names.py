"""Names of parameters in universal checkpoints.

There are three styles, those of the programs that train them. A pipeline numbers its stages:
Megatron-DeepSpeed has 0 cast, 1 embedding, 2.. layers, final norm, head; BigScience's fork (BLOOM)
has two transpositions around the layers. Without a pipeline the names are those of the module.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

# Names within a layer and within the embedding: model space -> universal.
_IN_LAYER = {
    "input_layernorm.": "input_layernorm.",  # before a foreign mixer
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
    "embedding.word_embeddings.": "word_embeddings.",
    "embedding.position_embeddings.": "position_embeddings.",
    "embedding.word_embeddings_layernorm.": "word_embeddings.norm.",
}
_FINAL_NORM = "decoder.final_layernorm."
_HEAD = "output_layer.weight"
_KEY = re.compile(r"(?:decoder\.layers\.(\d+)\.)?(.*?)(weight|bias)")


class Style(NamedTuple):
    """Naming scheme of a program; `{n}` is the number of a layer or of a stage after the layers."""

    first_layer: int  # number of layer 0
    gap: int  # numbers without parameters between the last layer and the final norm
    tied_embedding: str = "tied_modules.embed."
    untied_embedding: str = "1."
    layer: str = "{n}."
    final_norm: str = "{n}."
    head: str = "{n}.lm_head.weight"

    def make_name(self, key: str, num_layers: int, tied: bool) -> str:
        """Return the universal name of model-space `key`.

        Raises ValueError for a tensor that these programs do not have.
        """
        end = self.first_layer + num_layers + self.gap  # number of the final norm
        match = _KEY.fullmatch(key)
        if match is not None:
            layer, module, suffix = match.groups()
            if layer is not None and module in _IN_LAYER:
                prefix = self.layer.format(n=self.first_layer + int(layer))
                return prefix + _IN_LAYER[module] + suffix
            if module in _IN_EMBEDDING:
                prefix = self.tied_embedding if tied else self.untied_embedding
                return prefix + _IN_EMBEDDING[module] + suffix
            if module == _FINAL_NORM:
                return self.final_norm.format(n=end) + suffix
            if key == _HEAD:
                return self.head.format(n=end + 1)
        raise ValueError(
            f"universal checkpoints have no name for {key}, nor for any parameter of "
            "--num-experts, --multi-latent-attention and norms after a block: write torch_dist, "
            "legacy or hf"
        )


STYLES = {
    "pipeline": Style(first_layer=2, gap=0),
    "bigscience": Style(first_layer=3, gap=1),
    "no-pipeline": Style(
        first_layer=0,
        gap=0,
        tied_embedding="language_model.embedding.",
        untied_embedding="language_model.embedding.",
        layer="language_model.encoder.layers.{n}.",
        final_norm="language_model.encoder.final_layernorm.",
        head="language_model.output_layer.weight",
    ),
}

_FIRST_NORM = re.compile(r"(?:language_model\.encoder\.layers\.)?(\d+)\.input_layernorm\.weight")


def map_to_model_space(names: Sequence[str], description: str) -> dict[str, str]:
    """Return model-space key -> universal name.

    Layers are counted from the smallest number that has an input norm. Raises ValueError for names
    of another kind of model, and for layers with gaps.
    """
    first_layer, num_layers = _find_layers(names, description)
    model_keys = _list_known_names(first_layer, num_layers)

    # Look up each name.
    keys: dict[str, str] = {}  # name -> model-space key
    unknown = []
    for name in names:
        key = model_keys.get(_remove_wrapper(name))
        if key is None:
            unknown.append(name)
        else:
            keys[name] = key
    if unknown:
        raise ValueError(
            f"{description}: {', '.join(unknown)} are not parameters of a GPT that is supported "
            "here"
        )

    # Invert the mapping.
    names_by_key = {key: name for name, key in keys.items()}
    duplicates = [name for name, key in keys.items() if names_by_key[key] != name]
    if duplicates:
        raise ValueError(
            f"{description}: {', '.join(duplicates)} and other names are the same parameters of "
            "a GPT"
        )
    return names_by_key


def has_megatron_names(names: Sequence[str]) -> bool:
    """Return whether a model has layers with the names of Megatron-DeepSpeed."""
    return any(_FIRST_NORM.fullmatch(_remove_wrapper(name)) for name in names)


def _remove_wrapper(name: str) -> str:
    """Return the name without the prefix of a wrapper around the module."""
    return name.removeprefix("module.")


def _find_layers(names: Sequence[str], description: str) -> tuple[int, int]:
    """Return the number of the first layer, and the number of layers."""
    layers = set()
    for name in names:
        match = _FIRST_NORM.fullmatch(_remove_wrapper(name))
        if match is not None:
            layers.add(int(match[1]))
    if not layers and any(".layers." in name for name in names):
        raise ValueError(
            f"{description} has the names of a model of transformers. Universal checkpoints of "
            "these models, with or without experts (AutoEP), are not supported: save the model in "
            "DeepSpeed with save_pretrained() or save_16bit_model(), and convert that directory"
        )
    if not layers:
        raise ValueError(
            f"{description} has no layers with the names of Megatron-DeepSpeed "
            "(N.input_layernorm.weight)"
        )
    # The first layer follows the embedding, whose number depends on the version.
    first = min(layers)
    if layers != set(range(first, first + len(layers))):
        raise ValueError(
            f"{description}: layers {sorted(layers)} have gaps: the directory is incomplete"
        )
    return first, len(layers)


def _list_known_names(first_layer: int, num_layers: int) -> dict[str, str]:
    """Return every name that any style gives to a parameter -> model-space key."""
    model_keys: dict[str, str] = {}
    for style in STYLES.values():
        shifted = style._replace(first_layer=first_layer)
        for tied in (True, False):
            # Of two keys with the same name the last one, that of the fused norm, is used.
            for key in _list_keys(num_layers):
                model_keys[shifted.make_name(key, num_layers, tied)] = key
    return model_keys


def _list_keys(num_layers: int) -> list[str]:
    """Return every model-space key that universal checkpoints have a name for."""
    modules = [*_IN_EMBEDDING, _FINAL_NORM]
    for layer in range(num_layers):
        for module in _IN_LAYER:
            modules.append(f"decoder.layers.{layer}.{module}")
    keys = [_HEAD]
    for module in modules:
        keys.append(f"{module}weight")
        keys.append(f"{module}bias")
    return keys
