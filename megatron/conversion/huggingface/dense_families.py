"""Families of dense models with gated MLPs: a `Family` for each `model_type` of transformers."""

from __future__ import annotations

from megatron.conversion.huggingface import parameters as rows
from megatron.conversion.huggingface.attention_rules import (
    ATTENTION_MULTIPLIER,
    QUERY_SCALAR,
    heads,
)
from megatron.conversion.huggingface.common_rules import (
    GATE,
    GATED_RULES,
    LLAMA_RULES,
    NO_BIAS,
    NO_DROPOUT,
    RMS_NORM,
    SIZES,
    SIZES_WITHOUT_MLP,
    UNTIED,
    layer_norm,
)
from megatron.conversion.huggingface.family import Family
from megatron.conversion.huggingface.layer_rope_rules import LAYER_BASES, two_ropes
from megatron.conversion.huggingface.mixer_rules import (
    CONVOLUTION,
    CONVOLUTIONS,
    LISTED_ATTENTION,
    STATE_SPACE,
)
from megatron.conversion.huggingface.rope_rules import HUNYUAN_ROPE, MINISTRAL3_ROPE, rope
from megatron.conversion.huggingface.rules import (
    ADJUSTED_WIDTH,
    ATTENTION,
    COMMON_BIASES,
    MLP,
    POST_NORM,
    QKV,
    always,
    biases,
    copied,
    dropout,
    fixed,
    implied,
    nullable,
    opposite,
    reciprocal,
)
from megatron.conversion.huggingface.window_rules import (
    COMMON_WINDOW,
    FULL_ATTENTION,
    LISTED_WINDOWS,
    NO_ROPE_LAYERS,
    alternating_windows,
    hybrid_windows,
    qwen_windows,
)

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    rows.LLAMA_ROWS,
    (
        *LLAMA_RULES,
        heads(),
        biases(attention_bias=ATTENTION, mlp_bias=MLP),
        FULL_ATTENTION,
        fixed("rope_interleaved", False),
    ),
    harmless="is_llama_config",  # nanotron's converter writes both, e.g. for SmolLM2-135M
)
INTERNLM3 = Family(
    "internlm3",
    "LlamaForCausalLM",
    rows.LLAMA_ROWS,
    (*LLAMA_RULES, heads(), COMMON_BIASES, FULL_ATTENTION),
    other_architectures=("InternLM3ForCausalLM",),
)
IQUESTCODER = Family(
    "iquestcoder",
    "LlamaForCausalLM",
    rows.LLAMA_ROWS,
    (
        *LLAMA_RULES,
        heads(),
        biases(attention_bias=ATTENTION, mlp_bias=MLP),
        FULL_ATTENTION,
        fixed("clip_qkv", None),
        fixed("use_sliding_window", False),
    ),
    harmless="sliding_window max_window_layers",
    other_architectures=("IQuestCoderForCausalLM",),
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    rows.LLAMA_ROWS,
    (*LLAMA_RULES, heads(), NO_BIAS, COMMON_WINDOW),
)
MINISTRAL = Family(
    "ministral",
    "MinistralForCausalLM",
    rows.LLAMA_ROWS,
    (*LLAMA_RULES, heads(), NO_BIAS, LISTED_WINDOWS),
)
MINISTRAL3 = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    rows.LLAMA_ROWS,
    (*GATED_RULES, *RMS_NORM, MINISTRAL3_ROPE, heads(), NO_BIAS, COMMON_WINDOW),
)
CWM = Family(
    "cwm",
    "CwmForCausalLM",
    rows.LLAMA_ROWS,
    (
        *GATED_RULES,
        *RMS_NORM,
        rope(spelled_out=True, whole_default=True),
        heads(),
        NO_BIAS,
        *always(mlp_bias=False),
        alternating_windows(4, full_first=True),
    ),
)
SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    rows.LLAMA_ROWS,
    (
        *LLAMA_RULES,
        heads(always_written=False),
        biases(attention_bias=ATTENTION, mlp_bias=MLP),
        NO_ROPE_LAYERS,
        FULL_ATTENTION,
        fixed("use_sliding_window", False),
    ),
    harmless="sliding_window max_window_layers",
)
EXAONE4 = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    rows.OLMO2_ROWS,
    (
        *LLAMA_RULES,
        heads(always_written=False),
        NO_BIAS,
        implied(qk_layernorm=True, norm_placement="post"),
        hybrid_windows(always=False),
    ),
)
_MULTIPLIERS = (
    copied("embedding_multiplier", "embedding_multiplier"),
    copied("residual_multiplier", "residual_multiplier"),
    ATTENTION_MULTIPLIER,
)
GRANITE_MODEL = (
    *GATED_RULES,
    *RMS_NORM,
    heads(always_written=False),
    *_MULTIPLIERS,
    copied("logits_scaling", "logits_scaling"),
)
GRANITE_RULES = (*GRANITE_MODEL, rope(), FULL_ATTENTION)
# A window in all layers but every fourth, starting with the first; sinks, and bases by layer.
GRANITE_SWA_RULES = (
    *GRANITE_MODEL,
    alternating_windows(4, full_first=True),
    LAYER_BASES,
    implied(softmax_type="learnable"),
)
GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    rows.LLAMA_ROWS,
    (*GRANITE_RULES, biases(attention_bias=ATTENTION, mlp_bias=MLP)),
)
GRANITE_SWA = Family(
    "granite_swa",
    "GraniteSWAForCausalLM",
    rows.GRANITE_SWA_ROWS,
    (*GRANITE_SWA_RULES, biases(attention_bias=ATTENTION, mlp_bias=MLP)),
)
HYPERCLOVAX = Family(
    "hyperclovax",
    "HyperCLOVAXForCausalLM",
    rows.HYPERCLOVAX_ROWS,
    (
        *LLAMA_RULES,
        heads(),
        *_MULTIPLIERS,
        reciprocal("logits_scaling", "logits_scaling"),
        biases(attention_bias=ATTENTION, mlp_bias=MLP),
        POST_NORM,
        FULL_ATTENTION,
    ),
)
SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    rows.LLAMA_ROWS,
    (
        copied("hidden_dropout", "residual_dropout"),
        *LLAMA_RULES,
        heads(),
        biases(
            attention_bias=QKV,
            attention_out_bias=".self_attention.linear_proj.",
            mlp_bias=MLP,
        ),
        FULL_ATTENTION,
    ),
)
ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    rows.LLAMA_ROWS,
    (
        implied(attention_dropout=0.0, rotary_interleaved=True),
        *LLAMA_RULES,
        heads(),
        copied("add_bias_linear", "use_bias"),
        FULL_ATTENTION,
    ),
)
HELIUM = Family(
    "helium",
    "HeliumForCausalLM",
    rows.HELIUM_ROWS,
    (
        *LLAMA_RULES,
        implied(rotary_interleaved=True),
        heads(free_width=False),
        biases(attention_bias=QKV, mlp_bias=MLP),
        FULL_ATTENTION,
    ),
)
_GLM_RULES = (
    *GATED_RULES,
    *RMS_NORM,
    heads(),
    rope(partial=True),
    implied(rotary_interleaved=True),
    biases(attention_bias=QKV),
    FULL_ATTENTION,
)
GLM = Family("glm", "GlmForCausalLM", rows.GLM_ROWS, _GLM_RULES)
GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    rows.GLM4_ROWS,
    (*_GLM_RULES, implied(norm_placement="both")),
)
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    rows.PHI3_ROWS,
    (
        dropout("resid_pdrop", "embd_pdrop"),
        *GATED_RULES,
        *RMS_NORM,
        heads(always_written=False),
        rope(("default", "longrope"), partial=True),
        NO_BIAS,
        COMMON_WINDOW,
    ),
)
QWEN2_RULES = (
    *LLAMA_RULES,
    heads(always_written=False),
    implied(add_bias_linear=False, add_qkv_bias=True),
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    rows.LLAMA_ROWS,
    (*QWEN2_RULES, qwen_windows(), fixed("use_mrope", False)),
)
QWEN3_RULES = (
    *LLAMA_RULES,
    heads(),
    biases(attention_bias=ATTENTION),
    implied(qk_layernorm=True),
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    rows.QWEN3_ROWS,
    (*QWEN3_RULES, qwen_windows()),
)
# Delta nets, and attention whose output is gated. Both are foreign.
GATED_MIXERS = {
    "linear_attn.": "gated delta net",
    "self_attn.": "attention with a gate of its output",
}
FOREIGN_QWEN_RULES = (
    *SIZES_WITHOUT_MLP,
    GATE,
    *RMS_NORM,
    UNTIED,
    NO_DROPOUT,
    heads(),
    NO_BIAS,
    implied(apply_layernorm_1p=True, position_embedding_type="none"),
)
QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    rows.QWEN3_NEXT_ROWS,
    (*FOREIGN_QWEN_RULES, copied("ffn_hidden_size", "intermediate_size", required=True)),
    foreign_mixers=GATED_MIXERS,
)
# Fields of state space layers.
MAMBA2_FIELDS = """
    mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size
    mamba_conv_bias mamba_proj_bias time_step_limit"""
BAMBA = Family(
    "bamba",
    "BambaForCausalLM",
    rows.JAMBA_ROWS,
    (
        *GATED_RULES,
        *RMS_NORM,
        heads(always_written=False, free_width=False),
        rope(partial=True),
        NO_BIAS,
        *always(attention_bias=False, mlp_bias=False),
        LISTED_ATTENTION,
    ),
    harmless=f"{MAMBA2_FIELDS} mamba_n_heads use_mamba_kernels attn_rotary_emb num_logits_to_keep "
    "z_loss_coefficient",
    foreign_mixers={"mamba.": STATE_SPACE},
)
LFM2_RULES = (
    implied(swiglu=True, normalization="RMSNorm", qk_layernorm=True, attention_dropout=0.0),
    *SIZES_WITHOUT_MLP,
    copied("norm_epsilon", "norm_eps"),
    opposite("untie_embeddings_and_output_weights", "tie_embedding", "tie_word_embeddings"),
    rope(),
    heads(always_written=False, free_width=False),
    NO_BIAS,
    NO_DROPOUT,
)
LFM2 = Family(
    "lfm2",
    "Lfm2ForCausalLM",
    rows.LFM2_ROWS,
    (*LFM2_RULES, ADJUSTED_WIDTH, CONVOLUTIONS),
    # Fields of convolutions, repetitions of others, and options of training.
    harmless="""
        conv_L_cache conv_bias conv_dim conv_dim_out conv_use_xavier_init block_dim block_norm_eps
        block_mlp_init_scale block_out_init_scale block_use_swiglu block_use_xavier_init num_heads
        use_pos_enc""",
    foreign_mixers={"conv.": CONVOLUTION},
)
HUNYUAN_RULES = (
    *GATED_RULES,
    *RMS_NORM,
    heads(),
    HUNYUAN_ROPE,
    implied(qk_layernorm=True, qk_layernorm_after_rope=True),
    FULL_ATTENTION,
)
HUNYUAN_V1_DENSE = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    rows.HUNYUAN_ROWS,
    (*HUNYUAN_RULES, biases(attention_bias=ATTENTION)),
    harmless="eod_token_id",
)
_OLMO_MODEL = (
    *RMS_NORM,
    biases(attention_bias=ATTENTION),
    implied(qk_layernorm=True, qk_layernorm_across_heads=True),
)
OLMO_RULES = (*GATED_RULES, rope(), *_OLMO_MODEL)
OLMO = Family(
    "olmo",
    "OlmoForCausalLM",
    rows.QWEN3_ROWS,
    (
        *GATED_RULES,
        rope(),
        heads(always_written=False),
        biases(attention_bias=ATTENTION),
        nullable("clip_qkv"),
        implied(normalization="LayerNorm", norm_weights=False, norm_epsilon=1e-5),
    ),
)
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    rows.OLMO2_ROWS,
    (*OLMO_RULES, heads(always_written=False), implied(norm_placement="post")),
)
OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    rows.OLMO2_ROWS,
    (
        *GATED_RULES,
        two_ropes("rope_theta", "rope_scaling"),
        *_OLMO_MODEL,
        heads(always_written=False),
        alternating_windows(4),
        implied(norm_placement="post"),
    ),
)
_GEMMA1_RULES = (
    *SIZES,
    *RMS_NORM,
    UNTIED,
    *always(attention_bias=False),
    fixed("use_bidirectional_attention", False, None),
    heads(),
    NO_BIAS,
    NO_DROPOUT,
    implied(geglu=True, apply_layernorm_1p=True, scale_embeddings=True),
)
GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    rows.LLAMA_ROWS,
    (
        *_GEMMA1_RULES,
        rope(),
        # The official releases call the tanh approximation "gelu".
        fixed("hidden_act", "gelu_pytorch_tanh", "gelu", written=True),
        fixed("hidden_activation", "gelu_pytorch_tanh"),
        FULL_ATTENTION,
    ),
)
_GEMMA_RULES = (
    *_GEMMA1_RULES,
    *always(hidden_activation="gelu_pytorch_tanh"),
    QUERY_SCALAR,
    nullable("final_logit_softcapping"),
)
_GEMMA_HARMLESS = "cache_implementation hidden_act"
_GEMMA2_RULES = (
    *_GEMMA_RULES,
    rope(),
    alternating_windows(2),
    nullable("attn_logit_softcapping"),
)
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    rows.GEMMA_ROWS,
    (*_GEMMA2_RULES, implied(norm_placement="both")),
    harmless=_GEMMA_HARMLESS,
)
VAULTGEMMA = Family(
    "vaultgemma",
    "VaultGemmaForCausalLM",
    rows.VAULTGEMMA_ROWS,
    _GEMMA2_RULES,
    harmless=_GEMMA_HARMLESS,
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    rows.GEMMA_ROWS,
    (
        *_GEMMA_RULES,
        two_ropes("rope_theta", "rope_local_base_freq", "rope_scaling"),
        alternating_windows(6, free=True),
        implied(qk_layernorm=True, norm_placement="both"),
    ),
    # Its attention does not read the first of these, and its configuration not the second.
    harmless=f"{_GEMMA_HARMLESS} attn_logit_softcapping _sliding_window_pattern",
)
STABLELM = Family(
    "stablelm",
    "StableLmForCausalLM",
    rows.STABLELM_ROWS,
    (
        *SIZES,
        GATE,
        *layer_norm("layer_norm_eps"),
        UNTIED,
        heads(always_written=False, free_width=False),
        rope(partial=True),
        NO_BIAS,
        copied("add_qkv_bias", "use_qkv_bias"),
        copied("hidden_dropout", "hidden_dropout"),
        copied("parallel_residual", "use_parallel_residual"),
        copied("share_parallel_norm", "use_parallel_residual"),
        copied("qk_layernorm", "qk_layernorm"),
        copied("qk_layernorm_per_head", "qk_layernorm"),
    ),
)
_COHERE_RULES = (
    *GATED_RULES,
    *layer_norm("layer_norm_eps"),
    heads(always_written=False, free_width=False),
    rope(),
    biases(attention_bias=ATTENTION),
    reciprocal("logits_scaling", "logit_scale"),
    implied(rotary_interleaved=True, parallel_residual=True, share_parallel_norm=True),
)
COHERE = Family(
    "cohere",
    "CohereForCausalLM",
    rows.COHERE_ROWS,
    (
        *_COHERE_RULES,
        FULL_ATTENTION,
        copied("qk_layernorm", "use_qk_norm"),
        copied("qk_layernorm_per_head", "use_qk_norm"),
    ),
)
COHERE2 = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    rows.COHERE_ROWS,
    (*_COHERE_RULES, hybrid_windows(always=True)),
    harmless="cache_implementation use_gated_activation position_embedding_type",
)
