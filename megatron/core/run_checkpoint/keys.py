"""Names in checkpoints: keys of a model's tensors and optimizer state, and files.

There is one key per layer with its global number, and the optimizer state of a parameter is under
`optimizer.state.*` (see "Keys" in `docs/architecture.md`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

import torch

from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import AVERAGE_PREFIX

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


# The state of a parameter that is its average, which does not belong to the optimizer.
AVERAGE = "ema"


def split_key(key: str) -> tuple[str, str | None]:
    """Return the parameter of a key, and its state: one of the optimizer's, AVERAGE, or None for
    the parameter itself.
    """
    if key.startswith(AVERAGE_PREFIX):
        return key.removeprefix(AVERAGE_PREFIX), AVERAGE
    if not key.startswith("optimizer.state."):
        return key, None
    state, _, parameter = key.removeprefix("optimizer.state.").partition(".")
    return parameter, state


# Prefix of the keys of foreign tensors, which are copied byte for byte (--keep-foreign).
FOREIGN_PREFIX = "foreign."


def is_foreign(key: str) -> bool:
    """Return whether a key is that of a tensor that the model does not have."""
    return key.startswith(FOREIGN_PREFIX)


def is_weight(key: str) -> bool:
    """Return whether a key is that of a parameter of the model, not of its state."""
    _, state = split_key(key)
    return state is None and not is_foreign(key)


_UNTRAINED = (".router.expert_bias", ".activation.beta", ".activation.eps")


def is_trained(key: str) -> bool:
    """Return whether the optimizer trains the parameter.

    A router's bias follows the load. Constants and foreign tensors do not change.
    """
    return not key.endswith(_UNTRAINED) and not is_foreign(key)


# ---- Other names of the same parameters ----

# Name of a norm in Megatron-core's local modules -> its name in ours and Transformer Engine's,
# where it is part of the projection that follows. Norms without a single following projection
# (before experts, before latent attention) have a module of their own everywhere, but
# Megatron-core's local modules write the one before experts under the fused name.
NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}


def find_norm_key(name: str, names: Container[str]) -> str:
    """Return the key of a norm's parameter that has either of its names; others are unchanged.

    `names` contains the names of all weights.
    """
    for local, fused in NORMS.items():
        if f".{local}" in name:
            before, _, suffix = name.partition(f".{local}")
        elif f".{fused}" in name:
            before, _, suffix = name.partition(f".{fused}")
        else:
            continue
        # The norm is fused if the projection that follows is in the model.
        projection = f"{before}.{fused}".replace(".layer_norm_", ".weight")
        if projection in names:
            return f"{before}.{fused}{suffix}"
        return f"{before}.{local}{suffix}"
    return name


HYBRID_FINAL_NORM = "decoder.final_norm."


def is_hybrid(keys: Iterable[str]) -> bool:
    """Return whether the keys of a torch_dist checkpoint are those of HybridModel."""
    return any(key.startswith(HYBRID_FINAL_NORM) for key in keys)


# ---- Empty extra states ----
#
# Modules of Megatron-core request an `_extra_state` each (the scales of FP8 training), and its
# reader stops at the first one that is missing, although all are empty in other precisions.

# Modules that have an extra state, by their weight. Attention and norms have one in Transformer
# Engine; Megatron-core's own do not request it. Each expert of a layer is a module.
_STATEFUL = re.compile(
    r"((?:decoder\.layers\.\d+|mtp\.layers\.\d+\.transformer_layer)\."
    r"(?:self_attention\.linear_(?:qkv|proj|q_proj|(?:q|kv)_(?:down|up)_proj)"
    r"|mlp\.(?:shared_experts\.|experts\.experts\.)?linear_fc[12]"
    r"|(?:self_attention\.[qk]|input|pre_mlp)_layernorm)"
    r"|mtp\.layers\.\d+\.(?:enorm|hnorm|eh_proj|final_layernorm)"
    r"|decoder\.final_layernorm)\.weight"
)
_EMPTY_NORM_STATE = torch.empty(0, dtype=torch.uint8)  # of other modules it is None


def build_extra_states(keys: Iterable[str], experts: int = 0) -> dict[str, ShardedObject]:
    """Return an entry for each module of the model with these weights.

    `experts` is the number of experts per layer.
    """
    states: dict[str, ShardedObject] = {}

    def add(module: str, index: int, count: int, value: torch.Tensor | None) -> None:
        key = f"{module}._extra_state/shard_{index}_{count}"
        states[key] = ShardedObject(key, value, is_constant=True)

    for key in keys:
        match = _STATEFUL.fullmatch(key)
        if match is None:
            continue
        module = match[1]
        count = 1
        if ".experts.experts." in module:
            count = experts
        value = None
        if module.endswith("norm"):
            value = _EMPTY_NORM_STATE
        for index in range(count):
            add(module, index, count, value)
        if module.endswith("self_attention.linear_proj"):
            # Attention itself has an extra state, but no weight.
            add(module.replace("linear_proj", "core_attention"), 0, 1, None)
    return states


def is_extra_state(key: str) -> bool:
    """Return whether an object is the state that a module of Megatron-core keeps per module."""
    return "._extra_state/shard_" in key


# ---- Names of files and directories in checkpoints of other programs ----

MODEL_FILE = "model_optim_rng.pt"  # of a rank in a legacy directory
OPTIMIZER_FILE = "distrib_optim.pt"  # of a rank in a legacy directory
LATEST = "latest_universal"  # DeepSpeed's tracker of universal checkpoints
ENGINE_LATEST = "latest"  # DeepSpeed's tracker of checkpoints of its engine
ENGINE_MODEL_FILES = "*mp_rank_*_model_states.pt"  # of the engine
ZERO = "zero"  # the directory of parameters in a universal checkpoint
GGUF_FILES = "*.gguf"  # of files of llama.cpp
NEMO_ARCHIVES = "*.nemo"
NEMO_WEIGHTS = "model_weights"  # in an unpacked archive
NEMO_CONTEXT = "context/model.yaml"  # in a directory of NeMo 2
RELEASE = "release"  # in a tracker and as a directory: weights that belong to no iteration
PARAMS = "params.json"  # of a Llama model of Meta
CONSOLIDATED = "consolidated.*.pth"  # its weights
# Files by which checkpoints that other programs save during training are recognized, by format.
TRAINING_FOLDERS = {
    "accelerate": ("pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp.bin"),
    "verl": ("model_world_size_*_rank_0.pt",),
    "olmo_core": ("model_and_optim/.metadata",),
    "automodel": ("model/shard-*.safetensors", "model/.metadata"),
    "torch_checkpointing": ("metadata.pkl",),
}
# Files of transformers that prepare the images of a multimodal model.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
