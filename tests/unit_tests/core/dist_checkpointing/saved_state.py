"""State that is saved in tests of saving, and whether a checkpoint holds it."""

import torch

from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor, load, load_common

ROWS = 300_000  # two tensors of 24 MB, each staged in three slots


class Training:
    """State that changes as in training: the step changes tensors, all the time the rest."""

    def __init__(self, seed=0, rows=ROWS):
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(rows, 20, generator=generator)
        self.moment = torch.randn(rows * 20, generator=generator)
        self.transposed = torch.randn(300, 500, generator=generator)
        self.buffer = torch.randn(1000, generator=generator)
        self.step = torch.tensor(seed)
        self.rng = {"python": [seed, seed], "torch": torch.randn(8, generator=generator)}
        self.common = {"iteration": seed, "args": {"lr": [0.1 * seed]}}

    def state(self):
        weight = ShardedTensor.replicated("weight", self.weight)
        return {
            "weight": weight,
            "moment": weight.flat_range("moment", 0, self.moment),
            "transposed": ShardedTensor.replicated("transposed", self.transposed.t()),
            "buffer": ShardedTensor.replicated("buffer", self.buffer),
            "step": ShardedTensor.replicated("step", self.step),
            "rng": ShardedObject("rng", self.rng),
        }

    def change_objects(self):
        self.rng["python"].append(-1)
        self.rng["torch"].zero_()
        self.common["args"]["lr"][0] = -1
        self.common["iteration"] = -1

    def change_tensors(self):
        for tensor in (self.weight, self.moment, self.transposed, self.buffer, self.step):
            tensor.zero_()


def assert_holds(directory, seed, rows=ROWS):
    expected = Training(seed, rows)
    loaded = Training(seed + 1, rows)
    report = load(loaded.state(), directory, verify=True)

    for name in ("weight", "moment", "transposed", "buffer", "step"):
        assert torch.equal(getattr(loaded, name), getattr(expected, name)), name
    assert report.objects["rng"]["python"] == expected.rng["python"]
    assert torch.equal(report.objects["rng"]["torch"], expected.rng["torch"])
    assert load_common(directory) == expected.common


def sharded(rank, size, value):
    local = torch.full((1000, 64), float(value + rank))
    whole = torch.full((300, 10), float(value))
    return {
        "split": ShardedTensor.split("split", local, 0, rank, size),
        "whole": ShardedTensor.replicated("whole", whole),
        "rng": ShardedObject(f"rng/{rank}", [rank, value]),
    }


def assert_sharded(directory, size, value):
    split = torch.zeros(1000 * size, 64)
    whole = torch.zeros(300, 10)
    state = {
        "split": ShardedTensor.replicated("split", split),
        "whole": ShardedTensor.replicated("whole", whole),
    }
    state |= {f"rng/{rank}": ShardedObject(f"rng/{rank}", None) for rank in range(size)}
    report = load(state, directory, verify=True)

    assert (whole == value).all()
    for rank in range(size):
        assert (split[1000 * rank : 1000 * (rank + 1)] == value + rank).all()
        assert report.objects[f"rng/{rank}"] == [rank, value]


def state_of(**tensors):
    return {key: ShardedTensor.replicated(key, tensor) for key, tensor in tensors.items()}
