"""The families of models with experts: a `Family` for each `model_type` of transformers."""

from __future__ import annotations

from megatron.conversion.huggingface import parameters as rows
from megatron.conversion.huggingface.attention_rules import (
    heads,
)
from megatron.conversion.huggingface.common_rules import (
    GATE,
    GATED_RULES,
    LLAMA_RULES,
    NO_BIAS,
    NO_DROPOUT,
    RMS_NORM,
    RMS_OR_LAYER_NORM,
    SILU,
    SIZES,
    SIZES_WITHOUT_MLP,
    UNTIED,
)
from megatron.conversion.huggingface.dense_families import (
    FOREIGN_QWEN_RULES,
    GATED_MIXERS,
    GRANITE_MODEL,
    GRANITE_RULES,
    GRANITE_SWA_RULES,
    HUNYUAN_RULES,
    LFM2_RULES,
    MAMBA2_FIELDS,
    OLMO_RULES,
    QWEN2_RULES,
    QWEN3_RULES,
)
from megatron.conversion.huggingface.expert_rules import (
    AUXILIARY_LOSS,
    DEEPSEEK_HARMLESS,
    DENSE_PREFIX,
    EXPERT_AND_DENSE_WIDTH,
    EXPERT_INTERVAL,
    EXPERT_LAYERS,
    EXPERTS_PER_TOKEN,
    FLINT_EXPERT_LAYERS,
    LAYER_TOPK,
    NORMALIZED_SIGMOID,
    NORMALIZED_WEIGHTS,
    OPTIONAL_EXPERTS,
    PERIODIC_EXPERTS,
    PREDICTION_LAYERS,
    SELECTION_FUNCTION,
    SHARED_COMBINATION,
    SHARED_WIDTH,
    SIGMOID_CHOICE,
    SIGMOID_EXPERTS,
    SIGMOID_NORMALIZATION,
    SIGMOID_SCORES,
    SWITCHED_NORMALIZATION,
    WIDTH_WITHOUT_EXPERTS,
    counted_shared_experts,
    dense_prefix,
    listed_expert_layers,
    scaled_weights,
)
from megatron.conversion.huggingface.family import Family
from megatron.conversion.huggingface.layer_rope_rules import SWITCHED_ROPE, two_ropes
from megatron.conversion.huggingface.mixer_rules import (
    ATTENTION_LAYERS,
    CONVOLUTION,
    CONVOLUTION_LAYERS,
    PERIODIC_ATTENTION,
    STATE_SPACE,
)
from megatron.conversion.huggingface.rope_rules import rope
from megatron.conversion.huggingface.rules import (
    ATTENTION,
    QKV,
    Rule,
    always,
    biases,
    copied,
    fixed,
    implied,
    nullable,
    reciprocal,
    root_scale,
)
from megatron.conversion.huggingface.window_rules import (
    COHERE_WINDOWS,
    COMMON_WINDOW,
    FLINT_WINDOWS,
    FULL_ATTENTION,
    QWEN3_MOE_WINDOW,
    alternating_windows,
    hybrid_windows,
    qwen_windows,
)

_SHARED_REASON = "layers with shared experts do not have biases"
_NO_ATTENTION_BIAS = fixed("attention_bias", False, written=True, reason=_SHARED_REASON)


def _experts(counts: tuple[str, ...], width: str) -> tuple[Rule, ...]:
    """Return the rules of `counts`, the fields of the number of experts, and of their `width`."""
    num_experts = copied("num_experts", *counts)
    return EXPERTS_PER_TOKEN, AUXILIARY_LOSS, num_experts, copied("moe_ffn_hidden_size", width)


_QWEN_EXPERT_RULES = (
    *_experts(("num_experts", "num_local_experts"), "moe_intermediate_size"),
    SWITCHED_NORMALIZATION,
    EXPERT_LAYERS,
)
_SHARED_EXPERT = (
    copied("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
    implied(moe_shared_expert_gate=True),
)
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    rows.MIXTRAL_ROWS,
    (
        *LLAMA_RULES,
        *_experts(("num_local_experts", "num_experts"), "intermediate_size"),
        NORMALIZED_WEIGHTS,
        heads(),
        NO_BIAS,
        COMMON_WINDOW,
        fixed("router_jitter_noise", 0.0),
    ),
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    rows.LLAMA_ROWS,
    (
        *QWEN2_RULES,
        qwen_windows(in_first_layers=True),
        *_QWEN_EXPERT_RULES,
        *_SHARED_EXPERT,
        fixed("qkv_bias", True),
        fixed("use_mrope", False),
    ),
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    rows.QWEN3_ROWS,
    (*QWEN3_RULES, QWEN3_MOE_WINDOW, *_QWEN_EXPERT_RULES),
)
QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    rows.QWEN3_NEXT_ROWS,
    (
        *FOREIGN_QWEN_RULES,
        copied("ffn_hidden_size", "intermediate_size", required=True),
        *_QWEN_EXPERT_RULES,
        *_SHARED_EXPERT,
    ),
    foreign_mixers=GATED_MIXERS,
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    rows.QWEN3_NEXT_ROWS,
    (
        *FOREIGN_QWEN_RULES,
        *_experts(("num_experts", "num_local_experts"), "moe_intermediate_size"),
        NORMALIZED_WEIGHTS,
        *_SHARED_EXPERT,
    ),
    foreign_mixers=GATED_MIXERS,
)
_GRANITE_EXPERTS = (
    biases(attention_bias=ATTENTION),
    *_experts(("num_local_experts",), "intermediate_size"),
    NORMALIZED_WEIGHTS,
)
GRANITEMOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    rows.GRANITEMOE_ROWS,
    (*GRANITE_RULES, *_GRANITE_EXPERTS),
)
GRANITEMOESHARED = Family(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    rows.GRANITEMOE_ROWS,
    (*GRANITE_RULES, *_GRANITE_EXPERTS, SHARED_WIDTH),
)
GRANITEMOE_SWA = Family(
    "granitemoe_swa",
    "GraniteMoeSWAForCausalLM",
    rows.GRANITEMOE_SWA_ROWS,
    (*GRANITE_SWA_RULES, *_GRANITE_EXPERTS, SHARED_WIDTH),
)
GRANITEMOEHYBRID = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    rows.GRANITE_HYBRID_ROWS,
    (
        WIDTH_WITHOUT_EXPERTS,
        SWITCHED_ROPE,
        *GRANITE_MODEL,
        ATTENTION_LAYERS,
        rope(),
        biases(attention_bias=ATTENTION),
        OPTIONAL_EXPERTS,
        AUXILIARY_LOSS,
    ),
    # transformers reads neither of the last two.
    harmless=f"{MAMBA2_FIELDS} normalization_function init_method",
    foreign_mixers={"mamba.": STATE_SPACE},
)
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    rows.QWEN3_ROWS,
    (
        *OLMO_RULES,
        # Its norms of queries and keys have hidden_size weights.
        heads(always_written=False, free_width=False),
        *_experts(("num_experts", "num_local_experts"), "intermediate_size"),
        SWITCHED_NORMALIZATION,
        nullable("clip_qkv"),
    ),
)
FLEX_OLMO = Family(
    "flex_olmo",
    "FlexOlmoForCausalLM",
    rows.OLMO2_ROWS,
    (
        *OLMO_RULES,
        heads(always_written=False),
        *_experts(("num_experts", "num_local_experts"), "intermediate_size"),
        SWITCHED_NORMALIZATION,
        implied(norm_placement="post"),
    ),
)
GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    rows.GPT_OSS_ROWS,
    (
        *SIZES,
        *RMS_NORM,
        *_experts(("num_local_experts", "num_experts"), "intermediate_size"),
        NORMALIZED_WEIGHTS,
        UNTIED,
        rope(spelled_out=True),
        heads(),
        alternating_windows(2),
        copied("activation_func_clamp_value", "swiglu_limit"),
        fixed("swiglu_alpha", 1.702),
        SILU,
        fixed("attention_bias", True, written=True),
        implied(
            quick_geglu=True,
            glu_linear_offset=1.0,
            add_bias_linear=True,
            softmax_type="learnable",
            hidden_dropout=0.0,
        ),
    ),
    harmless="experts_per_token initial_context_length",  # repeat fields that are read
)
_SIGMOID_MODEL = (
    GATE,
    UNTIED,
    NO_DROPOUT,
    *RMS_NORM,
    heads(),
    *SIGMOID_EXPERTS,
    FULL_ATTENTION,
    PREDICTION_LAYERS,
)
_GLM4_MOE_RULES = (*SIZES, *_SIGMOID_MODEL)
GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    rows.GLM4_MOE_ROWS,
    (
        *_GLM4_MOE_RULES,
        rope(partial=True),
        biases(attention_bias=QKV),
        copied("qk_layernorm", "use_qk_norm"),
        DENSE_PREFIX,
    ),
    harmless=DEEPSEEK_HARMLESS,
)
SOLAR_OPEN = Family(
    "solar_open",
    "SolarOpenForCausalLM",
    rows.GLM4_MOE_ROWS,
    (
        *SIZES_WITHOUT_MLP,
        # All layers have experts, and transformers does not save this field.
        copied("ffn_hidden_size", "intermediate_size"),
        *_SIGMOID_MODEL,
        rope(),
        biases(attention_bias=QKV),
        fixed("first_k_dense_replace", 0),
        fixed("use_qk_norm", False),
    ),
    harmless=DEEPSEEK_HARMLESS,
)
DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    rows.GLM4_MOE_ROWS,
    (
        *LLAMA_RULES,
        heads(always_written=False),
        NO_BIAS,
        _NO_ATTENTION_BIAS,
        implied(qk_layernorm=True),
        EXPERTS_PER_TOKEN,  # without a default
        *SIGMOID_EXPERTS,
        DENSE_PREFIX,
        fixed("moe_layer_freq", 1),
        qwen_windows(switched=False),
    ),
    harmless=DEEPSEEK_HARMLESS,
)
COHERE2_MOE = Family(
    "cohere2_moe",
    "Cohere2MoeForCausalLM",
    rows.COHERE2_MOE_ROWS,
    (
        *SIZES_WITHOUT_MLP,
        EXPERT_AND_DENSE_WIDTH,
        GATE,
        RMS_OR_LAYER_NORM,
        UNTIED,
        NO_DROPOUT,
        heads(),
        NO_BIAS,
        _NO_ATTENTION_BIAS,
        # transformers ignores the field of a scaling, and saves a base that it does not read.
        rope(("default",), is_nested=True),
        reciprocal("logits_scaling", "logit_scale"),
        implied(rotary_interleaved=True, parallel_residual=True, share_parallel_norm=True),
        EXPERTS_PER_TOKEN,
        copied("num_experts", "num_experts"),
        listed_expert_layers(num_dense=None),
        COHERE_WINDOWS,
        SELECTION_FUNCTION,
        counted_shared_experts("num_shared_experts"),
        SHARED_COMBINATION,
    ),
)
EXAONE_MOE = Family(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    rows.EXAONE_MOE_ROWS,
    (
        *LLAMA_RULES,
        heads(always_written=False),
        NO_BIAS,
        implied(qk_layernorm=True),
        hybrid_windows(always=False),
        *SIGMOID_CHOICE,
        copied("num_experts", "num_experts", "num_local_experts"),
        counted_shared_experts("num_shared_experts"),
        listed_expert_layers(num_dense=None),
    ),
    harmless="num_nextn_predict_layers",  # transformers ignores these layers
)
HY_V3 = Family(
    "hy_v3",
    "HYV3ForCausalLM",
    rows.HY_V3_ROWS,
    (
        *LLAMA_RULES,
        heads(),
        NO_BIAS,
        _NO_ATTENTION_BIAS,
        *always(mlp_bias=False),
        implied(qk_layernorm=True),
        *_experts(("num_experts", "num_local_experts"), "moe_intermediate_size"),
        NORMALIZED_SIGMOID,
        SIGMOID_SCORES,
        scaled_weights("router_scaling_factor"),
        # Without shared experts, transformers builds one of the width of a dense layer.
        counted_shared_experts("num_shared_experts", least=1),
        listed_expert_layers(num_dense=1),
    ),
    harmless="enable_moe_fp32_combine num_nextn_predict_layers",
)
AFMOE = Family(
    "afmoe",
    "AfmoeForCausalLM",
    rows.AFMOE_ROWS,
    (
        *LLAMA_RULES,
        heads(),
        NO_BIAS,
        _NO_ATTENTION_BIAS,
        implied(qk_layernorm=True, attention_output_gate=True, norm_placement="both"),
        hybrid_windows(always=True, period_field="global_attn_every_n_layers"),
        root_scale("mup_enabled"),
        EXPERTS_PER_TOKEN,
        copied("num_experts", "num_experts"),
        copied("moe_ffn_hidden_size", "moe_intermediate_size"),
        scaled_weights("route_scale"),
        counted_shared_experts("num_shared_experts"),
        dense_prefix("num_dense_layers"),
        NORMALIZED_SIGMOID,
        SIGMOID_SCORES,
        # Published models state these. transformers does not support other values.
        fixed("score_func", "sigmoid"),
        fixed("route_norm", True),
        fixed("n_group", 1),
        fixed("topk_group", 1),
        fixed("num_expert_groups", 1),
        fixed("num_limited_groups", 1),
    ),
    harmless="auto_map load_balance_coeff use_grouped_mm",
)
FLINT = Family(
    "flint",
    "FlintForCausalLM",
    rows.FLINT_ROWS,
    (
        *LLAMA_RULES,
        heads(),
        NO_BIAS,
        _NO_ATTENTION_BIAS,
        implied(
            qk_layernorm=True,
            softmax_type="learnable",
            moe_router_score_function="sigmoid",
            moe_router_dtype="fp32",
        ),
        FLINT_WINDOWS,
        *_experts(("num_experts", "num_local_experts"), "moe_intermediate_size"),
        SIGMOID_NORMALIZATION,
        copied("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
        FLINT_EXPERT_LAYERS,
    ),
)
HUNYUAN_V1_MOE = Family(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    rows.HUNYUAN_MOE_ROWS,
    (
        *HUNYUAN_RULES,
        NO_BIAS,
        _NO_ATTENTION_BIAS,
        copied("num_experts", "num_experts", "num_local_experts"),
        LAYER_TOPK,
        NORMALIZED_WEIGHTS,
        # The shared expert has the width of the others.
        copied("moe_ffn_hidden_size", "intermediate_size"),
        copied("moe_shared_expert_intermediate_size", "intermediate_size"),
        implied(moe_router_dtype="fp32"),
    ),
    harmless="eod_token_id",
)
ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    rows.ERNIE4_5_MOE_ROWS,
    (
        implied(attention_dropout=0.0, rotary_interleaved=True),
        *LLAMA_RULES,
        heads(),
        NO_BIAS,
        *always(use_bias=False),
        FULL_ATTENTION,
        copied("num_experts", "moe_num_experts", "num_experts"),
        copied("moe_router_topk", "moe_k", "num_experts_per_tok"),
        NORMALIZED_WEIGHTS,
        copied("moe_ffn_hidden_size", "moe_intermediate_size"),
        counted_shared_experts("moe_num_shared_experts"),
        EXPERT_INTERVAL,
        AUXILIARY_LOSS,
        # A limit of the sum of the weights, which real sums exceed.
        fixed("moe_norm_min", 1e-12),
        implied(
            moe_router_score_function="softmax",
            moe_router_enable_expert_bias=True,
            moe_router_dtype="fp32",
        ),
    ),
    # transformers reads none of these.
    harmless="moe_capacity moe_gate moe_use_aux_free num_nextn_predict_layers",
)
ARIA_TEXT = Family(
    "aria_text",
    "AriaTextForCausalLM",
    rows.ARIA_ROWS,
    (
        *LLAMA_RULES,
        SILU,  # of the experts, for every value of the field
        heads(),
        NO_BIAS,
        _NO_ATTENTION_BIAS,
        *always(mlp_bias=False),
        copied("num_experts", "moe_num_experts"),
        copied("moe_router_topk", "moe_topk"),
        copied("moe_ffn_hidden_size", "intermediate_size"),
        counted_shared_experts("moe_num_shared_experts"),
        NORMALIZED_WEIGHTS,
        FULL_ATTENTION,
    ),
)
MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    rows.MINIMAX_M2_ROWS,
    (
        *GATED_RULES,
        *RMS_NORM,
        heads(),
        rope(partial=True, width="rotary_dim"),
        NO_BIAS,
        *_experts(("num_local_experts", "num_experts"), "intermediate_size"),
        NORMALIZED_SIGMOID,
        FULL_ATTENTION,
        fixed("router_jitter_noise", 0.0),
        fixed("scoring_func", "sigmoid"),
        fixed("use_qk_norm", True),
        fixed("qk_norm_type", "per_layer"),
        fixed("use_routing_bias", True),
        fixed("shared_intermediate_size", 0),
        implied(
            qk_layernorm=True,
            qk_layernorm_across_heads=True,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
        ),
    ),
    harmless=f"{DEEPSEEK_HARMLESS} attn_type_list mtp_transformer_layers num_mtp_modules use_mtp",
)
MELLUM = Family(
    "mellum",
    "MellumForCausalLM",
    rows.QWEN3_ROWS,
    (
        *GATED_RULES,
        *RMS_NORM,
        two_ropes(),
        heads(),
        biases(attention_bias=ATTENTION),
        implied(qk_layernorm=True),
        *_experts(("num_experts", "num_local_experts"), "moe_intermediate_size"),
        SWITCHED_NORMALIZATION,
        listed_expert_layers(num_dense=0),
        alternating_windows(1),
    ),
)
JAMBA = Family(
    "jamba",
    "JambaForCausalLM",
    rows.JAMBA_ROWS,
    (
        *GATED_RULES,
        *RMS_NORM,
        heads(always_written=False, free_width=False),
        NO_BIAS,
        implied(position_embedding_type="none", moe_router_pre_softmax=True),
        *_experts(("num_experts", "num_local_experts"), "intermediate_size"),
        PERIODIC_EXPERTS,
        PERIODIC_ATTENTION,
    ),
    # Fields of state space layers.
    harmless="""
        mamba_d_state mamba_d_conv mamba_expand mamba_dt_rank mamba_conv_bias mamba_proj_bias
        mamba_inner_layernorms use_mamba_kernels use_mambapy use_associative_scan
        num_logits_to_keep calc_logits_for_entire_prompt""",
    foreign_mixers={"mamba.": STATE_SPACE},
)
LFM2_MOE = Family(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    rows.LFM2_ROWS,
    (
        *LFM2_RULES,
        copied("ffn_hidden_size", "intermediate_size", required=True),
        EXPERTS_PER_TOKEN,
        copied("num_experts", "num_experts"),
        copied("moe_ffn_hidden_size", "moe_intermediate_size"),
        dense_prefix("num_dense_layers"),
        SIGMOID_NORMALIZATION,
        scaled_weights("routed_scaling_factor"),
        copied("moe_router_enable_expert_bias", "use_expert_bias"),
        implied(moe_router_score_function="sigmoid", moe_router_dtype="fp32"),
        CONVOLUTION_LAYERS,
    ),
    harmless="conv_L_cache conv_bias",
    foreign_mixers={"conv.": CONVOLUTION},
)
