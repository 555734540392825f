"""Families with experts and multi-head latent attention, in the order of DeepSeek's releases."""

from __future__ import annotations

from megatron.conversion.huggingface import parameters as rows
from megatron.conversion.huggingface.attention_rules import (
    INDEXED_LAYERS,
    LATENT_HEAD_DIM,
    NO_GROUPS,
    WHOLE_HEAD_DIM,
)
from megatron.conversion.huggingface.common_rules import (
    GATED_RULES,
    NO_BIAS,
    RMS_NORM,
)
from megatron.conversion.huggingface.expert_rules import (
    DEEPSEEK_HARMLESS,
    DENSE_PREFIX,
    EXPERTS_PER_TOKEN,
    PREDICTION_LAYERS,
    SHARED_EXPERTS,
    SIGMOID_EXPERTS,
    SWITCHED_NORMALIZATION,
    deepseek_experts,
    listed_expert_layers,
    scaled_weights,
)
from megatron.conversion.huggingface.family import Family
from megatron.conversion.huggingface.rope_rules import MISTRAL4_ROPE, ROPE_INTERLEAVE, rope
from megatron.conversion.huggingface.rules import (
    SHORT_TEXT,
    always,
    copied,
    fixed,
    implied,
    nullable,
    repeated,
)
from megatron.core.safe_files.schema import COUNT, anything, integer, sequence

_LATENT_MODEL = (
    *GATED_RULES,
    *RMS_NORM,
    NO_BIAS,
    fixed("attention_bias", False, written=True, reason="latent attention does not have biases"),
    NO_GROUPS,
    nullable("q_lora_rank"),
    copied("kv_lora_rank", "kv_lora_rank"),
    copied("qk_head_dim", "qk_nope_head_dim"),
    copied("qk_pos_emb_head_dim", "qk_rope_head_dim"),
    copied("v_head_dim", "v_head_dim"),
    # The norms within attention always have this epsilon.
    implied(multi_latent_attention=True, qk_layernorm=True, latent_norm_epsilon=1e-6),
)
_LATENT_RULES = (*_LATENT_MODEL, rope(), LATENT_HEAD_DIM)
DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    rows.DEEPSEEK_ROWS,
    (
        *_LATENT_RULES,
        DENSE_PREFIX,
        fixed("moe_layer_freq", 1),
        EXPERTS_PER_TOKEN,
        copied("num_experts", "n_routed_experts", "num_local_experts"),
        copied("moe_ffn_hidden_size", "moe_intermediate_size"),
        deepseek_experts(("greedy", "group_limited_greedy"), best=1),
        SHARED_EXPERTS,
        *always(mlp_bias=False, norm_topk_prob=False),
        fixed("scoring_func", "softmax"),
        implied(
            moe_router_score_function="softmax",
            moe_router_pre_softmax=True,
            moe_router_dtype="fp32",
        ),
    ),
    harmless=DEEPSEEK_HARMLESS,
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    rows.DEEPSEEK_ROWS,
    (
        *_LATENT_RULES,
        DENSE_PREFIX,
        fixed("moe_layer_freq", 1),
        *SIGMOID_EXPERTS,
        ROPE_INTERLEAVE,
        PREDICTION_LAYERS,
    ),
    harmless=DEEPSEEK_HARMLESS,
    aliases=("kimi_k2",),
)
MISTRAL4 = Family(
    "mistral4",
    "Mistral4ForCausalLM",
    rows.MISTRAL4_ROWS,
    (
        *_LATENT_MODEL,
        MISTRAL4_ROPE,
        WHOLE_HEAD_DIM,
        DENSE_PREFIX,
        EXPERTS_PER_TOKEN,
        copied("num_experts", "n_routed_experts", "num_local_experts"),
        copied("moe_ffn_hidden_size", "moe_intermediate_size"),
        scaled_weights("routed_scaling_factor"),
        SHARED_EXPERTS,
        SWITCHED_NORMALIZATION,
        fixed("n_group", 1),
        fixed("topk_group", 1),
        ROPE_INTERLEAVE,
    ),
    harmless="qk_head_dim",
)
GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    rows.DEEPSEEK_ROWS,
    (
        *_LATENT_RULES,
        listed_expert_layers(num_dense=1),
        *SIGMOID_EXPERTS,
        ROPE_INTERLEAVE,
        PREDICTION_LAYERS,
    ),
    harmless=DEEPSEEK_HARMLESS,
)
# DeepSeek-V3 with an indexer per layer that chooses the tokens to attend to. Our model attends to
# all, which is the same in short sequences.
_INDEXED_RULES = (
    *_LATENT_RULES,
    listed_expert_layers(num_dense=None),
    fixed("moe_layer_freq", 1),
    *SIGMOID_EXPERTS,
    PREDICTION_LAYERS,
    INDEXED_LAYERS,
    repeated(index_topk=integer(1), index_head_dim=COUNT, index_n_heads=COUNT),
    fixed("rope_interleave", True),
    fixed("mlp_bias", False),
)
_INDEXER = ".self_attn.indexer."
DEEPSEEK_V32 = Family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    rows.DEEPSEEK_ROWS,
    _INDEXED_RULES,
    harmless=DEEPSEEK_HARMLESS,
    indexer=_INDEXER,
)
_INDEXER_KINDS = sequence(SHORT_TEXT, 10**5)
GLM_MOE_DSA = Family(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    rows.DEEPSEEK_ROWS,
    (
        *_INDEXED_RULES,
        # Layers with an indexer of their own; the others use that of the previous one.
        repeated(indexer_types=_INDEXER_KINDS),
        repeated(index_topk_pattern=anything),
        repeated(index_topk_freq=COUNT),
        repeated(index_skip_topk_offset=COUNT),
    ),
    harmless=DEEPSEEK_HARMLESS,
    indexer=_INDEXER,
)
YOUTU = Family(
    "youtu",
    "YoutuForCausalLM",
    rows.DEEPSEEK_ROWS,
    (*_LATENT_RULES, ROPE_INTERLEAVE),
    harmless="qk_head_dim embedding_initializer_range",
)
