"""Weights of transformers' models as Meta, torchtitan and torchtune store them.

Each has names of its own. Where rotary embeddings rotate neighboring elements (Llama), the rows of
queries and keys alternate between the two halves of a head, which transformers stores one after the
other. Newer torchtitan has other names for q, k, v and the head, and optionally one matrix for q, k
and v, ordered by query groups. It stacks experts. (Source: the converters of transformers,
torchtitan's main branch of 2026 and torchtune 0.6; checked against torchtitan 0.3.0.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.model_space.lazy_tensors import concatenate, scatter_rows, select
from megatron.conversion.model_space.pieces import map_separate_qkv
from megatron.core.dist_checkpointing import CheckpointError, Reader
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.run_checkpoint.keys import PARAMS
from megatron.core.safe_files import schema
from megatron.core.safe_files.reading import read_json

EMBEDDING = "tok_embeddings.weight"
_GATE = "layers.0.feed_forward.w1.weight"

# Name in transformers -> name of Meta and torchtitan, and of torchtune. Biases follow weights.
_LAYER = {
    "input_layernorm.weight": ("attention_norm.weight", "sa_norm.scale"),
    "self_attn.q_proj.": ("attention.wq.", "attn.q_proj."),
    "self_attn.k_proj.": ("attention.wk.", "attn.k_proj."),
    "self_attn.v_proj.": ("attention.wv.", "attn.v_proj."),
    "self_attn.o_proj.": ("attention.wo.", "attn.output_proj."),
    "self_attn.q_norm.weight": ("attention.q_norm.weight", "attn.q_norm.scale"),
    "self_attn.k_norm.weight": ("attention.k_norm.weight", "attn.k_norm.scale"),
    "post_attention_layernorm.weight": ("ffn_norm.weight", "mlp_norm.scale"),
    "mlp.gate_proj.": ("feed_forward.w1.", "mlp.w1."),
    "mlp.up_proj.": ("feed_forward.w3.", "mlp.w3."),
    "mlp.down_proj.": ("feed_forward.w2.", "mlp.w2."),
}
_OUTSIDE = {
    EMBEDDING: "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "norm.scale": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "lm_head.weight": "lm_head.weight",
}
_QKV_MODULE = "attention.qkv_linear."  # of newer torchtitan, around the projections
_FUSED = re.compile(r"(layers\.\d+\.)attention\.qkv_linear\.wqkv\.(weight|bias)")
# The stacked matrices of experts, by version.
_EXPERTS = re.compile(
    r"layers\.(\d+)\.moe\.(?:routed_experts\.inner_experts|experts)\.(w[123])(?:_EFD|_EDF)?"
)
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_ROUTER = re.compile(r"layers\.(\d+)\.moe\.router\.gate\.weight")
_EXPERT_BIAS = re.compile(r"layers\.(\d+)\.moe\.expert_bias(?:_E)?")
_FREQUENCIES = ("rope.freqs", "freqs_cis", "rope.cache")  # computed, not trained
_NUMBERED = re.compile(r"layers\.(\d+)\.(.+)")
_ROTATED = (".q_proj.", ".k_proj.")
_INTERLEAVED = ("llama", "mistral")  # model types whose programs rotate neighboring elements
# Axis that Meta splits over its files, by part of the name.
_SPLIT_AXES = {".wo.": 1, ".w2.": 1, ".wq.": 0, ".wk.": 0, ".wv.": 0, ".w1.": 0, ".w3.": 0}

_POSITIVE = schema.integer(1, 2**31 - 1)
_PARAMS = schema.record(
    {
        "dim": _POSITIVE,
        "n_layers": schema.integer(1, 10_000),
        "n_heads": _POSITIVE,
        "n_kv_heads?": schema.optional(_POSITIVE),
        "norm_eps": schema.number(0, 1),
        "rope_theta?": schema.number(1, 1e15),
        "use_scaled_rope?": schema.boolean,
    }
)


# ---- Files ----


def open_dcp(directory: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a DCP directory, without the state of an optimizer."""
    reader = Reader(directory)
    tensors = {}
    for key in reader.metadata.tensors:
        name = key.removeprefix("model.")
        if name in _OUTSIDE or _NUMBERED.fullmatch(name):
            tensors[name] = reader.view(key)
    return tensors


def join_consolidated(files: list[dict[str, LazyTensor]], location: str) -> dict[str, LazyTensor]:
    """Return the tensors that Meta splits over several files."""
    joined = {}
    for name in files[0]:
        missing = [file_index for file_index, tensors in enumerate(files) if name not in tensors]
        if missing:
            raise CheckpointError(f"{location}: file {missing[0]} lacks {name}")
        shards = [tensors[name] for tensors in files]
        joined[name] = shards[0]
        # Norms are stored whole in every file.
        axis = _find_split_axis(name, files[0])
        if len(shards) == 1 or axis is None:
            continue
        shapes = {shard.shape for shard in shards}
        if len(shapes) > 1 or len(shards[0].shape) != 2:
            raise CheckpointError(
                f"{location}: {name} has the shapes {sorted(shapes)} in the files"
            )
        joined[name] = concatenate(shards, axis)
    return joined


def _find_split_axis(name: str, tensors: Mapping[str, LazyTensor]) -> int | None:
    """Return the axis of a tensor that Meta splits; None for norms, which every file repeats."""
    if name == EMBEDDING:
        # Llama 3 splits the vocabulary, earlier models the hidden size, which norms have.
        norm = tensors.get("norm.weight")
        has_all_columns = norm is not None and tensors[name].shape[1:] == norm.shape
        return 0 if has_all_columns else 1
    if name == "output.weight":
        return 0
    for module, axis in _SPLIT_AXES.items():
        if module in name:
            return axis
    return None


# ---- Names and rows of transformers ----


def use_transformers_layout(
    files: Mapping[str, LazyTensor], config: Mapping[str, Any]
) -> dict[str, LazyTensor]:
    """Return the tensors under the names of transformers and in its order of rows.

    Tensors of transformers itself are returned unchanged.
    """
    if EMBEDDING not in files:
        return dict(files)
    heads = config.get("num_attention_heads")
    groups = config.get("num_key_value_heads") or heads
    is_interleaved = config.get("model_type") in _INTERLEAVED
    result = {}
    for name, tensor in _split_fused_qkv(files, heads, groups).items():
        if name in _FREQUENCIES:
            continue
        if _is_unused_bias(name, tensor):
            continue
        match = _EXPERTS.fullmatch(name)
        if match is not None:
            layer, projection = match.groups()
            for expert, matrix in enumerate(_split_experts(tensor, name)):
                experts = f"model.layers.{layer}.mlp.experts.{expert}"
                result[f"{experts}.{_PROJECTIONS[projection]}.weight"] = matrix
            continue
        new_name = _find_name(name)
        # Rotary pairs are adjacent rows here, and halves of a head in transformers.
        if is_interleaved and any(module in new_name for module in _ROTATED):
            count = heads if ".q_proj." in new_name else groups
            tensor = _separate_halves(tensor, count, name)
        result[new_name] = tensor
    return result


def _split_fused_qkv(
    files: Mapping[str, LazyTensor], heads: Any, groups: Any
) -> dict[str, LazyTensor]:
    """Return `files` with queries, keys and values of their own instead of fused ones.

    For each query group, a fused matrix has the rows of its queries, its key and its value.
    """
    result = {}
    for name, tensor in files.items():
        match = _FUSED.fullmatch(name)
        if match is None:
            result[name] = tensor
            continue
        rows = tensor.shape[0] if tensor.shape else 0
        is_known = type(heads) is int and type(groups) is int and heads > 0 and groups > 0
        if not is_known or heads % groups or rows == 0 or rows % (heads + 2 * groups):
            raise CheckpointError(
                f"{name} has {rows} rows, which are not {heads} heads and {groups} query groups"
            )
        row_map = map_separate_qkv(heads, groups, rows // (heads + 2 * groups))
        layer, suffix = match.groups()
        for index, projection in enumerate(("wq", "wk", "wv")):
            name = f"{layer}attention.{projection}.{suffix}"
            result[name] = scatter_rows(tensor, row_map, index)
    return result


def _split_experts(stacked: LazyTensor, name: str) -> Iterator[LazyTensor]:
    """Yield the matrices of a tensor `[experts, rows, columns]`."""
    if len(stacked.shape) != 3:
        raise CheckpointError(f"{name} of shape {list(stacked.shape)} is not a stack of matrices")

    for expert in range(stacked.shape[0]):
        yield select(stacked, expert)


def _is_unused_bias(name: str, tensor: LazyTensor) -> bool:
    """Return whether a tensor is a bias that balances experts, which models here do not have.

    Raises CheckpointError if it is not zero, because it decides which experts a token goes to.
    """
    if _EXPERT_BIAS.fullmatch(name) is None:
        return False
    if torch.count_nonzero(tensor.read_all()):
        raise CheckpointError(
            f"{name} is not zero: the model was trained with torchtitan's load_balance_coeff, and "
            "this model type of transformers has no bias of the router"
        )
    return True


def _find_name(name: str) -> str:
    """Return the name in transformers; an unknown name is returned as it is."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    router = _ROUTER.fullmatch(name)
    if router is not None:
        return f"model.layers.{router[1]}.mlp.gate.weight"
    match = _NUMBERED.fullmatch(name)
    if match is not None:
        layer, module = match.groups()
        module = module.replace(_QKV_MODULE, "attention.")
        for new, olds in _LAYER.items():
            for old in olds:
                if module == old or (old.endswith(".") and module.startswith(old)):
                    return f"model.layers.{layer}.{new}{module.removeprefix(old)}"
    return name


def _separate_halves(tensor: LazyTensor, heads: Any, name: str) -> LazyTensor:
    """Return a tensor whose heads have the even rows first, then the odd ones."""
    rows = tensor.shape[0] if tensor.shape else 0
    if type(heads) is not int or heads < 1 or rows % (2 * heads):
        raise CheckpointError(f"{name} has {rows} rows, which are not {heads} heads")
    return replace(tensor, read=partial(_read_halves, tensor, rows // heads))


def _read_halves(tensor: LazyTensor, head_rows: int, offset: Shape, shape: Shape) -> torch.Tensor:
    # Whole heads are read, because their rows move.
    first_head = offset[0] // head_rows
    last_head = -(-(offset[0] + shape[0]) // head_rows)  # rounded up
    start = first_head * head_rows
    extent = ((last_head - first_head) * head_rows, *shape[1:])
    value = tensor.read((start, *offset[1:]), extent)
    pairs = value.view(last_head - first_head, head_rows // 2, 2, *shape[1:])
    moved = pairs.transpose(1, 2).reshape(extent)
    skipped = offset[0] - start
    return moved[skipped : skipped + shape[0]]


# ---- params.json ----


def read_params(directory: Path, files: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """Return the config.json of the Llama model that Meta's `params.json` describes."""
    path = directory / PARAMS
    params = _PARAMS(read_json(path), str(path))
    if params.get("use_scaled_rope"):
        raise CheckpointError(
            f"{path}: use_scaled_rope does not state the scaling factor: copy the model's "
            "config.json of transformers into the directory"
        )
    # The file does not contain these sizes: take them from the shapes of the weights.
    rows = {}
    for name in (EMBEDDING, _GATE):
        if name not in files or len(files[name].shape) != 2:
            raise CheckpointError(f"{directory} lacks the matrix {name}")
        rows[name] = files[name].shape[0]
    return {
        "model_type": "llama",
        "hidden_size": params["dim"],
        "intermediate_size": rows[_GATE],
        "num_hidden_layers": params["n_layers"],
        "num_attention_heads": params["n_heads"],
        "num_key_value_heads": params.get("n_kv_heads") or params["n_heads"],
        "rms_norm_eps": params["norm_eps"],
        "rope_theta": float(params.get("rope_theta", 10000.0)),
        "vocab_size": rows[EMBEDDING],
        "tie_word_embeddings": "output.weight" not in files,
        "hidden_act": "silu",
    }
