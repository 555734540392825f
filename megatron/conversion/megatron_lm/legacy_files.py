"""Directories and files of a legacy checkpoint (`mp_rank_XX[_YYY][_ZZZ]/model_optim_rng.pt`)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.conversion.model_space.pieces import find_archive_faults
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState
from megatron.core.run_checkpoint.checks import COMMON, RANKS
from megatron.core.run_checkpoint.keys import MODEL_FILE, OPTIMIZER_FILE
from megatron.core.safe_files import safe_open

# Entry of the first rank's model file: foreign tensors by name, which Megatron-LM does not read.
FOREIGN = "foreign"


class MegatronRank(NamedTuple):
    """A rank that writes a directory.

    With expert parallelism these are the ranks with the first replica of their experts.
    """

    tp: int
    pp: int
    expert: tuple[int, int] | None = None  # (etp, ep)
    dense_optimizer: bool = True  # whether it also writes the sharded optimizer of dense layers

    @classmethod
    def list_all(cls, parallel: ParallelConfig, world_size: int) -> list[MegatronRank]:
        """Return every rank of a run that writes a directory; `world_size` 0 is unknown."""
        # Without expert parallelism, the first data-parallel rank of each (tp, pp) writes.
        if parallel.ep_size == 1:
            ranks = []
            for pp in range(parallel.pp_size):
                for tp in range(parallel.tp_size):
                    ranks.append(cls(tp, pp))
            return ranks

        # The smallest run of the layout has the same directories as a larger one.
        minimum = compute_minimum_world_size(parallel)
        if world_size == 0 or world_size % minimum != 0:
            world_size = minimum
        RANKS(world_size, f"a world of {world_size} ranks")

        # Only the first replica of the experts (first expert-data-parallel rank) writes.
        ranks = []
        for rank in range(world_size):
            state = ParallelState.for_rank(parallel, world_size, rank)
            if state.edp.is_first:
                expert = (state.etp.rank, state.ep.rank)
                ranks.append(cls(state.tp.rank, state.pp.rank, expert, state.dp.is_first))
        return ranks

    @property
    def is_first(self) -> bool:
        """Return whether this is the first rank of the first stage."""
        return (self.tp, self.pp) == (0, 0) and self.expert in (None, (0, 0))

    def __str__(self) -> str:
        """Return the rank as named in messages."""
        if self.expert is None:
            return f"tensor-parallel rank {self.tp}, pipeline rank {self.pp}"
        etp, ep = self.expert
        return f"expert rank {ep} of tensor-parallel rank {etp}, pipeline rank {self.pp}"

    def directory(self, parallel: ParallelConfig) -> str:
        """Return the name of the rank's directory: mp_rank_<tp>[_<pp>][_<ep>]."""
        name = f"mp_rank_{self.tp:02d}"
        if parallel.pp_size > 1:
            name += f"_{self.pp:03d}"
        if self.expert is not None:
            _, ep = self.expert
            name += f"_{ep:03d}"
        return name


def list_expert_ranks(parallel: ParallelConfig) -> list[MegatronRank]:
    """Return every rank of the experts' grid without their replicas, ETP fastest."""
    ranks = []
    for pp in range(parallel.pp_size):
        for ep in range(parallel.ep_size):
            for etp in range(parallel.etp_size):
                ranks.append(MegatronRank(0, pp, (etp, ep)))
    return ranks


def compute_minimum_world_size(parallel: ParallelConfig) -> int:
    """Return the smallest number of processes that dense layers and experts can be split over."""
    ranks = math.lcm(parallel.tp_size, parallel.etp_size * parallel.ep_size)
    return ranks * parallel.pp_size


def open_legacy(path: Path, *types: type) -> Any:
    """Open a file; raise CheckpointError unless it contains an object of one of `types`.

    The default kind is a dictionary. Tensors are not read.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the stored arguments call for this rank")
    content = safe_open(path)
    if not isinstance(content, types or dict):
        raise CheckpointError(f"{path} contains a {type(content).__name__}, not a checkpoint")
    return content


def find_first_legacy_file(directory: Path) -> Path:
    """Return the model file of the first rank; raise CheckpointError if there is none."""
    files = sorted(directory.glob(f"mp_rank_*/{MODEL_FILE}"))
    if not files:
        raise CheckpointError(
            f"{directory} is not a legacy checkpoint: it has no mp_rank_*/{MODEL_FILE}"
        )
    return files[0]


def list_legacy_damage(directory: Path) -> list[str]:
    """Return a line for each missing or damaged file of the ranks that the arguments call for.

    A checkpoint that is refused when it is opened has no damage.
    """
    first = find_first_legacy_file(directory)
    content = COMMON(open_legacy(first), str(first))
    namespace = content.get("args")
    if not isinstance(namespace, argparse.Namespace):
        return []
    args = vars(namespace)

    # List the directories of the layout.
    parallel = _read_parallel_config(args)
    tp = parallel.tp_size
    pp = parallel.pp_size
    RANKS(tp * pp, f"{first}: {tp} x {pp} ranks")
    ranks = MegatronRank.list_all(parallel, int(args.get("world_size") or 0))
    directories = {rank.directory(parallel) for rank in ranks}
    if not args or first.parent.name not in directories:
        return []  # a layout or an age that is refused

    # Check the files of each: the model, and the sharded optimizer if any rank has one.
    has_optimizer = any(directory.glob(f"mp_rank_*/{OPTIMIZER_FILE}"))
    files = []
    for name in sorted(directories):
        files.append(directory / name / MODEL_FILE)
        if has_optimizer:
            files.append(directory / name / OPTIMIZER_FILE)
    return find_archive_faults(files, directory)


def _read_parallel_config(args: Mapping[str, Any]) -> ParallelConfig:
    """Return the layout of a run, from arguments that may be missing or None."""
    names = ["tensor_model_parallel_size", "pipeline_model_parallel_size"]
    num_experts = args.get("num_experts")
    if isinstance(num_experts, int) and num_experts > 1:
        names += ["expert_model_parallel_size", "expert_tensor_parallel_size"]
    sizes = {name: args[name] for name in names if args.get(name)}
    return ParallelConfig(**sizes)
