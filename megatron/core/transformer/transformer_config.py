"""The configuration of a model. Field names are the argument names of Megatron-LM."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.flags import CHANGED, FlagRule, FlagSection, find_field_problems, raise_problems
from megatron.core.transformer.model_options import ACTIVATIONS, ModelOptions
from megatron.core.wings import resolve

_FIND_EXPERT_PROBLEMS = "megatron.core.transformer.expert_flag_rules:find_expert_problems"
_SHARED_EXPERT = "moe_shared_expert_intermediate_size"
_LOSSES = "moe_router_load_balancing_type"


@dataclass
class TransformerConfig(ModelOptions, FlagSection):
    """A complete and consistent definition of a model; it is stored in checkpoints."""

    # Rules of values and of several flags; those of one flag are in its field.
    RULES: ClassVar[tuple[FlagRule, ...]] = (
        FlagRule(
            {"clip_qkv": True, "qk_layernorm": True},
            requires={"qk_layernorm_across_heads": True},
            reason="published models clip before the norm of all heads, but after that of each",
        ),
        FlagRule(
            {"rope_type": ("yarn", "longrope")},
            requires={"rotary_scaling_factor": True, "original_max_position_embeddings": True},
        ),
        FlagRule({"rope_type": "longrope"}, requires={"rotary_stretch": 1.0}),
        FlagRule(
            {"query_length_scaling": CHANGED, "multi_latent_attention": False},
            requires={"position_embedding_type": "rope"},
        ),
        FlagRule(
            {"recompute_granularity": "full"},
            requires={"recompute_method": True, "recompute_num_layers": True},
        ),
        FlagRule(
            {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
            requires={"transformer_impl": "transformer_engine"},
            reason="it has the kernel",
        ),
        # The options of experts have no effect in a dense model.
        FlagRule(
            {"experts": True, "moe_shared_expert_gate": True}, requires={_SHARED_EXPERT: True}
        ),
        FlagRule(
            {"experts": True, "moe_average_shared_expert": True}, requires={_SHARED_EXPERT: True}
        ),
        FlagRule(
            {"experts": True, _SHARED_EXPERT: True},
            requires={"add_bias_linear": False},
            reason="shared experts do not have biases",
        ),
        FlagRule(
            {"experts": True, "moe_router_num_groups": CHANGED},
            requires={"moe_router_group_topk": CHANGED},
        ),
        FlagRule(
            {"experts": True, "moe_router_group_topk": CHANGED},
            requires={"moe_router_num_groups": CHANGED},
        ),
        FlagRule(
            {"experts": True, "moe_pad_expert_input_to_capacity": True},
            requires={"moe_expert_capacity_factor": True},
            excludes={"moe_router_enable_expert_bias": True},
            reason="padding gives all experts the same load, so their bias never changes",
        ),
        # The counts of tokens accumulate over the micro-batches of a step.
        FlagRule(
            {"experts": True, _LOSSES: "global_aux_loss"},
            excludes={"recompute_granularity": "full"},
            reason="recomputed layers would count their tokens twice; use aux_loss or seq_aux_loss",
        ),
        FlagRule(
            {"experts": True, _LOSSES: "sinkhorn"},
            excludes={
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_num_groups": True,
                "moe_router_topk_scaling_factor": True,
                "moe_expert_capacity_factor": True,
            },
            reason="they do not affect the choice by sinkhorn",
        ),
    )

    def __post_init__(self) -> None:
        """Fill defaults that depend on other fields.

        Raises ValueError that lists everything that is missing, out of range or contradictory.
        """
        self._convert_losses_to_lists()
        # Defaults depend on valid sizes.
        raise_problems(find_field_problems(self))
        raise_problems(self._find_size_problems())
        self._fill_rope_type()
        if self.mtp_num_layers == 0:
            self.mtp_num_layers = None
        if self.kv_channels is None:
            self.kv_channels = self.hidden_size // self.num_attention_heads
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = self._compute_default_ffn_size()
        self.num_query_groups = count_query_groups(vars(self))
        if self.has_experts and self.moe_ffn_hidden_size is None:
            self.moe_ffn_hidden_size = self.ffn_hidden_size
        super().__post_init__()

    def _find_size_problems(self) -> Iterator[str]:
        """Yield the problems of the sizes from which the defaults of other fields are derived."""
        # The default head width is hidden_size / heads. Latent attention has widths of its own.
        needs_default = self.kv_channels is None and not self.multi_latent_attention
        if needs_default and self.hidden_size % self.num_attention_heads:
            yield (
                f"--hidden-size {self.hidden_size} is not a multiple of --num-attention-heads "
                f"{self.num_attention_heads}: change one of them or give --kv-channels"
            )
        # 8/3 of the width, rounded down to a multiple of 64, is 0 for widths below 24.
        ffn_size = self.ffn_hidden_size
        if ffn_size is None:
            ffn_size = self._compute_default_ffn_size()
        if ffn_size < 1:
            yield (
                f"--hidden-size {self.hidden_size} is too small for --swiglu without "
                "--ffn-hidden-size: give one"
            )

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

    # Rules that are not a `FlagRule`

    def find_problems(self) -> Iterator[str]:
        yield from self._find_mlp_problems()
        yield from self._find_pattern_problems()
        yield from self._find_position_problems()
        # All heads expand the same latent vector, so they do not form groups.
        if self.multi_latent_attention and self.query_groups != self.num_attention_heads:
            yield (
                "--multi-latent-attention has keys and values for every head: leave out "
                "--group-query-attention"
            )
        if self.share_parallel_norm and self.recomputes("layernorm"):
            yield ("--share-parallel-norm and --recompute-modules layernorm are mutually exclusive")
        if self.has_experts:
            yield from resolve(_FIND_EXPERT_PROBLEMS)(self)

    def _find_mlp_problems(self) -> Iterator[str]:
        activations = [flag_name(name) for name in ACTIVATIONS if getattr(self, name)]
        if len(activations) > 1:
            yield f"{' and '.join(activations)} are mutually exclusive"
        # The low-precision kernels require both dimensions of every matrix to be multiples of 16.
        if self.low_precision is not None:
            for name in ("hidden_size", "ffn_hidden_size"):
                size = getattr(self, name)
                if size % 16:
                    yield (
                        f"{flag_name(name)} {size} is not a multiple of 16, as the "
                        f"{self.low_precision} kernels require"
                    )

    def _find_pattern_problems(self) -> Iterator[str]:
        """Check the patterns of layers: one entry per layer, or every n-th layer."""
        for name in ("window_attn_skip_freq", "no_rope_freq", "moe_layer_freq"):
            freq = getattr(self, name)
            if freq is None or (name == "moe_layer_freq" and not self.has_experts):
                continue
            if isinstance(freq, int):
                if freq < 1:
                    yield f"{flag_name(name)} must be positive, got {freq}"
            elif len(freq) != self.num_layers or not set(freq) <= {0, 1}:
                yield (
                    f"{flag_name(name)} {freq} must have a 0 or a 1 for each of the --num-layers "
                    f"{self.num_layers}"
                )

    def _find_position_problems(self) -> Iterator[str]:
        # RoPE rotates pairs of elements, each with a frequency of its own.
        if self.multi_latent_attention:
            rotated = self.qk_pos_emb_head_dim
            if rotated is not None and rotated % 2:
                yield f"--qk-pos-emb-head-dim must be even and positive, got {rotated}"
        elif self.rope_type == "longrope":
            pairs = int(self.head_dim * self.rotary_percent) // 2
            for name in ("longrope_short_factor", "longrope_long_factor"):
                factors = getattr(self, name) or []
                if len(factors) != pairs or min(factors) <= 0:
                    yield (
                        f"--rope-type longrope: {flag_name(name)} needs a positive number for each "
                        f"of the {pairs} rotated pairs of a head, got {factors}"
                    )

    # Quantities derived from the fields
    @property
    def moe_layer_pattern(self) -> list[int]:
        """1 for each layer with experts (the first of every `moe_layer_freq`), 0 for dense ones."""
        if not self.has_experts:
            return [0] * self.num_layers
        return self._mark_layers(self.moe_layer_freq, range(self.num_layers))

    @property
    def has_dense_layers(self) -> bool:
        return 0 in self.moe_layer_pattern

    @property
    def num_mtp_layers(self) -> int:
        """Number of layers for multi-token prediction."""
        return self.mtp_num_layers or 0

    @property
    def moe_layer_pattern_with_mtp(self) -> list[int]:
        """`moe_layer_pattern`, followed by the layers for multi-token prediction."""
        pattern = self.moe_layer_pattern
        return pattern + pattern[-1:] * self.num_mtp_layers

    @property
    def window_pattern(self) -> list[int]:
        """1 for each layer with a sliding window, 0 for each other one."""
        skip = self.window_attn_skip_freq
        if isinstance(skip, list):
            return list(skip)
        if self.window_size is None:
            return [0] * self.num_layers
        if skip is None:
            return [1] * self.num_layers
        # Every `skip`-th layer, counted from 1, has no window.
        return [int(layer_number % skip > 0) for layer_number in range(1, self.num_layers + 1)]

    @property
    def no_rope_pattern(self) -> list[int]:
        """1 for each layer without RoPE (the last of every `no_rope_freq`), 0 for others."""
        if self.no_rope_freq is None:
            return [0] * self.num_layers
        return self._mark_layers(self.no_rope_freq, range(1, self.num_layers + 1))

    @staticmethod
    def _mark_layers(freq: list[int] | int, layer_numbers: range) -> list[int]:
        """Return `freq` if it is a list, else 1 for each number that is a multiple of it."""
        if isinstance(freq, list):
            return list(freq)
        return [int(layer_number % freq == 0) for layer_number in layer_numbers]

    def get_window(self, layer_number: int) -> tuple[int, int] | None:
        """Return the sliding window of layer `layer_number`, if it has one."""
        if not self.window_pattern[layer_number]:
            return None
        return self.window_size

    @property
    def head_dim(self) -> int:
        assert self.kv_channels is not None
        return self.kv_channels

    @property
    def qk_width(self) -> int:
        """Width of a query or key head."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.head_dim

    @property
    def v_width(self) -> int:
        """Width of a value head."""
        if self.multi_latent_attention:
            return self.v_head_dim
        return self.head_dim

    @property
    def core_head_dim(self) -> int:
        """Width of the heads in core attention, which is the same for queries, keys and values."""
        return max(self.qk_width, self.v_width)

    @property
    def attends_in_blocks(self) -> bool:
        """Return whether attention needs a score modification that torch's SDPA does not support.

        Then `blockwise_attention` or `local_attention` computes it.
        """
        return self.attn_logit_softcapping is not None or self.softmax_type != "vanilla"

    @property
    def separate_rotary_base_local(self) -> float | None:
        """Base of the rotary frequencies in layers with a window, if theirs differ."""
        is_scaled = self.use_rope_scaling or self.rope_type != "rope" or self.rotary_stretch != 1.0
        if self.rotary_base_local == self.rotary_base and not is_scaled:
            return None
        return self.rotary_base_local

    @property
    def latent_epsilon(self) -> float:
        if self.latent_norm_epsilon is None:
            return self.norm_epsilon
        return self.latent_norm_epsilon

    def select_latent_norms(self) -> TransformerConfig:
        """Return the configuration with the epsilon of the norms of latent vectors."""
        return dataclasses.replace(self, norm_epsilon=self.latent_epsilon)

    @property
    def rotary_stretch(self) -> float:
        return self.rotary_seq_len_interpolation_factor or 1.0

    @property
    def width_mult(self) -> float:
        """Width of the model relative to the base model of --use-mup."""
        if not self.use_mup or self.mup_base_hidden_size is None:
            return 1.0
        return self.hidden_size / self.mup_base_hidden_size

    @property
    def embedding_factor(self) -> float:
        """Factor of the embedding, not including --scale-embeddings."""
        if not self.use_mup:
            return self.embedding_multiplier
        return self.embedding_multiplier * self.mup_embedding_mult

    @property
    def logits_divisor(self) -> float:
        """Divisor of the logits."""
        if not self.use_mup:
            return self.logits_scaling
        # As in Megatron-LM, the value 1 of a wider model means the default.
        if self.mup_output_mult == 1.0:
            return self.logits_scaling * self.width_mult
        return self.logits_scaling / self.mup_output_mult

    @property
    def chosen_score_scale(self) -> float | None:
        """Factor of the attention scores; None for the usual 1 / sqrt(width of a head)."""
        if self.softmax_scale is not None or not self.use_mup:
            return self.softmax_scale
        base = 1.0 if self.mup_base_head_dim is None else self.mup_base_head_dim**0.5
        return base / float(self.head_dim**self.mup_attn_scale_power)

    @property
    def score_scale(self) -> float:
        """Factor of the attention scores."""
        return self.chosen_score_scale or self.head_dim**-0.5

    @property
    def query_groups(self) -> int:
        assert self.num_query_groups is not None
        return self.num_query_groups

    @property
    def ffn_size(self) -> int:
        assert self.ffn_hidden_size is not None
        return self.ffn_hidden_size

    @property
    def has_input_norms(self) -> bool:
        """Return whether each branch has a norm of its own before its first projection."""
        return self.norm_placement != "post" and not self.share_parallel_norm

    @property
    def has_qkv_bias(self) -> bool:
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def hidden_init_std(self) -> float:
        """Standard deviation of the initial matrices of the layers."""
        return self.init_method_std / math.sqrt(self.width_mult)

    @property
    def output_init_std(self) -> float:
        """Standard deviation of projections to the residual stream (Radford et al. 2019)."""
        return self.hidden_init_std / math.sqrt(2.0 * self.num_layers)

    @property
    def gated(self) -> bool:
        """Return whether the MLP is gated; gate and up projection are stacked in one matrix."""
        return self.swiglu or self.quick_geglu or self.geglu

    @property
    def activation(self) -> str:
        """Name of the activation function of the MLP."""
        for name in ACTIVATIONS:
            if getattr(self, name):
                return name
        if self.tanh_gelu:
            return "gelu (tanh)"
        return "gelu (erf)"

    @property
    def tanh_gelu(self) -> bool:
        """Return whether GELU is the tanh approximation.

        Megatron-LM uses it where GELU is fused with a bias, and the exact function elsewhere.
        """
        return self.openai_gelu or (self.bias_gelu_fusion and self.add_bias_linear)

    def quantizes(self, layer_number: int) -> bool:
        """Return whether layer `layer_number` computes in fp8 or fp4."""
        if self.low_precision is None:
            return False
        if not self.first_last_layers_bf16:
            return True
        first = self.num_layers_at_start_in_bf16
        end = self.num_layers - self.num_layers_at_end_in_bf16
        return first <= layer_number < end


LOCAL_BACKEND_FIELDS: dict[str, Any] = {
    "transformer_impl": "local",
    "fp8": None,
    "fp4": None,
    "fp8_param_gather": False,
    "cross_entropy_fusion_impl": "native",
    "norm_impl": "torch",
}
"""Replacements that select the local backend for a model of which only the shapes are needed."""


def select_architecture_fields(*decisions: str) -> list[dataclasses.Field[Any]]:
    """Return the fields that decide "shapes" or "mathematics" of a model; by default both."""
    selected = []
    for field in dataclasses.fields(TransformerConfig):
        decides = field.metadata["decides"]
        if decides and (not decisions or decides in decisions):
            selected.append(field)
    return selected


def count_query_groups(flag_values: Mapping[str, Any]) -> int:
    """Return the number of key and value heads. Without groups, every query head has its own."""
    num_groups: int | None = flag_values.get("num_query_groups")
    if not flag_values.get("group_query_attention"):
        num_groups = flag_values.get("num_attention_heads", 0)
    return 1 if num_groups is None else num_groups


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
