"""Checkpoints of plain PyTorch programs: modules, optimizers and DTensors instead of a trainer."""
