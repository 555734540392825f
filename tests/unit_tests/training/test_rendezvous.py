"""Rendezvous: launches of a job share a store, but do not find entries of earlier launches."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.training.rendezvous import agree_on_prefix
from megatron.training.restart.monitor import listen_at_node_address


def meet(server, ranks):
    """Return the entries that each rank reads of the others."""
    peers = {}

    def join(rank):
        shared = dist.TCPStore(
            "127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20)
        )
        store = dist.PrefixStore(agree_on_prefix(shared, rank, len(ranks)), shared)
        store.set(f"place/{rank}", ranks[rank])
        peers[rank] = [store.get(f"place/{other}").decode() for other in range(len(ranks))]

    threads = [threading.Thread(target=join, args=(rank,)) for rank in reversed(range(len(ranks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return peers


@pytest.mark.parametrize("world_size", [1, 4])
def test_starts_use_separate_prefixes(world_size):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for start in range(4):
        size = max(1, world_size - start)  # some restarts have fewer ranks
        ranks = [f"start {start} rank {rank}" for rank in range(size)]
        assert meet(server, ranks) == {rank: ranks for rank in range(size)}


def test_request_of_a_dead_rank_is_ignored():
    """Rank 0 replies to it, and continues until all living ranks have joined."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("request/1", "a word that nobody waits for")
    assert meet(server, ["a", "b"]) == {0: ["a", "b"], 1: ["a", "b"]}


@pytest.mark.parametrize(
    "name, local_size, expected",
    [
        ("localhost", "2", "127.0.0.1"),
        ("127.0.0.1", "1", "0.0.0.0"),  # the other node could not connect
        ("192.0.2.1", "2", "0.0.0.0"),  # not an address of this machine
    ],
)
def test_the_store_of_the_monitor_listens_at_the_address_of_the_node(
    name: str, local_size: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_size)
    with listen_at_node_address(name, 0) as listener:
        assert listener.getsockname()[0] == expected
