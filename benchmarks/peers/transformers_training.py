"""Plain training loop of transformers: Llama or Mixtral with SDPA, clipping, fused AdamW.

Prints one step time (ms) per line. With --save it saves every 10 steps with `async_save` of
torch.distributed.checkpoint (DCP) and prints the blocking time of each save. bf16 is the fastest
form: bf16 parameters and moments without fp32 main parameters (which this project keeps).
"""

import argparse
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)


def build_model(args: argparse.Namespace) -> PreTrainedModel:
    shape = {
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "intermediate_size": args.ffn,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.groups,
        "max_position_embeddings": args.seq,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    if not args.experts:
        return LlamaForCausalLM(LlamaConfig(**shape))
    router = {
        "num_local_experts": args.experts,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.01,
    }
    config = MixtralConfig(
        **shape, **router, output_router_logits=True, experts_implementation=args.experts_by
    )
    return MixtralForCausalLM(config)


class Saves:
    """DCP's asynchronous saves of a training state, one at a time."""

    def __init__(
        self, path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, stager: bool
    ) -> None:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if model.device.type == "cuda" else "gloo",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
        )
        self.path = path
        self.model = model
        self.optimizer = optimizer
        # As many bytes as a run of ours saves: moments in fp32, and main parameters.
        missing = 3 * 4 - 2 * next(model.parameters()).element_size()
        self.rest = [
            torch.zeros(p.numel() * missing // 4, device=p.device) for p in model.parameters()
        ]
        pinned = model.device.type == "cuda"
        options = StagingOptions(
            pinned, False, use_async_staging=True, use_non_blocking_copy=pinned
        )
        self.stager = DefaultStager(options) if stager else None
        self.staged: Callable[[], object] = lambda: None
        self.written: Callable[[], object] = lambda: None
        self.blocked = 0.0
        self.previous: Path | None = None

    def begin(self, step: int) -> None:
        start = time.perf_counter()
        self.written()
        if self.previous is not None:
            # In the background, as with --keep-last-n 1 of ours; a disk has room for two.
            threading.Thread(target=shutil.rmtree, args=(self.previous,)).start()
        directory = self.path / str(step)
        self.previous = directory
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rest": self.rest,
        }
        storage = dcp.FileSystemWriter(directory, sync_files=True)
        if self.stager is None:
            self.written = dcp.async_save(state, storage_writer=storage).result
        else:
            response = dcp.async_save(state, storage_writer=storage, async_stager=self.stager)
            self.staged = response.staging_completion.result
            self.written = response.upload_completion.result
        self.blocked = time.perf_counter() - start

    def wait_staged(self) -> None:
        """Wait until the state may change."""
        start = time.perf_counter()
        self.staged()
        if self.blocked:
            print(
                f"blocking {(self.blocked + time.perf_counter() - start) * 1e3:.1f} ms", flush=True
            )
        self.staged = lambda: None
        self.blocked = 0.0

    def close(self) -> None:
        self.written()
        if self.stager is not None:
            self.stager.close()
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=1408)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument(
        "--experts",
        type=int,
        default=0,
        help="experts of width --ffn in every layer, 2 for a token",
    )
    parser.add_argument(
        "--experts-by", default="grouped_mm", help="how: eager, batched_mm or grouped_mm"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--save", type=Path, help="a directory for checkpoints")
    parser.add_argument(
        "--stager",
        action="store_true",
        help="with --save: DCP stages in a thread, into kept buffers",
    )
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = torch.float32 if args.dtype == "fp32" else torch.bfloat16
    model = build_model(args).to(args.device, dtype)
    if args.compile:
        model.compile()
    decay = [p for p in model.parameters() if p.dim() > 1]
    no_decay = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    synchronize = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    generator = torch.Generator().manual_seed(1)
    saves = Saves(args.save, model, optimizer, args.stager) if args.save is not None else None
    for step in range(args.steps):
        start = time.perf_counter()
        if saves is not None and step > 0 and step % 10 == 0:
            saves.begin(step)
        tokens = torch.randint(args.vocab, (args.batch, args.seq + 1), generator=generator).to(
            args.device
        )
        labels = tokens[:, 1:].contiguous()
        loss = model(input_ids=tokens[:, :-1], labels=labels, shift_labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if saves is not None:
            saves.wait_staged()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        synchronize()
        print(f"{(time.perf_counter() - start) * 1e3:.1f}", flush=True)
    if saves is not None:
        saves.close()


if __name__ == "__main__":
    main()
