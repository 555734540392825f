"""The files of a legacy directory: one `mp_rank_XX[_YYY][_ZZZ]/` for every (tensor, pipeline, expert) rank."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from megatron.conversion.files import archive_faults
from megatron.conversion.model_space.source import COMMON, RANKS
from megatron.core.dist_checkpointing import CheckpointError, safe_open

MODEL_FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"


def rank_directory(tp: int, pp: int, pp_size: int, ep: int = 0, ep_size: int = 1) -> str:
    return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if pp_size > 1 else "") + (f"_{ep:03d}" if ep_size > 1 else "")


def open_file(path: Path, *kinds: type) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the stored arguments call for this rank")
    content = safe_open(path)
    if not isinstance(content, kinds or dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a checkpoint")
    return content


def is_legacy(directory: Path) -> bool:
    return any(directory.glob(f"mp_rank_*/{MODEL_FILE}"))


def legacy_faults(directory: Path) -> list[str]:
    """Files that are missing or damaged: those of every rank that the stored arguments call for."""
    first = sorted(directory.glob(f"mp_rank_*/{MODEL_FILE}"))[0]
    stored = COMMON(open_file(first), str(first)).get("args")
    args = vars(stored) if isinstance(stored, argparse.Namespace) else {}
    tp, pp = (args.get(f"{axis}_model_parallel_size") or 1 for axis in ("tensor", "pipeline"))
    RANKS(tp * pp, f"{first}: {tp} x {pp} ranks")
    ranks = {rank_directory(*rank, pp) for rank in itertools.product(range(tp), range(pp))}
    if not args or first.parent.name not in ranks:
        return []  # of a layout or an age that is refused when it is opened
    names = [MODEL_FILE]
    if any(directory.glob(f"mp_rank_*/{OPTIMIZER_FILE}")):
        names.append(OPTIMIZER_FILE)
    return archive_faults([directory / rank / name for rank in sorted(ranks) for name in names], directory)
