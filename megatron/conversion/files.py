"""Output files: written under a temporary name, named at last, and flushed to disk as a tree."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.files import fsync_directory, naming

Progress = Callable[[int], None]  # called with the number of bytes just written


def no_progress(nbytes: int) -> None:
    """The default `Progress`."""


def make_empty_directory(directory: Path) -> None:
    """Create `directory`; a directory with anything in it is refused, so that no stale file joins the new ones."""
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty: choose another target or remove it first")


@contextmanager
def committed(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it takes its name `path` only if the block ends well."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_at(path: Path, tensor: torch.Tensor, position: int) -> None:
    """Into the existing file, which is open meanwhile only: any number of files can be written in turns."""
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


def write_json(path: Path, value: Any) -> None:
    with committed(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


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


def sync_tree(directory: Path) -> None:
    """Make every file and directory below `directory` durable."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            handle = os.open(path, os.O_RDONLY)
            try:
                with naming(path):
                    os.fsync(handle)
            finally:
                os.close(handle)
        fsync_directory(Path(folder))


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
