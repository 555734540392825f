"""Peer for resuming: transformers under FSDP with torch.distributed.checkpoint, AdamW, load, one
step.

    torchrun --nproc-per-node 2 dcp_resume.py DIRECTORY LAYERS HIDDEN FFN HEADS VOCABULARY LENGTH [--write]

With --write, files are sharded along the other dimension, as with tensor parallelism. Prints
`iteration` after the step.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map
from transformers import LlamaConfig, LlamaForCausalLM


def along_columns(value: object) -> object:
    return (
        value.redistribute(placements=[Shard(1)])
        if isinstance(value, DTensor) and value.dim() > 1
        else value
    )


def main() -> None:
    directory, *numbers = sys.argv[1:8]
    layers, hidden, ffn, heads, vocabulary, length = map(int, numbers)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=hidden,
            intermediate_size=ffn,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            vocab_size=vocabulary,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    if "--write" in sys.argv:
        dcp.save(tree_map(along_columns, state), checkpoint_id=directory)
    else:
        dcp.load(state, checkpoint_id=directory)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        tokens = torch.randint(vocabulary, (1, length))
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print("iteration", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
