"""From many durable shards to one checkpoint: a directory that grows under another name and gets its own by one rename.

All ranks write their shards to it; rank 0 makes it, adds the small files that belong to all, and renames it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.core.dist_checkpointing import files
from megatron.core.dist_checkpointing.format.checksums import checksum_records, checksums_of, seal_checksums
from megatron.core.dist_checkpointing.generation import Generation
from megatron.core.durable_files import check_free_space, discard, fsync_directory, put_in_place, write_flushed

Progress = Callable[[int], None]
Rewrite = Callable[[Path, Progress], None]
"""Puts other files in the place of a checkpoint's, durably, in the directory where it grows.

It calls its second argument now and then, with the bytes just written, so that the other ranks know that it works.
"""


class PendingCheckpoint(NamedTuple):
    """A checkpoint that grows in `pending` and will be `directory`."""

    directory: Path
    pending: Path
    generation: Generation | None

    @classmethod
    def of(cls, directory: Path, save_id: str, generation: Generation | None = None) -> PendingCheckpoint:
        """Beside `directory`, or inside the `generation` that owns the directory of checkpoints."""
        if generation is None:
            return cls(directory, files.pending_directory(directory, save_id), None)
        return cls(directory, generation.directory / f"saving-{directory.name}-{save_id}", generation)

    def begin(self, nbytes: int) -> None:
        """On rank 0, before any rank writes: make the directory. Raises OSError if `nbytes` do not fit."""
        if self.generation is None:
            self.pending.parent.mkdir(parents=True, exist_ok=True)
        self.pending.mkdir()
        check_free_space(self.pending, nbytes)

    def commit(
        self,
        checksums: Iterable[bytes],
        metadata: Sequence[bytes],
        common: bytes,
        beside: Mapping[str, bytes],
        rewrite: Rewrite | None = None,
        progress: Progress = lambda nbytes: None,
    ) -> None:
        """On rank 0: complete the checkpoint and give it its name.

        `metadata` is the content of `.metadata`, in parts; `checksums` are the records of all ranks; `beside` are
        further small files, which a `rewrite` does not touch.
        """
        metadata_json = json.dumps(files.BACKEND).encode()
        contents = {files.COMMON: [common], files.METADATA: metadata, files.METADATA_JSON: [metadata_json]}
        ours = checksum_records({name: checksums_of(*parts) for name, parts in contents.items()})
        write_flushed(self.pending / files.CHECKSUMS, *seal_checksums(*checksums, ours))
        for name, parts in contents.items():
            write_flushed(self.pending / name, *parts)
        if rewrite is not None:
            rewrite(self.pending, progress)
        for name, content in beside.items():
            write_flushed(self.pending / name, content)
        fsync_directory(self.pending)
        put_in_place(self.pending, self.directory)

    def abandon(self) -> None:
        """On rank 0: remove everything, as far as possible."""
        discard(self.pending)
