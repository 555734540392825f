"""From many durable shards to one checkpoint, without a collective.

The ranks meet in the file system that they share anyway. A checkpoint grows in a directory of its own
(`.saving-<name>-<save id>`); a rank whose files are durable leaves a marker there, with the checksums and the places of
its objects. When all markers are there, rank 0 writes `checksums.json`, `common.pt`, `.metadata` and `metadata.json`,
in this order, each durably, and renames the directory to its final name. The other ranks see that rename. A rank that
fails leaves a marker that says why; then rank 0 removes the directory and leaves the reason beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from megatron.core.dist_checkpointing import files
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.checksums import FileChecksums, checksums_of, encode_checksums
from megatron.core.dist_checkpointing.format.metadata import Location
from megatron.core.durable_files import put_in_place, write_durably

Rewrite = Callable[[Path, Callable[[int], None]], None]
"""Puts other files in the place of a checkpoint's, durably, in the directory where it grows.

It calls its second argument now and then, with the bytes just written, so that the other ranks know that it lives.
"""

_DONE, _FAILED = ".done", ".failed"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1  # seconds between two looks


class RankResult(NamedTuple):
    """What a rank has made durable."""

    files: dict[str, FileChecksums]
    objects: dict[str, Location]


class PendingSave(NamedTuple):
    """One save as one rank sees it. `identity` recognises the directory under its final name."""

    directory: Path
    pending: Path
    identity: tuple[int, int]
    rank: int
    size: int

    @classmethod
    def begin(cls, directory: Path, save_id: str, rank: int, size: int) -> PendingSave:
        pending = files.pending_directory(directory, save_id)
        pending.mkdir(parents=True, exist_ok=True)
        return cls(directory, pending, _identity(pending), rank, size)

    def publish(self, result: RankResult) -> None:
        """Tell rank 0 that this rank's files are durable."""
        content = {
            "files": {name: [sums.size, sums.blocks.hex()] for name, sums in result.files.items()},
            "objects": {key: list(location) for key, location in result.objects.items()},
        }
        self._mark(_DONE, json.dumps(content))

    def publish_failure(self, reason: str, names: Iterable[str]) -> None:
        """Remove this rank's files and tell rank 0 why; if even that fails, it will notice by its timeout."""
        for name in names:  # first: on a full disk they are what makes room for the marker
            with contextlib.suppress(OSError):
                os.unlink(self.pending / name)
        with contextlib.suppress(OSError):
            self._mark(_FAILED, reason)

    def collect(self, timeout: float) -> RankResult:
        """On rank 0: wait for all ranks and merge their results. Raises CheckpointError when one fails or is late."""
        deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
        while True:
            names = self._names()
            failed = sorted(name for name in names if name.endswith(_FAILED))
            if failed:
                reason = (self.pending / failed[0]).read_text(errors="replace")
                raise CheckpointError(f"rank {failed[0].removesuffix(_FAILED).removeprefix('rank_')}: {reason}")
            done = [name for name in names if name.endswith(_DONE)]
            if len(done) == self.size:
                return self._merge(done)
            if time.monotonic() > deadline:
                late = sorted(set(range(self.size)) - {int(name.removesuffix(_DONE)[len("rank_") :]) for name in done})
                raise CheckpointError(
                    f"nothing was heard from rank {', '.join(map(str, late[:20]))} for {timeout:.0f} s: dead, hanging, "
                    f"or not seeing {self.directory.parent}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def commit(self, result: RankResult, metadata: bytes, common: bytes, rewrite: Rewrite | None = None) -> None:
        """On rank 0: complete the checkpoint and give it its name."""
        metadata_json = json.dumps(files.BACKEND).encode()
        contents = {files.COMMON: common, files.METADATA: metadata, files.METADATA_JSON: metadata_json}
        sums = result.files | {name: checksums_of(content) for name, content in contents.items()}
        for name in self._names():
            if name.endswith((_DONE, _FAILED)):
                os.unlink(self.pending / name)
        write_durably(self.pending / files.CHECKSUMS, encode_checksums(sums))
        for name, content in contents.items():
            write_durably(self.pending / name, content)
        if rewrite is not None:
            rewrite(self.pending, lambda _: self._show_life())
        put_in_place(self.pending, self.directory)

    def abandon(self, reason: str) -> None:
        """On rank 0: tell the other ranks why and remove all files."""
        with contextlib.suppress(OSError):
            _write_at_once(self._note(), reason)
        shutil.rmtree(self.pending, ignore_errors=True)
        if not self._note().exists():  # the disk was full
            with contextlib.suppress(OSError):
                _write_at_once(self._note(), reason)

    def forget(self) -> None:
        """On rank 0: remove what `abandon` left for the other ranks, and what a late one made after it."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self.pending, ignore_errors=True)
            self._note().unlink(missing_ok=True)

    def given_up(self) -> bool:
        """Whether rank 0 has abandoned the save."""
        return self._note().exists() or not self.pending.exists()

    def await_outcome(self, timeout: float) -> None:
        """On the other ranks: wait until rank 0 has committed. Raises CheckpointError if it does not.

        `timeout` seconds without a sign of life from rank 0 are too many.
        """
        seen, deadline, pause = None, time.monotonic() + timeout, _FIRST_PAUSE
        while (life := self._sign_of_life()) is not None and not self._note().exists():
            if life != seen:
                seen, deadline = life, time.monotonic() + timeout
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank 0 did not commit {self.directory}, silent for {timeout:.0f} s: dead or hanging"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        with contextlib.suppress(OSError):
            if _identity(self.directory) == self.identity:
                return
        raise CheckpointError(self.failure_reason())

    def failure_reason(self) -> str:
        try:
            return self._note().read_text(errors="replace")
        except OSError:
            return f"rank 0 gave up the save of {self.directory} (its log says why)"

    def _note(self) -> Path:
        return self.pending.with_name(self.pending.name + _FAILED)

    def _mark(self, suffix: str, content: str) -> None:
        _write_at_once(self.pending / f"rank_{self.rank}{suffix}", content)

    def _names(self) -> list[str]:
        """Fresh even over NFS: changing the directory's times makes the client drop what it has cached of it."""
        self._show_life()
        return os.listdir(self.pending)

    def _show_life(self) -> None:
        os.utime(self.pending)

    def _sign_of_life(self) -> int | None:
        """The time that rank 0 sets again and again while it works; None when the directory is gone."""
        try:
            return self.pending.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _merge(self, names: list[str]) -> RankResult:
        result = RankResult({}, {})
        for name in names:
            content = json.loads((self.pending / name).read_bytes())
            for file, (size, blocks) in content["files"].items():
                result.files[file] = FileChecksums(size, bytes.fromhex(blocks))
            result.objects.update({key: Location(*location) for key, location in content["objects"].items()})
        return result


def _write_at_once(path: Path, content: str) -> None:
    """Others see all of the content or no file; not durable."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(content)
    os.replace(temporary, path)


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
