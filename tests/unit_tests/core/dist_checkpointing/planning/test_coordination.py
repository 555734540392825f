"""Exchange of values between the ranks."""

import pickle

import torch.distributed as dist

from megatron.core.dist_checkpointing.planning.coordination import Coordination

LARGE = 1_000_000


def exchange(rank, size):
    """Send a large value from the last rank only; return the answer and the bytes sent here."""
    sent = []

    def count(transfer):
        def counted(tensor, *args, **kwargs):
            sent.append(tensor.numel() * tensor.element_size())
            return transfer(tensor, *args, **kwargs)

        return counted

    originals = {name: getattr(dist, name) for name in ("send", "isend")}
    for name, original in originals.items():
        setattr(dist, name, count(original))
    try:
        value = bytes(LARGE) if rank == size - 1 else rank
        answer = Coordination.of(None).gather_compute_scatter(
            value, lambda values: [(rank_index, values[rank_index]) for rank_index in range(size)]
        )
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    assert answer == (rank, value)
    return sum(sent), len(pickle.dumps(value))


def test_values_are_not_padded_to_the_largest(pool):
    """At 16,384 ranks rank 0 would otherwise receive as many copies of the largest plan."""
    results = pool.run(exchange, 3)
    for sent, own in results[1:]:
        assert own <= sent < own + 1000
    sent_by_rank_0, _ = results[0]
    assert LARGE < sent_by_rank_0 < LARGE + 1000
