"""The configuration of a model. Field names are the argument names of Megatron-LM."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.flags import FlagSection, find_field_problems, raise_problems
from megatron.core.transformer import model_rules
from megatron.core.transformer.model_options import ModelOptions


@dataclass
class TransformerConfig(ModelOptions, FlagSection):
    """A complete and consistent definition of a model; it is stored in checkpoints."""

    def __post_init__(self) -> None:
        """Fill defaults that depend on other fields.

        Raises ValueError that lists everything that is missing, out of range or contradictory.
        """
        self._convert_losses_to_lists()
        # Defaults depend on valid sizes.
        raise_problems(find_field_problems(self))
        raise_problems(model_rules.find_size_problems(self))
        self._fill_rope_type()
        if self.mtp_num_layers == 0:
            self.mtp_num_layers = None
        if self.kv_channels is None:
            self.kv_channels = self.hidden_size // self.num_attention_heads
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = self._compute_default_ffn_size()
        if not self.group_query_attention:
            self.num_query_groups = self.num_attention_heads
        elif self.num_query_groups is None:
            self.num_query_groups = 1
        if self.has_experts and self.moe_ffn_hidden_size is None:
            self.moe_ffn_hidden_size = self.ffn_hidden_size
        raise_problems([*find_field_problems(self), *model_rules.find_problems(self)])

    def _fill_rope_type(self) -> None:
        if self.position_embedding_type == "yarn":
            self.position_embedding_type = "rope"
            self.rope_type = "yarn"
        if self.rope_type is not None:
            return
        # The defaults of Megatron-LM
        self.rope_type = "rope"
        if self.multi_latent_attention:
            self.rope_type = "yarn"

    def _compute_default_ffn_size(self) -> int:
        if self.swiglu:
            # A gated MLP has three matrices: as many parameters as two of width 4 * hidden_size.
            return int(4 * self.hidden_size * 2 / 3 / 64) * 64
        return 4 * self.hidden_size


class LayerKind(NamedTuple):
    """Properties in which the layers of a model differ."""

    experts: bool = False
    window: bool = False
    cp_comm_type: str = "p2p"

    @classmethod
    def from_model(
        cls, model: TransformerConfig, number: int, cp_comm_type: str = "p2p"
    ) -> LayerKind:
        has_experts = bool(model.moe_layer_pattern[number])
        has_window = bool(model.window_pattern[number])
        return cls(has_experts, has_window, cp_comm_type)


LOCAL_BACKEND_FIELDS: dict[str, Any] = {
    "transformer_impl": "local",
    "fp8": None,
    "fp4": None,
    "fp8_param_gather": False,
    "cross_entropy_fusion_impl": "native",
    "apply_rope_fusion": False,
    "norm_impl": "torch",
}
"""Replacements that select the local backend for a model of which only the shapes are needed."""


def select_architecture_fields(*kinds: str) -> list[dataclasses.Field[Any]]:
    """Return the fields that decide "shapes" or "mathematics" of a model; by default both."""
    selected = []
    for field in dataclasses.fields(TransformerConfig):
        decides = field.metadata["decides"]
        if decides and (not kinds or decides in kinds):
            selected.append(field)
    return selected


def flag_name(argument: str) -> str:
    """Return the command-line spelling of an argument, for messages."""
    field = TransformerConfig.__dataclass_fields__.get(argument)
    if field is not None and field.metadata["flags"]:
        return str(field.metadata["flags"][0])
    return "--" + argument.replace("_", "-")


def is_used(field: dataclasses.Field[Any], conditions: Mapping[str, Any]) -> bool:
    """Return whether a model with these `find_conditions` depends on `field`.

    For example, the rotary base has an effect only with rotary position embeddings.
    """
    for name, required_value in field.metadata["when"].items():
        if conditions[name] != required_value:
            return False
    return True


def find_conditions(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conditions that fields depend on: `values`, and properties derived from several.

    `values` are those of a `TransformerConfig` or the arguments of a checkpoint, which may lack
    fields.
    """
    # Experts
    has_experts = (values.get("num_experts") or 0) > 1
    freq = values.get("moe_layer_freq", 1)
    has_dense_layers = 0 in freq if isinstance(freq, list) else freq > 1

    # Positions
    is_latent = bool(values.get("multi_latent_attention"))
    position_type = values.get("position_embedding_type")
    has_rope = is_latent or position_type in ("rope", "yarn")
    rope_type = values.get("rope_type")
    if not rope_type:
        rope_type = "yarn" if is_latent or position_type == "yarn" else "rope"
    # Megatron-LM's latent attention scales its scores by these fields for any rope type.
    has_yarn = is_latent or (has_rope and rope_type == "yarn")
    has_longrope = has_rope and rope_type == "longrope"
    derived = {
        "multi_latent_attention": is_latent,
        "use_mup": bool(values.get("use_mup")),
        "has_rope": has_rope,
        "has_yarn": has_yarn,
        "has_longrope": has_longrope,
        "has_yarn_or_longrope": has_yarn or has_longrope,
        "has_window": values.get("window_size") is not None,
        "has_experts": has_experts,
        "has_dense_layers": not has_experts or has_dense_layers,
        "has_groups": bool(values.get("moe_router_num_groups")),
        "has_shared_experts": bool(values.get("moe_shared_expert_intermediate_size")),
        "drops_tokens": values.get("moe_expert_capacity_factor") is not None,
    }
    return derived | dict(values)


def spell_out_mup(config: TransformerConfig) -> TransformerConfig:
    """Return the same model without --use-mup, with the factors of other flags instead."""
    if not config.use_mup:
        return config
    return dataclasses.replace(
        config,
        use_mup=False,
        embedding_multiplier=config.embedding_factor,
        logits_scaling=config.logits_divisor,
        softmax_scale=config.chosen_score_scale,
    )


def compute_model_signature(config: TransformerConfig) -> dict[str, Any]:
    """Return a description of the computed function.

    Two configurations of the same model have the same signature even if their flags differ.
    """
    signature: dict[str, Any] = {"vocab_size": config.vocab_size}
    conditions = find_conditions(vars(config))
    for field in dataclasses.fields(config):
        if not field.metadata["decides"]:
            continue
        # A derived property states the meaning of fields that have several spellings.
        name = field.metadata["meaning"] or field.name
        if not is_used(field, conditions):
            # Another field may have stated the same property.
            signature.setdefault(name, None)
            continue
        value = getattr(config, name)
        if isinstance(value, list):
            value = tuple(value)
        signature[name] = value
    return signature
