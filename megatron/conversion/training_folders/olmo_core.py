"""Checkpoints of OLMo-core's trainer, of models of the families OLMo 2 and Llama.

<directory>/model_and_optim: weights and optimizer, a DCP directory with OLMo-core's names
<directory>/config.json: the configuration of the experiment, with that of the model
<directory>/train/rankN.pt: the state of the trainer

The tensors are those of transformers under other names. (Source: ai2-olmo-core 3.0.0,
`train/checkpoint.py`, `nn/hf/convert.py`, `nn/hf/config.py`.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron.conversion.options import ReadOptions
from megatron.conversion.training_folders.dcp_files import read_optimizer, read_tensors
from megatron.conversion.training_folders.folder_source import FolderContents, FolderSource
from megatron.core.dist_checkpointing import CheckpointError, Reader
from megatron.core.safe_files import safe_load, schema
from megatron.core.safe_files.reading import read_json

_WEIGHTS = "model_and_optim"
_TRAINER = "train/rank0.pt"
_MODEL_KEY = "model."
_OPTIMIZER_KEY = "optim."
_OUTSIDE = {
    "embeddings.": "model.embed_tokens.",
    "lm_head.norm.": "model.norm.",
    "lm_head.w_out.": "lm_head.",
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_MODULES = {
    "attention.w_q.": "self_attn.q_proj.",
    "attention.w_k.": "self_attn.k_proj.",
    "attention.w_v.": "self_attn.v_proj.",
    "attention.w_out.": "self_attn.o_proj.",
    "attention.q_norm.": "self_attn.q_norm.",
    "attention.k_norm.": "self_attn.k_norm.",
    "feed_forward.w1.": "mlp.gate_proj.",
    "feed_forward.w2.": "mlp.down_proj.",
    "feed_forward.w3.": "mlp.up_proj.",
}
# Names of the two norms of a block in transformers, by OLMo-core's name of the block: OLMo 2 has
# them after the branches, Llama before.
_NORMS = {
    "reordered_norm": ("post_attention_layernorm.", "post_feedforward_layernorm."),
    "default": ("input_layernorm.", "post_attention_layernorm."),
}
_SIZE = schema.integer(1, 2**31 - 1)
_ROPE = schema.record({"name": schema.text(), "theta": schema.number(1, 1e15)})
_NORM = schema.record({"name": schema.text(), "eps": schema.number(0, 1)})
_ATTENTION = schema.record(
    {
        "n_heads": _SIZE,
        "n_kv_heads?": schema.optional(_SIZE),
        "rope": _ROPE,
        "qk_norm?": schema.optional(_NORM),
    }
)
_CONFIG = schema.record(
    {
        "model": schema.record(
            {
                "d_model": _SIZE,
                "vocab_size": _SIZE,
                "n_layers": schema.integer(1, 10_000),
                "block": schema.record(
                    {
                        "name": schema.text(),
                        "layer_norm": _NORM,
                        "feed_forward": schema.record({"hidden_size": _SIZE}),
                    }
                ),
            }
        )
    }
)
# Fields of the model, its attention and feed-forward layers -> the values that are read
_PLAIN: dict[str, dict[str, tuple[Any, ...]]] = {
    "model": {
        "name": ("default",),
        "embedding_norm": (None,),
        "block_pattern": (None,),
        "block_overrides": (None,),
        "embed_scale": (None,),
    },
    "attention": {
        "name": ("default", "fused"),
        "bias": (False,),
        "clip_qkv": (None,),
        "sliding_window": (None,),
        "use_head_qk_norm": (False, None),
        "gate": (None,),
        "scalable_softmax": (False, None),
        "attention_sinks": (False, None),
        "head_dim": (None,),
    },
    "rope": {
        "name": ("default", "fused"),
        "scaling": (None,),
        "no_global_rope": (False, None),
        "partial_rotary_factor": (1.0, None),
    },
    "feed_forward": {"name": ("default",), "bias": (False,), "activation": ("silu", None)},
}


def open_olmo_core(directory: Path, read_options: ReadOptions | None = None) -> FolderSource:
    """Open a checkpoint. Raises CheckpointError for a model of another family."""
    read_options = read_options or ReadOptions()
    reader = Reader(directory / _WEIGHTS)
    config_json, block_name = _read_config(directory / "config.json")
    rename = partial(_find_name, _NORMS[block_name])
    weights = read_tensors(reader, _MODEL_KEY)
    contents = FolderContents(
        f"OLMo-core checkpoint {directory}",
        directory,
        {rename(name): tensor for name, tensor in weights.items()},
        config_json=config_json,
        iteration=_read_iteration(directory / _TRAINER),
        has_own_decay=True,
        unused=["state: train (data loader, random number generators)"],
    )
    if any(key.startswith(_OPTIMIZER_KEY) for key in reader.metadata.tensors):
        contents.read_optimizer = partial(read_optimizer, reader, _OPTIMIZER_KEY, rename)
    return FolderSource(contents, read_options)


def _read_config(path: Path) -> tuple[dict[str, Any], str]:
    """Return the config.json of transformers, and the name of the blocks."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: it describes the model of OLMo-core")
    model = _CONFIG(read_json(path), str(path))["model"]
    block = model["block"]
    feed_forward = block["feed_forward"]
    # Version 3 calls attention a sequence mixer.
    mixer = block.get("sequence_mixer", block.get("attention"))
    attention = _ATTENTION(mixer, f"{path}: the attention of a block")
    rope = attention["rope"]
    parts = {"model": model, "attention": attention, "rope": rope, "feed_forward": feed_forward}
    for name, part in parts.items():
        _check_plain(part, _PLAIN[name], f"{path}: {name}")
    block_name = block["name"]
    has_norms = attention.get("qk_norm") is not None
    if block_name not in _NORMS or has_norms != (block_name == "reordered_norm"):
        raise CheckpointError(
            f"{path}: blocks {block_name!r} {'with' if has_norms else 'without'} norms of queries "
            "and keys are not those of OLMo 2 or Llama: export a model of transformers with "
            "OLMo-core's converter"
        )
    for norm in (block["layer_norm"], attention.get("qk_norm") or block["layer_norm"]):
        if norm["name"] not in ("rms", "fused_rms") or norm["eps"] != block["layer_norm"]["eps"]:
            schema.refuse(f"{path}: a norm", norm["name"], "rms, all with one eps")
    config = {
        "model_type": "olmo2" if block_name == "reordered_norm" else "llama",
        "hidden_size": model["d_model"],
        "intermediate_size": feed_forward["hidden_size"],
        "num_hidden_layers": model["n_layers"],
        "num_attention_heads": attention["n_heads"],
        "num_key_value_heads": attention.get("n_kv_heads") or attention["n_heads"],
        "vocab_size": model["vocab_size"],
        "rms_norm_eps": block["layer_norm"]["eps"],
        "rope_theta": float(rope["theta"]),
        "tie_word_embeddings": model.get("tie_word_embeddings") is True,
        "hidden_act": "silu",
    }
    return config, block_name


def _check_plain(part: Mapping[str, Any], plain: Mapping[str, Any], location: str) -> None:
    """Raise CheckpointError for a field with another value than those that are read."""
    for name, values in plain.items():
        if part.get(name, values[-1]) not in values:
            raise CheckpointError(
                f"{location} has {name} = {schema.format_value(part[name])}, which is not read: "
                "export a model of transformers with OLMo-core's converter"
            )


def _find_name(norms: tuple[str, str], name: str) -> str:
    """Return the name in transformers; an unknown name is returned as it is."""
    for old, new in _OUTSIDE.items():
        if name.startswith(old):
            return name.replace(old, new, 1)
    match = _BLOCK.fullmatch(name)
    if match is None:
        return name
    layer, module = match.groups()
    attention_norm, mlp_norm = norms
    modules = {**_MODULES, "attention_norm.": attention_norm, "feed_forward_norm.": mlp_norm}
    for old, new in modules.items():
        if module.startswith(old):
            return f"model.layers.{layer}.{new}{module.removeprefix(old)}"
    return name


def _read_iteration(path: Path) -> int | None:
    """Return the step of the trainer, None without its state."""
    if not path.is_file():
        return None
    content = safe_load(path)
    step = content.get("global_step") if isinstance(content, dict) else None
    iteration: int = schema.COUNT(step, f"{path}: global_step")
    return iteration
