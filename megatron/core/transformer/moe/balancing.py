"""What the routers of a rank do once per step: the expert bias, and the numbers that a log wants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.transformer.moe.router import LOSS_NAMES, Z_LOSS, TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

LOAD = "load"  # the largest load of an expert over the mean one


def routers(chunks: Iterable[nn.Module]) -> list[TopKRouter]:
    """Of all layers with experts in these chunks, in order."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]


@torch.no_grad()
def finish_step(of_rank: Sequence[TopKRouter]) -> None:
    """After the last backward pass of a step: the loads of all micro batches of all ranks, and by them the bias."""
    if not of_rank:
        return
    axes = of_rank[0].axes
    loads = torch.stack([router.recorded["tokens_per_expert"] for router in of_rank])
    for axis in axes.everyone:
        if axis.size > 1:
            dist.all_reduce(loads, group=axis.group)
    for router, load in zip(of_rank, loads.float(), strict=True):
        router.recorded["tokens_per_expert"] = load
        if router.expert_bias is not None:
            router.expert_bias.add_(torch.sign(load.mean() - load), alpha=router.config.moe_router_bias_update_rate)


def measured(config: TransformerConfig) -> list[str]:
    """The names of what `measurements` has, in its order."""
    losses = [LOSS_NAMES[kind] for kind in config.load_balancing] + ([Z_LOSS] if config.moe_z_loss_coeff else [])
    return [*losses, LOAD]


def measurements(
    config: TransformerConfig, of_rank: Sequence[TopKRouter], num_microbatches: int, device: torch.device
) -> Tensor:
    """This rank's share of the losses of each layer, `[measured, layers]` in fp64: a sum over the world, divided by the
    number of data-parallel ranks, gives them. After `finish_step`."""
    names = measured(config)
    values = torch.zeros(len(names), config.num_layers, dtype=torch.float64, device=device)
    for router in of_rank:
        for row, name in enumerate(names):
            if name == LOAD:
                load = router.recorded["tokens_per_expert"]
                values[row, router.layer_number] = load.max() / load.mean().clamp(min=1e-9) / router.axes.token_ranks
            else:
                values[row, router.layer_number] = router.recorded[name] / num_microbatches
    return values
