"""The shape and the arithmetic of a model. Field names are Megatron-LM's argument names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.utils import flag, raise_problems

_LEARNED = {"position_embedding_type": "learned_absolute"}
_ROPE = {"position_embedding_type": "rope"}
_SCALED_ROPE = _ROPE | {"use_rope_scaling": True}
_GELU = {"swiglu": False, "quick_geglu": False, "squared_relu": False}
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp")


@dataclass
class TransformerConfig:
    """What defines the model; everything that changes the mathematics is here and travels with the checkpoint.

    A field that is part of the architecture says in its `flag` what it decides: comparing a checkpoint's model with
    the run's, taking its flags over and checking an export all follow from that.
    """

    num_layers: int = flag(0, decides="shapes")
    """Number of transformer layers."""
    hidden_size: int = flag(0, decides="shapes")
    """Width of the residual stream."""
    num_attention_heads: int = flag(0, decides="shapes")
    """Number of query heads."""
    ffn_hidden_size: int | None = flag(None, decides="shapes")
    """Inner width of the MLP. Default: 4 * hidden_size, or 8/3 * hidden_size rounded down to 64 with --swiglu."""
    group_query_attention: bool = flag(False)
    """Share key and value heads among groups of query heads (GQA, Ainslie et al. 2023); see --num-query-groups."""
    num_query_groups: int | None = flag(None, decides="shapes")
    """Number of key/value heads with --group-query-attention. Default: 1; without that flag one per query head."""
    kv_channels: int | None = flag(None, decides="shapes")
    """Width of one attention head. Default: hidden_size / num_attention_heads."""
    vocab_size: int | None = flag(None)
    """Number of tokens of the model. Default: the tokenizer's. With NullTokenizer n means n + 1 tokens, EOD = n."""
    max_position_embeddings: int | None = flag(None, decides="shapes", when=_LEARNED)
    """Longest sequence; the number of rows of learned position embeddings."""
    position_embedding_type: str = flag(
        "learned_absolute", choices=("learned_absolute", "rope", "alibi", "none"), decides="shapes"
    )
    """How positions enter the model."""
    rotary_base: float = flag(10000.0, decides="mathematics", when=_ROPE)
    """Base of the rotary frequencies."""
    rotary_percent: float = flag(1.0, decides="mathematics", when=_ROPE)
    """Fraction of each head that is rotated."""
    rotary_interleaved: bool = flag(False, decides="mathematics", when=_ROPE)
    """Rotate elements 2i and 2i + 1 of a head together (GPT-J) in place of i and i + half."""
    use_rope_scaling: bool = flag(False, decides="mathematics", when=_ROPE)
    """Llama-3 frequency scaling with the four numbers below."""
    rope_scaling_factor: float = flag(8.0, decides="mathematics", when=_SCALED_ROPE)
    """Llama-3 scaling: factor by which low frequencies are divided."""
    rope_low_freq_factor: float = flag(1.0, decides="mathematics", when=_SCALED_ROPE)
    """Llama-3 scaling: wavelengths above original_max_position / this are divided in full."""
    rope_high_freq_factor: float = flag(4.0, decides="mathematics", when=_SCALED_ROPE)
    """Llama-3 scaling: wavelengths below original_max_position / this are left alone."""
    rope_original_max_position_embeddings: int = flag(8192, decides="mathematics", when=_SCALED_ROPE)
    """Llama-3 scaling: the context length the frequencies were first trained for."""
    normalization: str = flag("LayerNorm", choices=("LayerNorm", "RMSNorm"), decides="shapes")
    """Kind of normalization."""
    apply_layernorm_1p: bool = flag(False, decides="mathematics")
    """Keep the weights of all norms as their difference from 1, which bfloat16 and weight decay treat better."""
    norm_epsilon: float = flag(1e-5, "--norm-epsilon", "--layernorm-epsilon", decides="mathematics")
    """Epsilon of the normalization."""
    swiglu: bool = flag(False, decides="shapes")
    """Gated MLP with SiLU (Shazeer 2020) in place of GELU."""
    quick_geglu: bool = flag(False, decides="shapes")
    """Gated MLP with x * sigmoid(1.702 x) in place of GELU."""
    squared_relu: bool = flag(False, decides="mathematics")
    """The square of ReLU (So et al. 2021) in place of GELU."""
    bias_gelu_fusion: bool = flag(True, "--no-bias-gelu-fusion", decides="mathematics", when=_GELU, meaning="tanh_gelu")
    """Use the exact (erf) GELU in place of the tanh approximation, as --disable-bias-linear does, too."""
    openai_gelu: bool = flag(False, decides="mathematics", when=_GELU, meaning="tanh_gelu")
    """Use the tanh approximation of GELU whatever the other flags say."""
    add_bias_linear: bool = flag(True, "--disable-bias-linear", decides="shapes")
    """Leave out the biases of all linear layers."""
    add_qkv_bias: bool = flag(False, decides="shapes", meaning="has_qkv_bias")
    """Keep the bias of the QKV projection even with --disable-bias-linear."""
    qk_layernorm: bool = flag(False, decides="shapes")
    """Normalize every query and key head."""
    window_size: tuple[int, int] | None = flag(None, decides="mathematics")
    """Sliding-window attention as LEFT,RIGHT: a token sees itself, LEFT tokens before it and RIGHT (0) after it."""
    embedding_layernorm: bool = flag(False, decides="shapes")
    """Normalize the word embedding (BLOOM)."""
    untie_embeddings_and_output_weights: bool = flag(False, decides="shapes")
    """Give the output layer a matrix of its own."""
    hidden_dropout: float = flag(0.1)
    """Dropout after the embedding and on every residual branch."""
    attention_dropout: float = flag(0.1)
    """Dropout on the attention probabilities."""
    init_method_std: float = flag(0.02)
    """Standard deviation of the initial weights; output projections of a block get std / sqrt(2 * num_layers)."""
    bf16: bool = flag(False)
    """bfloat16 parameters and arithmetic, fp32 gradients and main parameters."""
    fp16: bool = flag(False)
    """float16 parameters and arithmetic with loss scaling, fp32 gradients and main parameters."""
    recompute_granularity: str | None = flag(None, choices=("full", "selective"))
    """Recompute activations in backward: whole layers (full) or parts of them (selective)."""
    recompute_modules: list[str] | None = flag(None, choices=RECOMPUTE_MODULES)
    """With selective: attention without its projections (core_attn, the default), the two norms in front of the
    projections (layernorm: their outputs are not kept), the whole MLP (mlp)."""
    recompute_method: str | None = flag(None, choices=("uniform", "block"))
    """With full: groups of --recompute-num-layers layers (uniform), or the first so many layers of a chunk (block)."""
    recompute_num_layers: int | None = flag(None)
    """Number of layers per group (uniform) or per chunk (block)."""

    def __post_init__(self) -> None:
        raise_problems(self._missing())
        if self.kv_channels is None:
            self.kv_channels = self.hidden_size // self.num_attention_heads
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = int(4 * self.hidden_size * 2 / 3 / 64) * 64 if self.swiglu else 4 * self.hidden_size
        if not self.group_query_attention:
            self.num_query_groups = self.num_attention_heads
        elif self.num_query_groups is None:
            self.num_query_groups = 1
        raise_problems(self._problems())

    def _missing(self) -> Iterator[str]:
        """What the defaults of other fields cannot be derived without."""
        for name in ("num_layers", "hidden_size", "num_attention_heads"):
            if getattr(self, name) < 1:
                yield f"--{name.replace('_', '-')} must be given and positive, got {getattr(self, name)}"
        if self.kv_channels is None and self.hidden_size % max(self.num_attention_heads, 1):
            yield (
                f"--hidden-size {self.hidden_size} is not a multiple of --num-attention-heads "
                f"{self.num_attention_heads}: change one of them or give --kv-channels"
            )

    def _problems(self) -> Iterator[str]:
        if self.query_groups < 1 or self.num_attention_heads % self.query_groups:
            yield (
                f"--num-attention-heads {self.num_attention_heads} is not a multiple of "
                f"--num-query-groups {self.num_query_groups}"
            )
        if self.ffn_size < 1:
            yield f"--hidden-size {self.hidden_size} is too small for --swiglu without --ffn-hidden-size: give one"
        activations = [name for name in ("swiglu", "quick_geglu", "squared_relu") if getattr(self, name)]
        if len(activations) > 1:
            yield f"{' and '.join('--' + name.replace('_', '-') for name in activations)} exclude each other"
        if self.bf16 and self.fp16:
            yield "--bf16 and --fp16 exclude each other"
        if self.recompute_granularity == "full" and (self.recompute_method is None or not self.recompute_num_layers):
            yield "--recompute-granularity full needs --recompute-method and --recompute-num-layers"

    @property
    def head_dim(self) -> int:
        assert self.kv_channels is not None
        return self.kv_channels

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
    def params_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32

    @property
    def output_init_std(self) -> float:
        """Standard deviation of the projections that write to the residual stream (Radford et al. 2019)."""
        return self.init_method_std / math.sqrt(2.0 * self.num_layers)

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate, stacked with its other half in one matrix."""
        return self.swiglu or self.quick_geglu

    @property
    def activation(self) -> str:
        """What the MLP computes between its matrices."""
        named = {"swiglu": self.swiglu, "quick geglu": self.quick_geglu, "squared relu": self.squared_relu}
        return next((name for name, on in named.items() if on), "gelu (tanh)" if self.tanh_gelu else "gelu (erf)")

    def recomputes(self, module: str) -> bool:
        """Whether --recompute-granularity selective recomputes this one of RECOMPUTE_MODULES."""
        return self.recompute_granularity == "selective" and module in (self.recompute_modules or ["core_attn"])

    @property
    def tanh_gelu(self) -> bool:
        """Megatron-LM's GELU is the tanh approximation where it is fused with a bias, and exact elsewhere."""
        return self.openai_gelu or (self.bias_gelu_fusion and self.add_bias_linear)


def deciding_fields(*what: str) -> list[dataclasses.Field[Any]]:
    """The fields that decide "shapes" or "mathematics" of a model; without arguments both."""
    fields = [field for field in dataclasses.fields(TransformerConfig) if field.metadata["decides"]]
    return [field for field in fields if not what or field.metadata["decides"] in what]


def is_used(field: dataclasses.Field[Any], values: Mapping[str, Any]) -> bool:
    """Whether a model with these values depends on `field`: the rotary base counts only with rotary positions."""
    return all(values[name] == value for name, value in field.metadata["when"].items())


def model_signature(config: TransformerConfig) -> dict[str, Any]:
    """What the model computes: two configurations of the same model, however spelled, have the same signature."""
    signature: dict[str, Any] = {"vocab_size": config.vocab_size}
    for field in deciding_fields():
        name = field.metadata["meaning"] or field.name
        value = getattr(config, name) if is_used(field, vars(config)) else None
        signature[name] = tuple(value) if isinstance(value, list) else value
    return signature
