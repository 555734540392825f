"""The model families of transformers as tables: rows for parameters, rules for config fields, with their inverses."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.conversion.huggingface.config_rules import (
    COMMON_RULES,
    AuxiliaryLoss,
    Biases,
    Copy,
    Dropout,
    ExpertLayers,
    FeedForward,
    Fixed,
    FullAttention,
    GatedSilu,
    Gelu,
    HeadDim,
    Implied,
    Json,
    MistralWindow,
    NormalizedTopK,
    QueryGroups,
    QwenWindow,
    Rope,
    Rule,
    Tied,
    read_config,
    write_config,
)
from megatron.conversion.model_space.model import model_config, model_tensors
from megatron.conversion.model_space.row_maps import RowMap, as_is, qkv_apart, qkv_blocks, stacked, stored_rows
from megatron.conversion.model_space.source import Shape
from megatron.core.dist_checkpointing.format.schema import printable
from megatron.core.transformer.transformer_config import TransformerConfig, model_signature

Layout = Callable[[TransformerConfig, Shape], RowMap]


def _same(config: TransformerConfig, shape: Shape) -> RowMap:
    return as_is(shape[0])


def _gate_up(config: TransformerConfig, shape: Shape) -> RowMap:
    return stacked(config.ffn_size, 2)


def _qkv(config: TransformerConfig, shape: Shape) -> RowMap:
    return qkv_apart(config.num_attention_heads, config.query_groups, config.head_dim)


def _thirds(config: TransformerConfig, shape: Shape) -> RowMap:
    return qkv_blocks(config.num_attention_heads, config.query_groups, config.head_dim, 1)


def _experts_gate_up(config: TransformerConfig, shape: Shape) -> RowMap:
    return stacked(config.moe_ffn_size, 2 * shape[0])


def _experts_down(config: TransformerConfig, shape: Shape) -> RowMap:
    return stacked(shape[1], shape[0])


def _shared_gate_up(config: TransformerConfig, shape: Shape) -> RowMap:
    return stacked(shape[0] // 2, 2)


@dataclass(frozen=True)
class Row:
    """One model-space tensor and the stored tensors that hold its rows; `{i}` is the layer.

    Names with `{e}` stand for those of every expert in turn; the rows of a tensor of experts are those of its matrices,
    one above the other.
    """

    key: str
    names: tuple[str, ...]
    layout: Layout = _same
    transposed: bool = False  # stored as [in, out] (Conv1D of GPT-2)
    fused: str | None = None  # the whole tensor as transformers 5 has it in memory, all experts in one: read, too


@dataclass(frozen=True)
class StoredParameter:
    """A row for one tensor of one model: where exactly its values are."""

    key: str
    shape: Shape
    names: tuple[str, ...]
    row_map: RowMap
    transposed: bool
    fused: str | None = None

    @property
    def matrix(self) -> Shape:
        """The shape with the matrices of experts one above the other."""
        return self.shape if len(self.shape) < 3 else (math.prod(self.shape[:-1]), self.shape[-1])

    def stored_shapes(self) -> list[Shape]:
        if self.names == (self.fused,):
            return [self.shape]
        shapes = [(rows, *self.matrix[1:]) for rows in stored_rows(self.row_map)]
        return [shape[::-1] for shape in shapes] if self.transposed else shapes


@dataclass(frozen=True)
class Family:
    """One `model_type`."""

    model_type: str
    architecture: str  # the class with the language model head
    prefix: str  # of the base model's names; files of the base model alone lack it
    rows: tuple[Row, ...]
    rules: tuple[Rule, ...]
    harmless: tuple[str, ...] = ()  # fields of this family that change nothing
    whole_heads: bool = False  # transformers insists that heads divide hidden_size, whatever head_dim is

    def read_config(self, hf: Json, args: Mapping[str, Any], ignored: Collection[str] = ()) -> dict[str, Any]:
        return read_config(hf, COMMON_RULES + self.rules, (*self.harmless, *ignored), args)

    def write_config(self, config: TransformerConfig) -> Json:
        head = {"architectures": [self.architecture], "model_type": self.model_type}
        return head | write_config(config, COMMON_RULES + self.rules)

    @property
    def has_optional_biases(self) -> bool:
        return any(isinstance(rule, Biases) for rule in self.rules)

    def obstacles(self, config: TransformerConfig) -> list[str]:
        """What of the model this family cannot express: config.json is written, read back and compared."""
        wanted = model_signature(config)
        implied = {"kv_channels": config.hidden_size // config.num_attention_heads}
        args = implied | self.read_config({"n_positions": 0} | self.write_config(config), {}, ("n_positions",))
        try:
            got = model_signature(model_config(args, args["vocab_size"], self.model_type))
        except ValueError as error:  # what the family implies does not go with this model
            return str(error).splitlines()
        if self.whole_heads and config.hidden_size % config.num_attention_heads:
            got["num_attention_heads"] = None
        return [f"{name} = {wanted[name]}" for name in wanted if wanted[name] != got[name]]

    def places(self, config: TransformerConfig) -> list[StoredParameter]:
        """Every parameter of the model that has a row, in the order of transformers."""
        shapes = model_tensors(config)
        layers = [row for row in self.rows if "{i}" in row.key]
        first, last = self.rows.index(layers[0]), self.rows.index(layers[-1]) + 1
        in_order = [(row, 0) for row in self.rows[:first]]
        in_order += [(row, layer) for layer in range(config.num_layers) for row in layers]
        in_order += [(row, 0) for row in self.rows[last:]]
        places = []
        for row, layer in in_order:
            key = row.key.replace("{i}", str(layer))
            if key in shapes:
                row_map = row.layout(config, shapes[key])
                names, fused = _names(row, layer, shapes[key][0]), row.fused and row.fused.replace("{i}", str(layer))
                places.append(StoredParameter(key, shapes[key], names, row_map, row.transposed, fused))
        return places


def _names(row: Row, layer: int, num_experts: int) -> tuple[str, ...]:
    names = [name.replace("{i}", str(layer)) for name in row.names]
    if "{e}" not in names[0]:
        return tuple(names)
    return tuple(name.replace("{e}", str(expert)) for expert in range(num_experts) for name in names)


def _pair(key: str, name: str, layout: Layout = _same, transposed: bool = False) -> tuple[Row, Row]:
    """Weight and bias of one module."""
    return (
        Row(key + "weight", (name + ".weight",), layout, transposed),
        Row(key + "bias", (name + ".bias",), layout),
    )


_LAYER, _LLAMA_LAYER = "decoder.layers.{i}.", "model.layers.{i}."


def _several(key: str, names: tuple[str, ...], layout: Layout) -> tuple[Row, Row]:
    """Weight and bias of one module that is stored as several."""
    weight, bias = (tuple(f"{name}.{kind}" for name in names) for kind in ("weight", "bias"))
    return Row(key + "weight", weight, layout), Row(key + "bias", bias, layout)


_LLAMA_ROWS = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    *_several(
        _LAYER + "self_attention.linear_qkv.",
        tuple(f"{_LLAMA_LAYER}self_attn.{name}_proj" for name in "qkv"),
        _qkv,
    ),
    Row(_LAYER + "self_attention.q_layernorm.weight", (_LLAMA_LAYER + "self_attn.q_norm.weight",)),
    Row(_LAYER + "self_attention.k_layernorm.weight", (_LLAMA_LAYER + "self_attn.k_norm.weight",)),
    *_pair(_LAYER + "self_attention.linear_proj.", _LLAMA_LAYER + "self_attn.o_proj"),
    *_several(_LAYER + "mlp.linear_fc1.", tuple(f"{_LLAMA_LAYER}mlp.{name}_proj" for name in ("gate", "up")), _gate_up),
    *_pair(_LAYER + "mlp.linear_fc2.", _LLAMA_LAYER + "mlp.down_proj"),
    Row(_LAYER + "self_attention.linear_qkv.layer_norm_weight", (_LLAMA_LAYER + "input_layernorm.weight",)),
    Row(_LAYER + "mlp.linear_fc1.layer_norm_weight", (_LLAMA_LAYER + "post_attention_layernorm.weight",)),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Row("output_layer.weight", ("lm_head.weight",)),
)


def _expert_rows(module: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Router and experts of a layer; gate and up of an expert are stacked in the model."""
    layer, each = f"{_LLAMA_LAYER}{module}.", f"{_LLAMA_LAYER}{module}.experts.{{e}}."
    fused = f"{_LLAMA_LAYER}mlp.experts."
    return (
        Row(_LAYER + "mlp.router.weight", (layer + "gate.weight",), fused=f"{_LLAMA_LAYER}mlp.gate.weight"),
        Row(
            _LAYER + "mlp.experts.experts.linear_fc1.weight",
            (f"{each}{gate}.weight", f"{each}{up}.weight"),
            _experts_gate_up,
            fused=fused + "gate_up_proj",
        ),
        Row(
            _LAYER + "mlp.experts.experts.linear_fc2.weight",
            (f"{each}{down}.weight",),
            _experts_down,
            fused=fused + "down_proj",
        ),
    )


def _with_experts(rows: tuple[Row, ...], experts: tuple[Row, ...]) -> tuple[Row, ...]:
    """`experts` beside the rows of the dense MLP."""
    place = next(index for index, row in enumerate(rows) if row.key.startswith(_LAYER + "mlp."))
    return rows[:place] + experts + rows[place:]


def _without(rows: tuple[Row, ...], *endings: str) -> tuple[Row, ...]:
    return tuple(row for row in rows if not row.key.endswith(endings))


_NO_BIAS = (Implied("add_bias_linear", False), Implied("add_qkv_bias", False))
_GATED_RMS_RULES: tuple[Rule, ...] = (
    Copy("num_layers", ("num_hidden_layers",)),
    Copy("hidden_size", ("hidden_size",)),
    Copy("num_attention_heads", ("num_attention_heads",)),
    Copy("ffn_hidden_size", ("intermediate_size",)),
    Copy("max_position_embeddings", ("max_position_embeddings",), None),
    GatedSilu(),
    Tied(False),
    Dropout("attention_dropout", ("attention_dropout",), 0.0),
    Implied("normalization", "RMSNorm"),
    Implied("position_embedding_type", "rope"),
)
_LLAMA_RULES = (
    *_GATED_RMS_RULES,
    Copy("norm_epsilon", ("rms_norm_eps",), 1e-6),
    Rope(),
    Implied("hidden_dropout", 0.0),
    Implied("rotary_percent", 1.0),
)

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    "model.",
    _without(_LLAMA_ROWS, "q_layernorm.weight", "k_layernorm.weight"),
    (*_LLAMA_RULES, QueryGroups(None), HeadDim(), Biases(), FullAttention(), Implied("qk_layernorm", False)),
    whole_heads=True,
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    "model.",
    _without(_LLAMA_ROWS, "q_layernorm.weight", "k_layernorm.weight", ".bias"),
    (*_LLAMA_RULES, QueryGroups(8), HeadDim(), *_NO_BIAS, MistralWindow(), Implied("qk_layernorm", False)),
)
_FUSED_ROWS = {
    row.key: row
    for row in (
        Row(_LAYER + "self_attention.linear_qkv.weight", (_LLAMA_LAYER + "self_attn.qkv_proj.weight",), _thirds),
        Row(_LAYER + "mlp.linear_fc1.weight", (_LLAMA_LAYER + "mlp.gate_up_proj.weight",)),
    )
}
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    "model.",
    tuple(_FUSED_ROWS.get(row.key, row) for row in MISTRAL.rows),
    (
        *_GATED_RMS_RULES,
        Copy("norm_epsilon", ("rms_norm_eps",), 1e-5),
        Rope(partial=True),
        Dropout("hidden_dropout", ("resid_pdrop", "embd_pdrop"), 0.0),
        QueryGroups(None),
        HeadDim(always=False),
        *_NO_BIAS,
        MistralWindow(default=None),
        Implied("qk_layernorm", False),
    ),
    ("original_max_position_embeddings",),  # of a scaled rope
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    "model.",
    _without(_LLAMA_ROWS, "q_layernorm.weight", "k_layernorm.weight", "linear_proj.bias", "fc1.bias", "fc2.bias"),
    (
        *_LLAMA_RULES,
        QueryGroups(32),
        HeadDim(always=False),
        Implied("add_bias_linear", False),
        Implied("add_qkv_bias", True),
        QwenWindow(),
        Fixed("use_mrope", False),
        Implied("qk_layernorm", False),
    ),
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    "model.",
    _without(_LLAMA_ROWS, "fc1.bias", "fc2.bias"),
    (
        *_LLAMA_RULES,
        QueryGroups(32),
        HeadDim(default=128),
        Biases(("attention_bias",)),
        QwenWindow(),
        Implied("qk_layernorm", True),
    ),
)

_EXPERT_RULES: tuple[Rule, ...] = (
    Copy("moe_router_topk", ("num_experts_per_tok",)),
    AuxiliaryLoss(),
)
_QWEN_EXPERT_RULES: tuple[Rule, ...] = (
    *_EXPERT_RULES,
    Copy("num_experts", ("num_experts", "num_local_experts"), None),
    Copy("moe_ffn_hidden_size", ("moe_intermediate_size",), None),
    NormalizedTopK(),
    ExpertLayers(),
)
_QWEN_EXPERTS = _expert_rows("mlp", "gate_proj", "up_proj", "down_proj")
_SHARED_NAMES = tuple(f"{_LLAMA_LAYER}mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down"))

MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    "model.",
    _with_experts(
        _without(
            _LLAMA_ROWS, "q_layernorm.weight", "k_layernorm.weight", ".bias", "mlp.linear_fc1.weight", "fc2.weight"
        ),
        _expert_rows("block_sparse_moe", "w1", "w3", "w2"),
    ),
    (
        *_LLAMA_RULES,
        *_EXPERT_RULES,
        Copy("num_experts", ("num_local_experts",), None),
        Copy("moe_ffn_hidden_size", ("intermediate_size",)),
        QueryGroups(8),
        HeadDim(),
        *_NO_BIAS,
        MistralWindow(default=None),
        Implied("qk_layernorm", False),
        Fixed("router_jitter_noise", 0.0),
    ),
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    "model.",
    _with_experts(
        QWEN2.rows,
        (
            *_QWEN_EXPERTS,
            Row(_LAYER + "mlp.shared_experts.linear_fc1.weight", _SHARED_NAMES[:2], _shared_gate_up),
            Row(_LAYER + "mlp.shared_experts.linear_fc2.weight", _SHARED_NAMES[2:]),
            Row(_LAYER + "mlp.shared_experts.gate_weight", (_LLAMA_LAYER + "mlp.shared_expert_gate.weight",)),
        ),
    ),
    (
        *QWEN2.rules,
        *_QWEN_EXPERT_RULES,
        Copy("moe_shared_expert_intermediate_size", ("shared_expert_intermediate_size",), None),
        Implied("moe_shared_expert_gate", True),
        Fixed("qkv_bias", True),
    ),
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "model.",
    _with_experts(QWEN3.rows, _QWEN_EXPERTS),
    (*QWEN3.rules, *_QWEN_EXPERT_RULES),
)

_GPT2_LAYER = "transformer.h.{i}."
GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    "transformer.",
    (
        Row("embedding.word_embeddings.weight", ("transformer.wte.weight",)),
        Row("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
        *_pair(_LAYER + "self_attention.linear_qkv.layer_norm_", _GPT2_LAYER + "ln_1"),
        *_pair(_LAYER + "self_attention.linear_qkv.", _GPT2_LAYER + "attn.c_attn", _thirds, True),
        *_pair(_LAYER + "self_attention.linear_proj.", _GPT2_LAYER + "attn.c_proj", _same, True),
        *_pair(_LAYER + "mlp.linear_fc1.layer_norm_", _GPT2_LAYER + "ln_2"),
        *_pair(_LAYER + "mlp.linear_fc1.", _GPT2_LAYER + "mlp.c_fc", _same, True),
        *_pair(_LAYER + "mlp.linear_fc2.", _GPT2_LAYER + "mlp.c_proj", _same, True),
        *_pair("decoder.final_layernorm.", "transformer.ln_f"),
        Row("output_layer.weight", ("lm_head.weight",)),
    ),
    (
        Copy("num_layers", ("n_layer", "num_hidden_layers")),
        Copy("hidden_size", ("n_embd", "hidden_size")),
        Copy("num_attention_heads", ("n_head", "num_attention_heads")),
        Copy("max_position_embeddings", ("n_positions", "max_position_embeddings", "n_ctx")),
        FeedForward("n_inner", free=True),
        Copy("norm_epsilon", ("layer_norm_epsilon",), 1e-5),
        Gelu(),
        Tied(True),
        Dropout("attention_dropout", ("attn_pdrop",), 0.1),
        Dropout("hidden_dropout", ("resid_pdrop", "embd_pdrop"), 0.1),
        Fixed("scale_attn_weights", True, written=True),
        Fixed("scale_attn_by_inverse_layer_idx", False, written=True),
        Fixed("reorder_and_upcast_attn", False, written=True),
        Implied("normalization", "LayerNorm"),
        Implied("position_embedding_type", "learned_absolute"),
        Implied("add_bias_linear", True),
        Implied("embedding_layernorm", False),
        Implied("group_query_attention", False),
    ),
)

_BLOOM_LAYER = "transformer.h.{i}."
BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    "transformer.",
    (
        Row("embedding.word_embeddings.weight", ("transformer.word_embeddings.weight",)),
        *_pair("embedding.word_embeddings_layernorm.", "transformer.word_embeddings_layernorm"),
        *_pair(_LAYER + "self_attention.linear_qkv.layer_norm_", _BLOOM_LAYER + "input_layernorm"),
        *_pair(_LAYER + "self_attention.linear_qkv.", _BLOOM_LAYER + "self_attention.query_key_value"),
        *_pair(_LAYER + "self_attention.linear_proj.", _BLOOM_LAYER + "self_attention.dense"),
        *_pair(_LAYER + "mlp.linear_fc1.layer_norm_", _BLOOM_LAYER + "post_attention_layernorm"),
        *_pair(_LAYER + "mlp.linear_fc1.", _BLOOM_LAYER + "mlp.dense_h_to_4h"),
        *_pair(_LAYER + "mlp.linear_fc2.", _BLOOM_LAYER + "mlp.dense_4h_to_h"),
        *_pair("decoder.final_layernorm.", "transformer.ln_f"),
        Row("output_layer.weight", ("lm_head.weight",)),
    ),
    (
        Copy("num_layers", ("n_layer", "num_hidden_layers")),
        Copy("hidden_size", ("hidden_size", "n_embed")),
        Copy("num_attention_heads", ("n_head", "num_attention_heads")),
        Copy("max_position_embeddings", ("seq_length",), None),
        FeedForward("n_inner", free=False),
        Copy("norm_epsilon", ("layer_norm_epsilon",), 1e-5),
        Tied(True),
        Dropout("attention_dropout", ("attention_dropout",), 0.0),
        Dropout("hidden_dropout", ("hidden_dropout",), 0.0),
        Fixed("apply_residual_connection_post_layernorm", False, written=True),
        Implied("normalization", "LayerNorm"),
        Implied("position_embedding_type", "alibi"),
        Implied("embedding_layernorm", True),
        Implied("add_bias_linear", True),
        Implied("bias_gelu_fusion", True),  # the tanh approximation
        Implied("group_query_attention", False),
    ),
    (
        "slow_but_exact",
        "offset_alibi",
        "attention_softmax_in_fp32",
        "masked_softmax_fusion",
        "bias_dropout_fusion",
        "skip_bias_add",
        "skip_bias_add_qkv",
    ),
)

FAMILIES = (LLAMA, MISTRAL, PHI3, QWEN2, QWEN3, MIXTRAL, QWEN2_MOE, QWEN3_MOE, GPT2, BLOOM)


def family_of(hf: Json) -> Family:
    """The family that config.json names; raises ValueError for any other model."""
    by_name = {family.model_type: family for family in FAMILIES}
    supported = ", ".join(by_name)
    model_type, architectures = hf.get("model_type"), hf.get("architectures") or []
    if model_type is None:
        by_class = {family.architecture: family.model_type for family in FAMILIES}
        model_type = next((by_class[name] for name in architectures if name in by_class), None)
    if model_type not in by_name:
        raise ValueError(f"config.json: model_type {model_type!r} is not supported; supported are {supported}")
    family = by_name[model_type]
    headless = family.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Model"
    if architectures and not {family.architecture, headless} & set(architectures):
        raise ValueError(
            f"config.json: architecture {printable(architectures[0])} is no {family.architecture}: not supported"
        )
    return family


def choose_family(config: TransformerConfig, preferred: str | None) -> Family:
    """The first family that can express the model, `preferred` before the others.

    Raises ValueError with the obstacles of the family that comes nearest.
    """
    ordered = sorted(FAMILIES, key=lambda family: family.model_type != preferred)
    obstacles = {family.model_type: family.obstacles(config) for family in ordered}
    for family in ordered:
        if not obstacles[family.model_type]:
            return family
    nearest = min(obstacles, key=lambda name: len(obstacles[name]))
    raise ValueError(
        "none of the supported models of transformers computes the same as this one; "
        f"{nearest} comes nearest, but has no {', no '.join(obstacles[nearest])}"
    )
