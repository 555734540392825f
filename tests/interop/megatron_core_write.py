"""Train a tiny model, save it, and keep what it holds and computes, for `megatron_core_load.py`.

    torchrun --nproc-per-node 4 -m tests.interop.megatron_core_write DIRECTORY MODEL

DIRECTORY/checkpoint is what `pretrain_gpt.py --save` leaves, with the distributed optimizer in
several buckets. DIRECTORY/expected.pt holds, from the memory of the same processes, every global
tensor of weights and optimizer, the parameter groups and the schedule, the numbers that the
generators draw next, and tokens [b, s] with the logits [b, s, vocab] of one process.
"""

import random
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.core.models.gpt import GPTModel
from megatron.training.checkpoint.contents import get_model_state
from megatron.training.config.parsing import parse_args
from megatron.training.run import Run
from megatron.training.training import pretrain
from pretrain_gpt import datasets_provider, forward_step, model_provider
from tests.support.training_harness import (
    COMMON,
    DISTRIBUTED_OPTIMIZER,
    GPT2,
    LLAMA,
    Measurements,
    Outcome,
    whole,
)

TP2_DP2 = "--tensor-model-parallel-size 2 --sequence-parallel "
TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall "
MODELS = {
    "llama": LLAMA + TP2_DP2,  # 61 tokens: the files hold no padding rows, the peer's model does
    "llama-bf16": LLAMA + TP2_DP2 + "--bf16 ",
    "llama-pp2-bf16": LLAMA + TP2_PP2 + "--bf16 ",
    "gpt2": GPT2 + TP2_DP2 + "--vocab-size 63 ",  # 64 tokens: neither program pads
    "mixtral-ep2": LLAMA + EXPERTS + "--expert-model-parallel-size 2 ",
    "mixtral-tp2-ep2": LLAMA
    + EXPERTS
    + TP2_DP2
    + "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 ",
    "gpt2-pp2": GPT2 + TP2_PP2,  # tied embeddings on two stages
}
RUN = (
    "--mock-data --train-iters 3 --lr-decay-iters 8 --save-interval 2 --adam-beta2 0.95 "
    "--adam-eps 1e-9 "
)


def main() -> None:
    directory = Path(sys.argv[1])
    flags = (
        COMMON
        + DISTRIBUTED_OPTIMIZER
        + RUN
        + MODELS[sys.argv[2]]
        + f"--save {directory / 'checkpoint'}"
    )
    config = parse_args(shlex.split(flags), world_size=4)
    run = pretrain(config, model_provider, datasets_provider, forward_step)
    next_numbers = gathered([random.random(), float(np.random.random()), torch.rand(()).item()])
    tensors = global_tensors(run)
    if dist.get_rank() == 0:
        tokens = torch.randint(run.vocab_size, (2, 16), generator=torch.Generator().manual_seed(1))
        expected = {
            "tensors": tensors,
            "param_groups": run.optimizer.state_dict()["optimizer"]["param_groups"],
            "opt_param_scheduler": run.scheduler.state_dict(),
            "next_numbers": next_numbers,
            "tokens": tokens,
            "logits": logits(run, tensors, tokens),
        }
        torch.save(expected, directory / "expected.pt")
    dist.barrier()
    dist.destroy_process_group()


def global_tensors(run: Run) -> dict[str, torch.Tensor]:
    """Return all weights and optimizer state by key, assembled from all ranks."""
    state = get_model_state(run)
    state |= run.optimizer.sharded_state_dict(state)
    boxes = [
        (key, entry.global_shape, box.offset, box.tensor)
        for key, entry in state.items()
        for box in entry.boxes
    ]
    mine = Outcome(
        Measurements(),
        run.state.iteration,
        run.state.consumed_train_samples,
        run.learning_rate,
        boxes,
    )
    return whole(gathered(mine))


def gathered(mine: Any) -> list[Any]:
    """Return the values of all ranks in rank order."""
    result = [None] * dist.get_world_size()
    dist.all_gather_object(result, mine)
    return result


@torch.no_grad()
def logits(run: Run, tensors: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of these weights, computed in one process."""
    model = GPTModel(run.config.model)
    for key, entry in model.sharded_state_dict().items():
        for box in entry.boxes:
            slices = tuple(
                slice(o, o + n) for o, n in zip(box.offset, box.tensor.shape, strict=True)
            )
            box.tensor.copy_(tensors[key][slices])
    return model.eval()(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))


if __name__ == "__main__":
    main()
