"""Training steps in which half of the experts get no tokens."""

from torch import Tensor

from megatron.core.module import MegatronModule
from megatron.core.transformer.moe.router import find_routers
from megatron.training.run import Batch, Loss
from pretrain_gpt import forward_step

IDLE_EXPERTS = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0 "
)
"""Flags that `step_with_idle_experts` requires."""


def step_with_idle_experts(
    chunk: MegatronModule, batch: Batch, activation: Tensor | None
) -> Tensor | Loss:
    """Run a forward step in which no token chooses the second half of the experts."""
    for router in find_routers([chunk]):
        assert router.expert_bias is not None
        half = router.num_experts // 2
        router.expert_bias.data[half:] = -10.0  # scores are between 0 and 1
    return forward_step(chunk, batch, activation)
