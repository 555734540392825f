"""Training of the tiny model with our optimizer, and with torch.optim on fp32 copies."""

import torch

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import Axis, ParallelState
from tests.support.tiny_ddp_model import TinyModel, build, microbatches, run, snapshot

ONE = ParallelState.for_rank(ParallelConfig())
BUCKETS = DistributedDataParallelConfig(ddp_bucket_size=600, overlap_grad_reduce=True)
ADAM = {"lr": 0.01, "weight_decay": 0.1, "adam_beta2": 0.95}
SGD = {"optimizer": "sgd", "lr": 0.05, "weight_decay": 0.01}


def train_ours(config, steps, ddp=BUCKETS, dtype=torch.float32, **kwargs):
    """Return the model, its optimizer, and the loss and the result of every step."""
    chunk, optimizer = build(ONE, ddp, OptimizerConfig(**config), dtype, **kwargs)
    results = run(chunk, optimizer, range(steps))
    return chunk, optimizer, results


def build_torch_optimizer(main, config, fused):
    """Return the optimizer of the main copies, without weight decay for 1-D parameters."""
    matrices = [param for param in main.values() if param.dim() > 1]
    vectors = [param for param in main.values() if param.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config["weight_decay"]},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if config.get("optimizer") == "sgd":
        return torch.optim.SGD(groups, lr=config["lr"], momentum=0.9, fused=fused)
    return torch.optim.AdamW(groups, lr=config["lr"], betas=(0.9, 0.95), fused=fused)


def train_with_torch_optim(config, steps, dtype=torch.float32, clip=1.0, fused=True, **kwargs):
    """Train with a plain loop and fp32 main copies of the parameters.

    Return the copies by name, their optimizer, and the gradient norm of every step.
    """
    model = TinyModel(dtype, **kwargs)
    model.initialize(seed=7)
    main = {name: param.detach().float().clone() for name, param in model.named_parameters()}
    optimizer = build_torch_optimizer(main, config, fused)
    norms = []
    for step in range(steps):
        # Accumulate the gradients of two micro-batches.
        for value in main.values():
            value.grad = torch.zeros_like(value)

        for tokens, labels in microbatches(step, Axis(), 2):
            model.zero_grad()
            loss = model(tokens, labels) / 2
            loss.backward()
            for name, param in model.named_parameters():
                main[name].grad += param.grad.float()

        # Clip.
        gradients = [value.grad.flatten().double() for value in main.values()]
        norm = torch.cat(gradients).norm().item()
        norms.append(norm)
        if clip:
            factor = min(1.0, clip / (norm + 1e-6))
            for value in main.values():
                value.grad *= factor

        # Update the main copies and the parameters.
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(main[name])
    return main, optimizer, norms


def read_main_params(chunk, optimizer):
    """Return the fp32 main parameters by name, read through their boxes."""
    prefix = "optimizer.state.param."
    params = {}
    for key, value in snapshot(chunk, optimizer).items():
        if key.startswith(prefix):
            params[key.removeprefix(prefix)] = value
    return params


def without_padding(expected, actual):
    """Return the rows of `expected` that `actual` has: a vocabulary is stored without padding."""
    return expected[: len(actual)]
