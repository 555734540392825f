"""Peer for resuming: megatron-core loads our checkpoint, and makes one step.

    torchrun --nproc-per-node 2 megatron_core_resume.py DIRECTORY LENGTH

Requires an environment with megatron-core. On the CPU, `tests/interop` has replacements for CUDA
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

from megatron_core_load import (  # noqa: E402
    FusedAdam,
    build_model,
    build_optimizer,
    request,
    stand_in_for_cuda,
)


class Adam(FusedAdam):
    """AdamW with the step count that megatron-core reads."""

    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params: list[torch.Tensor] = []
            grads: list[torch.Tensor] = []
            exp_avgs: list[torch.Tensor] = []
            exp_avg_sqs: list[torch.Tensor] = []
            steps: list[torch.Tensor] = []
            for param in group["params"]:
                if param.grad is None:
                    continue
                params.append(param)
                grads.append(param.grad)
                exp_avgs.append(self.state[param]["exp_avg"])
                exp_avg_sqs.append(self.state[param]["exp_avg_sq"])
                steps.append(torch.tensor(float(group["step"])))
            beta1, beta2 = group["betas"]
            torch._fused_adamw_(
                params,
                grads,
                exp_avgs,
                exp_avg_sqs,
                [],  # maxima of AMSGrad
                steps,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )


def initialize() -> None:
    """Create the process groups on the CPU."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.set_num_threads(1)
    stand_in_for_cuda(adam=Adam)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def find_newest_checkpoint(root: Path) -> str:
    """Return the directory that the tracker names."""
    tracker = root / "latest_checkpointed_iteration.txt"
    iteration = int(tracker.read_text())
    return str(root / f"iter_{iteration:07d}")


def main() -> None:
    path = find_newest_checkpoint(Path(sys.argv[1]))
    length = int(sys.argv[2])
    initialize()

    # Build the model of the checkpoint.
    common = dist_checkpointing.load_common_state_dict(path)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    args = common["args"]
    model = build_model(args, 1, 1)
    model.output_layer.gather_output = False  # as for training
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    ddp = DistributedDataParallel(model.config, ddp_config, model)
    optimizer = build_optimizer(args, ddp)

    # Load.
    requested = request(args, metadata, model, optimizer, is_loading=True)
    state = dist_checkpointing.load(requested, path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])

    # Train for one step.
    tokens = torch.randint(args.model_vocab_size, (1, length))
    positions = torch.arange(length)[None]
    # True where a query (row) must not attend to a key (column).
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    ddp.zero_grad_buffer()
    loss = ddp(tokens, positions, mask, labels=tokens).mean()
    loss.backward()
    ddp.finish_grad_sync()
    optimizer.step()
    print("iteration", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
