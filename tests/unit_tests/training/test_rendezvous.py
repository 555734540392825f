"""Every start of a job finds its own ranks, whatever earlier starts left in the store that they
share.
"""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.training.rendezvous import store_of_this_start


def meet(server, ranks):
    """What each rank reads of the others' places."""
    found = {}

    def join(rank):
        shared = dist.TCPStore(
            "127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20)
        )
        store = store_of_this_start(shared, rank, len(ranks))
        store.set(f"place/{rank}", ranks[rank])
        found[rank] = [store.get(f"place/{other}").decode() for other in range(len(ranks))]

    threads = [threading.Thread(target=join, args=(rank,)) for rank in reversed(range(len(ranks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("world_size", [1, 4])
def test_starts_do_not_mix(world_size):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for start in range(4):
        size = max(1, world_size - start)  # some restarts have fewer ranks
        ranks = [f"start {start} rank {rank}" for rank in range(size)]
        assert meet(server, ranks) == {rank: ranks for rank in range(size)}


def test_a_rank_that_died_before_it_came():
    """Its hello stays; rank 0 answers it in vain and goes on until the living have come."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("request/1", "a word that nobody waits for")
    assert meet(server, ["a", "b"]) == {0: ["a", "b"], 1: ["a", "b"]}
