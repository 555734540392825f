"""Taking the directory of --save at the start of a run: it has one live owner, and all ranks must see it."""

from __future__ import annotations

import os
import socket
import tempfile
from collections import defaultdict
from pathlib import Path

import torch.distributed as dist

from megatron.core.dist_checkpointing import Generation, clean_up
from megatron.training.config.run_config import Config


def take_save_directory(config: Config) -> Generation | None:
    """The next generation of --save, the same on all ranks; None for a run that saves nothing there. Collective.

    From then on no earlier start can change the directory, and what saves and removals that were cut off left in it is
    gone. Raises ValueError on every rank if it cannot be written to, or if not all ranks see it.
    """
    checkpoint = config.checkpoint
    if checkpoint.save is None or config.training.skip_train or checkpoint.ckpt_convert_format is not None:
        return None
    root = Path(checkpoint.save)
    answer: list[Generation | ValueError | None] = [None]
    if dist.get_rank() == 0:
        try:
            check_writable(root)
            answer = [Generation.take(root, _this_start())]
            clean_up(root)
        except ValueError as error:
            answer = [error]
        except OSError as error:
            answer = [ValueError(f"checkpoints cannot be saved to {root}: {error}")]
    dist.broadcast_object_list(answer, src=0)
    generation = answer[0]
    if isinstance(generation, ValueError):
        raise generation
    assert generation is not None
    seen: list[tuple[str, bool]] = [("", False)] * dist.get_world_size()
    dist.all_gather_object(seen, (socket.gethostname(), generation.is_current()))
    if not seen[0][1]:
        generation.check()
    _check_shared(root, seen)
    return generation


def check_writable(root: str | Path) -> None:
    """Create `root` if need be; ValueError if files cannot be written there (better now than after hours)."""
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise ValueError(f"checkpoints cannot be saved to {root}: {error}") from error


def _this_start() -> dict[str, str | int]:
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID")
    return {"host": socket.gethostname(), "pid": os.getpid(), **({"job": job} if job else {})}


def _check_shared(root: Path, seen: list[tuple[str, bool]]) -> None:
    """`seen`: the host of each rank, and whether it sees what rank 0 has just made in `root`."""
    blind = defaultdict(list)
    for rank, (host, sees) in enumerate(seen):
        if not sees:
            blind[host].append(rank)
    if blind:
        where = "; ".join(f"{host} (rank {', '.join(map(str, ranks[:8]))})" for host, ranks in list(blind.items())[:8])
        raise ValueError(
            f"--save {root} is not shared by all ranks: what rank 0 on {seen[0][0]} writes there is not seen on "
            f"{where}. Give a directory on a file system that all nodes share"
        )
