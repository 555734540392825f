"""Rules of models in which some layers have another mixer than attention: foreign tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megatron.conversion.huggingface.config_fields import ConfigFields, Json
from megatron.conversion.huggingface.rules import Rule, unsupported
from megatron.conversion.huggingface.window_rules import LAYER_TYPES
from megatron.core.safe_files import schema
from megatron.core.safe_files.schema import COUNT, Check
from megatron.core.transformer.transformer_config import TransformerConfig

STATE_SPACE = "state space mixer"
CONVOLUTION = "short convolution"


def _make_foreign_mixers(mixer: str, has_attention: Sequence[bool]) -> Json:
    """Return the arguments of a model whose layers without attention have mixers of this kind."""
    if all(has_attention):
        return {"foreign_mixers": None}
    return {"foreign_mixers": ["" if value else mixer for value in has_attention]}


def _find_attention(
    field: str, layer_types: Sequence[str], mixer_types: Sequence[str]
) -> list[bool]:
    """Return which layers have attention. `mixer_types` are the names of the other layers."""
    strange = set(layer_types) - set(_ATTENTION_KINDS) - set(mixer_types)
    if strange:
        supported = f"{', '.join([*_ATTENTION_KINDS, *mixer_types])} are"
        raise unsupported(field, sorted(strange), supported)
    return [layer_type in _ATTENTION_KINDS for layer_type in layer_types]


# Granite 4: attention or state space layers, under their names in transformers 4.x or 5.x.
_ATTENTION_KINDS = ("attention", "full_attention")
_LAYER_KINDS = ("layer_types", "layers_block_type")


def _read_attention_layers(hf_config: ConfigFields, args: Json) -> Json:
    layer_types = hf_config.first(*_LAYER_KINDS)
    if layer_types is None:
        layer_types = ["linear_attention"] * args["num_layers"]
    has_attention = _find_attention(_LAYER_KINDS[0], layer_types, ("mamba", "linear_attention"))
    return _make_foreign_mixers(STATE_SPACE, has_attention)


def _write_attention_layers(config: TransformerConfig) -> Json:
    # The name in transformers 4.x, which 5.x knows as well. It checks sizes of state space layers
    # even if there are none, and one head fits any width.
    return {"layer_types": [_ATTENTION_KINDS[0]] * config.num_layers, "mamba_n_heads": 1}


ATTENTION_LAYERS = Rule(
    dict.fromkeys(_LAYER_KINDS, LAYER_TYPES["layer_types"]) | {"mamba_n_heads": COUNT},
    _read_attention_layers,
    _write_attention_layers,
)


# LFM2: attention or short convolutions.
def _read_convolutions(hf_config: ConfigFields, args: Json) -> Json:
    layer_types = hf_config.first("layer_types")
    if layer_types is not None:
        has_attention = _find_attention("layer_types", layer_types, ("conv",))
        return _make_foreign_mixers(CONVOLUTION, has_attention)
    layers = range(args["num_layers"])
    attention_layers = hf_config.first("full_attn_idxs")
    if attention_layers is None:
        attention_layers = layers
    return _make_foreign_mixers(CONVOLUTION, [layer in attention_layers for layer in layers])


def _write_convolutions(config: TransformerConfig) -> Json:
    return {"layer_types": [_ATTENTION_KINDS[1]] * config.num_layers}


CONVOLUTIONS = Rule(
    LAYER_TYPES | {"full_attn_idxs": schema.sequence(COUNT, 10**5)},
    _read_convolutions,
    _write_convolutions,
)


def foreign_layers(
    mixer: str,
    fields: Mapping[str, Check],
    find_attention: Callable[[ConfigFields, int], Sequence[bool]],
) -> Rule:
    """Map layers of which some have mixers of this foreign kind, as all models of a family have.

    `find_attention` returns which layers have attention, from the fields and the number of layers.
    """

    def read(hf_config: ConfigFields, args: Json) -> Json:
        has_attention = find_attention(hf_config, args["num_layers"])
        if all(has_attention):
            first = next(iter(fields))
            raise unsupported(first, hf_config.first(first), f"a model with a {mixer} is")
        return _make_foreign_mixers(mixer, has_attention)

    return Rule(fields, read)


def _find_listed_attention(hf_config: ConfigFields, num_layers: int) -> list[bool]:
    attention_layers = hf_config.first("attn_layer_indices") or ()
    return [layer in attention_layers for layer in range(num_layers)]


# Bamba.
LISTED_ATTENTION = foreign_layers(
    STATE_SPACE, {"attn_layer_indices": schema.sequence(COUNT, 10**5)}, _find_listed_attention
)


def _find_periodic_attention(hf_config: ConfigFields, num_layers: int) -> list[bool]:
    period = hf_config.first("attn_layer_period")
    offset = hf_config.first("attn_layer_offset")
    return [layer % period == offset for layer in range(num_layers)]


# Jamba.
PERIODIC_ATTENTION = foreign_layers(
    STATE_SPACE,
    {"attn_layer_period": schema.integer(1, 10**5), "attn_layer_offset": COUNT},
    _find_periodic_attention,
)


def _find_layers_of_attention(hf_config: ConfigFields, num_layers: int) -> list[bool]:
    layer_types = hf_config.first("layer_types") or _ATTENTION_KINDS[1:] * num_layers
    return _find_attention("layer_types", layer_types, ("conv",))


# LFM2 with experts.
CONVOLUTION_LAYERS = foreign_layers(CONVOLUTION, LAYER_TYPES, _find_layers_of_attention)
