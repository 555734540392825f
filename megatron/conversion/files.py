"""What all writers share: options, the output directory, threads, and writing at given positions."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing import CheckpointError, safe_open
from megatron.core.dist_checkpointing.format.torch_zip import TensorSlot, lay_out_archive
from megatron.core.durable_files import naming, remove

Progress = Callable[[int], None]  # called with the number of bytes just written


def no_progress(nbytes: int) -> None:
    """The default `Progress`."""


@dataclass(frozen=True)
class Options:
    """How the target shall be; None means as the source is."""

    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    virtual_pipeline_parallel: int | None = None
    dtype: torch.dtype | None = None  # of the weights
    optimizer: bool = True
    vocab_size: int | None = None  # rows beyond it are cut
    tokenizer: Path | None = None  # a directory or SentencePiece model; default: the one in the arguments
    max_shard_size: int = 5 * 10**9
    optim_sidecar: bool = False
    workers: int = 1
    universal_style: str | None = None  # pipeline, bigscience or no-pipeline; default: bigscience for models like BLOOM
    qkv_blocks: bool = False  # as Megatron-DeepSpeed has them since December 2024, for the target's TP size
    transformer_impl: str | None = None  # whose modules of Megatron-LM legacy files are for
    stacked_layers: bool = False
    trusted: tuple[Path, ...] = ()  # where a tokenizer that the checkpoint names may lie, besides the checkpoint itself
    note: Callable[[str], None] = lambda text: None  # receives further lines for the user


def make_empty_directory(directory: Path) -> None:
    """Create `directory`; a directory with anything in it is refused, so that no stale file joins the new ones."""
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty: choose another target or remove it first")


@contextmanager
def exclusive_output_dir(directory: Path) -> Iterator[None]:
    """Create or empty `directory` for one process at a time, and remove it if the block fails.

    Raises ValueError while another conversion works there. Leftovers of a killed conversion are removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    handle = _open_own(directory)
    try:
        # The lock goes with the process: a killed conversion blocks nobody.
        _lock(handle, directory)
        try:
            for path in directory.iterdir():
                remove(path)
            make_empty_directory(directory)
            yield
        except BaseException:
            remove(directory)
            raise
    finally:
        os.close(handle)


def _open_own(directory: Path) -> int:
    """Refuse links: a planted one would have its target emptied."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise ValueError(f"{directory} is a link: remove it, since a conversion would write to its target") from error
    if os.fstat(handle).st_uid != os.geteuid():
        os.close(handle)
        raise ValueError(f"{directory} belongs to another user: remove it, or choose another --save-dir")
    return handle


def _lock(handle: int, directory: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{directory}: another conversion to the same --save-dir is writing: wait for it") from error
    except OSError:  # some network file systems do not support locks
        pass


def write_at(path: Path, tensor: torch.Tensor, position: int) -> None:
    """Write at byte `position` of an existing file, which is open only meanwhile: there is no limit on their number."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    view = memoryview(array)
    descriptor = os.open(path, os.O_WRONLY)
    try:
        with naming(path):
            while view:
                count = os.pwrite(descriptor, view, position)
                view, position = view[count:], position + count
    finally:
        os.close(descriptor)


def write_archive(path: Path, value: Any) -> list[tuple[TensorSlot, int]]:
    """Write what `torch.load` reads as `value`; returns its slots and where their bytes go, which are zero so far."""
    layout = lay_out_archive(value)
    with naming(path), path.open("wb") as file:
        file.truncate(layout.size)
        for position, fixed in layout.fixed:
            file.seek(position)
            file.write(fixed)
        for slot, position in layout.places:
            if slot.content is not None:
                file.seek(position)
                file.write(slot.content.view(-1).view(torch.uint8).numpy().data)
    return [(slot, position) for slot, position in layout.places if slot.content is None]


def archive_faults(paths: Iterable[Path], directory: Path) -> list[str]:
    """Files of torch.save below `directory` that are missing or structurally damaged."""
    faults = []
    for path in paths:
        if not path.is_file():
            faults.append(f"{path.relative_to(directory)} is missing")
            continue
        try:
            safe_open(path)  # an archive lists its content at its end
        except CheckpointError as error:
            faults.append(str(error))
    return faults


def run_jobs(jobs: Iterable[Callable[[], None]], workers: int) -> None:
    """Run independent jobs on `workers` threads; the first error stops the rest.

    Threads are enough: the work is reading, writing and copying, and all three release the interpreter lock.
    """
    if workers <= 1:
        for job in jobs:
            job()
        return
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str | int) -> int:
    """Bytes of "5GB", "300MB", "2GiB" or a plain number; decimal units as in `transformers`."""
    value = str(text).strip().upper()
    digits = value.rstrip("BKMGTI ")
    unit = value[len(digits) :].strip()
    try:
        size = int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError):
        size = 0
    if size <= 0:
        raise ValueError(f"--max-shard-size {text!r}: give a number with KB, MB, GB, KiB, MiB or GiB, such as 5GB")
    return size
