"""Optimizer of the training loops of other projects."""

import torch
from torch import nn


def build_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Build an optimizer without weight decay of vectors."""
    matrices = []
    vectors = []
    for param in model.parameters():
        group = matrices if param.dim() > 1 else vectors
        group.append(param)
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
