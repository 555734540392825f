"""Rank and world size from the launcher's environment, and the default process group.

With --max-restarts, torchrun gives all launches of a job the same store. The addresses that a
killed launch has left there would mislead the next one, so every launch first agrees on its own
prefix.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist

STORE_PREFIX = "MEGATRON_STORE_PREFIX"
"""Environment variable with the part of the launcher's store for the process groups. Without it,
the ranks agree on one.
"""

_PAUSE = 0.02  # seconds between two checks of which ranks have joined


def environment_rank() -> int:
    """Return the rank of this process that the launcher has set; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def environment_world_size() -> int:
    """Return the number of processes that the launcher has set; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def init_process_group(backend: str, timeout: timedelta, device: torch.device) -> None:
    """Create the default process group, with torchrun, another launcher, or as one process."""
    # Without a device, every barrier of NCCL warns that it has to guess one.
    device_id = device if backend == "nccl" else None
    # A single process without a launcher needs no network.
    if environment_world_size() == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(
            backend,
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=timeout,
            device_id=device_id,
        )
        return
    shared = launcher_store(timeout)
    if shared is None:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
        return
    rank = environment_rank()
    world_size = environment_world_size()
    prefix = os.environ.get(STORE_PREFIX)
    if prefix is None:
        prefix = agree_on_prefix(shared, rank, world_size)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(prefix, shared),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device_id,
    )
    if backend == "nccl":
        _list_ranks_of_world(device, world_size)


def _list_ranks_of_world(device: torch.device, world_size: int) -> None:
    """Let groups be split off the world, even if it is not the first one of this process.

    Otherwise torch up to 2.15 crashes when it splits the world of a second attempt: it has no list
    of its ranks, except for the first group of a process.
    """
    world = dist.group.WORLD
    assert world is not None
    world._get_backend(device).options.global_ranks_in_group = list(range(world_size))


def launcher_store(timeout: timedelta) -> dist.TCPStore | None:
    """Return a client of the launcher's store, None if it has none for its workers."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timeout)


def agree_on_prefix(shared: dist.TCPStore, rank: int, world_size: int) -> str:
    """Return the prefix of a part of `shared` that no earlier launch has used.

    Collective: all ranks of this launch call it, and no process of an earlier launch is alive.

    Launches cannot be numbered, because each node counts its own. Instead, every rank sends a
    request with a random token, and rank 0 replies to that token with the prefix: a reply cannot
    belong to another launch. Rank 0 may also find requests of an earlier launch, so it replies
    until all ranks of this one have joined.
    """
    if rank > 0:
        token = uuid.uuid4().hex
        shared.set(f"request/{rank}", token)
        prefix = shared.get(f"reply/{token}").decode()
        dist.PrefixStore(prefix, shared).add("joined", 1)
        return prefix
    # Rank 0 replies until all other ranks have joined.
    prefix = uuid.uuid4().hex
    store = dist.PrefixStore(prefix, shared)
    replied = set()
    requests = [f"request/{peer}" for peer in range(1, world_size)]
    while requests and store.add("joined", 0) < len(requests):
        for request in shared.multi_get(requests):
            if request not in replied:
                shared.set(f"reply/{request.decode()}", prefix)
                replied.add(request)
        time.sleep(_PAUSE)
    return prefix
