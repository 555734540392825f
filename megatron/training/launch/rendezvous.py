"""Where the ranks of a run find each other's addresses.

torchrun lends all starts of a job one store. What a killed start left there (--max-restarts) would lead the next one to
addresses where nobody listens any more. So every start agrees on a prefix of its own first.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_PAUSE = 0.02  # seconds between two looks at who has come


def lent_store(timeout: timedelta) -> dist.TCPStore | None:
    """The launcher's store, if it lends one to its workers."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)


def store_of_this_start(shared: dist.TCPStore, rank: int, world_size: int) -> dist.Store:
    """A part of `shared` that no earlier start knows. All ranks of this start call it; none of an earlier one lives.

    The ranks cannot count starts alike (each node counts its own). So each says hello under a word that it made up, and
    rank 0 answers to that word with the prefix: an answer cannot be meant for another start. Rank 0 may find the hellos
    of an earlier start; it goes on answering until all ranks of this one have come.
    """
    if rank > 0:
        word = uuid.uuid4().hex
        shared.set(f"hello/{rank}", word)
        store = dist.PrefixStore(shared.get(f"answer/{word}").decode(), shared)
        store.add("here", 1)
        return store
    prefix = uuid.uuid4().hex
    store = dist.PrefixStore(prefix, shared)
    answered = set()
    hellos = [f"hello/{other}" for other in range(1, world_size)]
    while hellos and store.add("here", 0) < len(hellos):
        for hello in shared.multi_get(hellos):
            if hello not in answered:
                shared.set(f"answer/{hello.decode()}", prefix)
                answered.add(hello)
        time.sleep(_PAUSE)
    return store
