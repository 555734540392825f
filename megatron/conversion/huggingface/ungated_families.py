"""Families of dense models whose MLP has two matrices, without a gate: GPT-2 and later ones."""

from __future__ import annotations

from megatron.conversion.huggingface import parameters as rows
from megatron.conversion.huggingface.attention_rules import (
    CODEGEN_HEADS,
    FALCON_LAYERS,
    MPT_ATTENTION,
    MULTI_QUERY,
    SWITCHED_ALIBI,
    heads,
)
from megatron.conversion.huggingface.common_rules import (
    NO_DROPOUT,
    RMS_NORM,
    SIZES,
    SQUARED_RELU,
    UNTIED,
    layer_norm,
)
from megatron.conversion.huggingface.family import Family
from megatron.conversion.huggingface.rope_rules import (
    GPTJ_ROPE,
    rope,
)
from megatron.conversion.huggingface.rules import (
    ATTENTION,
    EMBEDDING_WIDTH,
    INEXACT_PROJECTIONS,
    MLP,
    Rule,
    always,
    biases,
    copied,
    dropout,
    feed_forward,
    fixed,
    gelu,
    implied,
    nullable,
    root_scale,
)
from megatron.conversion.huggingface.window_rules import (
    ATTENTION_TYPES,
    COMMON_WINDOW,
    FULL_ATTENTION,
)

_UNGATED_RULES = (
    *SIZES,
    *SQUARED_RELU,
    UNTIED,
    NO_DROPOUT,
    heads(),
    biases(attention_bias=ATTENTION, mlp_bias=MLP),
    FULL_ATTENTION,
)
ARCEE = Family(
    "arcee",
    "ArceeForCausalLM",
    rows.UNGATED_ROWS,
    (*_UNGATED_RULES, *RMS_NORM, rope()),
)
APERTUS = Family(
    "apertus",
    "ApertusForCausalLM",
    rows.APERTUS_ROWS,
    (
        *SIZES,
        *RMS_NORM,
        fixed("hidden_act", "xielu", written=True),
        rope(spelled_out=True, whole_default=True),
        UNTIED,
        NO_DROPOUT,
        heads(always_written=False, free_width=False),
        biases(attention_bias=ATTENTION),
        FULL_ATTENTION,
        implied(swiglu=False, xielu=True, qk_layernorm=True),
        fixed("qk_norm", True),
        fixed("post_norm", False),
        fixed("mlp_bias", False),
    ),
)
NANOCHAT = Family(
    "nanochat",
    "NanoChatForCausalLM",
    rows.NANOCHAT_ROWS,
    (
        *SIZES,
        *SQUARED_RELU,
        *RMS_NORM,
        rope(),
        UNTIED,
        NO_DROPOUT,
        heads(always_written=False),
        biases(attention_bias=ATTENTION),
        nullable("final_logit_softcapping"),
        implied(
            norm_weights=False,
            embedding_layernorm=True,
            qk_layernorm=True,
            qk_layernorm_after_rope=True,
        ),
    ),
)
JAIS2 = Family(
    "jais2",
    "Jais2ForCausalLM",
    rows.UNGATED_ROWS,
    (*_UNGATED_RULES, *layer_norm("layer_norm_eps"), rope()),
)
NEMOTRON = Family(
    "nemotron",
    "NemotronForCausalLM",
    rows.UNGATED_ROWS,
    (
        *_UNGATED_RULES,
        *layer_norm("norm_eps"),
        rope(partial=True),
        implied(apply_layernorm_1p=True),
    ),
)
PERSIMMON = Family(
    "persimmon",
    "PersimmonForCausalLM",
    rows.PERSIMMON_ROWS,
    (
        *SIZES,
        *SQUARED_RELU,
        *layer_norm("layer_norm_eps"),
        UNTIED,
        rope(partial=True),
        copied("qk_layernorm", "qk_layernorm"),
        copied("hidden_dropout", "hidden_dropout"),
        implied(group_query_attention=False, add_bias_linear=True),
    ),
)
GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    rows.GPT_NEOX_ROWS,
    (
        *SIZES,
        *layer_norm("layer_norm_eps"),
        gelu("hidden_act"),
        UNTIED,
        rope(partial=True, names=("rotary_emb_base", "rotary_pct")),
        copied("parallel_residual", "use_parallel_residual"),
        copied("hidden_dropout", "hidden_dropout"),
        *always(attention_bias=True),
        implied(group_query_attention=False, add_bias_linear=True),
    ),
    layers="gpt_neox.layers.",
)
STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    rows.STARCODER2_ROWS,
    (
        *SIZES,
        *layer_norm("norm_epsilon"),
        gelu("hidden_act"),
        UNTIED,
        rope(),
        heads(always_written=False),
        copied("add_bias_linear", "use_bias"),
        dropout("residual_dropout", "embedding_dropout"),
        COMMON_WINDOW,
    ),
)
_GPT_RULES: tuple[Rule, ...] = (
    copied("num_layers", "n_layer", "num_hidden_layers", required=True),
    copied("num_attention_heads", "n_head", "num_attention_heads", required=True),
    *layer_norm("layer_norm_epsilon"),
    UNTIED,
    implied(add_bias_linear=True),
)
_GPT_EMBD_RULES: tuple[Rule, ...] = (
    *_GPT_RULES,
    copied("hidden_size", "n_embd", "hidden_size", required=True),
    copied("max_position_embeddings", "n_positions", "max_position_embeddings"),
    feed_forward("n_inner", free=True),
    gelu("activation_function"),
    copied("attention_dropout", "attn_pdrop"),
    dropout("resid_pdrop", "embd_pdrop"),
)
_GPT2_RULES = (
    *_GPT_EMBD_RULES,
    *always(scale_attn_weights=True),
    implied(position_embedding_type="learned_absolute"),
)
# Attention and MLP have the same input; the output layer has a bias.
_PARALLEL = implied(
    parallel_residual=True,
    share_parallel_norm=True,
    add_bias_linear=True,
    output_layer_bias=True,
)
_GPTJ_RULES = (
    *_GPT_EMBD_RULES,
    GPTJ_ROPE,
    fixed("scale_attn_weights", True),
    _PARALLEL,
    implied(group_query_attention=False),
)
GPTJ = Family(
    "gptj",
    "GPTJForCausalLM",
    rows.GPTJ_ROWS,
    _GPTJ_RULES,
    harmless="rotary gradient_checkpointing",
    layers="transformer.h.",
)
CODEGEN = Family(
    "codegen",
    "CodeGenForCausalLM",
    rows.CODEGEN_ROWS,
    (*_GPTJ_RULES, CODEGEN_HEADS),
    harmless="rotary gradient_checkpointing",
    layers="transformer.h.",
)
PHI = Family(
    "phi",
    "PhiForCausalLM",
    rows.PHI_ROWS,
    (
        *SIZES,
        *layer_norm("layer_norm_eps"),
        gelu("hidden_act"),
        UNTIED,
        heads(always_written=False, free_width=False),
        rope(partial=True),
        copied("qk_layernorm", "qk_layernorm"),
        dropout("resid_pdrop", "embd_pdrop"),
        _PARALLEL,
    ),
)
GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    rows.GPT2_ROWS,
    (
        *_GPT2_RULES,
        *always(scale_attn_by_inverse_layer_idx=False, reorder_and_upcast_attn=False),
        implied(group_query_attention=False),
    ),
    layers="transformer.h.",
)
GPT_BIGCODE = Family(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    rows.GPT_BIGCODE_ROWS,
    (*_GPT2_RULES, MULTI_QUERY),
    harmless="""
        num_key_value_heads attention_softmax_in_fp32 scale_attention_softmax_in_fp32
        inference_runner max_batch_size max_sequence_length pad_key_length pre_allocate_kv_cache
        validate_runner_input runner_max_sequence_length""",
    layers="transformer.h.",
)
# Learned positions, of which two precede the first token.
_OPT_MODEL = (
    copied("num_layers", "num_hidden_layers", required=True),
    copied("hidden_size", "hidden_size", required=True),
    copied("num_attention_heads", "num_attention_heads", required=True),
    copied("max_position_embeddings", "max_position_embeddings"),
    UNTIED,
    implied(
        normalization="LayerNorm",
        norm_epsilon=1e-5,
        group_query_attention=False,
        position_embedding_type="learned_absolute",
    ),
)
OPT = Family(
    "opt",
    "OPTForCausalLM",
    rows.OPT_ROWS,
    (
        *_OPT_MODEL,
        copied("ffn_hidden_size", "ffn_dim", required=True),
        gelu("activation_function", relu=True),
        copied("add_bias_linear", "enable_bias"),
        copied("norm_weights", "layer_norm_elementwise_affine"),
        copied("hidden_dropout", "dropout"),
        copied("attention_dropout", "attention_dropout"),
        copied("init_method_std", "init_std"),
        EMBEDDING_WIDTH,
        INEXACT_PROJECTIONS,
        fixed("do_layer_norm_before", True),
        fixed("_remove_final_layer_norm", False),
        fixed("learned_embeddings", True),
        fixed("scale_embeddings", False),
    ),
    harmless="layerdrop activation_dropout",  # options of training
    layers="model.decoder.layers.",
)
BIOGPT = Family(
    "biogpt",
    "BioGptForCausalLM",
    rows.BIOGPT_ROWS,
    (
        *_OPT_MODEL,
        copied("ffn_hidden_size", "intermediate_size", required=True),
        gelu("hidden_act", relu=True),
        root_scale("scale_embedding"),
        copied("hidden_dropout", "hidden_dropout_prob"),
        copied("attention_dropout", "attention_probs_dropout_prob"),
        implied(add_bias_linear=True),
    ),
    # transformers does not read the first; the others are options of training.
    harmless="layer_norm_eps layerdrop activation_dropout",
    layers="biogpt.layers.",
)
GPT_NEO = Family(
    "gpt_neo",
    "GPTNeoForCausalLM",
    rows.GPT_NEO_ROWS,
    (
        copied("num_layers", "num_layers", "num_hidden_layers", required=True),
        copied("num_attention_heads", "num_heads", "num_attention_heads", required=True),
        copied("hidden_size", "hidden_size", required=True),
        copied("max_position_embeddings", "max_position_embeddings"),
        feed_forward("intermediate_size", free=True),
        *layer_norm("layer_norm_epsilon"),
        gelu("activation_function"),
        copied("attention_dropout", "attention_dropout"),
        dropout("resid_dropout", "embed_dropout"),
        UNTIED,
        ATTENTION_TYPES,
        implied(
            add_bias_linear=True,
            group_query_attention=False,
            position_embedding_type="learned_absolute",
            softmax_scale=1.0,
        ),
    ),
    layers="transformer.h.",
)
FALCON = Family(
    "falcon",
    "FalconForCausalLM",
    rows.FALCON_ROWS,
    (
        copied("num_layers", "num_hidden_layers", required=True),
        copied("hidden_size", "hidden_size", required=True),
        copied("num_attention_heads", "num_attention_heads", required=True),
        copied("max_position_embeddings", "max_position_embeddings"),
        feed_forward("ffn_hidden_size", free=True),
        *layer_norm("layer_norm_epsilon"),
        gelu("activation"),
        UNTIED,
        SWITCHED_ALIBI,
        rope(),
        copied("add_bias_linear", "bias"),
        copied("hidden_dropout", "hidden_dropout"),
        copied("attention_dropout", "attention_dropout"),
        fixed("apply_residual_connection_post_layernorm", False),
        FALCON_LAYERS,
    ),
    layers="transformer.h.",
    sequential_rows=rows.SEQUENTIAL_FALCON_ROWS,
)
BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    rows.BLOOM_ROWS,
    (
        *_GPT_RULES,
        copied("hidden_size", "hidden_size", "n_embed", required=True),
        copied("max_position_embeddings", "seq_length"),
        feed_forward("n_inner", free=False),
        copied("attention_dropout", "attention_dropout"),
        copied("hidden_dropout", "hidden_dropout"),
        fixed("apply_residual_connection_post_layernorm", False, written=True),
        INEXACT_PROJECTIONS,
        # Its GELU is the tanh approximation.
        implied(
            bias_gelu_fusion=True,
            embedding_layernorm=True,
            group_query_attention=False,
            position_embedding_type="alibi",
        ),
    ),
    harmless="""
        offset_alibi attention_softmax_in_fp32 masked_softmax_fusion
        bias_dropout_fusion skip_bias_add skip_bias_add_qkv""",
    layers="transformer.h.",
)
MPT = Family(
    "mpt",
    "MptForCausalLM",
    rows.MPT_ROWS,
    (
        copied("num_layers", "n_layers", "num_hidden_layers", required=True),
        copied("hidden_size", "d_model", "hidden_size", required=True),
        copied("num_attention_heads", "n_heads", "num_attention_heads", required=True),
        copied("max_position_embeddings", "max_seq_len"),
        *layer_norm("layer_norm_epsilon"),
        UNTIED,
        MPT_ATTENTION,
        feed_forward("n_inner", free=False),
        dropout("resid_pdrop", "emb_pdrop"),
        implied(
            swiglu=False,
            openai_gelu=False,
            add_bias_linear=False,
            group_query_attention=False,
            position_embedding_type="alibi",
        ),
        fixed("expansion_ratio", 4),
        fixed("no_bias", True),
        fixed("logit_scale", None),
    ),
    # Published models state learned positions, which they do not have next to ALiBi.
    harmless="learned_pos_emb embedding_fraction norm_type init_device verbose",
    layers="transformer.blocks.",
)
