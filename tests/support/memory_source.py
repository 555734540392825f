"""A checkpoint in memory, for tests of writers."""

from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.conversion.model_space.lazy_tensors import view_tensor
from megatron.conversion.model_space.model import model_config, model_tensors
from megatron.conversion.model_space.optimizer_states import ADAM, SGD, optimizer_key
from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.run_checkpoint.source import TrainingState


@dataclass
class MemorySource:
    args: dict[str, Any]
    values: dict[str, torch.Tensor]
    training: TrainingState | None = None
    description: str = "checkpoint in memory"
    unused: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> dict[str, LazyTensor]:
        return {key: view_tensor(value) for key, value in self.values.items()}


LLAMA_ARGS = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "max_position_embeddings": 64,
    "seq_length": 64,
}
GPT_ARGS = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "position_embedding_type": "learned_absolute",
    "max_position_embeddings": 40,
}
BLOOM_ARGS = GPT_ARGS | {"position_embedding_type": "alibi", "embedding_layernorm": True}


def random_source(
    args: dict[str, Any], vocab_size: int = 67, optimizer: bool = True, seed: int = 0
) -> MemorySource:
    """Return random weights in the dtype of `args`, with optimizer state after seven iterations."""
    generator = torch.Generator().manual_seed(seed)
    config = model_config(args, vocab_size, "test")
    values: dict[str, torch.Tensor] = {}
    for key, shape in model_tensors(config).items():
        main = 0.3 * torch.randn(shape, generator=generator)
        values[key] = main.to(config.params_dtype)
        if optimizer:
            states = (
                main,
                torch.randn(shape, generator=generator),
                torch.rand(shape, generator=generator),
            )
            names = SGD if args.get("optimizer") == "sgd" else ADAM
            values |= {
                optimizer_key(state, key): v for state, v in zip(names, states, strict=False)
            }
    return MemorySource(dict(args), values, training_state() if optimizer else None)


def training_state() -> TrainingState:
    group = {
        "is_expert_parallel": False,
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": 3e-3,
        "min_lr": 3e-4,
        "lr": 0.1 + 0.2,
        "bias_correction": True,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "step": 7,
    }
    scheduler = {
        "max_lr": 3e-3,
        "lr_warmup_steps": 8,
        "num_steps": 28,
        "lr_decay_style": "cosine",
        "lr_decay_steps": 48,
        "min_lr": 3e-4,
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_style": "constant",
        "wd_incr_steps": 48,
    }
    return TrainingState(
        iteration=7,
        consumed_train_samples=28,
        consumed_valid_samples=4,
        num_floating_point_operations_so_far=1.5e18,
        param_groups=[group, group | {"wd_mult": 0.0, "weight_decay": 0.0}],
        scheduler=scheduler,
    )
