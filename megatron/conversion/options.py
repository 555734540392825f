"""Options of reading, editing and writing a checkpoint: their values, flags and parsers.

This module does not import torch, because tools parse these options before they import it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megatron.core.flags import CHANGED, FlagSection, flag
from megatron.core.object_path import path_of

FORMAT_NAMES = ("torch_dist", "legacy", "hf", "universal")
SAVERS = (*FORMAT_NAMES, "gguf")  # the last one contains weights only
FOLDER_FORMATS = ("accelerate", "verl", "olmo_core", "automodel", "torch_checkpointing")
READ_FORMATS = (*FORMAT_NAMES, *FOLDER_FORMATS, "deepspeed", "gguf", "nemo")
UNIVERSAL_STYLES = ("pipeline", "bigscience", "no-pipeline")  # of parameter names
QKV_LAYOUTS = ("groups", "tp-blocks")  # of universal checkpoints
NEW_ROWS = ("mean", "init", "zero")  # initial values of new rows of the vocabulary
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # on the command line
QUANTIZATIONS = ("fp8-block", "fp8-channel", "mxfp4", "nvfp4")  # of a Hugging Face model
GGUF_QUANTIZATIONS = ("q8_0",)
# The fix in a message about an optimizer that cannot be read.
DROP_OPTIMIZER = "leave the optimizer out (--no-optim of convert.py, --no-load-optim of a run)"

_T = TypeVar("_T")

_MAX_LAYERS = 10_000


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
            f"{text!r} is not a size: use a number with KB, MB, GB, KiB, MiB or GiB, e.g. 5GB"
        )
    return size


def _target_flag(*names: str, savers: tuple[str, ...], **checks: Any) -> Any:
    """Return an optional flag that only files of the formats `savers` depend on."""
    return flag(None, *names, when={"saver": savers}, **checks)


def _target_switch(*names: str, savers: tuple[str, ...]) -> Any:
    return flag(False, *names, when={"saver": savers})


@dataclass(frozen=True)
class ReadOptions(FlagSection):
    """Facts missing from the files, and the parts to read."""

    args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments under Megatron-LM's names. They override those in the files."""
    ignored_fields: list[str] = flag((), "--hf-ignore-fields")
    """Fields of config.json to ignore because they do not change the model."""
    qkv_layout: str | None = flag(None, "--universal-qkv-layout", choices=QKV_LAYOUTS)
    """QKV layout of a universal checkpoint: groups (for each query group its queries, key and
    value) or tp-blocks (Megatron-DeepSpeed since December 2024: for each tensor-parallel rank all
    queries, keys and values). Default: as its arguments imply.
    """
    hf_config: Path | None = flag(None, "--hf-config", parse=path_of)
    """Directory with the config.json of transformers for a source of another trainer (deepspeed,
    accelerate, ...). Default: the source, or where the program stores it.
    """
    no_optim: bool = flag(False)
    """Leave the optimizer state out, and merge the weights even if there are main parameters."""
    verify_source: bool | None = flag(None)
    """Require the source's checksums (checksums.bin), and compare the blocks that are read with
    them. Default: compare them if the source has any; --no-verify-source: never.
    """
    waits_for_shards: bool = False
    """Wait for shards of a torch_dist checkpoint that a network file system does not show yet:
    another rank has seen all of them.
    """
    renames: list[Rename] = flag((), "--rename", parse=parse_rename)
    """New names OLD=NEW for tensors in the files of an hf, deepspeed or torch_dist source; one * in
    OLD and in NEW matches any text, e.g. language_model.*=*
    """
    keep_foreign: bool | Path = flag(False, parse=path_of)
    """Keep tensors that the model does not have, under their names: convert.py copies them byte for
    byte, merge.py merges them like weights. With a path, those of this checkpoint, which the source
    was trained from, are copied. Default: list them as unused and leave them out.
    """
    foreign_splits: list[ForeignSplit] = flag((), "--foreign-split", parse=parse_foreign_split)
    """Axis NAME=AXIS that tensor-parallel ranks of a legacy source split a foreign tensor over; one
    * in NAME matches any text. Default: all ranks have the same tensor.
    """
    follow_links: bool = flag(False)
    """Follow links that leave a source's directory."""

    def find_problems(self) -> Iterator[str]:
        if self.foreign_splits and self.keep_foreign is not True:
            yield "--foreign-split requires --keep-foreign without a path"


@dataclass(frozen=True)
class EditOptions(FlagSection):
    """Changes of the model between reading and writing."""

    adapters: list[Path] = flag((), "--lora", parse=path_of)
    """Directories of LoRA adapters of PEFT to merge, one after the other, as merge_and_unload()
    does.
    """
    layers: tuple[int, ...] | None = flag(None, parse=parse_layers)
    """Layers of the source that the result consists of, in order, e.g. 0-11,6-17"""
    target_vocab_size: int | None = flag(None, at_least=1)
    """Grow the vocabulary to N rows, or remove rows that no token uses."""
    new_rows: str = flag("mean", choices=NEW_ROWS)
    """Values of new rows of the vocabulary: the mean of the existing rows, the initial values of
    training, or zero.
    """
    experts: int | None = flag(None, "--upcycle-experts", at_least=1)
    """Make N experts in each layer of a dense model, copies of its MLP."""
    topk: int | None = flag(None, at_least=1, requires={"experts": CHANGED})
    """For --upcycle-experts: experts per token. Default: --moe-router-topk, or 2."""


@dataclass(frozen=True)
class WriteOptions(FlagSection):
    """Properties of the result that differ from the source."""

    tensor_parallel: int | None = _target_flag(
        "--target-tensor-parallel-size", at_least=1, savers=("legacy", "universal")
    )
    """Tensor-parallel size of the target."""
    pipeline_parallel: int | None = _target_flag(
        "--target-pipeline-parallel-size", at_least=1, savers=("legacy",)
    )
    """Pipeline-parallel size of the target."""
    virtual_pipeline_parallel: int | None = _target_flag(
        "--target-virtual-pipeline-parallel-size", at_least=1, savers=("legacy",)
    )
    """Model chunks per stage."""
    expert_parallel: int | None = _target_flag(
        "--target-expert-model-parallel-size", at_least=1, savers=("legacy",)
    )
    """Expert-parallel size of the target."""
    expert_tensor_parallel: int | None = _target_flag(
        "--target-expert-tensor-parallel-size", at_least=1, savers=("legacy",)
    )
    """Expert-tensor-parallel size of the target."""
    dtype: str | None = flag(None, choices=tuple(DTYPES))
    """Dtype of the weights."""
    quantization: str | None = _target_flag(
        "--quantize", choices=(*QUANTIZATIONS, *GGUF_QUANTIZATIONS), savers=("hf", "gguf")
    )
    """Store the matrices of linear layers in fp8 with a scale per block of 128 x 128 as DeepSeek-V3
    does (fp8-block), in fp8 with a scale per row (fp8-channel) or in nvfp4 as compressed-tensors
    does, or those of gpt_oss's experts in mxfp4; other weights keep their dtype. All matrices of a
    GGUF file in q8_0.
    """
    quantized_original: Path | None = _target_flag(
        "--keep-quantization", parse=path_of, savers=("hf",), excludes={"quantization": CHANGED}
    )
    """The quantized model of transformers that the source comes from: matrices that have not
    changed are stored as its bytes, others without quantization.
    """
    optimizer: bool = True
    """Write the optimizer state."""
    weights: str = flag("model", choices=("model", "ema"))
    """Weights to write: the model's, or their average (--ema-decay of training), without optimizer
    state.
    """
    true_vocab_size: int | None = _target_flag(at_least=1, savers=("hf", "universal", "gguf"))
    """Number of tokens to keep: rows of the embedding."""
    tokenizer: Path | None = _target_flag(savers=("hf",))
    """A tokenizer directory or SentencePiece model to store next to the model. Default: the
    tokenizer named in the arguments.
    """
    max_shard_size: int = flag(5 * 10**9, parse=parse_size, when={"saver": ("hf",)})
    """Maximum size of a weight file, e.g. 5GB."""
    optim_sidecar: bool = _target_switch("--save-optim-sidecar", savers=("hf",))
    """Store the optimizer state next to the model."""
    workers: int = flag(2, at_least=1)
    """Number of files written at once."""
    universal_style: str | None = _target_flag(choices=UNIVERSAL_STYLES, savers=("universal",))
    """Style of parameter names. Default: bigscience for models like BLOOM, pipeline for others."""
    qkv_blocks: bool = _target_switch("--target-qkv-blocks", savers=("universal",))
    """Order q, k and v as Megatron-DeepSpeed since December 2024 does at the target's TP size."""
    target_transformer_impl: str | None = _target_flag(
        choices=("local", "transformer_engine"), savers=("legacy", "torch_dist")
    )
    """Implementation of Megatron-LM's modules that the files are for. Default: as the source, else
    transformer_engine.
    """
    stacked_layers: bool = _target_switch(savers=("torch_dist",))
    """Write one tensor for all layers instead of one per layer."""
    hybrid_layers: bool = _target_switch(savers=("torch_dist",))
    """Write a checkpoint of Megatron-core's HybridModel: attention and MLP become layers of their
    own."""
    foreign: Path | None = None
    """Checkpoint with the tensors that the model does not have, instead of the source."""
    trusted: tuple[Path, ...] = ()
    """Directories next to the checkpoint's own from which a tokenizer named in it may be copied."""
    note: Callable[[str], None] = lambda text: None
    """Receives notes for the user."""
    edits: EditOptions = field(default_factory=EditOptions)
    """Changes of the model."""


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
