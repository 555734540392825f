"""Freeze a model, and add adapters to the layers of `--lora-targets`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from megatron.core.module import MegatronModule, param_info, set_param_info
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorParallelRng
from megatron.core.transformer.grouped_linear import GroupedLinear
from megatron.core.transformer.layer_spec import FP8StateMixin
from megatron.training.adapters.adapted_layers import AdapterOptions, Linear, RowLayout, adapt_layer
from megatron.training.adapters.encoded_layers import encode_layer
from megatron.training.config.lora_options import LoraConfig

# Linear layers -> names of their projections, those of Llama in transformers
PROJECTIONS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    # Multi-latent attention
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
}


def add_adapters(model: MegatronModule, lora: LoraConfig, rng: TensorParallelRng) -> None:
    """Freeze the parameters of a pipeline chunk, and add trained adapters to it."""
    assert lora.lora_rank is not None
    # A plan builds single layers on the meta device, and some layers have no target.
    is_planned = all(param.is_meta for param in model.parameters())
    device = torch.device("meta") if is_planned else rng.device
    options = AdapterOptions(
        lora.lora_rank, compute_scale(lora), lora.lora_dropout, lora.lora_dora, rng, device
    )
    for param in model.parameters():
        param.requires_grad_(False)
        set_param_info(param, replace(param_info(param), trained=False))
    layers = list(iterate_linear_layers(model))
    has_adapters = False
    for path, layer in layers:
        if lora.lora_base_encoding is not None:
            encode_layer(layer, path, lora.lora_base_encoding, device)
        rows = _find_rows(layer)
        names = [
            name if any(_is_target(path, name, target) for target in lora.lora_targets) else None
            for name in list_projections(path, len(rows.widths))
        ]
        if any(names):
            if lora.lora_dropout and isinstance(layer, GroupedLinear):
                raise ValueError(
                    f"--lora-dropout {lora.lora_dropout:g} with adapters of experts ({path}): "
                    "ranks that share tokens would drop different elements, and PEFT does not "
                    "support it either. Use --lora-dropout 0, or --lora-targets linear_qkv"
                )
            if lora.lora_dora and isinstance(layer, FP8StateMixin):
                raise ValueError(
                    f"--lora-dora with {path} of Transformer Engine: DoRA scales the product "
                    "before the bias, which that layer adds. Use --transformer-impl local, or LoRA"
                )
            adapt_layer(layer, names, rows, options)
            has_adapters = True
    if lora.lora_base_encoding is not None:
        # The model was built on the host, whose memory for encoded weights was never touched.
        for param in model.parameters():
            if not param.is_meta:
                param.data = torch.empty_like(param, device=device)
    if layers and not has_adapters and not is_planned:
        available = ", ".join(sorted(set(list_available(layers))))
        raise ValueError(
            f"--lora-targets {' '.join(lora.lora_targets)} match no layer of a pipeline chunk: "
            f"every chunk needs an adapter. Available there: {available}"
        )


def compute_scale(lora: LoraConfig) -> float:
    """Return the factor of B A."""
    assert lora.lora_rank is not None
    return (lora.lora_alpha or lora.lora_rank) / lora.lora_rank


def iterate_linear_layers(model: MegatronModule) -> Iterator[tuple[str, Linear]]:
    """Yield the path in the model and the module of each layer that can have adapters."""
    for path, module in model.named_modules():
        is_linear = isinstance(module, ColumnParallelLinear | RowParallelLinear | GroupedLinear)
        if is_linear and path.rpartition(".")[2] in PROJECTIONS:
            yield path, module


def list_available(layers: Iterable[tuple[str, Linear]]) -> list[str]:
    """Return the ends of paths that targets can match, e.g. `self_attention.linear_qkv.q_proj`."""
    available = []
    for path, layer in layers:
        end = ".".join(path.split(".")[-2:])
        for name in list_projections(path, len(_find_rows(layer).widths)):
            available.append(f"{end}.{name}")
    return available


def list_projections(path: str, count: int) -> Sequence[str]:
    """Return the names of the `count` projections that a layer computes."""
    names = PROJECTIONS[path.rpartition(".")[2]]
    if len(names) == count:
        return names
    if count == 4:  # --attention-output-gate: the gates follow the queries
        return ("q_proj", "q_gate_proj", "k_proj", "v_proj")
    assert names == ("gate_proj", "up_proj") and count == 1
    return ("up_proj",)


def find_unmatched_targets(paths: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Return the targets that name neither a layer nor a projection in `paths`, `path.name`."""
    unmatched = []
    for target in targets:
        matches = False
        for path in paths:
            layer, _, name = path.rpartition(".")
            matches = matches or _is_target(layer, name, target)
        if not matches:
            unmatched.append(target)
    return unmatched


def _is_target(path: str, name: str, target: str) -> bool:
    """Return whether `target` is the end of the path of a layer or of its projection `name`."""
    return f".{path}".endswith(f".{target}") or f".{path}.{name}".endswith(f".{target}")


def _find_rows(layer: Linear) -> RowLayout:
    """Return the rows that this rank has of each projection."""
    sharding = param_info(layer.weight).sharding
    num_rows = layer.weight.shape[-2]
    if sharding.row_blocks:
        return RowLayout(num_rows // sum(sharding.row_blocks), sharding.row_blocks)
    return RowLayout(1, (num_rows // sharding.blocks,) * sharding.blocks)
