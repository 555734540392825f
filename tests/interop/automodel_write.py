"""Write a checkpoint of NeMo Automodel on a CPU.

    torchrun --nproc-per-node 2 automodel_write.py DIRECTORY

Runs in an environment with torch, transformers, accelerate and nemo-automodel. Two ranks train a
Llama for two steps with FSDP 2, and its checkpointer saves sharded weights and the optimizer.
`expected.pt` contains both, gathered, under the names of transformers.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate_write import CONFIG, build_optimizer, gather_state, train_two_steps
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer
from nemo_automodel.components.checkpoint.config import CheckpointingConfig
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM


def main() -> None:
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = LlamaForCausalLM(CONFIG)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = build_optimizer(model)
    train_two_steps(model, optimizer)

    folder = directory / "epoch_0_step_2"
    config = CheckpointingConfig(checkpoint_dir=str(directory), save_consolidated=False)
    checkpointer = Checkpointer(config, dp_rank=dist.get_rank(), tp_rank=0, pp_rank=0)
    checkpointer.save_model(model, str(folder))
    checkpointer.save_optimizer(optimizer, model, str(folder))
    expected = gather_state(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, directory / "expected.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
