"""Ownership: rules for taking over a directory of checkpoints.

A launch takes ownership at the last possible moment: after its checkpoint is loaded, before it
trains. A launch that fails before leaves the directory unchanged, and a run that is training to the
same directory goes on.

An explicit launch takes over from any other. An automatic restart (by torchrun --max-restarts or a
requeue by Slurm) does not take over from another job that has taken the directory from its own job:
two jobs would otherwise supersede each other in turn.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.files import clean_up
from megatron.core.dist_checkpointing.local_checkpoints import Tier
from megatron.core.dist_checkpointing.ownership.fencing import (
    Generation,
    find_newest,
    read_owner,
    take_generation,
)
from megatron.core.dist_checkpointing.planning.coordination import Coordination, wait_until_visible
from megatron.core.object_path import ObjectPath
from megatron.core.wings import resolve

_CHECK_CONDITIONAL_REQUESTS = "megatron.core.object_files:check_conditional_requests"
_MAX_FORMER_JOBS = 16  # in owner.json
_MAX_LAUNCHERS = 256  # of one job
_SHOWN_HOSTS = 8  # in an error message


class Job(NamedTuple):
    """The job of this process, as far as the launcher identifies it.

    `launchers` identify the processes of torchrun, which stay the same when it restarts the job:
    many jobs have the same `run_id`, such as torchrun's default "none".
    """

    run_id: str | None = None
    launchers: tuple[str, ...] = ()
    is_restart: bool = False

    def is_recorded_in(self, owner: Mapping[str, Any]) -> bool:
        """Return whether `owner`, from `owner.json`, describes a launch of this job."""
        if self.run_id is None or owner.get("run_id") != self.run_id:
            return False
        recorded = _texts(owner.get("launchers"))
        if not recorded or not self.launchers:
            return True
        return not recorded.isdisjoint(self.launchers)


def _texts(value: Any) -> set[str]:
    if not isinstance(value, list):
        return set()
    return {item for item in value if isinstance(item, str)}


def identify_job() -> Job:
    """Return the job of all ranks. Collective."""
    # torchrun is checked first: it may itself run inside a Slurm job.
    elastic_id = os.environ.get("TORCHELASTIC_RUN_ID")
    slurm_id = os.environ.get("SLURM_JOB_ID")
    if elastic_id is None:
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        run_id = None if slurm_id is None else f"slurm {slurm_id}"
        return Job(run_id, (), slurm_id is not None and restarts not in ("", "0"))
    gathered = Coordination.of(None).all_gather(_identify_launcher())
    launchers = sorted({name for name in gathered if name is not None})
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    run_id = f"torchrun {elastic_id}"
    return Job(run_id, tuple(launchers[:_MAX_LAUNCHERS]), restarts not in ("", "0"))


def _identify_launcher() -> str | None:
    """Return a name for this rank's torchrun process: its directory of logs is unique and kept.

    The error file is `<directory>/attempt_<n>/<local rank>/error.json`.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None:
        return None
    parents = Path(error_file).parents
    return f"{socket.gethostname()}:{parents[2]}" if len(parents) > 3 else None


class PreviousOwner(NamedTuple):
    """The owner of a directory of checkpoints before this launch.

    `job_id` is None unless that owner was an earlier launch of the same job, and this one is an
    automatic restart. `first_generation` is then the first generation of the job.
    """

    owner: Mapping[str, Any]
    job_id: str | None = None
    first_generation: int = 0


def read_previous_owner(root: Path, job: Job) -> PreviousOwner:
    """Read who owns `root`. ValueError if this restart must not take over from that owner."""
    newest = find_newest(root)
    if newest is None:
        return PreviousOwner({})
    owner = read_owner(root, newest)
    # A launch by hand may take over from any owner.
    if not job.is_restart:
        return PreviousOwner(owner)
    # A restart continues the ownership of its own job.
    if job.is_recorded_in(owner):
        job_id = owner.get("job_id")
        first = owner.get("first_generation", newest.number)
        has_job_id = isinstance(job_id, str) and isinstance(first, int)
        return PreviousOwner(owner, job_id, first) if has_job_id else PreviousOwner(owner)
    # Another job owns the directory. If it took over from this job, the restart must not take it
    # back.
    former = owner.get("former_jobs")
    if isinstance(former, list) and any(
        isinstance(entry, dict) and job.is_recorded_in(entry) for entry in former
    ):
        who = ", ".join(f"{key} {owner[key]}" for key in ("since", "host", "pid") if key in owner)
        raise ValueError(
            f"{root}: another job has taken over this directory ({who}), and this is an "
            f"automatic restart of the job that had it before ({job.run_id}). A restart does not "
            "take over from another job: start the command by hand to take the directory over, or "
            "give it another directory to save to"
        )
    return PreviousOwner(owner)


def prepare_directory(root: Path) -> None:
    """Create `root`, and check that it can be written to and that all ranks see it. Collective.

    Raises ValueError on every rank otherwise: an error now is better than a failed first save.
    """
    ranks = Coordination.of(None)
    probe = ranks.run_on_rank0(lambda: _create_probe(root))
    if probe is None:
        return
    try:
        is_visible = ranks.run_on_all(lambda: not wait_until_visible([probe]))
        seen = ranks.all_gather((socket.gethostname(), is_visible))
    finally:
        if ranks.is_coordinator:
            with contextlib.suppress(OSError):
                probe.rmdir()
    _check_shared(root, seen)


def _create_probe(root: Path) -> Path | None:
    """Create an empty directory for the other ranks to find; None in object storage."""
    if isinstance(root, ObjectPath):
        resolve(_CHECK_CONDITIONAL_REQUESTS)(root)
        return None
    if root.is_symlink() and not root.exists():
        raise ValueError(
            f"checkpoints cannot be saved to {root}: it is a link to {os.readlink(root)}, which "
            "does not exist"
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        # An existing directory may be read-only.
        with tempfile.TemporaryFile(dir=root):
            pass
        probe = root / f".probe-{secrets.token_hex(8)}"
        probe.mkdir()
    except OSError as error:
        raise ValueError(f"checkpoints cannot be saved to {root}: {error}") from error
    return probe


def _check_shared(root: Path, seen: list[tuple[str, bool]]) -> None:
    """Raise ValueError unless all ranks see the directory that rank 0 has created.

    `seen` contains (host, whether it is visible) of each rank.
    """
    blind = defaultdict(list)
    for rank, (host, sees) in enumerate(seen):
        if not sees:
            blind[host].append(rank)
    if not blind:
        return
    hosts = list(blind.items())[:_SHOWN_HOSTS]
    host_descriptions = [f"{host} (rank {', '.join(map(str, ranks[:8]))})" for host, ranks in hosts]
    raise ValueError(
        f"{root} is not shared by all ranks: files that rank 0 on {seen[0][0]} writes there are "
        f"not visible on {'; '.join(host_descriptions)}. Give a directory on a file system that "
        "all nodes share"
    )


def take_directory(root: Path, job: Job, tier: Tier | None = None) -> Generation:
    """Take ownership of `root`; returns the generation, the same on all ranks. Collective.

    From then on no earlier launch can change the directory. Unfinished saves and removals of
    earlier launches are cleaned up.

    Its number is unique among the launches that saved to the disks of the nodes (`tier`): names of
    local checkpoints contain the number only. `root` alone cannot ensure that, because numbers
    repeat after a backup was restored.
    """
    ranks = Coordination.of(None)
    above = _find_newest_local_generation(ranks, tier)
    while True:
        generation = _take_on_all(ranks, root, job, above)
        if tier is None:
            return generation
        # Each launch looks after it has recorded its number. So of two launches with the same
        # number, at least one sees the other.
        ranks.run_on_all(partial(tier.record_generation, generation.id))
        above = _find_newest_local_generation(ranks, tier, generation.token)
        if above < generation.number:
            return generation


def _take_on_all(ranks: Coordination, root: Path, job: Job, above: int) -> Generation:
    """Take the next generation, which exceeds `above`, and return it on all ranks. Collective."""
    generation = ranks.run_on_rank0(lambda: _take(root, job, above))
    # Only rank 0 looks: other ranks may see a network file system with a delay.
    if not ranks.run_on_rank0(generation.is_current):
        generation.check()  # raises: another launch has already taken the directory over
    return generation


def _find_newest_local_generation(
    ranks: Coordination, tier: Tier | None, own_token: str | None = None
) -> int:
    """Return the newest generation that is recorded on a node, except the own one. Collective."""
    newest = 0
    if tier is not None:
        for generation in tier.list_generations():
            if generation.token != own_token:
                newest = max(newest, generation.number)
    return max(ranks.all_gather(newest))


def _take(root: Path, job: Job, above: int) -> Generation:
    """Take the next generation, on rank 0."""
    previous = read_previous_owner(root, job)
    try:
        generation = take_generation(root, _describe_start(job, previous), above)
        clean_up(root)
    except OSError as error:
        raise ValueError(f"checkpoints cannot be saved to {root}: {error}") from error
    return generation


def _describe_start(job: Job, previous: PreviousOwner) -> dict[str, Any]:
    """Return the content of `owner.json`, except token and time."""
    # The owner that loses the directory becomes the last former job, unless it is this job.
    former = previous.owner.get("former_jobs")
    former_jobs = list(former) if isinstance(former, list) else []
    if previous.job_id is None and isinstance(previous.owner.get("run_id"), str):
        former_jobs.append(
            {
                "run_id": previous.owner["run_id"],
                "launchers": sorted(_texts(previous.owner.get("launchers"))),
            }
        )
    # Shown by the launch that loses the directory to this one.
    description: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
    if job.run_id is not None:
        description["job"] = job.run_id.partition(" ")[2]
        description["run_id"] = job.run_id
        description["launchers"] = list(job.launchers)
    # All launches of a job share an id and record its first generation.
    description["job_id"] = previous.job_id or secrets.token_hex(8)
    if previous.job_id is not None:
        description["first_generation"] = previous.first_generation
    description["former_jobs"] = former_jobs[-_MAX_FORMER_JOBS:]
    return description
