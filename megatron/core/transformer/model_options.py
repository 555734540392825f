"""The flags of a model's architecture."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.flags import flag
from megatron.core.transformer.config_parts import (
    ComputeOptions,
    ExpertOptions,
    parse_layer_pattern,
)

ACTIVATIONS = ("swiglu", "quick_geglu", "geglu", "squared_relu", "relu", "xielu")
"""Flags that select another activation function than GELU; they are mutually exclusive."""

# Conditions under which a field has an effect (`transformer_config.find_conditions`)
_LEARNED = {"position_embedding_type": "learned_absolute"}
_ROPE = {"has_rope": True}
_SCALED_ROPE = _ROPE | {"use_rope_scaling": True}
_YARN = {"has_yarn": True}
_LONGROPE = {"has_longrope": True}
_YARN_OR_LONGROPE = {"has_yarn_or_longrope": True}
_LATENT = {"multi_latent_attention": True}
_NOT_LATENT = {"multi_latent_attention": False}
_ALIBI = {"position_embedding_type": "alibi"}
_MUP = {"use_mup": True}
_GELU = dict.fromkeys(ACTIVATIONS, False)
_QUICK_GEGLU = {"quick_geglu": True}
_WINDOW = {"has_window": True}
_DENSE = {"has_dense_layers": True}


@dataclass
class ModelOptions(ExpertOptions, ComputeOptions):
    """Fields of `TransformerConfig`, which derives other quantities from them.

    The `flag` of a field that belongs to the architecture states whether it decides the shapes or
    the mathematics. The comparison of a checkpoint's model with the run, --use-checkpoint-args and
    the checks of an export are derived from that.
    """

    # Sizes
    num_layers: int = flag(0, required=True, decides="shapes")
    """Number of transformer layers."""
    hidden_size: int = flag(0, required=True, decides="shapes")
    """Width of the residual stream."""
    num_attention_heads: int = flag(0, required=True, decides="shapes")
    """Number of query heads."""
    ffn_hidden_size: int | None = flag(None, decides="shapes", when=_DENSE)
    """Inner width of the MLP. Default: 4 * hidden_size, or 8/3 * hidden_size rounded down to a
    multiple of 64 with --swiglu.
    """

    # Attention
    group_query_attention: bool = flag(False)
    """Share key and value heads among groups of query heads (GQA, Ainslie et al. 2023); see
    --num-query-groups.
    """
    num_query_groups: int | None = flag(
        None, decides="shapes", when=_NOT_LATENT, divides="num_attention_heads"
    )
    """Number of key/value heads with --group-query-attention. Default: 1. Without that flag every
    query head has its own.
    """
    kv_channels: int | None = flag(None, positive=True, decides="shapes", when=_NOT_LATENT)
    """Width of an attention head. Default: hidden_size / num_attention_heads."""

    # Latent attention
    multi_latent_attention: bool = flag(
        False,
        decides="shapes",
        requires={
            "kv_lora_rank": True,
            "qk_head_dim": True,
            "v_head_dim": True,
            "qk_pos_emb_head_dim": True,
        },
        excludes={
            "rotary_interleaved": True,
            "add_qkv_bias": True,
            "attention_output_gate": True,
            "clip_qkv": True,
            "rope_type": "longrope",
        },
    )
    """Project queries, and keys with values, from two low-rank latent vectors per token (MLA,
    DeepSeek-V2). It always uses RoPE.
    """
    q_lora_rank: int | None = flag(None, positive=True, decides="shapes", when=_LATENT)
    """Width of the latent vector of queries. Default: project them from the residual stream."""
    kv_lora_rank: int = flag(32, positive=True, decides="shapes", when=_LATENT)
    """Width of the latent vector of keys and values."""
    qk_head_dim: int = flag(128, positive=True, decides="shapes", when=_LATENT)
    """Width of the part of a query or key head without rotary embedding."""
    qk_pos_emb_head_dim: int = flag(64, positive=True, decides="shapes", when=_LATENT)
    """Width of the part with rotary embedding, which all key heads share."""
    v_head_dim: int = flag(128, positive=True, decides="shapes", when=_LATENT)
    """Width of a value head."""

    # Vocabulary and positions
    vocab_size: int | None = flag(None)
    """Number of tokens in the vocabulary. Default: the tokenizer's. With NullTokenizer N means N +
    1 tokens, of which N is the end-of-document token.
    """
    max_position_embeddings: int | None = flag(None, decides="shapes", when=_LEARNED)
    """Maximum sequence length; the number of rows of learned position embeddings."""
    position_embedding_type: str = flag(
        "learned_absolute",
        choices=("learned_absolute", "rope", "yarn", "alibi", "none"),
        aliases={"rotary": "rope", "absolute": "learned_absolute"},
        decides="shapes",
    )
    """Kind of position embedding; yarn is rope with --rope-type yarn."""
    scale_alibi: bool = flag(False, decides="mathematics", when=_ALIBI, requires=_ALIBI)
    """With --position-embedding-type alibi: add the biases before the scores are scaled, as Falcon
    does.
    """
    rotary_base: float = flag(10000.0, positive=True, decides="mathematics", when=_ROPE)
    """Base of the rotary frequencies."""
    rotary_percent: float = flag(1.0, positive=True, at_most=1, decides="mathematics", when=_ROPE)
    """Fraction of each head that is rotated."""
    rotary_interleaved: bool = flag(False, decides="mathematics", when=_ROPE)
    """Rotate elements 2i and 2i + 1 of a head together (GPT-J) instead of i and i + half."""
    rotary_base_local: float | None = flag(
        None,
        positive=True,
        decides="mathematics",
        when=_ROPE | _WINDOW,
        meaning="separate_rotary_base_local",
    )
    """Base of the rotary frequencies, without scaling, in layers with a sliding window. Default:
    the same frequencies as in the other layers.
    """

    no_rope_freq: int | list[int] | None = flag(
        None,
        parse=parse_layer_pattern,
        decides="mathematics",
        when=_ROPE,
        meaning="no_rope_pattern",
        requires={"position_embedding_type": "rope"},
        excludes=_LATENT,
    )
    """Every N-th layer does not rotate queries and keys; or a pattern of 1 (no RoPE) and 0 (RoPE),
    e.g. ([0]*3+[1])*4. Default: all layers have RoPE.
    """

    # Longer contexts than in training: Position Interpolation, Llama 3, YaRN
    rotary_seq_len_interpolation_factor: float | None = flag(
        None, positive=True, decides="mathematics", when=_ROPE, meaning="rotary_stretch"
    )
    """Divide all rotary frequencies by this factor, for longer sequences (Chen et al. 2023)."""
    use_rope_scaling: bool = flag(
        False,
        decides="mathematics",
        when=_ROPE,
        requires={"rope_type": "rope"},
        reason="Llama 3's scaling replaces that of YaRN and LongRoPE",
    )
    """Scale the rotary frequencies as Llama 3.1 does, using the four options below."""
    rope_scaling_factor: float = flag(8.0, positive=True, decides="mathematics", when=_SCALED_ROPE)
    """Llama 3 scaling: factor by which low frequencies are divided."""
    rope_low_freq_factor: float = flag(1.0, positive=True, decides="mathematics", when=_SCALED_ROPE)
    """Llama 3 scaling: longer wavelengths than the original context / this are scaled in full."""
    rope_high_freq_factor: float = flag(
        4.0, positive=True, decides="mathematics", when=_SCALED_ROPE
    )
    """Llama 3 scaling: shorter wavelengths than the original context / this are unchanged."""
    rope_original_max_position_embeddings: int = flag(
        8192, positive=True, decides="mathematics", when=_SCALED_ROPE
    )
    """Llama 3 scaling: context length of the original training."""
    rope_type: str | None = flag(
        None, choices=("rope", "yarn", "longrope"), decides="mathematics", when=_ROPE
    )
    """Rotary frequencies without scaling, or scaled for longer sequences by YaRN (Peng et al. 2023)
    or LongRoPE (Ding et al. 2024) using the options below. Default: yarn with
    --multi-latent-attention, otherwise rope.
    """
    longrope_short_factor: list[float] | None = flag(None, decides="mathematics", when=_LONGROPE)
    """LongRoPE: divisor of each rotary frequency in sequences of at most
    --original-max-position-embeddings tokens.
    """
    longrope_long_factor: list[float] | None = flag(None, decides="mathematics", when=_LONGROPE)
    """LongRoPE: divisor of each rotary frequency in longer sequences."""
    rotary_scaling_factor: float = flag(
        1.0, positive=True, decides="mathematics", when=_YARN_OR_LONGROPE
    )
    """YaRN and LongRoPE: ratio of the context length to that of the original training."""
    original_max_position_embeddings: int = flag(
        4096,
        "--original-max-position-embeddings",
        "--yarn-original-max-position-embeddings",
        positive=True,
        decides="mathematics",
        when=_YARN_OR_LONGROPE,
    )
    """YaRN and LongRoPE: context length of the original training."""
    beta_fast: float = flag(
        32.0, "--beta-fast", "--yarn-beta-fast", positive=True, decides="mathematics", when=_YARN
    )
    """YaRN: frequencies with more turns than this in the original context are unchanged."""
    beta_slow: float = flag(
        1.0, "--beta-slow", "--yarn-beta-slow", positive=True, decides="mathematics", when=_YARN
    )
    """YaRN: frequencies with fewer turns than this are divided by the scaling factor."""
    mscale: float = flag(1.0, at_least=0, decides="mathematics", when=_YARN)
    """YaRN: rotated elements are multiplied by (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim
    ln(factor) + 1).
    """
    mscale_all_dim: float = flag(0.0, at_least=0, decides="mathematics", when=_YARN)
    """YaRN: see --mscale. With --multi-latent-attention, attention scores are also multiplied by
    the square of the denominator.
    """
    yarn_correction_range_round_to_int: bool = flag(
        True, "--no-yarn-correction-range-round-to-int", decides="mathematics", when=_YARN
    )
    """YaRN: round the ends of the range of frequencies between --beta-fast and --beta-slow to
    integers.
    """

    query_length_scaling: float = flag(
        0.0, at_least=0, decides="mathematics", when=_YARN, requires={"rope_type": "yarn"}
    )
    """With --rope-type yarn: multiply the query at position p by 1 + this * ln(1 + floor(p / L)),
    where L is --original-max-position-embeddings (Llama 4, Ministral 3).
    """

    # Norms
    normalization: str = flag(
        "LayerNorm",
        choices=("LayerNorm", "RMSNorm"),
        aliases={"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"},
        decides="shapes",
    )
    """Kind of normalization."""
    apply_layernorm_1p: bool = flag(False, decides="mathematics")
    """Store norm weights zero-centered (w - 1): more precise in bf16, and weight decay pulls them
    towards 1.
    """
    norm_weights: bool = flag(
        True,
        "--no-norm-weights",
        decides="shapes",
        requires={"transformer_impl": "local"},
        excludes={"apply_layernorm_1p": True},
    )
    """Norms have trained weights, LayerNorm also biases. --no-norm-weights leaves both out (OLMo,
    nanochat).
    """
    norm_placement: str = flag("pre", choices=("pre", "post", "both"), decides="shapes")
    """Position of the norms of a layer: before attention and MLP (pre), on their output before it
    is added to the residual stream (post, OLMo 2), or both (Gemma 2).
    """
    parallel_residual: bool = flag(False, decides="mathematics")
    """Compute attention and MLP from the same input, x + attention(norm(x)) + mlp(norm(x)), as
    GPT-NeoX does.
    """
    share_parallel_norm: bool = flag(
        False, decides="shapes", requires={"parallel_residual": True, "norm_placement": "pre"}
    )
    """With --parallel-residual: use one norm for attention and MLP (GPT-J, Cohere)."""
    norm_epsilon: float = flag(
        1e-5, "--norm-epsilon", "--layernorm-epsilon", at_least=0, decides="mathematics"
    )
    """Epsilon of the normalization."""
    latent_rotary_interleaved: bool = flag(
        True, "--no-latent-rotary-interleaved", decides="mathematics", when=_LATENT
    )
    """With multi-latent attention: rotate elements 2i and 2i + 1 instead of i and i + d/2."""
    latent_norm_epsilon: float | None = flag(
        None, at_least=0, decides="mathematics", when=_LATENT, meaning="latent_epsilon"
    )
    """Epsilon of the norms of the latent vectors of --multi-latent-attention. Default:
    --norm-epsilon.
    """

    # Activation functions
    swiglu: bool = flag(False, decides="shapes")
    """Use a gated MLP with SiLU (Shazeer 2020) instead of GELU."""
    quick_geglu: bool = flag(False, decides="shapes")
    """Use a gated MLP with x * sigmoid(1.702 x) instead of GELU."""
    glu_linear_offset: float = flag(
        0.0,
        decides="mathematics",
        when=_QUICK_GEGLU,
        requires=_QUICK_GEGLU,
        reason="it changes the gate",
    )
    """With --quick-geglu: constant added to the factor of the gate (1 in gpt-oss)."""
    activation_func_clamp_value: float | None = flag(
        None,
        positive=True,
        decides="mathematics",
        when=_QUICK_GEGLU,
        requires=_QUICK_GEGLU,
        reason="it changes the gate",
    )
    """With --quick-geglu: upper limit of the gate's input, and limit of the absolute value of its
    factor (7 in gpt-oss).
    """
    geglu: bool = flag(False, decides="shapes")
    """Use a gated MLP with GELU (tanh approximation) instead of GELU without a gate."""
    squared_relu: bool = flag(False, decides="mathematics")
    """Use the square of ReLU (So et al. 2021) instead of GELU."""
    relu: bool = flag(False, decides="mathematics")
    """Use ReLU instead of GELU (OPT)."""
    xielu: bool = flag(
        False,
        decides="shapes",
        excludes={"experts": True},
        reason="the slopes are those of one MLP",
    )
    """Use xIELU (Huang and Schlag 2024) instead of GELU, with two learned slopes per layer
    (Apertus).
    """
    bias_gelu_fusion: bool = flag(
        True, "--no-bias-gelu-fusion", decides="mathematics", when=_GELU, meaning="tanh_gelu"
    )
    """Use the tanh approximation of GELU. --no-bias-gelu-fusion or --disable-bias-linear select the
    exact one (erf), as in Megatron-LM.
    """
    openai_gelu: bool = flag(False, decides="mathematics", when=_GELU, meaning="tanh_gelu")
    """Use the tanh approximation of GELU regardless of the other flags."""

    # Biases and attention scores
    add_bias_linear: bool = flag(True, "--disable-bias-linear", decides="shapes")
    """Add biases to all linear layers; --disable-bias-linear leaves them out."""
    add_qkv_bias: bool = flag(False, decides="shapes", meaning="has_qkv_bias")
    """Add a bias to the QKV projection even with --disable-bias-linear."""
    qk_layernorm: bool = flag(False, decides="shapes")
    """Normalize every query and key head."""
    qk_layernorm_across_heads: bool = flag(
        False,
        decides="shapes",
        when={"qk_layernorm": True},
        requires={"qk_layernorm": True, "normalization": "RMSNorm"},
    )
    """Normalize all query heads together, and all key heads, using RMSNorm (OLMo 2)."""
    qk_layernorm_per_head: bool = flag(
        False,
        decides="shapes",
        when={"qk_layernorm": True},
        requires={"qk_layernorm": True},
        excludes={"qk_layernorm_across_heads": True, "multi_latent_attention": True},
    )
    """Give the norm of every query and key head its own weights (Command R+, StableLM 2)."""
    qk_layernorm_after_rope: bool = flag(
        False,
        decides="mathematics",
        when={"qk_layernorm": True} | _ROPE,
        requires={"qk_layernorm": True},
        excludes={
            "qk_layernorm_across_heads": True,
            "qk_layernorm_per_head": True,
            "multi_latent_attention": True,
        },
    )
    """Normalize queries and keys after rotating them, instead of before (Hunyuan)."""
    clip_qkv: float | None = flag(None, positive=True, decides="mathematics", when=_NOT_LATENT)
    """Limit the absolute values of queries, keys and values, before rotation (OLMo, DBRX)."""
    attention_output_gate: bool = flag(False, decides="shapes", when=_NOT_LATENT)
    """Multiply the output of attention by the sigmoid of a projection of its input (gated
    attention, Qiu et al. 2025; Qwen3-Next, AFMoE).
    """
    apply_wd_to_qk_layernorm: bool = flag(False)
    """Apply weight decay to the norms of queries and keys, unlike to other norms."""
    softmax_scale: float | None = flag(
        None, positive=True, decides="mathematics", when=_NOT_LATENT, meaning="score_scale"
    )
    """Factor of the attention scores. Default: 1 / sqrt(width of a head)."""
    attn_logit_softcapping: float | None = flag(
        None,
        positive=True,
        decides="mathematics",
        requires={"attention_dropout": 0},
        reason="the kernels that modify scores do not support dropout",
    )
    """Limit attention scores x smoothly to this value: cap * tanh(x / cap)."""
    final_logit_softcapping: float | None = flag(None, positive=True, decides="mathematics")
    """Limit the logits of the output layer in the same way."""
    softmax_type: str = flag(
        "vanilla",
        choices=("vanilla", "off-by-one", "learnable"),
        decides="shapes",
        requires={"attention_dropout": 0},
        reason="the kernels that modify scores do not support dropout",
    )
    """Attention sink, an additional score per query with a value of zero: none (vanilla), 0
    (off-by-one), or one learned per head (learnable, gpt-oss).
    """

    # Sliding windows
    window_size: tuple[int, int] | None = flag(None, decides="mathematics")
    """Sliding-window attention as LEFT,RIGHT: a token attends to itself, LEFT tokens before it and
    RIGHT (0) after it.
    """
    window_attn_skip_freq: int | list[int] | None = flag(
        None,
        parse=parse_layer_pattern,
        decides="mathematics",
        when=_WINDOW,
        meaning="window_pattern",
        requires={"window_size": True},
    )
    """Every N-th layer has no window; or a pattern of 1 (window) and 0 (none), e.g. ([1]*5+[0])*4.
    Default: all layers have the window.
    """

    # Embedding and output layer
    embedding_layernorm: bool = flag(False, decides="shapes")
    """Normalize the word embedding (BLOOM)."""
    scale_embeddings: bool = flag(False, decides="mathematics")
    """Multiply word embeddings by sqrt(hidden_size), rounded to the model's precision (Gemma)."""
    embedding_multiplier: float = flag(
        1.0, positive=True, decides="mathematics", meaning="embedding_factor"
    )
    """Factor of word embeddings (Granite)."""
    residual_multiplier: float = flag(1.0, positive=True, decides="mathematics")
    """Factor of the outputs of attention and MLP before they are added to the residual stream."""
    logits_scaling: float = flag(
        1.0, positive=True, decides="mathematics", meaning="logits_divisor"
    )
    """Divisor of the logits of the output layer."""
    untie_embeddings_and_output_weights: bool = flag(False, decides="shapes")
    """Give the output layer its own matrix instead of sharing the word embedding's."""
    output_layer_bias: bool = flag(False, decides="shapes")
    """Add a bias to the logits of the output layer (GPT-J, Phi)."""

    # Multi-token prediction
    mtp_num_layers: int | None = flag(
        None,
        at_least=0,
        decides="shapes",
        requires={"position_embedding_type": ("rope", "none")},
        excludes={"embedding_layernorm": True},
        reason="the last pipeline stage has word embeddings, but neither position embeddings nor "
        "the norm of embeddings",
    )
    """Number of tokens to predict in addition to the next one, by one more layer each (multi-token
    prediction, DeepSeek-V3). Default: 0.
    """
    mtp_loss_scaling_factor: float = flag(0.1, at_least=0)
    """With --mtp-num-layers: weight of the mean loss of these predictions in the objective."""

    # Maximal update parametrization
    use_mup: bool = flag(False, decides="mathematics", meaning="embedding_factor")
    """Maximal update parametrization (Yang et al. 2022): the best learning rate of a narrow model,
    the base model, is also that of a wider one. Scales attention scores and logits, and for
    matrices of the layers the initial weights, the learning rate and --adam-eps.
    """
    mup_base_hidden_size: int | None = flag(
        None, positive=True, decides="mathematics", when=_MUP, meaning="logits_divisor"
    )
    """With --use-mup: width of the base model. Default: --hidden-size."""
    mup_embedding_mult: float = flag(
        1.0, positive=True, decides="mathematics", when=_MUP, meaning="embedding_factor"
    )
    """With --use-mup: factor of the sum of word and position embeddings."""
    mup_output_mult: float = flag(
        1.0, positive=True, decides="mathematics", when=_MUP, meaning="logits_divisor"
    )
    """With --use-mup: factor of the logits. At 1, the base width divided by --hidden-size."""
    mup_base_head_dim: float | None = flag(
        None, positive=True, decides="mathematics", when=_MUP | _NOT_LATENT, meaning="score_scale"
    )
    """With --use-mup: width of a head of the base model; multiplies the factor of the attention
    scores by its square root. Default: 1.
    """
    mup_attn_scale_power: float = flag(
        1.0, decides="mathematics", when=_MUP | _NOT_LATENT, meaning="score_scale"
    )
    """With --use-mup: the factor of the attention scores is 1 / (width of a head) to this power."""

    # Dropout and initialization
    hidden_dropout: float = flag(0.1, at_least=0, at_most=1)
    """Dropout probability after the embedding and on every residual branch."""
    attention_dropout: float = flag(0.1, at_least=0, at_most=1)
    """Dropout probability of the attention probabilities."""
    init_method_std: float = flag(0.02, at_least=0)
    """Standard deviation of the initial weights. Output projections of a layer use std / sqrt(2 *
    num_layers). With --use-mup, all matrices of the layers divide it by sqrt(width / base width).
    """
