"""Write a folder of torch_checkpointing on a CPU.

    torchrun --nproc-per-node 2 torch_checkpointing_write.py DIRECTORY

Runs in an environment with torch, transformers, accelerate and torch_checkpointing. Two ranks train
a Llama for two steps with FSDP 2, and the library saves state dictionaries of torch.
`expected.pt` contains weights and moments, gathered, under the names of transformers.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate_write import CONFIG, build_optimizer, gather_state, train_two_steps
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
from transformers import LlamaForCausalLM


class OnCPU(TorchFunctionMode):
    """Creates tensors on the CPU that the library creates on a GPU to exchange metadata."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


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

    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    config.items = {name: ItemSpec(resharder=DefaultResharder()) for name in ("model", "optimizer")}
    manager = config.build()
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "train_state": {"step": 2},
    }
    with OnCPU():
        manager.save(str(directory / "step-2"), state)
    manager.close()
    expected = gather_state(model, optimizer)
    if dist.get_rank() == 0:
        CONFIG.save_pretrained(directory / "step-2")
        torch.save(expected, directory / "expected.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
