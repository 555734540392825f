"""The shape and the arithmetic of a model. Field names are Megatron-LM's argument names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.flags import find_range_problems, flag, raise_problems
from megatron.core.transformer import model_rules
from megatron.core.transformer.config_parts import ComputeOptions, ExpertOptions

_LEARNED = {"position_embedding_type": "learned_absolute"}
_ROPE = {"has_rope": True}
_SCALED_ROPE = _ROPE | {"use_rope_scaling": True}
_YARN = {"has_yarn": True}
_LATENT, _NOT_LATENT = ({"multi_latent_attention": on} for on in (True, False))
_GELU = {"swiglu": False, "quick_geglu": False, "geglu": False, "squared_relu": False}
_QUICK_GEGLU = {"quick_geglu": True}
_WINDOW = {"has_window": True}
_DENSE = {"has_dense_layers": True}


@dataclass
class TransformerConfig(ExpertOptions, ComputeOptions):
    """What defines the model; everything that changes the mathematics is here and travels with the
    checkpoint.

    A field that is part of the architecture says in its `flag` what it decides: comparing a
    checkpoint's model with the run's, taking its flags over and checking an export all follow from
    that.
    """

    num_layers: int = flag(0, decides="shapes")
    """Number of transformer layers."""
    hidden_size: int = flag(0, decides="shapes")
    """Width of the residual stream."""
    num_attention_heads: int = flag(0, decides="shapes")
    """Number of query heads."""
    ffn_hidden_size: int | None = flag(None, decides="shapes", when=_DENSE)
    """Inner width of the MLP. Default: 4 * hidden_size, or 8/3 * hidden_size rounded down to 64
    with --swiglu.
    """
    group_query_attention: bool = flag(False)
    """Share key and value heads among groups of query heads (GQA, Ainslie et al. 2023); see
    --num-query-groups.
    """
    num_query_groups: int | None = flag(None, decides="shapes", when=_NOT_LATENT)
    """Number of key/value heads with --group-query-attention. Default: 1; without that flag one per
    query head.
    """
    kv_channels: int | None = flag(None, positive=True, decides="shapes", when=_NOT_LATENT)
    """Width of one attention head. Default: hidden_size / num_attention_heads."""
    multi_latent_attention: bool = flag(False, decides="shapes")
    """Queries, and keys with values, come from two narrow vectors per token (MLA, DeepSeek-V2); it
    has RoPE always.
    """
    q_lora_rank: int | None = flag(None, decides="shapes", when=_LATENT)
    """Width of the vector that queries come from. Default: they come from the residual stream."""
    kv_lora_rank: int = flag(32, decides="shapes", when=_LATENT)
    """Width of the vector that keys and values come from."""
    qk_head_dim: int = flag(128, decides="shapes", when=_LATENT)
    """Width of the part of a query or key head that is not rotated."""
    qk_pos_emb_head_dim: int = flag(64, decides="shapes", when=_LATENT)
    """Width of the part that is rotated; of keys it is one for all heads."""
    v_head_dim: int = flag(128, decides="shapes", when=_LATENT)
    """Width of a value head."""
    vocab_size: int | None = flag(None)
    """Number of tokens of the model. Default: the tokenizer's. With NullTokenizer n means n + 1
    tokens, EOD = n.
    """
    max_position_embeddings: int | None = flag(None, decides="shapes", when=_LEARNED)
    """Longest sequence; the number of rows of learned position embeddings."""
    position_embedding_type: str = flag(
        "learned_absolute",
        choices=("learned_absolute", "rope", "yarn", "alibi", "none"),
        decides="shapes",
    )
    """How positions enter the model; yarn is rope with --rope-type yarn."""
    rotary_base: float = flag(10000.0, positive=True, decides="mathematics", when=_ROPE)
    """Base of the rotary frequencies."""
    rotary_percent: float = flag(1.0, positive=True, at_most=1, decides="mathematics", when=_ROPE)
    """Fraction of each head that is rotated."""
    rotary_interleaved: bool = flag(False, decides="mathematics", when=_ROPE)
    """Rotate elements 2i and 2i + 1 of a head together (GPT-J) in place of i and i + half."""
    rotary_base_local: float | None = flag(
        None, positive=True, decides="mathematics", when=_ROPE | _WINDOW
    )
    """Base of the rotary frequencies, unscaled, in layers with a sliding window. Default: as in all
    layers.
    """
    rotary_seq_len_interpolation_factor: float | None = flag(
        None, positive=True, decides="mathematics", when=_ROPE, meaning="rotary_stretch"
    )
    """Divide all rotary frequencies by this, for longer sequences (Chen et al. 2023)."""
    use_rope_scaling: bool = flag(False, decides="mathematics", when=_ROPE)
    """Llama-3 frequency scaling with the four numbers below."""
    rope_scaling_factor: float = flag(8.0, positive=True, decides="mathematics", when=_SCALED_ROPE)
    """Llama-3 scaling: factor by which low frequencies are divided."""
    rope_low_freq_factor: float = flag(1.0, positive=True, decides="mathematics", when=_SCALED_ROPE)
    """Llama-3 scaling: wavelengths above original_max_position / this are divided in full."""
    rope_high_freq_factor: float = flag(
        4.0, positive=True, decides="mathematics", when=_SCALED_ROPE
    )
    """Llama-3 scaling: wavelengths below original_max_position / this are left alone."""
    rope_original_max_position_embeddings: int = flag(
        8192, positive=True, decides="mathematics", when=_SCALED_ROPE
    )
    """Llama-3 scaling: the context length the frequencies were first trained for."""
    rope_type: str | None = flag(None, choices=("rope", "yarn"), decides="mathematics", when=_ROPE)
    """Rotary frequencies as they are, or stretched for longer sequences (YaRN, Peng et al. 2023)
    with the numbers below. Default: yarn with --multi-latent-attention, else rope.
    """
    rotary_scaling_factor: float = flag(1.0, positive=True, decides="mathematics", when=_YARN)
    """YaRN: by how much the context is longer than the one first trained for."""
    original_max_position_embeddings: int = flag(
        4096,
        "--original-max-position-embeddings",
        "--yarn-original-max-position-embeddings",
        positive=True,
        decides="mathematics",
        when=_YARN,
    )
    """YaRN: the context length first trained for."""
    beta_fast: float = flag(
        32.0, "--beta-fast", "--yarn-beta-fast", positive=True, decides="mathematics", when=_YARN
    )
    """YaRN: frequencies that turn more often than this in that context are left alone."""
    beta_slow: float = flag(
        1.0, "--beta-slow", "--yarn-beta-slow", positive=True, decides="mathematics", when=_YARN
    )
    """YaRN: frequencies that turn less often are divided by the factor."""
    mscale: float = flag(1.0, at_least=0, decides="mathematics", when=_YARN)
    """YaRN: rotated elements grow by (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) +
    1).
    """
    mscale_all_dim: float = flag(0.0, at_least=0, decides="mathematics", when=_YARN)
    """YaRN: as above; attention scores of --multi-latent-attention grow by the square of the lower
    term.
    """
    yarn_correction_range_round_to_int: bool = flag(
        True, "--no-yarn-correction-range-round-to-int", decides="mathematics", when=_YARN
    )
    """YaRN: do not round the ends of the range of frequencies between those two."""
    normalization: str = flag("LayerNorm", choices=("LayerNorm", "RMSNorm"), decides="shapes")
    """Kind of normalization."""
    apply_layernorm_1p: bool = flag(False, decides="mathematics")
    """Keep the weights of all norms as their difference from 1, which bfloat16 and weight decay
    treat better.
    """
    norm_placement: str = flag("pre", choices=("pre", "post", "both"), decides="shapes")
    """Where a layer's norms stand: before attention and MLP, or after each before it is added to
    the residual stream (OLMo 2), or both (Gemma 2).
    """
    norm_epsilon: float = flag(
        1e-5, "--norm-epsilon", "--layernorm-epsilon", at_least=0, decides="mathematics"
    )
    """Epsilon of the normalization."""
    swiglu: bool = flag(False, decides="shapes")
    """Gated MLP with SiLU (Shazeer 2020) in place of GELU."""
    quick_geglu: bool = flag(False, decides="shapes")
    """Gated MLP with x * sigmoid(1.702 x) in place of GELU."""
    glu_linear_offset: float = flag(0.0, decides="mathematics", when=_QUICK_GEGLU)
    """With --quick-geglu: added to what the gate multiplies (1 in gpt-oss)."""
    activation_func_clamp_value: float | None = flag(
        None, positive=True, decides="mathematics", when=_QUICK_GEGLU
    )
    """With --quick-geglu: keep the gate's input below this, and what it multiplies within it (7 in
    gpt-oss).
    """
    geglu: bool = flag(False, decides="shapes")
    """Gated MLP with GELU, its tanh approximation, in place of GELU alone."""
    squared_relu: bool = flag(False, decides="mathematics")
    """The square of ReLU (So et al. 2021) in place of GELU."""
    bias_gelu_fusion: bool = flag(
        True, "--no-bias-gelu-fusion", decides="mathematics", when=_GELU, meaning="tanh_gelu"
    )
    """Use the exact (erf) GELU in place of the tanh approximation, as --disable-bias-linear does,
    too.
    """
    openai_gelu: bool = flag(False, decides="mathematics", when=_GELU, meaning="tanh_gelu")
    """Use the tanh approximation of GELU whatever the other flags say."""
    add_bias_linear: bool = flag(True, "--disable-bias-linear", decides="shapes")
    """Leave out the biases of all linear layers."""
    add_qkv_bias: bool = flag(False, decides="shapes", meaning="has_qkv_bias")
    """Keep the bias of the QKV projection even with --disable-bias-linear."""
    qk_layernorm: bool = flag(False, decides="shapes")
    """Normalize every query and key head."""
    qk_layernorm_across_heads: bool = flag(False, decides="shapes", when={"qk_layernorm": True})
    """Normalize the queries, and the keys, of all heads together (OLMo 2), by RMSNorm."""
    softmax_scale: float | None = flag(
        None, positive=True, decides="mathematics", when=_NOT_LATENT, meaning="score_scale"
    )
    """Factor of the attention scores. Default: 1 / sqrt(width of a head)."""
    attn_logit_softcapping: float | None = flag(None, positive=True, decides="mathematics")
    """Keep attention scores x within this: x becomes cap * tanh(x / cap)."""
    final_logit_softcapping: float | None = flag(None, positive=True, decides="mathematics")
    """The same for the logits of the output layer."""
    softmax_type: str = flag(
        "vanilla", choices=("vanilla", "off-by-one", "learnable"), decides="shapes"
    )
    """A score that every query has besides those of its keys, with a value of zero (an attention
    sink): none, 0, or one learned for each head (gpt-oss).
    """
    window_size: tuple[int, int] | None = flag(None, decides="mathematics")
    """Sliding-window attention as LEFT,RIGHT: a token sees itself, LEFT tokens before it and RIGHT
    (0) after it.
    """
    window_attn_skip_freq: int | list[int] | None = flag(
        None,
        parse=model_rules.layer_pattern,
        decides="mathematics",
        when=_WINDOW,
        meaning="window_pattern",
    )
    """Every N-th layer has no window; or a pattern of 1 (window) and 0 (none), as ([1]*5+[0])*4.
    Default: all have.
    """
    embedding_layernorm: bool = flag(False, decides="shapes")
    """Normalize the word embedding (BLOOM)."""
    scale_embeddings: bool = flag(False, decides="mathematics")
    """Multiply word embeddings by sqrt(hidden_size), rounded to the model's precision (Gemma)."""
    untie_embeddings_and_output_weights: bool = flag(False, decides="shapes")
    """Give the output layer a matrix of its own."""
    hidden_dropout: float = flag(0.1, at_least=0, at_most=1)
    """Dropout after the embedding and on every residual branch."""
    attention_dropout: float = flag(0.1, at_least=0, at_most=1)
    """Dropout on the attention probabilities."""
    init_method_std: float = flag(0.02, at_least=0)
    """Standard deviation of the initial weights; output projections of a block get std / sqrt(2 *
    num_layers).
    """

    def __post_init__(self) -> None:
        raise_problems(model_rules.missing(self))
        if self.position_embedding_type == "yarn":
            self.position_embedding_type = "rope"
            self.rope_type = "yarn"
        if self.rope_type is None:
            self.rope_type = "yarn" if self.multi_latent_attention else "rope"
        if self.kv_channels is None:
            self.kv_channels = self.hidden_size // self.num_attention_heads
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = (
                int(4 * self.hidden_size * 2 / 3 / 64) * 64 if self.swiglu else 4 * self.hidden_size
            )
        if not self.group_query_attention:
            self.num_query_groups = self.num_attention_heads
        elif self.num_query_groups is None:
            self.num_query_groups = 1
        if self.has_experts and self.moe_ffn_hidden_size is None:
            self.moe_ffn_hidden_size = self.ffn_hidden_size
        self._list_losses()
        raise_problems([*find_range_problems(self), *model_rules.problems(self)])

    @property
    def moe_layer_pattern(self) -> list[int]:
        """A 1 for every layer with experts, a 0 for every dense one."""
        freq = self.moe_layer_freq
        if not self.has_experts:
            return [0] * self.num_layers
        return (
            list(freq)
            if isinstance(freq, list)
            else [int(number % freq == 0) for number in range(self.num_layers)]
        )

    @property
    def window_pattern(self) -> list[int]:
        """A 1 for every layer with a sliding window, a 0 for every other."""
        skip = self.window_attn_skip_freq
        layers = range(1, self.num_layers + 1)
        if isinstance(skip, list):
            return list(skip)
        return [
            int(self.window_size is not None and (skip is None or number % skip > 0))
            for number in layers
        ]

    def window_of(self, number: int) -> tuple[int, int] | None:
        """The sliding window of layer `number`."""
        return self.window_size if self.window_pattern[number] else None

    @property
    def head_dim(self) -> int:
        assert self.kv_channels is not None
        return self.kv_channels

    @property
    def qk_width(self) -> int:
        """Width of a query or key head."""
        return (
            self.qk_head_dim + self.qk_pos_emb_head_dim
            if self.multi_latent_attention
            else self.head_dim
        )

    @property
    def v_width(self) -> int:
        """Width of a value head."""
        return self.v_head_dim if self.multi_latent_attention else self.head_dim

    @property
    def core_head_dim(self) -> int:
        """Width of a head in the core of attention, where queries, keys and values have one width."""
        return max(self.qk_width, self.v_width)

    @property
    def attends_in_blocks(self) -> bool:
        """Whether scores are changed as torch's fused attention has no room for: see
        `blockwise_attention`.
        """
        return self.attn_logit_softcapping is not None or self.softmax_type != "vanilla"

    @property
    def rotary_stretch(self) -> float:
        return self.rotary_seq_len_interpolation_factor or 1.0

    @property
    def score_scale(self) -> float:
        return self.softmax_scale or self.head_dim**-0.5

    @property
    def query_groups(self) -> int:
        assert self.num_query_groups is not None
        return self.num_query_groups

    @property
    def ffn_size(self) -> int:
        assert self.ffn_hidden_size is not None
        return self.ffn_hidden_size

    @property
    def has_qkv_bias(self) -> bool:
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def output_init_std(self) -> float:
        """Standard deviation of the projections that write to the residual stream (Radford et al.
        2019).
        """
        return self.init_method_std / math.sqrt(2.0 * self.num_layers)

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate, stacked with its other half in one matrix."""
        return self.swiglu or self.quick_geglu or self.geglu

    @property
    def activation(self) -> str:
        """What the MLP computes between its matrices."""
        gates = {"swiglu": self.swiglu, "quick_geglu": self.quick_geglu, "geglu": self.geglu}
        named = gates | {"squared_relu": self.squared_relu}
        return next(
            (name for name, on in named.items() if on),
            "gelu (tanh)" if self.tanh_gelu else "gelu (erf)",
        )

    def quantizes(self, number: int) -> bool:
        """Whether layer `number` computes in fp8 or fp4."""
        first = self.num_layers_at_start_in_bf16
        last = self.num_layers - self.num_layers_at_end_in_bf16
        return self.low_precision is not None and (
            not self.first_last_layers_bf16 or first <= number < last
        )

    @property
    def tanh_gelu(self) -> bool:
        """Megatron-LM's GELU is the tanh approximation where it is fused with a bias, and exact
        elsewhere.
        """
        return self.openai_gelu or (self.bias_gelu_fusion and self.add_bias_linear)


class LayerKind(NamedTuple):
    """How the layers of a model differ."""

    experts: bool = False
    window: bool = False
    cp_comm_type: str = "p2p"

    @classmethod
    def of(cls, model: TransformerConfig, number: int, cp_comm_type: str = "p2p") -> LayerKind:
        return cls(
            bool(model.moe_layer_pattern[number]), bool(model.window_pattern[number]), cp_comm_type
        )


# The same model, whatever computed it: its shapes alone are wanted.
COMPUTED_LOCALLY: dict[str, Any] = {
    "transformer_impl": "local", "fp8": None, "fp4": None, "fp8_param_gather": False,
    "cross_entropy_fusion_impl": "native", "apply_rope_fusion": False, "norm_impl": "torch",
}  # fmt: skip


def deciding_fields(*what: str) -> list[dataclasses.Field[Any]]:
    """The fields that decide "shapes" or "mathematics" of a model; without arguments both."""
    fields = [field for field in dataclasses.fields(TransformerConfig) if field.metadata["decides"]]
    return [field for field in fields if not what or field.metadata["decides"] in what]


def flag_name(argument: str) -> str:
    """The command-line spelling of an argument, for messages."""
    field = TransformerConfig.__dataclass_fields__.get(argument)
    names = field.metadata["flags"] if field is not None else ()
    return names[0] if names else "--" + argument.replace("_", "-")


def is_used(field: dataclasses.Field[Any], values: Mapping[str, Any]) -> bool:
    """Whether a model with these values depends on `field`: the rotary base counts only with rotary
    positions.
    """
    has_experts = (values.get("num_experts") or 0) > 1
    freq = values.get("moe_layer_freq", 1)
    latent = bool(values.get("multi_latent_attention"))
    has_rope = latent or values.get("position_embedding_type") in ("rope", "yarn")
    default = "yarn" if latent or values.get("position_embedding_type") == "yarn" else "rope"
    has = {
        "multi_latent_attention": latent,
        "has_rope": has_rope,
        # Megatron-LM's latent attention takes the scale of its scores from these numbers, whatever
        # the frequencies.
        "has_yarn": latent or (has_rope and (values.get("rope_type") or default) == "yarn"),
        "has_window": values.get("window_size") is not None,
        "has_experts": has_experts,
        "has_dense_layers": not has_experts or (0 in freq if isinstance(freq, list) else freq > 1),
        "has_groups": bool(values.get("moe_router_num_groups")),
        "has_shared_experts": bool(values.get("moe_shared_expert_intermediate_size")),
        "drops_tokens": values.get("moe_expert_capacity_factor") is not None,
    }
    return all(
        (has | dict(values))[name] == value for name, value in field.metadata["when"].items()
    )


def model_signature(config: TransformerConfig) -> dict[str, Any]:
    """What the model computes: two configurations of the same model, however spelled, have the same
    signature.
    """
    signature: dict[str, Any] = {"vocab_size": config.vocab_size}
    for field in deciding_fields():
        name = field.metadata["meaning"] or field.name
        value = getattr(config, name) if is_used(field, vars(config)) else None
        signature[name] = tuple(value) if isinstance(value, list) else value
    return signature
