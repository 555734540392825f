"""Write the folders of accelerate's FSDP plugin on a CPU.

    torchrun --nproc-per-node 2 accelerate_write.py DIRECTORY 1|2 SHARDED_STATE_DICT|FULL_STATE_DICT

Runs in an environment with torch, transformers and accelerate. The ranks train a Llama for two
steps with FSDP 1 or 2. accelerate selects FSDP only on accelerators, so the model is wrapped here,
and its functions save it: sharded tensors of the model and the optimizer through DCP, or all of
them by rank 0 (with FSDP 1 on one rank: torch 2.13 fails on several CPUs). `expected.pt` contains
both, gathered, under the names of transformers.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

CONFIG = LlamaConfig(
    vocab_size=67,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


def build_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW with the parameter groups of transformers' trainer."""
    decayed = []
    others = []
    for name, param in model.named_parameters():
        (others if "norm" in name else decayed).append(param)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def train_two_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.randint(67, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def gather_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Return weights and optimizer state by name; all ranks call it, rank 0 gets the result."""
    is_fsdp1 = isinstance(model, FullyShardedDataParallel)
    options = StateDictOptions(full_state_dict=True, cpu_offload=not is_fsdp1)
    weights = get_model_state_dict(model, options=options)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": state.get("state", {})}


def main() -> None:
    directory = Path(sys.argv[1])
    version = int(sys.argv[2])
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=sys.argv[3])
    torch.manual_seed(3)
    model = LlamaForCausalLM(CONFIG)
    if version == 2:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        policy = ModuleWrapPolicy({LlamaDecoderLayer})
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
        )
    optimizer = build_optimizer(model)
    train_two_steps(model, optimizer)

    save_fsdp_model(plugin, accelerator, model, str(directory))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(directory))
    expected = gather_state(model, optimizer)
    if accelerator.is_main_process:  # only it has the gathered state
        CONFIG.save_pretrained(directory)
        torch.save(expected, directory / "expected.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
