"""Distributed checkpoints of named global tensors, independent of the layout that wrote them.

Saving is four verbs: plan (once), stage, write, finalize; `save` runs them in a row, `AsyncSaver` the last two behind
training. Loading fills any other tiling of the same tensors in place. Files are plain DCP, so that
`torch.distributed.checkpoint` alone can read them; see docs/checkpointing.md.
"""

from megatron.core.dist_checkpointing.async_save import AsyncSaver, SaveHandle, SaveReport, save, staging_for_waiting
from megatron.core.dist_checkpointing.errors import CheckpointError, UnsafePickleError
from megatron.core.dist_checkpointing.file_tensor import FileTensor, in_memory
from megatron.core.dist_checkpointing.files import clean_up, is_complete, read_tracker, write_tracker
from megatron.core.dist_checkpointing.integrity import VerifyReport, missing_or_truncated, verify
from megatron.core.dist_checkpointing.loading import LoadReport, load, load_common
from megatron.core.dist_checkpointing.mapping import (
    Box,
    Shape,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    flat_range_boxes,
    map_keys,
)
from megatron.core.dist_checkpointing.metadata import CheckpointMetadata, StoredChunk, StoredTensor
from megatron.core.dist_checkpointing.reader import Reader, Request, read_metadata
from megatron.core.dist_checkpointing.safe_unpickle import safe_load, safe_open

__all__ = [
    "AsyncSaver",
    "Box",
    "CheckpointError",
    "CheckpointMetadata",
    "FileTensor",
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
    "UnsafePickleError",
    "VerifyReport",
    "clean_up",
    "flat_range_boxes",
    "in_memory",
    "is_complete",
    "load",
    "load_common",
    "map_keys",
    "missing_or_truncated",
    "read_metadata",
    "read_tracker",
    "safe_load",
    "safe_open",
    "save",
    "staging_for_waiting",
    "verify",
    "write_tracker",
]
