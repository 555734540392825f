"""Transfer of micro-batches to the device, for several chunks of a rank."""

import torch

from megatron.training.run import MicrobatchFeed


def test_documents_stay_on_the_host():
    """Attention reads their boundaries, which would wait for the device. A batch is kept until its
    last use.
    """
    batches = iter([{"tokens": torch.zeros(1, 4), "documents": torch.tensor([[0, 0, 1, 1]])}] * 2)
    feed = MicrobatchFeed(batches, torch.device("meta"), [0, 2])
    first = feed(0, 0)
    assert {key: x.device.type for key, x in first.items()} == {
        "tokens": "meta",
        "documents": "cpu",
    }
    assert feed(1, 0) == {} and feed(0, 1) is not first and feed(2, 0) is first
