"""Distributed checkpoints of named global tensors, independent of the layout that wrote them.

Saving has four steps: plan (once), stage, write, commit. `save` runs them synchronously,
`AsyncSaver` runs the last two in the background. Loading fills any other tiling of the same tensors
in place. Files are plain DCP, so that `torch.distributed.checkpoint` alone can read them; see
docs/checkpointing.md.
"""

from megatron.core.dist_checkpointing.box_table import CheckpointMetadata, StoredChunk, StoredTensor
from megatron.core.dist_checkpointing.checkpoint_directory import (
    CheckpointDirectory,
    is_unfinished,
)
from megatron.core.dist_checkpointing.files import (
    clean_up,
    is_complete,
    read_tracker,
    write_tracker,
)
from megatron.core.dist_checkpointing.format.metadata_codec import read_metadata
from megatron.core.dist_checkpointing.format.verified_file import load_common
from megatron.core.dist_checkpointing.loading.load import LoadReport, fill, load
from megatron.core.dist_checkpointing.loading.reader import Reader
from megatron.core.dist_checkpointing.mapping import (
    Box,
    Shape,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    split_flat_range,
)
from megatron.core.dist_checkpointing.ownership.fencing import (
    Generation,
    SupersededError,
    take_generation,
)
from megatron.core.dist_checkpointing.ownership.lineage import (
    Lineage,
    Segment,
    iteration_in_name,
    read_lineage,
)
from megatron.core.dist_checkpointing.saving.run_saver import SaveFailedError
from megatron.core.dist_checkpointing.saving.save_thread import SaveHandle, SaveReport
from megatron.core.dist_checkpointing.saving.saver import (
    AsyncSaver,
    save,
    staging_for_waiting,
)
from megatron.core.safe_files import CheckpointError, DamagedError

__all__ = [
    "AsyncSaver",
    "Box",
    "CheckpointDirectory",
    "CheckpointError",
    "CheckpointMetadata",
    "DamagedError",
    "Generation",
    "Lineage",
    "LoadReport",
    "Reader",
    "SaveFailedError",
    "SaveHandle",
    "SaveReport",
    "Segment",
    "Shape",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "StoredChunk",
    "StoredTensor",
    "SupersededError",
    "clean_up",
    "fill",
    "is_complete",
    "is_unfinished",
    "iteration_in_name",
    "load",
    "load_common",
    "read_lineage",
    "read_metadata",
    "read_tracker",
    "save",
    "split_flat_range",
    "staging_for_waiting",
    "take_generation",
    "write_tracker",
]
