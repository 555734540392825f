"""Micro-batches of an iteration, for several chunks of a rank."""

import torch

from megatron.training.run import MicrobatchFeed


def test_a_batch_is_kept_until_its_last_use():
    batches = iter([{"tokens": torch.zeros(1, 4)} for _ in range(2)])
    feed = MicrobatchFeed(batches, [0, 2])
    first = feed(0, 0)
    assert feed(1, 0) == {}  # needs no data
    assert feed(0, 1) is not first
    assert feed(2, 0) is first
