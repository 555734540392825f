"""Options of reading, editing and writing a checkpoint: values, and parsers of their words.

This module does not import torch, because tools parse these options before they import it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch

FORMAT_NAMES = ("torch_dist", "legacy", "hf", "universal")
UNIVERSAL_STYLES = ("pipeline", "bigscience", "no-pipeline")  # of parameter names
QKV_LAYOUTS = ("groups", "tp-blocks")  # of universal checkpoints
NEW_ROWS = ("mean", "init", "zero")  # initial values of new rows of the vocabulary
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # on the command line
QUANTIZATIONS = ("fp8-block",)  # of the weights of a Hugging Face model

_T = TypeVar("_T")

_MAX_LAYERS = 10_000


@dataclass(frozen=True)
class EditOptions:
    """Changes of the model between reading and writing. None leaves the model unchanged."""

    layers: tuple[int, ...] | None = None
    """Number in the source of each layer of the result."""
    vocab_size: int | None = None
    """Number of rows of the word embedding and the output layer."""
    new_rows: str = "mean"
    """Values of rows that are added."""
    experts: int | None = None
    """Number of copies of each dense MLP that become experts."""
    topk: int | None = None
    """Experts per token. Default: as in the arguments, else 2."""
    adapters: tuple[Path, ...] = ()
    """Directories of LoRA adapters of PEFT to merge, in order."""


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


def parse_layers(text: str) -> tuple[int, ...]:
    """Return the layers that `0-11,6-17` lists: numbers and inclusive ranges, in order."""
    layers: list[int] = []
    for layer_range in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", layer_range.strip(), re.ASCII)
        if match is None:
            raise ValueError(
                f"{layer_range.strip()!r} is not a layer (5) or a range of layers (0-11)"
            )
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ValueError(f"{layer_range.strip()} ends before it begins")
        if len(layers) + last - first >= _MAX_LAYERS:
            raise ValueError(f"the result has more than {_MAX_LAYERS} layers")
        layers += range(first, last + 1)
    return tuple(layers)


class Rename(NamedTuple):
    """A new name for tensors of a source. One `*` in both matches any text."""

    old: str
    new: str

    def apply(self, name: str) -> str | None:
        """Return the new name of the tensor `name`, or None if this rename does not apply."""
        text = _match_name(self.old, name)
        if text is None:
            return None
        return self.new.replace("*", text)


class ForeignSplit(NamedTuple):
    """The axis that tensor-parallel ranks split foreign tensors over. `*` matches any text."""

    name: str
    axis: int

    def fits(self, name: str) -> bool:
        return _match_name(self.name, name) is not None


def _match_name(pattern: str, name: str) -> str | None:
    """Return the text that `*` matches in `name`, "" without a `*`, None for another name."""
    if "*" not in pattern:
        return "" if name == pattern else None
    before, _, after = pattern.partition("*")
    fits = len(name) >= len(before) + len(after)
    if not fits or not name.startswith(before) or not name.endswith(after):
        return None
    return name[len(before) : len(name) - len(after)]


def parse_foreign_split(text: str) -> ForeignSplit:
    """Return the split that `name=axis` specifies."""
    name, separator, axis = text.rpartition("=")
    if not separator or not name or re.fullmatch(r"[0-7]", axis, re.ASCII) is None:
        raise ValueError(f"{text!r} is not NAME=AXIS with an axis from 0 to 7")
    if name.count("*") > 1:
        raise ValueError(f"{text!r}: NAME has more than one *")
    return ForeignSplit(name, int(axis))


def parse_rename(text: str) -> Rename:
    """Return the rename that `old=new` specifies."""
    old, separator, new = text.partition("=")
    if not separator or not old or not new:
        raise ValueError(f"{text!r} is not OLD=NEW")
    if old.count("*") > 1 or old.count("*") != new.count("*"):
        raise ValueError(f"{text!r}: OLD and NEW need one * each, or none")
    return Rename(old, new)


def rename_tensors(
    tensors: Mapping[str, _T], renames: Sequence[Rename], location: str
) -> dict[str, _T]:
    """Return `tensors` under their new names. The first rename that fits a name is applied.

    Raises ValueError for a rename that fits no name, and for two tensors with the same new name.
    """
    result: dict[str, _T] = {}
    unused = list(renames)
    old_names: dict[str, str] = {}
    for name, value in tensors.items():
        new = name
        for rename in renames:
            renamed = rename.apply(name)
            if renamed is not None:
                new = renamed
                if rename in unused:
                    unused.remove(rename)
                break
        if new in result:
            raise ValueError(f"--rename: {location}: {old_names[new]} and {name} both become {new}")
        result[new] = value
        old_names[new] = name
    # A rename without effect is most likely a typing error.
    if unused:
        raise ValueError(f"--rename {unused[0].old}={unused[0].new}: {location} has no such tensor")
    return result


def parse_size(text: str | int) -> int:
    """Return the bytes of "5GB", "300MB", "2GiB" or a plain number; units as in `transformers`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT])(I?))?B?", str(text).strip().upper())
    size = 0
    if match is not None:
        amount, unit, binary = match.groups()
        base = 1024 if binary else 1000
        exponent = " KMGT".index(unit or " ")
        size = int(float(amount) * base**exponent)
    if size <= 0:
        raise ValueError(
            f"--max-shard-size {text!r} is not a size: use a number with KB, MB, GB, KiB, MiB or "
            "GiB, for example 5GB"
        )
    return size
