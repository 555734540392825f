"""Train a small language model with FSDP2, save it asynchronously, resume at any number of ranks.

    torchrun --nproc-per-node 4 examples/library/train_fsdp2.py --checkpoints run --steps 20
    torchrun --nproc-per-node 2 examples/library/train_fsdp2.py --checkpoints run --steps 40

The second command continues from step 20 with two ranks instead of four. Ctrl-C or SIGTERM saves
and ends. The losses do not depend on the number of ranks: all of them train on the same tokens.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from megatron.checkpointer import Checkpointer

VOCABULARY = 256
CONTEXT = 64
WIDTH = 128
LAYERS = 4


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [b, s, vocabulary] of `tokens` [b, s]."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.tokens(tokens) + self.positions.weight[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def make_batch(step: int) -> torch.Tensor:
    """Return tokens [b, s + 1] of step `step`: runs of consecutive numbers."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCABULARY, (8, 1), generator=generator)
    return (start + torch.arange(CONTEXT + 1)) % VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", required=True, help="directory or s3:// URL")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-interval", type=int, default=10)
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")

    torch.manual_seed(0)
    model = LanguageModel().to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)

    ckpt = Checkpointer(
        args.checkpoints,
        model,
        optimizer,
        scheduler=scheduler,
        save_interval=args.save_interval,
        exit_signals=[signal.SIGTERM, signal.SIGINT],
        keep_last=2,
    )
    for step in range(ckpt.load(), args.steps):
        batch = make_batch(step).to(device)
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1} of {args.steps}  loss {loss.item():.6f}", flush=True)
        if ckpt.step(step):
            break
    ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
