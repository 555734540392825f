"""Checkpoints of DeepSpeed's engine with ZeRO-3 and random values, written without DeepSpeed.

python -m tests.support.zero3_files DIRECTORY RANKS LAYERS HIDDEN_SIZE VOCABULARY
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

STATES = ("param", "exp_avg", "exp_avg_sq")


def write_zero3(directory: Path, config: LlamaConfig, ranks: int) -> None:
    """Write a checkpoint of `ranks` data-parallel ranks.

    A rank has the flat parameters and moments of a group with weight decay and one without.
    """
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    groups: list[dict[str, torch.Size]] = [{}, {}]
    for name, param in model.named_parameters():
        groups["norm" in name][name] = param.shape
    step_dir = directory / "global_step1"
    step_dir.mkdir(parents=True)
    config.save_pretrained(directory)
    (directory / "latest").write_text(step_dir.name)
    for rank in range(ranks):
        prefix = step_dir / f"zero_pp_rank_{rank}_mp_rank_00"
        state = {"module": {}, "param_shapes": groups, "global_steps": 1, "global_samples": ranks}
        torch.save(state, f"{prefix}_model_states.pt")
        content = {"optimizer_state_dict": _make_optimizer(groups, rank, ranks)}
        torch.save(content, f"{prefix}_optim_states.pt")


def _make_optimizer(
    groups: list[dict[str, torch.Size]], rank: int, ranks: int
) -> dict[str, object]:
    """Return the optimizer of a rank: each parameter is padded and split evenly."""
    generator = torch.Generator().manual_seed(rank)
    flats = []
    states = {}
    param_groups = []
    for index, group in enumerate(groups):
        size = sum(-(-math.prod(shape) // ranks) for shape in group.values())
        values = [torch.rand(size, generator=generator) for _ in STATES]
        flats.append(values[0])
        states[index] = {"step": torch.tensor(1.0), "exp_avg": values[1], "exp_avg_sq": values[2]}
        settings = {
            "lr": 1e-3,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "weight_decay": 0.1 * (not index),
        }
        param_groups.append(settings | {"params": [index]})
    return {
        "zero_stage": 3,
        "partition_count": ranks,
        "optimizer_state_dict": {"state": states, "param_groups": param_groups},
        "fp32_flat_groups": flats,
    }


def main() -> None:
    directory, *numbers = sys.argv[1:]
    ranks, layers, hidden, vocabulary = map(int, numbers)
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_attention_heads=max(1, hidden // 64),
        vocab_size=vocabulary,
    )
    write_zero3(Path(directory), config, ranks)


if __name__ == "__main__":
    main()
