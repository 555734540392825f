"""Options of reading and of writing a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.edit_options import EditOptions, ForeignSplit, Rename


@dataclass(frozen=True)
class ReadOptions:
    """Read options: facts missing from the files, and the parts to read."""

    args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments under Megatron-LM's names. They override those in the files."""
    ignored_fields: tuple[str, ...] = ()
    """Fields of config.json that are known to be harmless."""
    qkv_layout: str | None = None
    """Layout of QKV rows in a universal checkpoint: "groups" (for each query group its queries, key
    and value) or "tp-blocks" (Megatron-DeepSpeed since December 2024: for each tensor-parallel rank
    all queries, keys and values). Default: the layout that the arguments imply.
    """
    optimizer: bool = True
    """Read the optimizer state."""
    verify: bool | None = None
    """Whether to compare blocks that are read with checksums.bin. None: if the checkpoint contains
    it; True: it is required; False: never.
    """
    waits_for_shards: bool = False
    """Wait for shards of a torch_dist checkpoint that a network file system does not show yet:
    another rank has seen all of them.
    """
    renames: tuple[Rename, ...] = ()
    """New names of tensors in the files of a Hugging Face or torch_dist source."""
    keep_foreign: bool = False
    """Read tensors that the model does not have, to copy them byte for byte."""
    foreign_splits: tuple[ForeignSplit, ...] = ()
    """Axes that tensor-parallel ranks of a legacy source split such tensors over. Others are equal
    on all ranks.
    """


@dataclass(frozen=True)
class WriteOptions:
    """Write options. None keeps the value of the source."""

    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    virtual_pipeline_parallel: int | None = None
    expert_parallel: int | None = None
    expert_tensor_parallel: int | None = None
    dtype: torch.dtype | None = None
    """Dtype of the weights."""
    quantization: str | None = None
    """Quantization of the matrices of linear layers in a Hugging Face model: "fp8-block"."""
    optimizer: bool = True
    """Write the optimizer state."""
    average: bool = False
    """Write the average of the weights (--ema-decay) as the weights, without optimizer state."""
    vocab_size: int | None = None
    """Number of embedding rows to keep."""
    tokenizer: Path | None = None
    """A tokenizer directory or SentencePiece model. Default: the tokenizer named in the arguments.
    """
    max_shard_size: int = 5 * 10**9
    """Maximum size of a Hugging Face weight file in bytes."""
    optim_sidecar: bool = False
    """Store the optimizer state next to the Hugging Face model."""
    workers: int = 1
    """Number of files written at once."""
    universal_style: str | None = None
    """Style of parameter names: pipeline, bigscience or no-pipeline. Default: bigscience for models
    like BLOOM, pipeline for others.
    """
    qkv_blocks: bool = False
    """Write QKV rows in the "tp-blocks" layout for the target's tensor-parallel size."""
    transformer_impl: str | None = None
    """Implementation of Megatron-LM's modules that legacy files are for."""
    stacked_layers: bool = False
    """Write one tensor for all layers instead of one per layer."""
    hybrid_layers: bool = False
    """Write the keys of HybridModel, with two layers for each."""
    foreign: Path | None = None
    """Checkpoint with the tensors that the model does not have, instead of the source."""
    trusted: tuple[Path, ...] = ()
    """Directories next to the checkpoint's own from which a tokenizer named in it may be copied."""
    note: Callable[[str], None] = lambda text: None
    """Receives notes for the user."""
    edits: EditOptions = field(default_factory=EditOptions)
    """Changes of the model."""


def parse_size(text: str | int) -> int:
    """Return the bytes of "5GB", "300MB", "2GiB" or a plain number; units as in `transformers`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT])(I?))?B?", str(text).strip().upper())
    size = 0
    if match is not None:
        number, unit, binary = match.groups()
        base = 1024 if binary else 1000
        exponent = " KMGT".index(unit or " ")
        size = int(float(number) * base**exponent)
    if size <= 0:
        raise ValueError(
            f"--max-shard-size {text!r} is not a size: use a number with KB, MB, GB, KiB, MiB or "
            "GiB, for example 5GB"
        )
    return size
