"""The digest against its definition, over any tiling."""

import random

import pytest
import torch

from megatron.core.dist_checkpointing import Reader, ShardedTensor, save
from megatron.core.dist_checkpointing.verification import format_digest, partial_digest, tensor_digest

M = 1 << 64


def splitmix64(x):
    x = (x + 0x9E3779B97F4A7C15) % M
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % M
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % M
    return x ^ (x >> 31)


def by_definition(tensor):
    """Straight from the docstring, in Python integers."""
    size = min(8, tensor.dtype.itemsize)
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    total = 0
    for i in range(len(data) // size):
        e = int.from_bytes(data[i * size : (i + 1) * size], "little")
        f = e ^ (e >> (4 * size))
        total += f * (splitmix64(i % 65536) | 1) * (splitmix64((1 << 32) + i // 65536) | 1)
    return total % M


def random_tensor(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel() * dtype.itemsize
    content = torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=generator)
    return content.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (70_000,), (3, 30_000), (300, 7, 11), (70, 2000), (0, 3)], ids=str)
def test_definition(dtype, shape):
    tensor = random_tensor(shape, dtype)
    assert partial_digest(tensor, (0,) * len(shape), shape) == by_definition(tensor)


def tiling(rng, offset, shape):
    axis = rng.randrange(len(shape))
    if shape[axis] < 2 or rng.random() < 0.2:
        return [(offset, shape)]
    cut = rng.randrange(1, shape[axis])
    upper = tuple(o + cut * (i == axis) for i, o in enumerate(offset))
    first = tuple(cut if i == axis else n for i, n in enumerate(shape))
    second = tuple(n - cut * (i == axis) for i, n in enumerate(shape))
    return tiling(rng, offset, first) + tiling(rng, upper, second)


@pytest.mark.parametrize("shape", [(100_000,), (400, 500), (30, 9, 700)], ids=str)
def test_any_tiling_gives_the_same(shape):
    rng = random.Random(1)
    tensor = random_tensor(shape, torch.float32)
    whole = partial_digest(tensor, (0,) * len(shape), shape)
    for _ in range(20):
        boxes = tiling(rng, (0,) * len(shape), shape)
        parts = [tensor[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] for box in boxes]
        total = sum(partial_digest(part, box[0], shape) for part, box in zip(parts, boxes, strict=True))
        assert total % M == whole


def test_changes_show():
    tensor = torch.randn(200, 300)
    seen = {partial_digest(tensor, (0, 0), (200, 300))}
    changed = tensor.clone()
    changed[17, 5] = torch.nextafter(changed[17, 5], torch.tensor(10.0))
    flipped = tensor.clone()
    flipped[[3, 100], [4, 200]] *= -1
    for other in (changed, flipped, tensor.flip(0), tensor.roll(1, 0), -tensor, tensor * 0):
        seen.add(partial_digest(other.contiguous(), (0, 0), (200, 300)))
    assert len(seen) == 7


def test_stored_tensors(tmp_path):
    tensors = {"w": torch.randn(500, 70), "b": torch.randn(9).bfloat16(), "s": torch.tensor(3)}
    save({key: ShardedTensor.replicated(key, value) for key, value in tensors.items()}, tmp_path / "c", common={})
    reader = Reader(tmp_path / "c")
    for key, tensor in tensors.items():
        assert tensor_digest(reader, key) == by_definition(tensor)
    assert format_digest(255) == "00000000000000ff"
