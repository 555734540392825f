"""A DeepSpeed universal checkpoint as a `Source`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.deepspeed.args import BLOCKS_MARK, lost_state, read_args, read_training
from megatron.conversion.deepspeed.files import UniversalFiles
from megatron.conversion.model_space.model import WORD_EMBEDDINGS, model_config, model_tensors, resolved
from megatron.conversion.model_space.row_maps import as_is, qkv_blocks, unpack_rows
from megatron.conversion.model_space.source import Shape, TensorInfo, TrainingState, flag_name, optimizer_key, split_key
from megatron.core.transformer.transformer_config import TransformerConfig

QKV_LAYOUTS = ("groups", "tp-blocks")
_POSITIONS = "embedding.position_embeddings.weight"
_VOCABULARY = (WORD_EMBEDDINGS, "output_layer.weight")


class UniversalSource:
    """Full-precision parameters, moments and run of a universal checkpoint.

    The weights of a bf16 or fp16 run are its main parameters, cast. `args` (Megatron-LM's names) were given by the
    user: they override the files and supply what these lack; `vocab_size` is the number of tokens to keep.
    `qkv_layout`: "groups" (per query group its queries, key, value) or "tp-blocks" (Megatron-DeepSpeed since December
    2024: per tensor-parallel rank all queries, all keys, all values); by default what the arguments imply.
    """

    def __init__(
        self,
        directory: Path,
        args: Mapping[str, Any] | None = None,
        qkv_layout: str | None = None,
        optimizer: bool = True,
    ) -> None:
        self._files = files = UniversalFiles(directory)
        self.description = files.description
        given = dict(args or {})
        files.args = read_args(files.args, self.description) if files.args else {}
        told = files.args | given
        self.args: dict[str, Any] = _implied(files, told) | told
        config = model_config(self.args, _vocabulary(files, given), self.description)
        self.args |= resolved(config)
        self.tensors = _tensors(files, config, optimizer)
        blocks = self._blocks(qkv_layout, config)  # None: by query group, as the model has it
        heads = config.num_attention_heads, config.query_groups, config.head_dim
        self._qkv_map = None if blocks is None else qkv_blocks(*heads, blocks)
        self.unused = [f"model states: {name}" for name in lost_state(files.state)]
        self.training: TrainingState | None = read_training(
            files.state, files.optimizer_state(), files.step(), self.args
        )
        if not optimizer:
            self.training.param_groups = self.training.grad_scaler = None

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        info = self.tensors[key]
        parameter, state = split_key(key)
        stored = self._files.tensor(parameter, state or "param")  # weights are main parameters, cast
        # Universal checkpoints made from ZeRO-3 hold every parameter flat.
        if stored.dim() != len(info.shape):
            stored = stored.view(info.shape)  # flat, from ZeRO-3
        columns = tuple(slice(o, o + n) for o, n in zip(offset[1:], shape[1:], strict=True))

        def read_rows(source: int, first: int, count: int) -> torch.Tensor:
            return stored[(slice(first, first + count), *columns)]

        is_qkv = parameter.endswith(("linear_qkv.weight", "linear_qkv.bias"))
        row_map = self._qkv_map if is_qkv and self._qkv_map is not None else as_is(info.shape[0])
        return unpack_rows(row_map, offset[0], offset[0] + shape[0], read_rows).to(info.dtype, copy=True)

    def _blocks(self, layout: str | None, config: TransformerConfig) -> int | None:
        """Number of [q; k; v] blocks, None for the layout by groups; the arguments decide unless `layout` does."""
        if layout not in (None, *QKV_LAYOUTS):
            raise ValueError(f"--universal-qkv-layout {layout!r}: give one of {', '.join(QKV_LAYOUTS)}")
        if layout is None and BLOCKS_MARK in self._files.args:
            layout = "tp-blocks"
        if layout != "tp-blocks":
            return None
        if config.query_groups != config.num_attention_heads:
            raise ValueError(
                f"{self.description}: a version of Megatron-DeepSpeed that stores blocks of q, k and v computes "
                "something else than grouped-query attention from them, which no other model does. If another version "
                "trained it, give --universal-qkv-layout groups"
            )
        sizes = self._files.state.get("checkpoint_parallel_dimensions") or {}
        blocks = sizes.get("tp_degree") or self.args.get("tensor_model_parallel_size")
        if not blocks:
            flag = "--tensor-model-parallel-size"
            raise ValueError(f"{self.description} does not say how many ranks split q, k and v: give {flag}")
        return int(blocks)


def _vocabulary(files: UniversalFiles, given: Mapping[str, Any]) -> int:
    """Number of tokens: given, or recorded; else the rows, if the converter has cut the padding off."""
    if WORD_EMBEDDINGS not in files.names:
        raise ValueError(f"{files.description} has no word embedding")
    rows = files.shapes[WORD_EMBEDDINGS][0]
    info = files.state.get("universal_checkpoint_info") or files.state.get("checkpoint_info") or {}
    wanted = given.get("vocab_size") or info.get("original_vocab_size")
    if wanted is None:
        entry = files.entry(WORD_EMBEDDINGS, "param")
        if not (isinstance(entry, dict) and entry.get("vocab_tensor")):
            raise ValueError(f"{files.description} does not tell tokens from padding: give --vocab-size (rows: {rows})")
        wanted = rows
    if len(files.shapes[WORD_EMBEDDINGS]) > 1 and wanted > rows:
        raise ValueError(f"--vocab-size {wanted} is more than the {rows} rows of {files.description}")
    return int(wanted)


def _implied(files: UniversalFiles, told: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from names and shapes, for directories without arguments."""
    names, shapes = files.names, files.shapes
    implied: dict[str, Any] = {
        "num_layers": sum(key.endswith("linear_qkv.layer_norm_weight") for key in names),
        "normalization": "LayerNorm" if "decoder.final_layernorm.bias" in names else "RMSNorm",
        "add_bias_linear": "decoder.layers.0.mlp.linear_fc2.bias" in names,
        "untie_embeddings_and_output_weights": "output_layer.weight" in names,
        "embedding_layernorm": "embedding.word_embeddings_layernorm.weight" in names,
    }
    fc1, fc2, proj, qkv = (
        shapes.get(f"decoder.layers.0.{name}.weight", ())
        for name in ("mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_proj", "self_attention.linear_qkv")
    )
    heads = told.get("num_attention_heads")
    if len(fc1) == len(fc2) == 2:
        implied |= {"hidden_size": fc2[0], "ffn_hidden_size": fc2[1], "swiglu": fc1[0] == 2 * fc2[1]}
    if heads and len(proj) == len(qkv) == 2:
        head_dim = proj[1] // heads
        groups = (qkv[0] // head_dim - heads) // 2
        implied |= {"kv_channels": head_dim, "num_query_groups": groups, "group_query_attention": groups != heads}
    if len(shapes.get(_POSITIONS, ())) == 2:
        implied |= {"position_embedding_type": "learned_absolute", "max_position_embeddings": shapes[_POSITIONS][0]}
    elif "position_embedding_type" not in told:
        flag = flag_name("position_embedding_type")
        raise ValueError(f"{files.description} does not say how positions enter the model: give {flag}")
    return implied


def _tensors(files: UniversalFiles, config: TransformerConfig, optimizer: bool) -> dict[str, TensorInfo]:
    """Weights and states; raises ValueError unless files and arguments describe the same model."""
    wanted = model_tensors(config)
    missing = [key for key in wanted if key not in files.names]
    extra = [files.names[key] for key in files.names if key not in wanted]
    if missing or extra:
        problem = f"lacks {', '.join(missing)}" if missing else f"also has {', '.join(extra)}"
        raise ValueError(f"{files.description} is not the model of its arguments: it {problem}")
    for key, shape in wanted.items():
        found = files.shapes[key]
        flat = found == (math.prod(shape),)
        padded = key in _VOCABULARY and found[1:] == shape[1:] and found[0] >= shape[0]
        if found != shape and not flat and not padded:
            raise ValueError(
                f"{files.description}: {files.names[key]} has shape {list(found)}, its arguments make it {list(shape)}"
            )
    tensors = {key: TensorInfo(shape, config.params_dtype) for key, shape in wanted.items()}
    for state in files.states() if optimizer else ():
        tensors |= {optimizer_key(state, key): TensorInfo(shape, torch.float32) for key, shape in wanted.items()}
    return tensors
