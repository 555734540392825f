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
from optimizer import build_optimizer
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)


def build_model(args: argparse.Namespace) -> PreTrainedModel:
    """Build a Llama, or a Mixtral with `--experts`."""
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
    config = MixtralConfig(
        **shape,
        num_local_experts=args.experts,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.01,
        output_router_logits=True,
        experts_implementation=args.experts_by,
    )
    return MixtralForCausalLM(config)


class Saves:
    """DCP's asynchronous saves of a training state, one at a time."""

    def __init__(
        self, path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, stager: bool
    ) -> None:
        on_gpu = model.device.type == "cuda"
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self._path = path
        self._model = model
        self._optimizer = optimizer
        self._rest = allocate_missing_state(model)
        self._stager = None
        if stager:
            options = StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=on_gpu,
            )
            self._stager = DefaultStager(options)
        self._wait_until_staged: Callable[[], object] = do_nothing
        self._wait_until_written: Callable[[], object] = do_nothing
        self._blocked = 0.0  # seconds in `begin`
        self._previous: Path | None = None

    def begin(self, step: int) -> None:
        """Begin to save the state of a step, after the previous save has been written."""
        began = time.perf_counter()
        self._wait_until_written()
        if self._previous is not None:
            # In the background, as with --keep-last-n 1 of ours; a disk has room for two.
            threading.Thread(target=shutil.rmtree, args=(self._previous,)).start()
        directory = self._path / str(step)
        self._previous = directory
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "rest": self._rest,
        }
        storage = dcp.FileSystemWriter(directory, sync_files=True)
        if self._stager is None:
            written = dcp.async_save(state, storage_writer=storage)
        else:
            response = dcp.async_save(state, storage_writer=storage, async_stager=self._stager)
            self._wait_until_staged = response.staging_completion.result
            written = response.upload_completion
        self._wait_until_written = written.result
        self._blocked = time.perf_counter() - began

    def wait_staged(self) -> None:
        """Wait until the state may change, and print the blocking time of a save."""
        began = time.perf_counter()
        self._wait_until_staged()
        if self._blocked:
            blocked = self._blocked + time.perf_counter() - began
            print(f"blocking {blocked * 1e3:.1f} ms", flush=True)
        self._wait_until_staged = do_nothing
        self._blocked = 0.0

    def close(self) -> None:
        """Wait for the last save."""
        self._wait_until_written()
        if self._stager is not None:
            self._stager.close()
        dist.destroy_process_group()


def do_nothing() -> None:
    """Replace a wait or a synchronization that is not needed."""


def allocate_missing_state(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return tensors with the bytes that a run of ours saves in addition to this one.

    Ours has fp32 moments and main parameters; this one has moments in the dtype of the weights.
    """
    tensors = []
    for param in model.parameters():
        missing = 3 * 4 - 2 * param.element_size()  # bytes per element
        tensors.append(torch.zeros(param.numel() * missing // 4, device=param.device))
    return tensors


def train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,  # [b, s + 1]
    saves: Saves | None,
) -> None:
    """Train on one batch, and wait until its loss is known."""
    inputs = tokens[:, :-1]
    labels = tokens[:, 1:].contiguous()
    output = model(input_ids=inputs, labels=labels, shift_labels=labels)
    output.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    # The step changes the state that a save may still be copying.
    if saves is not None:
        saves.wait_staged()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    output.loss.item()


def train(args: argparse.Namespace) -> None:
    """Train, and print the time of each step."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = torch.float32
    if args.dtype == "bf16":
        dtype = torch.bfloat16
    model = build_model(args)
    model.to(args.device, dtype)
    if args.compile:
        model.compile()
    optimizer = build_optimizer(model)
    synchronize = do_nothing
    if args.device == "cuda":
        synchronize = torch.cuda.synchronize
    saves = None
    if args.save is not None:
        saves = Saves(args.save, model, optimizer, args.stager)

    generator = torch.Generator().manual_seed(1)
    shape = (args.batch, args.seq + 1)
    for step in range(args.steps):
        began = time.perf_counter()
        if saves is not None and step in range(10, args.steps, 10):
            saves.begin(step)
        tokens = torch.randint(args.vocab, shape, generator=generator)
        train_step(model, optimizer, tokens.to(args.device), saves)
        synchronize()
        milliseconds = (time.perf_counter() - began) * 1e3
        print(f"{milliseconds:.1f}", flush=True)
    if saves is not None:
        saves.close()


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
    train(parser.parse_args())


if __name__ == "__main__":
    main()
