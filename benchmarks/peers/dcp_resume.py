"""Peer for resuming: transformers under FSDP2 loads a checkpoint of DCP, and makes one step.

    torchrun --nproc-per-node 2 dcp_resume.py \\
        DIRECTORY LAYERS HIDDEN FFN HEADS VOCABULARY LENGTH [--write]

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


def shard_columns(value: object) -> object:
    """Return a matrix sharded along the other dimension than FSDP does; other values unchanged."""
    if isinstance(value, DTensor) and value.dim() > 1:
        return value.redistribute(placements=[Shard(1)])
    return value


def build_model(sizes: list[int]) -> LlamaForCausalLM:
    """Build a model, and shard its layers with FSDP2."""
    layers, hidden, ffn, heads, vocabulary, _ = sizes
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def train_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, length: int) -> None:
    tokens = torch.randint(model.config.vocab_size, (1, length))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def main() -> None:
    directory = sys.argv[1]
    sizes = list(map(int, sys.argv[2:8]))
    length = sizes[-1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = build_model(sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    # Creates the moments, too.
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    if "--write" in sys.argv:
        dcp.save(tree_map(shard_columns, state), checkpoint_id=directory)
    else:
        dcp.load(state, checkpoint_id=directory)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        train_step(model, optimizer, length)
    print("iteration", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
