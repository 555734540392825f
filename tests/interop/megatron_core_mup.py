"""Record the maximal update parametrization of real megatron-core on CPU.

    python megatron_core_mup.py DIRECTORY

Writes `mup.npz` and `hyperparameters.json`. Runs in a virtual environment with torch and
megatron-core, without this project.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import get_mup_config_overrides, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer import TransformerConfig

SEQ = 12
BATCH = 2
VOCAB = 40
# Name -> fields of muP, of a model of width 16 with heads of width 4.
CASES = {
    "default": {"mup_base_hidden_size": 8},
    "all": {
        "mup_base_hidden_size": 4,
        "mup_embedding_mult": 3.0,
        "mup_output_mult": 0.7,
        "mup_base_head_dim": 2.0,
        "mup_attn_scale_power": 0.75,
    },
}


def build_model(fields: dict[str, float]) -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        init_method_std=0.2,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        use_mup=True,
        **fields,
    )
    torch.manual_seed(5)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=False,
    )


def list_overrides(model: GPTModel, optimizer: str) -> dict[str, dict[str, float]]:
    """Return the differences from the optimizer's hyperparameters, by parameter."""
    config = OptimizerConfig(optimizer=optimizer, lr=1e-2, min_lr=1e-3, adam_eps=1e-6)
    overrides = get_standard_config_overrides(config)
    overrides |= get_mup_config_overrides(config, model.config.mup_width_mult, optimizer)
    found = {}
    for name, param in model.named_parameters():
        values = {}
        for key, override in overrides.items():
            if key.matches(param, name):
                values |= override
        found[name] = values
    return found


def main() -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29513")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.cuda.current_device = lambda: torch.device("cpu")
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)

    generator = torch.Generator().manual_seed(7)
    text = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=generator)
    tokens = text[:, :-1].contiguous()
    labels = text[:, 1:].contiguous()
    positions = torch.arange(SEQ).expand(BATCH, SEQ)
    attention_mask = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)
    arrays = {"tokens": tokens, "labels": labels}
    hyperparameters = {}
    for name, fields in CASES.items():
        model = build_model(fields)
        config = model.config
        losses = model(tokens, positions, attention_mask, labels=labels)
        losses.mean().backward()
        arrays[f"{name}/losses"] = losses
        for key, param in model.named_parameters():
            arrays[f"{name}/weights/{key}"] = param
            arrays[f"{name}/gradients/{key}"] = param.grad
        hyperparameters[name] = {
            "fields": fields,
            "std": {
                "embedding": config.embedding_init_method.keywords["std"],
                "hidden": config.init_method.keywords["std"],
                "output": config.output_layer_init_method.keywords["std"],
            },
            **{rule: list_overrides(model, rule) for rule in ("adam", "sgd", "muon")},
        }
    plain = {key: value.detach().numpy().copy() for key, value in arrays.items()}
    directory = Path(sys.argv[1])
    np.savez_compressed(directory / "mup.npz", **plain)
    text = json.dumps(hyperparameters, indent=1)
    (directory / "hyperparameters.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
