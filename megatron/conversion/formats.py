"""How the formats of checkpoints are called and recognised, and what a user may ask of a conversion.

Everything here is known without torch: for the parsers of the tools, and for finding the checkpoint that a path means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.files import METADATA, read_commit
from megatron.core.dist_checkpointing.format.schema import file_name, read_json, read_regular
from megatron.core.object_storage import ObjectPath

if TYPE_CHECKING:
    import torch

MODEL_FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"  # of a rank in a legacy directory
LATEST, ZERO = "latest_universal", "zero"
STYLES = ("pipeline", "bigscience", "no-pipeline")  # of names in universal checkpoints
QKV_LAYOUTS = ("groups", "tp-blocks")  # of universal checkpoints


def is_unfinished(directory: Path) -> bool:
    """In object storage an unfinished save has the final names, too."""
    return isinstance(directory, ObjectPath) and read_commit(directory) is None


def _is_torch_dist(directory: Path) -> bool:
    return (directory / METADATA).is_file() and not is_unfinished(directory)


def _is_legacy(directory: Path) -> bool:
    return any(directory.glob(f"mp_rank_*/{MODEL_FILE}"))


def is_huggingface(directory: Path) -> bool:
    """Whether `directory` holds a model of transformers."""
    path = directory / "config.json"
    hf = read_json(path) if path.is_file() else None
    return isinstance(hf, dict) and ("model_type" in hf or "architectures" in hf)


# Each is read and written. By name: whether a directory looks like it.
FORMATS: dict[str, Callable[[Path], bool]] = {
    "torch_dist": _is_torch_dist,
    "legacy": _is_legacy,
    "hf": is_huggingface,
    "universal": lambda directory: (directory / ZERO).is_dir(),
}


def formats_of(directory: Path) -> list[str]:
    return [name for name, is_one in FORMATS.items() if is_one(directory)]


def read_latest(root: Path) -> str | None:
    """The directory that `latest_universal` in `root` names; None without that file, CheckpointError for a bad name."""
    path = root / LATEST
    if not path.is_file():
        return None
    name = read_regular(path, limit=4096).decode(errors="replace").strip()
    return file_name(name, f"{path}: the name in it")


def is_extra_state(key: str) -> bool:
    """Whether an object is the state that a module of Megatron-core keeps beside its parameters."""
    return "._extra_state/shard_" in key


@dataclass(frozen=True)
class Hints:
    """What the user knows about a source that its files do not say."""

    args: Mapping[str, Any] = field(default_factory=dict)  # they override those in the files
    ignored_fields: tuple[str, ...] = ()  # of config.json, known to be harmless
    qkv_layout: str | None = None  # of a universal checkpoint
    optimizer: bool = True  # False: skip its state, whatever it is
    as_saved: bool = False  # keep the keys of what a run here saved, whatever its model
    verify: bool = False  # compare what is read with the checksums


@dataclass(frozen=True)
class Options:
    """How the target shall be; None means as the source is."""

    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    virtual_pipeline_parallel: int | None = None
    expert_parallel: int | None = None
    expert_tensor_parallel: int | None = None
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


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str | int) -> int:
    """Bytes of "5GB", "300MB", "2GiB" or a plain number; decimal units as in `transformers`."""
    value = str(text).strip().upper()
    digits = value.rstrip("BKMGTI ")
    unit = value[len(digits) :].strip()
    try:
        size = int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise ValueError(f"--max-shard-size {text!r}: give a number with KB, MB, GB, KiB, MiB or GiB, such as 5GB")
    return size
