"""Peer for resuming: megatron-core's model and distributed optimizer load our checkpoint, one step.

    torchrun --nproc-per-node 2 megatron_core_resume.py DIRECTORY LENGTH

Requires an environment with megatron-core. On the CPU, `tests/interop` provides stand-ins for CUDA
and Apex's Adam. Prints `iteration` after the step.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/interop"))

from megatron_core_load import FusedAdam, build_model, build_optimizer, request, stand_in_for_cuda  # noqa: E402


class Adam(FusedAdam):
    """AdamW with the step count that megatron-core reads."""

    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            torch._fused_adamw_(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                [torch.tensor(float(group["step"])) for _ in params],
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )


def main() -> None:
    root = Path(sys.argv[1])
    length = int(sys.argv[2])
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.set_num_threads(1)
    stand_in_for_cuda(adam=Adam)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)

    path = str(root / f"iter_{int((root / 'latest_checkpointed_iteration.txt').read_text()):07d}")
    common = dist_checkpointing.load_common_state_dict(path)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    args = common["args"]
    model = build_model(args, 1, 1)
    model.output_layer.gather_output = False  # as for training
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )
    optimizer = build_optimizer(args, ddp)
    state = dist_checkpointing.load(
        request(args, metadata, model, optimizer, is_loading=True), path
    )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])

    tokens = torch.randint(args.model_vocab_size, (1, length))
    positions = torch.arange(length)[None]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    ddp.zero_grad_buffer()
    ddp(tokens, positions, mask, labels=tokens).mean().backward()
    ddp.finish_grad_sync()
    optimizer.step()
    print("iteration", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
