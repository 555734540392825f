"""Write the folders of accelerate's FSDP plugin on a CPU.

    torchrun --nproc-per-node 2 accelerate_write.py DIRECTORY

Runs in an environment with torch, transformers and accelerate. Two ranks train a Llama for two
steps with FSDP 2. accelerate selects FSDP only on accelerators, so the model is wrapped here, and
its functions save it: sharded tensors of the model and the optimizer through DCP. `expected.pt`
contains both, gathered, under the names of transformers.
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
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

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


def main() -> None:
    directory = Path(sys.argv[1])
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    torch.manual_seed(3)
    model = LlamaForCausalLM(CONFIG)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = build_optimizer(model)
    tokens = torch.randint(67, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    save_fsdp_model(plugin, accelerator, model, str(directory))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(directory))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    if accelerator.is_main_process:  # only it has the gathered state
        CONFIG.save_pretrained(directory)
        torch.save({"model": weights, "optimizer": state["state"]}, directory / "expected.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
