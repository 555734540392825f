"""Writes a `Source` as a Megatron-LM legacy iteration directory, for any TP, PP and VPP.

Where every byte of every file goes is known before the first is read. So the tensors are streamed: each is read once,
a few rows at a time, and every rank's part is written to its place.
"""

from __future__ import annotations

import argparse
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.files import Progress, no_progress, run_jobs, sync_tree
from megatron.conversion.flat_buffer import bucket_size_of, plan_buckets
from megatron.conversion.legacy import MODEL_FILE, OPTIMIZER_FILE, rank_directory
from megatron.conversion.megatron_common import stored_model
from megatron.conversion.megatron_rng import initial_rng_state, rng_key
from megatron.conversion.model_config import WORD_EMBEDDINGS
from megatron.conversion.model_space import OPTIMIZER_STATES, Source, TrainingState, optimizer_key
from megatron.conversion.rank_layout import (
    Layout,
    LocalParameter,
    has_fused_norms,
    rank_parameters,
    with_fused_norms,
)
from megatron.conversion.scatter import Place, scatter
from megatron.core.dist_checkpointing.archive import TensorSlot, lay_out_archive
from megatron.core.dist_checkpointing.files import fsync_directory
from megatron.core.utils import round_up

_WITH_EXTRA_STATE = ("linear_proj", "linear_qkv", "linear_fc1", "linear_fc2", "output_layer")
_DEFAULT_DIVISIBLE_BY, _DEFAULT_SEED = 128, 1234  # Megatron-LM's

Chunks = list[list[LocalParameter]]


def write_legacy(
    source: Source, directory: Path, layout: Layout, workers: int = 1, progress: Progress = no_progress
) -> list[str]:
    """Write `directory` (an iteration); returns what could not be carried.

    The optimizer is written as the run had it: sharded (`distrib_optim.pt`) with the distributed optimizer, numbered
    states without. Rows that pad the vocabulary, and gaps in the flat buffers, are zero. The directory appears when it
    is complete. Raises ValueError where the model cannot be split like that.
    """
    if directory.exists():
        raise ValueError(f"{directory} exists: choose another directory or remove it")
    writer = _Writer(source, layout)
    pending = directory.with_name(f".saving-{directory.name}-{os.getpid()}")
    files = {pending / name: content for name, content in writer.files().items()}
    places = writer.places(pending)
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        _begin(path, content)
    jobs = [partial(scatter, source, key, targets, progress) for key, targets in places.items()]
    run_jobs(jobs, workers)
    sync_tree(pending)
    os.rename(pending, directory)
    fsync_directory(directory.parent)
    return writer.not_carried
