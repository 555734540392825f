"""Checkpoints of any PyTorch program: modules, optimizers and DTensors instead of a trainer.

    with Checkpointer("checkpoints", model=model, optimizer=optimizer) as checkpointer: ...

See docs/library.md.
"""

from megatron.checkpointer.checkpointer import Checkpointer
from megatron.checkpointer.state import Stateful
from megatron.checkpointer.tensors import make_sharded_tensor, mark_checkpointable

__all__ = ["Checkpointer", "Stateful", "make_sharded_tensor", "mark_checkpointable"]
