"""Train a model of real megatron-core, and save and resume it with `megatron_checkpoint`.

    torchrun --nproc-per-node N checkpointer_megatron_core.py DIRECTORY STEPS LOSSES

Runs in a virtual environment with torch, megatron-core and the distribution of `checkpointing/`,
without the rest of this project. Continues from the newest checkpoint in DIRECTORY up to STEPS and
writes {step: loss} to the JSON file LOSSES. All ranks train on the same tokens, so that the losses
do not depend on the number of ranks.
"""

import json
import sys
from pathlib import Path

import megatron_checkpoint
import torch
import torch.distributed as dist
from megatron_checkpoint import Checkpointer

import megatron.core
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

VOCABULARY = 64
LENGTH = 16


def build_model() -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="learned_absolute",
    )


def compute_loss(model: GPTModel, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(4, LENGTH)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).view(1, 1, LENGTH, LENGTH)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()


def main() -> None:
    directory, steps = sys.argv[1], int(sys.argv[2])
    assert "site-packages" in megatron.core.__file__, megatron.core.__file__
    assert megatron_checkpoint.Checkpointer.__module__.startswith("megatron_checkpoint.")
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    # megatron-core requests from CUDA the current device and the states of its generators.
    torch.cuda.current_device = lambda: torch.device("cpu")
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = {}
    with Checkpointer(directory, model, optimizer, save_interval=2) as ckpt:
        for step in range(ckpt.load(), steps):
            loss = compute_loss(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.item()
            ckpt.step(step)
    if dist.get_rank() == 0:
        Path(sys.argv[3]).write_text(json.dumps(losses))
        print(f"trained {len(losses)} steps of a model of megatron-core", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
