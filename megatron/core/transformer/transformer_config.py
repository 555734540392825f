"""The shape and the arithmetic of a model. Field names are Megatron-LM's argument names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.core.utils import flag, raise_problems


@dataclass
class TransformerConfig:
    """What defines the model; everything that changes the mathematics is here and travels with the checkpoint."""

    num_layers: int = flag(0)
    """Number of transformer layers."""
    hidden_size: int = flag(0)
    """Width of the residual stream."""
    num_attention_heads: int = flag(0)
    """Number of query heads."""
    ffn_hidden_size: int | None = flag(None)
    """Inner width of the MLP. Default: 4 * hidden_size, or 8/3 * hidden_size rounded down to 64 with --swiglu."""
    group_query_attention: bool = flag(False)
    """Share key and value heads among groups of query heads (GQA, Ainslie et al. 2023); see --num-query-groups."""
    num_query_groups: int | None = flag(None)
    """Number of key/value heads with --group-query-attention. Default: 1; without that flag one per query head."""
    kv_channels: int | None = flag(None)
    """Width of one attention head. Default: hidden_size / num_attention_heads."""
    vocab_size: int | None = flag(None)
    """Number of tokens of the model. Default: the tokenizer's. With NullTokenizer n means n + 1 tokens, EOD = n."""
    max_position_embeddings: int | None = flag(None)
    """Longest sequence; the number of rows of learned position embeddings."""
    position_embedding_type: str = flag("learned_absolute", choices=("learned_absolute", "rope", "alibi", "none"))
    """How positions enter the model."""
    rotary_base: float = flag(10000.0)
    """Base of the rotary frequencies."""
    rotary_percent: float = flag(1.0)
    """Fraction of each head that is rotated."""
    rotary_interleaved: bool = flag(False)
    """Rotate elements 2i and 2i + 1 of a head together (GPT-J) in place of i and i + half."""
    use_rope_scaling: bool = flag(False)
    """Llama-3 frequency scaling with the four numbers below."""
    rope_scaling_factor: float = flag(8.0)
    """Llama-3 scaling: factor by which low frequencies are divided."""
    rope_low_freq_factor: float = flag(1.0)
    """Llama-3 scaling: wavelengths above original_max_position / this are divided in full."""
    rope_high_freq_factor: float = flag(4.0)
    """Llama-3 scaling: wavelengths below original_max_position / this are left alone."""
    rope_original_max_position_embeddings: int = flag(8192)
    """Llama-3 scaling: the context length the frequencies were first trained for."""
    normalization: str = flag("LayerNorm", choices=("LayerNorm", "RMSNorm"))
    """Kind of normalization."""
    apply_layernorm_1p: bool = flag(False)
    """Keep the weights of all norms as their difference from 1, which bfloat16 and weight decay treat better."""
    norm_epsilon: float = flag(1e-5, "--norm-epsilon", "--layernorm-epsilon")
    """Epsilon of the normalization."""
    swiglu: bool = flag(False)
    """Gated MLP with SiLU (Shazeer 2020) in place of GELU."""
    quick_geglu: bool = flag(False)
    """Gated MLP with x * sigmoid(1.702 x) in place of GELU."""
    squared_relu: bool = flag(False)
    """The square of ReLU (So et al. 2021) in place of GELU."""
    bias_gelu_fusion: bool = flag(True, "--no-bias-gelu-fusion")
    """Use the exact (erf) GELU in place of the tanh approximation, as --disable-bias-linear does, too."""
    openai_gelu: bool = flag(False)
    """Use the tanh approximation of GELU whatever the other flags say."""
    add_bias_linear: bool = flag(True, "--disable-bias-linear")
    """Leave out the biases of all linear layers."""
    add_qkv_bias: bool = flag(False)
    """Keep the bias of the QKV projection even with --disable-bias-linear."""
    qk_layernorm: bool = flag(False)
    """Normalize every query and key head."""
    window_size: tuple[int, int] | None = flag(None)
    """Sliding-window attention as LEFT,RIGHT: a token sees itself, LEFT tokens before it and RIGHT (0) after it."""
    embedding_layernorm: bool = flag(False)
    """Normalize the word embedding (BLOOM)."""
    untie_embeddings_and_output_weights: bool = flag(False)
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
    """Recompute activations in backward: whole layers (full) or attention only (selective)."""
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

    @property
    def tanh_gelu(self) -> bool:
        """Megatron-LM's GELU is the tanh approximation where it is fused with a bias, and exact elsewhere."""
        return self.openai_gelu or (self.bias_gelu_fusion and self.add_bias_linear)
