"""The data of a run: how many samples of each split, and an iterator of micro batches over each."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.distributed as dist

from megatron.core.datasets import Dataset
from megatron.core.transformer.placement import ContextParallel
from megatron.training.data.samplers import DataIterator
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.run import DatasetsProvider, Run

Datasets = tuple[Dataset | None, Dataset | None, Dataset | None]  # train, valid, test

logger = logging.getLogger(__name__)


@dataclass
class Split:
    """One split: whether it has data, and this rank's iterator; None on ranks whose chunks need no data."""

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
    """Build the data sets on the ranks that need them, positioned where the run stands. Collective.

    Rank 0 holds the first layer, so it always needs data, and knows which splits there are.
    """

    def build(verify: bool) -> Datasets:
        data = replace(run.config.data, verify_index_cache=verify)
        return provider(replace(run.config, data=data), num_samples(run), tokenizer)

    needs_data = any(run.needs_batch(chunk) for chunk in range(len(run.chunks)))
    datasets = one_rank_per_node_first(build, needs_data) or (None, None, None)
    _compare_fingerprints(run, datasets[0])
    exists: list[list[bool]] = [[dataset is not None for dataset in datasets]]
    dist.broadcast_object_list(exists, src=0)
    consumed = (run.state.consumed_train_samples, run.state.consumed_valid_samples, 0)
    splits = zip(exists[0], datasets, consumed, strict=True)
    return Data(*(Split(there, _iterator(run, dataset, start)) for there, dataset, start in splits))


def one_rank_per_node_first(build: Callable[[bool], Datasets], needs_data: bool) -> Datasets | None:
    """`build(True)` on one rank of each node, which builds and verifies index caches; `build(False)` on the others.

    These begin when all nodes are ready, and map what was built. None where no data is needed. Collective.
    """
    places: list[tuple[str, bool]] = [("", False)] * dist.get_world_size()
    mine = (socket.gethostname(), needs_data)
    dist.all_gather_object(places, mine)
    # The first rank of each node that needs data: hosts, not ranks, decide who shares a page cache.
    first = needs_data and places.index(mine) == dist.get_rank()
    try:
        datasets = build(True) if first else None
    finally:  # also after an error: the others meet it by themselves
        dist.barrier()
    return build(False) if needs_data and not first else datasets


def num_samples(run: Run) -> tuple[int, int, int]:
    """Samples of (train, valid, test) that the whole run needs, from its beginning to its end."""
    training, state = run.config.training, run.state
    remaining = max(0, run.train_iters - state.iteration)
    train = training.train_samples or run.batches.consumed_after(remaining, state.consumed_train_samples)
    every = training.eval_interval
    evaluations = 1 + (run.train_iters // every - state.iteration // every if every else 0)
    per_evaluation = training.eval_iters * run.eval_batch_size
    valid = state.consumed_valid_samples + evaluations * per_evaluation if per_evaluation else 0
    return 0 if training.skip_train else train, valid, per_evaluation


def _compare_fingerprints(run: Run, train: Dataset | None) -> None:
    """Warn if samples come in another order than in the run that is resumed."""
    if train is None:
        return
    if run.state.consumed_train_samples and run.train_data_fingerprint not in (None, train.fingerprint):
        logger.warning(
            "the training data or its order differs from the checkpoint's: some of the "
            f"{run.state.consumed_train_samples} samples consumed so far may be repeated and others skipped"
        )
    run.train_data_fingerprint = train.fingerprint


def _iterator(run: Run, dataset: Dataset | None, consumed: int) -> DataIterator | None:
    if dataset is None:
        return None
    return DataIterator(
        dataset,
        consumed,
        run.config.training.micro_batch_size,
        run.config.loader,
        run.ps.dp.rank,
        run.ps.dp.size,
        ContextParallel.of(run.ps),
        pin_memory=run.device.type == "cuda",
    )
