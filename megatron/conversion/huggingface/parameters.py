"""Where the parameters of a model lie in the files of transformers: one row per module and family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.conversion.model_space.row_maps import (
    RowMap,
    alternating,
    as_is,
    qkv_apart,
    qkv_blocks,
    stacked,
    stored_rows,
)
from megatron.conversion.model_space.source import Shape
from megatron.core.transformer.transformer_config import TransformerConfig

_KEY = re.compile(r"(?:decoder\.layers\.(\d+)\.)?(.*?)(weight|bias|softmax_offset)")


@dataclass(frozen=True)
class Row:
    """The stored tensors that hold a module's weight, or its bias: equal shares of the rows, one after the other.

    Names lack the "weight" or "bias" at their end, or what `suffixes` has in its place; those with `{e}` are of one
    expert.
    """

    names: tuple[str, ...]
    qkv: bool = False  # the model has its rows by query group; the files have q, k and v, apart or one after the other
    transposed: bool = False  # matrices are stored as [in, out] (Conv1D of GPT-2)
    fused: str | None = None  # the one tensor that transformers 5 has in memory: all experts in one; read, too
    biased: bool = True  # False: a bias has no place in the files
    packed: bool = False  # all experts are in one tensor
    alternating: bool = False  # rows of the two halves of the model's matrix take turns
    suffixes: Mapping[str, str] = field(default_factory=dict)  # "weight" or "bias" -> what names have instead


# Module of the model -> where it is. Keys of layers lack `decoder.layers.N.`, their names what `Family.layers` says.
LLAMA_ROWS = {
    "embedding.word_embeddings.": Row(("model.embed_tokens.",)),
    "self_attention.linear_qkv.layer_norm_": Row(("input_layernorm.",)),
    "self_attention.linear_qkv.": Row(("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."), qkv=True),
    "self_attention.q_layernorm.": Row(("self_attn.q_norm.",)),
    "self_attention.k_layernorm.": Row(("self_attn.k_norm.",)),
    "self_attention.linear_proj.": Row(("self_attn.o_proj.",)),
    "mlp.linear_fc1.layer_norm_": Row(("post_attention_layernorm.",)),
    "mlp.linear_fc1.": Row(("mlp.gate_proj.", "mlp.up_proj.")),
    "mlp.linear_fc2.": Row(("mlp.down_proj.",)),
    "pre_mlp_layernorm.": Row(("post_attention_layernorm.",)),
    "mlp.router.": Row(("mlp.gate.",)),
    "mlp.experts.experts.linear_fc1.": Row(
        ("mlp.experts.{e}.gate_proj.", "mlp.experts.{e}.up_proj."), fused="mlp.experts.gate_up_proj"
    ),
    "mlp.experts.experts.linear_fc2.": Row(("mlp.experts.{e}.down_proj.",), fused="mlp.experts.down_proj"),
    "mlp.shared_experts.linear_fc1.": Row(("mlp.shared_expert.gate_proj.", "mlp.shared_expert.up_proj.")),
    "mlp.shared_experts.linear_fc2.": Row(("mlp.shared_expert.down_proj.",)),
    "mlp.shared_experts.gate_": Row(("mlp.shared_expert_gate.",)),
    "decoder.final_layernorm.": Row(("model.norm.",)),
    "output_layer.": Row(("lm_head.",)),
}
MIXTRAL_ROWS = LLAMA_ROWS | {
    "mlp.router.": Row(("block_sparse_moe.gate.",), fused="mlp.gate.weight"),
    "mlp.experts.experts.linear_fc1.": Row(
        ("block_sparse_moe.experts.{e}.w1.", "block_sparse_moe.experts.{e}.w3."), fused="mlp.experts.gate_up_proj"
    ),
    "mlp.experts.experts.linear_fc2.": Row(("block_sparse_moe.experts.{e}.w2.",), fused="mlp.experts.down_proj"),
}
# Biases are in attention alone.
QWEN3_ROWS = {key: replace(row, biased=not key.startswith("mlp.")) for key, row in LLAMA_ROWS.items()}
DEEPSEEK_ROWS = LLAMA_ROWS | {
    "input_layernorm.": Row(("input_layernorm.",)),
    "self_attention.linear_q_proj.": Row(("self_attn.q_proj.",)),
    "self_attention.linear_q_down_proj.": Row(("self_attn.q_a_proj.",)),
    "self_attention.linear_q_up_proj.layer_norm_": Row(("self_attn.q_a_layernorm.",)),
    "self_attention.linear_q_up_proj.": Row(("self_attn.q_b_proj.",)),
    "self_attention.linear_kv_down_proj.": Row(("self_attn.kv_a_proj_with_mqa.",)),
    "self_attention.linear_kv_up_proj.layer_norm_": Row(("self_attn.kv_a_layernorm.",)),
    "self_attention.linear_kv_up_proj.": Row(("self_attn.kv_b_proj.",)),
    "mlp.router.expert_": Row(("mlp.gate.e_score_correction_",)),
    "mlp.shared_experts.linear_fc1.": Row(("mlp.shared_experts.gate_proj.", "mlp.shared_experts.up_proj.")),
    "mlp.shared_experts.linear_fc2.": Row(("mlp.shared_experts.down_proj.",)),
}
_NORMS_BEHIND = {
    "self_attention.linear_proj.post_layernorm.": Row(("post_attention_layernorm.",)),
    "mlp.linear_fc2.post_layernorm.": Row(("post_feedforward_layernorm.",)),
}
OLMO2_ROWS = LLAMA_ROWS | _NORMS_BEHIND
GEMMA_ROWS = OLMO2_ROWS | {"mlp.linear_fc1.layer_norm_": Row(("pre_feedforward_layernorm.",))}
PHI3_ROWS = LLAMA_ROWS | {
    "self_attention.linear_qkv.": Row(("self_attn.qkv_proj.",), qkv=True),
    "mlp.linear_fc1.": Row(("mlp.gate_up_proj.",)),
}
_PACKED: dict[str, Any] = {"transposed": True, "packed": True, "suffixes": {"weight": "", "bias": "_bias"}}
GPT_OSS_ROWS = LLAMA_ROWS | {
    "self_attention.core_attention.": Row(("self_attn.sinks",), suffixes={"softmax_offset": ""}),
    "mlp.router.": Row(("mlp.router.",)),
    "mlp.experts.experts.linear_fc1.": Row(("mlp.experts.gate_up_proj",), alternating=True, **_PACKED),
    "mlp.experts.experts.linear_fc2.": Row(("mlp.experts.down_proj",), **_PACKED),
}
GPT2_ROWS = {
    "embedding.word_embeddings.": Row(("transformer.wte.",)),
    "embedding.position_embeddings.": Row(("transformer.wpe.",)),
    "self_attention.linear_qkv.layer_norm_": Row(("ln_1.",)),
    "self_attention.linear_qkv.": Row(("attn.c_attn.",), qkv=True, transposed=True),
    "self_attention.linear_proj.": Row(("attn.c_proj.",), transposed=True),
    "mlp.linear_fc1.layer_norm_": Row(("ln_2.",)),
    "mlp.linear_fc1.": Row(("mlp.c_fc.",), transposed=True),
    "mlp.linear_fc2.": Row(("mlp.c_proj.",), transposed=True),
    "decoder.final_layernorm.": Row(("transformer.ln_f.",)),
    "output_layer.": Row(("lm_head.",)),
}
BLOOM_ROWS = {
    "embedding.word_embeddings.": Row(("transformer.word_embeddings.",)),
    "embedding.word_embeddings_layernorm.": Row(("transformer.word_embeddings_layernorm.",)),
    "self_attention.linear_qkv.layer_norm_": Row(("input_layernorm.",)),
    "self_attention.linear_qkv.": Row(("self_attention.query_key_value.",)),  # by query group, as the model has it
    "self_attention.linear_proj.": Row(("self_attention.dense.",)),
    "mlp.linear_fc1.layer_norm_": Row(("post_attention_layernorm.",)),
    "mlp.linear_fc1.": Row(("mlp.dense_h_to_4h.",)),
    "mlp.linear_fc2.": Row(("mlp.dense_4h_to_h.",)),
    "decoder.final_layernorm.": Row(("transformer.ln_f.",)),
    "output_layer.": Row(("lm_head.",)),
}


@dataclass(frozen=True)
class StoredParameter:
    """A row for one tensor of one model, or for the matrix of one expert: where exactly its values are."""

    key: str
    lead: Shape  # the number of the expert, if it is one's
    shape: Shape  # without that axis
    names: tuple[str, ...]
    row_map: RowMap
    transposed: bool = False
    packed: int | None = None  # in tensors of so many experts

    def stored_shapes(self) -> list[Shape]:
        shapes = [(rows, *self.shape[1:]) for rows in stored_rows(self.row_map)]
        lead = () if self.packed is None else (self.packed,)
        return [lead + (shape[::-1] if self.transposed else shape) for shape in shapes]


def stored_parameters(
    shapes: Mapping[str, Shape],
    rows: Mapping[str, Row],
    layers: str,
    config: TransformerConfig,
    has: Callable[[str], bool],
) -> list[StoredParameter]:
    """Every parameter among `shapes` that has a row; the names of layer N begin with `layers` and N.

    `has` says whether the files have a tensor: then it holds all experts.
    """
    parameters = []
    for key, shape in shapes.items():
        match = _KEY.fullmatch(key)
        if match is None or match[2] not in rows or (match[3] == "bias" and not rows[match[2]].biased):
            continue
        row, prefix = rows[match[2]], "" if match[1] is None else f"{layers}{match[1]}."
        if row.fused is not None and has(prefix + row.fused):
            parameters.append(StoredParameter(key, (), shape, (prefix + row.fused,), as_is(shape[0])))
            continue
        of_experts, suffix = row.packed or len(shape) == 3, row.suffixes.get(match[3], match[3])
        own = shape[1:] if of_experts else shape
        row_map = _row_map(row, own[0], config)
        form = row_map, row.transposed and len(own) == 2, shape[0] if row.packed else None
        for expert in range(shape[0]) if of_experts else [None]:
            names = tuple(prefix + name.replace("{e}", str(expert)) + suffix for name in row.names)
            parameters.append(StoredParameter(key, () if expert is None else (expert,), own, names, *form))
    return parameters


def _row_map(row: Row, rows: int, config: TransformerConfig) -> RowMap:
    heads = config.num_attention_heads, config.query_groups, config.head_dim
    if row.qkv:
        return qkv_apart(*heads) if len(row.names) == 3 else qkv_blocks(*heads, blocks=1)
    if row.alternating:
        return alternating(rows // 2, 2)
    return stacked(rows // len(row.names), len(row.names))
