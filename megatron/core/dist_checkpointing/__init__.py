"""Distributed checkpoints of named global tensors, independent of the layout that wrote them.

Saving is four verbs: plan (once), stage, write, finalize; `save` runs them in a row, `AsyncSaver` the last two behind
training. Loading fills any other tiling of the same tensors in place. Files are plain DCP, so that
`torch.distributed.checkpoint` alone can read them; see docs/checkpointing.md.
"""

from megatron.core.dist_checkpointing.boxes import Shape, flat_range_boxes
from megatron.core.dist_checkpointing.files import clean_up, is_complete, read_tracker, write_tracker
from megatron.core.dist_checkpointing.format.metadata import CheckpointMetadata, StoredChunk, StoredTensor
from megatron.core.dist_checkpointing.format.schema import CheckpointError, UnsafePickleError
from megatron.core.dist_checkpointing.format.torch_zip import FileTensor, in_memory
from megatron.core.dist_checkpointing.format.unpickler import safe_load, safe_open
from megatron.core.dist_checkpointing.generation import Generation, Lineage, SupersededError, on_branch, read_lineage
from megatron.core.dist_checkpointing.loading.load import LoadReport, fill, load, load_common
from megatron.core.dist_checkpointing.loading.reader import Reader, Request, read_metadata
from megatron.core.dist_checkpointing.mapping import Box, ShardedObject, ShardedStateDict, ShardedTensor, map_keys
from megatron.core.dist_checkpointing.object_generation import take_generation
from megatron.core.dist_checkpointing.saving.commit import SaveReport
from megatron.core.dist_checkpointing.saving.saver import AsyncSaver, SaveHandle, save, staging_for_waiting
from megatron.core.dist_checkpointing.verification import VerifyReport, missing_or_truncated, verify

__all__ = [
    "AsyncSaver",
    "Box",
    "CheckpointError",
    "CheckpointMetadata",
    "FileTensor",
    "Generation",
    "Lineage",
    "LoadReport",
    "Reader",
    "Request",
    "SaveHandle",
    "SaveReport",
    "Shape",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "StoredChunk",
    "StoredTensor",
    "SupersededError",
    "UnsafePickleError",
    "VerifyReport",
    "clean_up",
    "fill",
    "flat_range_boxes",
    "in_memory",
    "is_complete",
    "load",
    "load_common",
    "map_keys",
    "missing_or_truncated",
    "on_branch",
    "read_lineage",
    "read_metadata",
    "read_tracker",
    "safe_load",
    "safe_open",
    "save",
    "staging_for_waiting",
    "take_generation",
    "verify",
    "write_tracker",
]
