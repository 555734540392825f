"""Data of a run: the number of samples of each split, and the micro-batches of each replica.

The stream of samples depends only on the consumed samples and the seed. Micro-batch m of an
iteration takes the next micro_batch_size * DP samples of the stream, replica r the r-th part of
them, so data-parallel size, micro-batch and global batch may change between runs without loss or
repetition.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megatron.core.datasets import Dataset
from megatron.core.datasets.config import SPLITS
from megatron.core.datasets.gpt_dataset import TokenFiles
from megatron.core.datasets.index_cache import compute_digest
from megatron.core.datasets.ordered_workers import OrderedWorkers
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.parallel_state import gather_objects
from megatron.core.transformer.placement import WHOLE_SEQUENCES, ContextParallel
from megatron.core.wings import resolve
from megatron.training.config.run_options import DataLoaderConfig
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.run import Batch, Datasets, DatasetsProvider, Run

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CYCLIC_STREAM = "megatron.training.data.cyclic_stream:CyclicStream"
_EXCHANGE_SECONDS = 5.0  # between two messages of ranks that wait for datasets
_PREPARE_PREFERENCES = "megatron.training.sft.preferences:prepare_preferences"
_DIGESTED_BLOCKS = 256  # of token files: at 5 ms each, 1.3 s at the start of a launch
_PATH_FLAGS = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")


@dataclass
class Split:
    """One split of the data. `batches` is this rank's iterator, or None if the rank does not need
    data.
    """

    exists: bool
    batches: DataIterator | None


@dataclass
class Data:
    """The three splits of a run."""

    train: Split
    valid: Split
    test: Split

    def close(self) -> None:
        """End the worker processes."""
        for split in (self.train, self.valid, self.test):
            if split.batches is not None:
                split.batches.close()


def build_data(run: Run, tokenizer: Tokenizer, provider: DatasetsProvider) -> Data:
    """Build the datasets on the ranks that need them, starting after the consumed samples.
    Collective.

    Rank 0 has the first layer, so it always needs data and knows which splits exist.
    """

    def build(verify: bool) -> Datasets:
        data = replace(run.config.data, verify_index_cache=verify)
        return provider(replace(run.config, data=data), count_samples(run), tokenizer)

    needs_data = any(map(run.needs_batch, range(len(run.chunks))))
    datasets = build_on_one_rank_per_node_first(build, needs_data) or (None, None, None)
    fingerprints, token_digest = _share_fingerprints(datasets, needs_data)
    _compare_with_checkpoint(run, datasets[0], token_digest)
    if run.config.data.dpo:
        resolve(_PREPARE_PREFERENCES)(run, datasets)

    # Training and validation continue where the run stopped; each test starts at the beginning.
    consumed = (run.state.consumed_train_samples, run.state.consumed_valid_samples, 0)
    splits = []
    for fingerprint, dataset, start in zip(fingerprints, datasets, consumed, strict=True):
        # Ranks without data also need to know which splits exist: all ranks evaluate together.
        exists = fingerprint is not None
        splits.append(Split(exists, make_iterator(run, dataset, start)))
    return Data(*splits)


def build_on_one_rank_per_node_first(build: Callable[[bool], T], needs_data: bool) -> T | None:
    """Call `build(True)` on one rank of each node, to build and verify index caches, and then
    `build(False)` on the other ranks, to map them.

    Returns None on ranks that do not need data. Collective.
    """
    local_host = (socket.gethostname(), needs_data)
    hosts = gather_objects(local_host)
    # The first rank on each host that needs data: ranks of a host share the page cache.
    is_first = needs_data and hosts.index(local_host) == dist.get_rank()
    datasets = None
    is_built = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        builders = threads.submit(_await_builders, is_built)
        try:
            if is_first:
                datasets = build(True)
        finally:
            # Also after an error: the other ranks then have the same error instead of waiting.
            is_built.set()
            builders.result()
    if needs_data and not is_first:
        datasets = build(False)
    return datasets


def _await_builders(is_built: threading.Event) -> None:
    """Return when all ranks have built their datasets. Collective.

    The ranks exchange messages meanwhile, because a collective that waits for the tokens of large
    text would exceed its timeout.
    """
    ranks = Coordination.of(None)
    while not ranks.all_true(is_built.wait(_EXCHANGE_SECONDS)):
        pass


def count_samples(run: Run) -> tuple[int, int, int]:
    """Return the samples of (train, valid, test) that the whole run needs, from the beginning."""
    training = run.config.training
    state = run.state
    if training.skip_train:
        train = 0
    elif training.train_samples is not None:
        train = training.train_samples
    else:
        # The batch size may change during the run (rampup), so iterations are converted by the
        # schedule.
        remaining = max(0, run.train_iters - state.iteration)
        train = run.batches.consumed_after(remaining, state.consumed_train_samples)

    # Remaining evaluations on the validation set, and the one at the end.
    interval = training.eval_interval
    num_evaluations = 1
    if interval:
        num_evaluations += run.train_iters // interval - state.iteration // interval
    per_evaluation = training.eval_iters * run.eval_batch_size
    valid = 0
    if per_evaluation:
        valid = state.consumed_valid_samples + num_evaluations * per_evaluation
    return train, valid, per_evaluation


def _share_fingerprints(
    datasets: Datasets, needs_data: bool
) -> tuple[list[str | None], str | None]:
    """Return the fingerprint of each split on rank 0, None for a split without data, and the digest
    of the tokens of the first, None without token files. Collective.

    Raises ValueError on all ranks if a rank has other data, e.g. because the copies of a file on
    the nodes are of different versions.
    """
    fingerprints = [None if dataset is None else dataset.fingerprint for dataset in datasets]
    token_digest: str | None = None
    train: object = datasets[0]
    if dist.get_rank() == 0 and isinstance(train, TokenFiles):
        with contextlib.suppress(OSError):  # which training will report
            token_digest = train.digest_tokens(_DIGESTED_BLOCKS)
    shared = [(fingerprints, token_digest)]
    dist.broadcast_object_list(shared, src=0)
    ((shared_fingerprints, token_digest),) = shared

    def compare() -> None:
        for split, fingerprint, expected in zip(
            SPLITS, fingerprints, shared_fingerprints, strict=True
        ):
            if fingerprint != expected:
                raise ValueError(
                    f"the {split} data on {socket.gethostname()} differs from that of rank 0: all "
                    "nodes must read the same version of the files"
                )

    Coordination.of(None).run_on_all(compare if needs_data else _accept)
    return shared_fingerprints, token_digest


def _accept() -> None:
    """Accept the data of a rank that reads none."""


def _compare_with_checkpoint(run: Run, train: Dataset | None, token_digest: str | None) -> None:
    """Warn if the order of samples or their tokens differ from those of the resumed run."""
    if train is None:
        return
    fingerprint = compute_order_fingerprint(train, run.config.loader)
    is_same = run.train_data_fingerprint in (None, fingerprint)
    if run.state.consumed_train_samples and not is_same:
        cause = "; ".join(run.changed_data_flags)
        if not cause:
            cause = (
                "its flags are the same: the .idx file of a member has other sequences, or a file "
                "that lists the members has changed"
            )
        logger.warning(
            f"the training data or its order differs from the checkpoint's ({cause}): some of the "
            f"{run.state.consumed_train_samples} samples consumed so far may be repeated and "
            "others skipped"
        )
    elif run.state.consumed_train_samples and run.train_token_digest not in (None, token_digest):
        flags = [f"--{name.replace('_', '-')}" for name in _PATH_FLAGS if run.config.flags()[name]]
        logger.warning(
            f"the tokens of {', '.join(flags)} differ from the checkpoint's (digest of blocks of "
            f"the .bin files: {run.train_token_digest} in the checkpoint, {token_digest} now): the "
            "files were replaced by others with the same names and lengths of sequences"
        )
    run.train_data_fingerprint = fingerprint
    run.train_token_digest = token_digest


def compute_order_fingerprint(dataset: Dataset, config: DataLoaderConfig) -> str:
    """Return a text that identifies the order in which a run reads the samples of `dataset`."""
    if config.dataloader_type == "single":
        return dataset.fingerprint
    # The permutations depend on the number of samples, too.
    description = {
        "stream": config.dataloader_type,
        "seed": config.seed,
        "num_samples": len(dataset),
        "dataset": dataset.fingerprint,
    }
    return compute_digest(description)


def make_iterator(run: Run, dataset: Dataset | None, consumed: int) -> DataIterator | None:
    """Return the micro-batches of this replica after `consumed` samples, None without a dataset."""
    if dataset is None:
        return None
    return DataIterator(
        dataset,
        consumed,
        run.config.training.micro_batch_size,
        run.config.loader,
        run.ps.dp.rank,
        run.ps.dp.size,
        ContextParallel.from_parallel_state(run.ps),
        run.device,
    )


Stream = Callable[[int, int], list[int]]
"""Function from positions [start, stop) of the stream to sample numbers."""


def _read_in_order(start: int, stop: int) -> list[int]:
    return list(range(start, stop))


def iterate_microbatches(
    stream: Stream,
    end: int | None,
    consumed_samples: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
) -> Iterator[list[int]]:
    """Yield the sample numbers of each micro-batch of one replica, from `consumed_samples` on.

    Stops before `end` if not all replicas would get a whole micro-batch.
    """
    step = micro_batch_size * dp_size
    start = consumed_samples
    while end is None or start + step <= end:
        # Replica r gets the r-th part of the samples [start, start + step).
        first = start + dp_rank * micro_batch_size
        yield stream(first, first + micro_batch_size)
        start += step


def _read_samples(dataset: Dataset, indices: list[int]) -> dict[str, np.ndarray]:
    """Return arrays [micro-batch, ...] of these samples."""
    samples = [dataset[index] for index in indices]
    arrays = {}
    for key in samples[0]:
        arrays[key] = np.stack([sample[key] for sample in samples])
    return arrays


_ALIGNMENT = 256  # bytes between the tensors of a batch, as torch's allocator aligns them
_ON_HOST = "documents"
"""Stays on the host: the kernels that attention launches depend on the boundaries of documents, and
reading these back from the device would wait for all of its queued work.
"""


class _BatchCopies:
    """Copies of micro-batches to a device, each in one transfer from a pinned buffer.

    A buffer is used again once its transfer has ended, so that there are as many as transfers in
    flight. Pinning each batch instead calls the driver several times, which takes milliseconds
    while a save is being staged.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Buffers, and the events after their last transfers; the oldest transfer first.
        self._buffers: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def copy(self, batch: Batch) -> Batch:
        """Return the batch on the device. Does not wait for the device."""
        # 1. Assign a range of bytes to each tensor.
        ranges = {}
        size = 0
        for key, tensor in batch.items():
            if key != _ON_HOST:
                ranges[key] = slice(size, size + tensor.nbytes)
                size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        # 2. Fill a free buffer, and transfer it.
        buffer, copied = self._take_buffer(size)
        for key, taken in ranges.items():
            _view_as(batch[key], buffer[taken]).copy_(batch[key])
        on_device = buffer[:size].to(self._device, non_blocking=True)
        copied.record()
        self._buffers.append((buffer, copied))
        # 3. Return views of the transferred bytes.
        copies = dict(batch)
        for key, taken in ranges.items():
            copies[key] = _view_as(batch[key], on_device[taken])
        return copies

    def _take_buffer(self, size: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Return a buffer of at least `size` bytes that no transfer uses, and its event."""
        if self._buffers and self._buffers[0][1].query():
            buffer, copied = self._buffers.popleft()
            if buffer.numel() >= size:
                return buffer, copied
        return torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()


def _view_as(tensor: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """Return bytes as a tensor of the dtype and shape of `tensor`."""
    return content.view(tensor.dtype).view(tensor.shape)


class DataIterator:
    """Iterator over the micro-batches of one replica, on `device`.

    A batch has tokens, labels, position_ids (int64) and loss_mask (fp32) [mbs, s], and with
    --reset-attention-mask documents (int64) [mbs, s], which stay on the host. Context-parallel
    ranks get their parts, but all of documents.

    Worker processes start with the first batch and end with `close`, with the iterator, or with the
    process. Raises ValueError when the data is exhausted.
    """

    def __init__(
        self,
        dataset: Dataset,
        consumed_samples: int,
        micro_batch_size: int,
        config: DataLoaderConfig,
        dp_rank: int = 0,
        dp_size: int = 1,
        cp: ContextParallel = WHOLE_SEQUENCES,
        device: torch.device | None = None,  # default: the CPU
    ) -> None:
        assert 0 <= dp_rank < dp_size and micro_batch_size > 0 and consumed_samples >= 0
        self._position = (consumed_samples, micro_batch_size, dp_rank, dp_size)
        self.dataset = dataset
        self.cp = cp
        self._copies = None
        if device is not None and device.type == "cuda":
            self._copies = _BatchCopies(device)

        # The samples of each micro-batch, in the order of the dataset or endlessly reshuffled.
        stream: Stream = _read_in_order
        end: int | None = len(dataset)
        if config.dataloader_type == "cyclic":
            stream = resolve(_CYCLIC_STREAM)(len(dataset), config.seed)
            end = None
        # Lazy: workers read ahead as far as OrderedWorkers lets them.
        indices = iterate_microbatches(stream, end, *self._position)
        self._batches = OrderedWorkers(
            functools.partial(_read_samples, dataset), indices, config.num_workers
        )

    def __iter__(self) -> DataIterator:
        return self

    def __next__(self) -> Batch:
        try:
            _, arrays = next(self._batches)
        except StopIteration:
            raise ValueError(self._explain_exhausted()) from None
        batch = {key: torch.from_numpy(array) for key, array in arrays.items()}
        # [mbs, s] -> [mbs, s / cp], except for documents
        batch = self.cp.select_local(batch)
        return batch if self._copies is None else self._copies.copy(batch)

    def close(self) -> None:
        """End the worker processes."""
        self._batches.close()

    def _explain_exhausted(self) -> str:
        consumed_samples, micro_batch_size, _, dp_size = self._position
        return (
            f"the data is exhausted: of {len(self.dataset)} samples, {consumed_samples} were "
            f"consumed before this run, and no micro-batch of {micro_batch_size} for each of "
            f"{dp_size} replicas is left. Build a larger dataset (--train-iters, --train-samples) "
            "or use --dataloader-type cyclic"
        )
