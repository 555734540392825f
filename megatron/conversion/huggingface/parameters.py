"""Names of a model's parameters in the files of transformers: one row per module and family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Row:
    """The stored tensors of a module's weight, or of its bias.

    Each has an equal share of the rows. Names lack their end, "weight" or "bias", which `suffixes`
    may replace; those with `{e}` are of one expert, the only one with `{h}` of one head.
    """

    names: tuple[str, ...]
    # Rows of the model are ordered by query group; the files have q, k and v one after the other,
    # or q, gate, k and v.
    qkv: bool = False
    # The halves of each head of separate q and k are swapped: nanochat rotates by negative angles.
    swapped_halves: bool = False
    # Blocks of query groups, each [q; v; k]: CodeGen was trained on four devices.
    codegen_qkv: bool = False
    transposed: bool = False  # matrices are stored as [in, out] (Conv1D of GPT-2)
    # Name of one tensor for the parameter of all experts, or another name of the only tensor, as
    # transformers 5 has in memory.
    fused: str | None = None
    biased: bool = True  # False: the files have no bias
    packed: bool = False  # all experts are in one tensor
    scalars: tuple[str, ...] = ()  # kinds of one element that the files have without an axis
    single_rows: bool = False  # the files have vectors as matrices of one row
    head_rows: bool = False  # the files have vectors as matrices of one row per head
    skipped_rows: int = 0  # rows of the files before those of the model; an export has zeros there
    alternating: bool = False  # rows of the two halves of the model's matrix alternate
    suffixes: Mapping[str, str] = field(default_factory=dict)  # "weight" or "bias" -> replacement


def make_rows(table: Mapping[str, Row | str]) -> dict[str, Row]:
    """Return rows by module; a name alone is the row of one tensor."""
    rows = {}
    for module, row in table.items():
        rows[module] = Row((row,)) if isinstance(row, str) else row
    return rows


# Module of the model -> row. Keys within layers lack `decoder.layers.N.`, names the prefix that
# `Family.layers` specifies.
LLAMA_ROWS = make_rows(
    {
        "embedding.word_embeddings.": "model.embed_tokens.",
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "self_attention.linear_qkv.": Row(
            ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."), qkv=True
        ),
        "self_attention.q_layernorm.": "self_attn.q_norm.",
        "self_attention.k_layernorm.": "self_attn.k_norm.",
        "self_attention.linear_proj.": "self_attn.o_proj.",
        "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
        "mlp.linear_fc1.": Row(("mlp.gate_proj.", "mlp.up_proj.")),
        "mlp.linear_fc2.": "mlp.down_proj.",
        "pre_mlp_layernorm.": "post_attention_layernorm.",
        "mlp.router.": "mlp.gate.",
        "mlp.experts.experts.linear_fc1.": Row(
            ("mlp.experts.{e}.gate_proj.", "mlp.experts.{e}.up_proj."),
            fused="mlp.experts.gate_up_proj",
        ),
        "mlp.experts.experts.linear_fc2.": Row(
            ("mlp.experts.{e}.down_proj.",), fused="mlp.experts.down_proj"
        ),
        "mlp.shared_experts.linear_fc1.": Row(
            ("mlp.shared_expert.gate_proj.", "mlp.shared_expert.up_proj.")
        ),
        "mlp.shared_experts.linear_fc2.": "mlp.shared_expert.down_proj.",
        "mlp.shared_experts.gate_": "mlp.shared_expert_gate.",
        "decoder.final_layernorm.": "model.norm.",
        "output_layer.": "lm_head.",
    }
)
MIXTRAL_ROWS = LLAMA_ROWS | {
    "mlp.router.": Row(("block_sparse_moe.gate.",), fused="mlp.gate.weight"),
    "mlp.experts.experts.linear_fc1.": Row(
        ("block_sparse_moe.experts.{e}.w1.", "block_sparse_moe.experts.{e}.w3."),
        fused="mlp.experts.gate_up_proj",
    ),
    "mlp.experts.experts.linear_fc2.": Row(
        ("block_sparse_moe.experts.{e}.w2.",), fused="mlp.experts.down_proj"
    ),
}
# Only attention has biases.
QWEN3_ROWS = {
    key: replace(row, biased=not key.startswith("mlp.")) for key, row in LLAMA_ROWS.items()
}
# Norms before foreign mixers, which are modules of their own.
_INPUT_NORM = make_rows({"input_layernorm.": "input_layernorm."})
QWEN3_NEXT_ROWS = QWEN3_ROWS | _INPUT_NORM
JAMBA_ROWS = LLAMA_ROWS | make_rows(
    {
        **_INPUT_NORM,
        "mlp.linear_fc1.layer_norm_": "pre_ff_layernorm.",
        "mlp.linear_fc1.": Row(("feed_forward.gate_proj.", "feed_forward.up_proj.")),
        "mlp.linear_fc2.": "feed_forward.down_proj.",
        "pre_mlp_layernorm.": "pre_ff_layernorm.",
        "mlp.router.": "feed_forward.router.",
        "mlp.experts.experts.linear_fc1.": Row(
            ("feed_forward.experts.{e}.gate_proj.", "feed_forward.experts.{e}.up_proj."),
            fused="feed_forward.experts.gate_up_proj",
        ),
        "mlp.experts.experts.linear_fc2.": Row(
            ("feed_forward.experts.{e}.down_proj.",), fused="feed_forward.experts.down_proj"
        ),
        "decoder.final_layernorm.": "model.final_layernorm.",
    }
)
LFM2_ROWS = LLAMA_ROWS | make_rows(
    {
        "input_layernorm.": "operator_norm.",
        "self_attention.linear_qkv.layer_norm_": "operator_norm.",
        "self_attention.q_layernorm.": "self_attn.q_layernorm.",
        "self_attention.k_layernorm.": "self_attn.k_layernorm.",
        "self_attention.linear_proj.": "self_attn.out_proj.",
        "mlp.linear_fc1.layer_norm_": "ffn_norm.",
        "mlp.linear_fc1.": Row(("feed_forward.w1.", "feed_forward.w3.")),
        "mlp.linear_fc2.": "feed_forward.w2.",
        "decoder.final_layernorm.": "model.embedding_norm.",
        "pre_mlp_layernorm.": "ffn_norm.",
        "mlp.router.": "feed_forward.gate.",
        "mlp.router.expert_": "feed_forward.expert_",
        "mlp.experts.experts.linear_fc1.": Row(
            ("feed_forward.experts.{e}.w1.", "feed_forward.experts.{e}.w3."),
            fused="feed_forward.experts.gate_up_proj",
        ),
        "mlp.experts.experts.linear_fc2.": Row(
            ("feed_forward.experts.{e}.w2.",), fused="feed_forward.experts.down_proj"
        ),
    }
)
HUNYUAN_ROWS = QWEN3_ROWS | make_rows(
    {
        "self_attention.q_layernorm.": "self_attn.query_layernorm.",
        "self_attention.k_layernorm.": "self_attn.key_layernorm.",
    }
)
_SHARED_MLP = make_rows(
    {
        "mlp.shared_experts.linear_fc1.": Row(
            ("mlp.shared_mlp.gate_proj.", "mlp.shared_mlp.up_proj.")
        ),
        "mlp.shared_experts.linear_fc2.": "mlp.shared_mlp.down_proj.",
    }
)
HUNYUAN_MOE_ROWS = HUNYUAN_ROWS | make_rows({"mlp.router.": "mlp.gate.wg."}) | _SHARED_MLP
_SHARED_EXPERT = make_rows(
    {
        "mlp.router.expert_": "mlp.gate.e_score_correction_",
        "mlp.shared_experts.linear_fc1.": Row(
            ("mlp.shared_experts.gate_proj.", "mlp.shared_experts.up_proj.")
        ),
        "mlp.shared_experts.linear_fc2.": "mlp.shared_experts.down_proj.",
    }
)
# Layers for multi-token prediction, which the files number after those of the model.
_PREDICTION = make_rows(
    {
        "enorm.": "enorm.",
        "hnorm.": "hnorm.",
        "eh_proj.": "eh_proj.",
        "final_layernorm.": "shared_head.norm.",
    }
)
GLM4_MOE_ROWS = LLAMA_ROWS | _SHARED_EXPERT | _PREDICTION
ERNIE4_5_MOE_ROWS = GLM4_MOE_ROWS | {
    "mlp.router.expert_": Row(("mlp.moe_statics.e_score_correction_",), single_rows=True)
}
MINIMAX_M2_ROWS = MIXTRAL_ROWS | make_rows(
    {"mlp.router.expert_": "block_sparse_moe.e_score_correction_"}
)
GRANITEMOE_ROWS = QWEN3_ROWS | make_rows(
    {
        "mlp.router.": Row(
            ("block_sparse_moe.router.layer.",),
            biased=False,
            fused="block_sparse_moe.router.weight",
        ),
        "mlp.experts.experts.linear_fc1.": Row(
            ("block_sparse_moe.input_linear.",),
            packed=True,
            biased=False,
            fused="block_sparse_moe.experts.gate_up_proj",
        ),
        "mlp.experts.experts.linear_fc2.": Row(
            ("block_sparse_moe.output_linear.",),
            packed=True,
            biased=False,
            fused="block_sparse_moe.experts.down_proj",
        ),
        # Gate and up are one tensor.
        "mlp.shared_experts.linear_fc1.": "shared_mlp.input_linear.",
        "mlp.shared_experts.linear_fc2.": "shared_mlp.output_linear.",
    }
)
# Models without experts have the MLP of the shared expert instead.
GRANITE_HYBRID_ROWS = GRANITEMOE_ROWS | {
    **_INPUT_NORM,
    "mlp.linear_fc1.": Row(("shared_mlp.input_linear.",), biased=False),
    "mlp.linear_fc2.": Row(("shared_mlp.output_linear.",), biased=False),
}
AFMOE_ROWS = (
    LLAMA_ROWS
    | _SHARED_EXPERT
    | make_rows(
        {
            "self_attention.linear_qkv.": Row(
                (
                    "self_attn.q_proj.",
                    "self_attn.gate_proj.",
                    "self_attn.k_proj.",
                    "self_attn.v_proj.",
                ),
                qkv=True,
            ),
            "self_attention.linear_proj.post_layernorm.": "post_attention_layernorm.",
            "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
            "mlp.linear_fc2.post_layernorm.": "post_mlp_layernorm.",
            "pre_mlp_layernorm.": "pre_mlp_layernorm.",
            "mlp.post_layernorm.": "post_mlp_layernorm.",
            "mlp.router.": "mlp.router.gate.",
            "mlp.router.expert_": "mlp.expert_",
        }
    )
)
_SINKS = {
    "self_attention.core_attention.": Row(("self_attn.sinks",), suffixes={"softmax_offset": ""})
}
GRANITE_SWA_ROWS = LLAMA_ROWS | _SINKS
FLINT_ROWS = QWEN3_ROWS | make_rows({"self_attention.core_attention.": "self_attn."})
_PACKED_EXPERTS: dict[str, Any] = {"packed": True, "suffixes": {"weight": "", "bias": "_bias"}}
GRANITEMOE_SWA_ROWS = (
    GRANITEMOE_ROWS
    | _SINKS
    | {
        "mlp.router.": Row(("block_sparse_moe.router.",), biased=False),
        "mlp.experts.experts.linear_fc1.": Row(
            ("block_sparse_moe.experts.gate_up_proj",), biased=False, **_PACKED_EXPERTS
        ),
        "mlp.experts.experts.linear_fc2.": Row(
            ("block_sparse_moe.experts.down_proj",), biased=False, **_PACKED_EXPERTS
        ),
    }
)
EXAONE_MOE_ROWS = GLM4_MOE_ROWS | make_rows({"mlp.router.expert_": "mlp.e_score_correction_"})
HY_V3_ROWS = (
    LLAMA_ROWS
    | _SHARED_MLP
    | make_rows(
        {
            "mlp.router.": Row(("mlp.router.gate.",), fused="mlp.gate.weight"),
            "mlp.router.expert_": "mlp.expert_",
        }
    )
)
DEEPSEEK_ROWS = GLM4_MOE_ROWS | make_rows(
    {
        **_INPUT_NORM,
        "self_attention.linear_q_proj.": "self_attn.q_proj.",
        "self_attention.linear_q_down_proj.": "self_attn.q_a_proj.",
        "self_attention.linear_q_up_proj.layer_norm_": "self_attn.q_a_layernorm.",
        "self_attention.linear_q_up_proj.": "self_attn.q_b_proj.",
        "self_attention.linear_kv_down_proj.": "self_attn.kv_a_proj_with_mqa.",
        "self_attention.linear_kv_up_proj.layer_norm_": "self_attn.kv_a_layernorm.",
        "self_attention.linear_kv_up_proj.": "self_attn.kv_b_proj.",
    }
)
MISTRAL4_ROWS = DEEPSEEK_ROWS | {
    "mlp.experts.experts.linear_fc1.": Row(("mlp.experts.gate_up_proj",), **_PACKED_EXPERTS),
    "mlp.experts.experts.linear_fc2.": Row(("mlp.experts.down_proj",), **_PACKED_EXPERTS),
}
# A single projection instead of gate and up.
UNGATED_ROWS = LLAMA_ROWS | make_rows({"mlp.linear_fc1.": "mlp.up_proj."})
APERTUS_ROWS = QWEN3_ROWS | make_rows(
    {
        "self_attention.linear_qkv.layer_norm_": "attention_layernorm.",
        "mlp.linear_fc1.layer_norm_": "feedforward_layernorm.",
        "mlp.linear_fc1.": Row(("mlp.up_proj.",), biased=False),
        "mlp.activation.": Row(("mlp.act_fn.",), scalars=("beta", "eps")),
    }
)
_POST_NORMS = make_rows(
    {
        "self_attention.linear_proj.post_layernorm.": "post_attention_layernorm.",
        "mlp.linear_fc2.post_layernorm.": "post_feedforward_layernorm.",
        "mlp.post_layernorm.": "post_feedforward_layernorm.",
    }
)
OLMO2_ROWS = QWEN3_ROWS | _POST_NORMS
GEMMA_ROWS = OLMO2_ROWS | make_rows({"mlp.linear_fc1.layer_norm_": "pre_feedforward_layernorm."})
# Gate and up are one tensor.
GLM_ROWS = LLAMA_ROWS | make_rows({"mlp.linear_fc1.": "mlp.gate_up_proj."})
GLM4_ROWS = GLM_ROWS | make_rows(
    {
        "self_attention.linear_proj.post_layernorm.": "post_self_attn_layernorm.",
        "mlp.linear_fc2.post_layernorm.": "post_mlp_layernorm.",
    }
)
HYPERCLOVAX_ROWS = LLAMA_ROWS | make_rows(
    {
        "self_attention.linear_proj.post_layernorm.": "post_norm1.",
        "mlp.linear_fc2.post_layernorm.": "post_norm2.",
    }
)
PHI3_ROWS = GLM_ROWS | {"self_attention.linear_qkv.": Row(("self_attn.qkv_proj.",), qkv=True)}
VAULTGEMMA_ROWS = LLAMA_ROWS | make_rows(
    {"mlp.linear_fc1.layer_norm_": "pre_feedforward_layernorm."}
)
HELIUM_ROWS = LLAMA_ROWS | {
    "self_attention.linear_proj.": Row(("self_attn.o_proj.",), biased=False)
}
STARCODER2_ROWS = LLAMA_ROWS | make_rows(
    {
        "mlp.linear_fc1.": "mlp.c_fc.",
        "mlp.linear_fc2.": "mlp.c_proj.",
    }
)
PERSIMMON_ROWS = LLAMA_ROWS | make_rows(
    {
        # Rows are ordered by query group, as in the model.
        "self_attention.linear_qkv.": "self_attn.query_key_value.",
        "self_attention.q_layernorm.": "self_attn.q_layernorm.",
        "self_attention.k_layernorm.": "self_attn.k_layernorm.",
        "self_attention.linear_proj.": "self_attn.dense.",
        "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
        "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
        "decoder.final_layernorm.": "model.final_layernorm.",
    }
)
STABLELM_ROWS = LLAMA_ROWS | make_rows(
    {
        "shared_layernorm.": "input_layernorm.",
        "self_attention.q_layernorm.": Row(("self_attn.q_layernorm.norms.{h}.",), biased=False),
        "self_attention.k_layernorm.": Row(("self_attn.k_layernorm.norms.{h}.",), biased=False),
    }
)
# Norms have no biases, and only attention has them at all.
COHERE_ROWS = QWEN3_ROWS | {
    "shared_layernorm.": Row(("input_layernorm.",), biased=False),
    "self_attention.q_layernorm.": Row(("self_attn.q_norm.",), biased=False, head_rows=True),
    "self_attention.k_layernorm.": Row(("self_attn.k_norm.",), biased=False, head_rows=True),
    "decoder.final_layernorm.": Row(("model.norm.",), biased=False),
}
COHERE2_MOE_ROWS = COHERE_ROWS | _SHARED_EXPERT
_TRANSPOSED_EXPERTS: dict[str, Any] = _PACKED_EXPERTS | {"transposed": True}
GPT_OSS_ROWS = (
    LLAMA_ROWS
    | _SINKS
    | make_rows(
        {
            "mlp.router.": "mlp.router.",
            "mlp.experts.experts.linear_fc1.": Row(
                ("mlp.experts.gate_up_proj",), alternating=True, **_TRANSPOSED_EXPERTS
            ),
            "mlp.experts.experts.linear_fc2.": Row(
                ("mlp.experts.down_proj",), **_TRANSPOSED_EXPERTS
            ),
        }
    )
)
# transformers 5 saves these experts without transposing them.
QWEN3_VL_MOE_ROWS = QWEN3_ROWS | {
    "mlp.experts.experts.linear_fc1.": Row(
        ("mlp.experts.gate_up_proj",), biased=False, **_TRANSPOSED_EXPERTS
    ),
    "mlp.experts.experts.linear_fc2.": Row(
        ("mlp.experts.down_proj",), biased=False, **_TRANSPOSED_EXPERTS
    ),
}
ARIA_ROWS = (
    LLAMA_ROWS
    | _SHARED_EXPERT
    | make_rows(
        {
            "mlp.router.": "mlp.router.",
            "mlp.experts.experts.linear_fc1.": Row(
                ("mlp.experts.fc1.",), transposed=True, packed=True
            ),
            "mlp.experts.experts.linear_fc2.": Row(
                ("mlp.experts.fc2.",), transposed=True, packed=True
            ),
        }
    )
)
GPT2_ROWS = make_rows(
    {
        "embedding.word_embeddings.": "transformer.wte.",
        "embedding.position_embeddings.": "transformer.wpe.",
        "self_attention.linear_qkv.layer_norm_": "ln_1.",
        "self_attention.linear_qkv.": Row(("attn.c_attn.",), qkv=True, transposed=True),
        "self_attention.linear_proj.": Row(("attn.c_proj.",), transposed=True),
        "mlp.linear_fc1.layer_norm_": "ln_2.",
        "mlp.linear_fc1.": Row(("mlp.c_fc.",), transposed=True),
        "mlp.linear_fc2.": Row(("mlp.c_proj.",), transposed=True),
        "decoder.final_layernorm.": "transformer.ln_f.",
        "output_layer.": "lm_head.",
    }
)
GPT_BIGCODE_ROWS = {
    key: replace(row, transposed=False) for key, row in GPT2_ROWS.items()
} | make_rows(
    {
        # Rows are ordered by query group, as in the model.
        "self_attention.linear_qkv.": "attn.c_attn."
    }
)
GPT_NEO_ROWS = {key: replace(row, transposed=False) for key, row in GPT2_ROWS.items()} | make_rows(
    {
        "self_attention.linear_qkv.": Row(
            ("attn.attention.q_proj.", "attn.attention.k_proj.", "attn.attention.v_proj."),
            qkv=True,
            biased=False,
        ),
        "self_attention.linear_proj.": "attn.attention.out_proj.",
    }
)
GPTJ_ROWS = make_rows(
    {
        "embedding.word_embeddings.": "transformer.wte.",
        "shared_layernorm.": "ln_1.",
        "self_attention.linear_qkv.": Row(
            ("attn.q_proj.", "attn.k_proj.", "attn.v_proj."), qkv=True, biased=False
        ),
        "self_attention.linear_proj.": Row(("attn.out_proj.",), biased=False),
        "mlp.linear_fc1.": "mlp.fc_in.",
        "mlp.linear_fc2.": "mlp.fc_out.",
        "decoder.final_layernorm.": "transformer.ln_f.",
        "output_layer.": "lm_head.",
    }
)
CODEGEN_ROWS = GPTJ_ROWS | {
    "self_attention.linear_qkv.": Row(("attn.qkv_proj.",), codegen_qkv=True, biased=False)
}
PHI_ROWS = PERSIMMON_ROWS | make_rows(
    {
        "shared_layernorm.": "input_layernorm.",
        "self_attention.linear_qkv.": Row(
            ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."), qkv=True
        ),
        "mlp.linear_fc1.": "mlp.fc1.",
        "mlp.linear_fc2.": "mlp.fc2.",
    }
)
NANOCHAT_ROWS = QWEN3_ROWS | {
    "self_attention.linear_qkv.": Row(
        ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."),
        qkv=True,
        swapped_halves=True,
    ),
    "mlp.linear_fc1.": Row(("mlp.fc1.",), biased=False),
    "mlp.linear_fc2.": Row(("mlp.fc2.",), biased=False),
}
OPT_ROWS = make_rows(
    {
        "embedding.word_embeddings.": "model.decoder.embed_tokens.",
        # Positions start at 2.
        "embedding.position_embeddings.": Row(("model.decoder.embed_positions.",), skipped_rows=2),
        "self_attention.linear_qkv.layer_norm_": "self_attn_layer_norm.",
        "self_attention.linear_qkv.": Row(
            ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."), qkv=True
        ),
        "self_attention.linear_proj.": "self_attn.out_proj.",
        "mlp.linear_fc1.layer_norm_": "final_layer_norm.",
        "mlp.linear_fc1.": "fc1.",
        "mlp.linear_fc2.": "fc2.",
        "decoder.final_layernorm.": "model.decoder.final_layer_norm.",
        "output_layer.": "lm_head.",
    }
)
BIOGPT_ROWS = OPT_ROWS | make_rows(
    {
        "embedding.word_embeddings.": "biogpt.embed_tokens.",
        "embedding.position_embeddings.": Row(("biogpt.embed_positions.",), skipped_rows=2),
        "decoder.final_layernorm.": "biogpt.layer_norm.",
        "output_layer.": "output_projection.",
    }
)
GPT_NEOX_ROWS = make_rows(
    {
        "embedding.word_embeddings.": "gpt_neox.embed_in.",
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        # Rows are ordered by query group, as in the model.
        "self_attention.linear_qkv.": "attention.query_key_value.",
        "self_attention.linear_proj.": "attention.dense.",
        "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
        "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
        "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
        "decoder.final_layernorm.": "gpt_neox.final_layer_norm.",
        "output_layer.": Row(("embed_out.",), fused="lm_head.weight"),
    }
)
# Rows of the QKV projection are ordered by query group, as in the model.
FALCON_ROWS = make_rows(
    {
        "embedding.word_embeddings.": "transformer.word_embeddings.",
        "shared_layernorm.": "input_layernorm.",
        "self_attention.linear_qkv.layer_norm_": "ln_attn.",
        "self_attention.linear_qkv.": "self_attention.query_key_value.",
        "self_attention.linear_proj.": "self_attention.dense.",
        "mlp.linear_fc1.layer_norm_": "ln_mlp.",
        "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
        "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
        "decoder.final_layernorm.": "transformer.ln_f.",
        "output_layer.": "lm_head.",
    }
)
SEQUENTIAL_FALCON_ROWS = FALCON_ROWS | make_rows(
    {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    }
)
BLOOM_ROWS = make_rows(
    {
        "embedding.word_embeddings.": "transformer.word_embeddings.",
        "embedding.word_embeddings_layernorm.": "transformer.word_embeddings_layernorm.",
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        # Rows are ordered by query group, as in the model.
        "self_attention.linear_qkv.": "self_attention.query_key_value.",
        "self_attention.linear_proj.": "self_attention.dense.",
        "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
        "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
        "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
        "decoder.final_layernorm.": "transformer.ln_f.",
        "output_layer.": "lm_head.",
    }
)
# The files have no biases at all, not even of norms.
MPT_ROWS = make_rows(
    {
        "embedding.word_embeddings.": "transformer.wte.",
        "self_attention.linear_qkv.layer_norm_": Row(("norm_1.",), biased=False),
        "self_attention.linear_qkv.": Row(("attn.Wqkv.",), qkv=True, biased=False),
        "self_attention.linear_proj.": Row(("attn.out_proj.",), biased=False),
        "mlp.linear_fc1.layer_norm_": Row(("norm_2.",), biased=False),
        "mlp.linear_fc1.": Row(("ffn.up_proj.",), biased=False),
        "mlp.linear_fc2.": Row(("ffn.down_proj.",), biased=False),
        "decoder.final_layernorm.": Row(("transformer.norm_f.",), biased=False),
        "output_layer.": Row(("lm_head.",), biased=False),
    }
)
