"""The layout of the contiguous buffers, as a pure function."""

import random

import pytest

from megatron.core.distributed.param_and_grad_buffer import (
    ALIGNMENT,
    ParamGroup,
    ParamSpec,
    find_ranges,
    intersect,
    plan_buffer,
)
from megatron.core.module import Constant, ParamInfo
from megatron.core.sharding import REPLICATED, Sharding

INIT = Constant(0.0)
SPLIT = Sharding(dim=0)


def spec(name, shape, **info):
    return ParamSpec(name, shape, ParamInfo(INIT, **info))


def random_specs(seed):
    rng = random.Random(seed)
    specs = []
    for i in range(rng.randint(1, 30)):
        shape = tuple(rng.randint(1, 40) for _ in range(rng.randint(1, 3)))
        kind = rng.choice(["weight", "bias", "word_embeddings.weight"])
        flags = {"sharding": rng.choice([REPLICATED, SPLIT]), "partial_grad": rng.random() < 0.5}
        specs.append(spec(f"p{i}.{kind}", shape, shared_embedding=rng.random() < 0.1, **flags))
    return specs


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_shards", [1, 3, 8])
@pytest.mark.parametrize("bucket_size", [1, 1000, 10**9])
def test_each_parameter_has_one_aligned_position(seed, num_shards, bucket_size):
    specs = random_specs(seed)
    buckets = plan_buffer(specs, bucket_size, num_shards)
    assert sorted(span.spec.name for b in buckets for span in b.spans) == sorted(
        s.name for s in specs
    )
    position = 0
    for bucket in buckets:
        assert bucket.start == position, "buckets are adjacent"
        assert bucket.numel % (num_shards * ALIGNMENT) == 0, "shards are equal and aligned"
        end = 0
        for span in bucket.spans:
            assert span.stop - span.start == span.spec.numel
            assert span.start % ALIGNMENT == 0 and 0 <= span.start - end < ALIGNMENT
            assert span.spec.group == bucket.group
            end = span.stop
        assert end <= bucket.numel < end + ALIGNMENT * (num_shards + 1)
        if any(span.spec.info.shared_embedding for span in bucket.spans):
            assert len(bucket.spans) == 1
        assert sum(span.spec.numel for span in bucket.spans[:-1]) < bucket_size, (
            "it should have been closed before"
        )
        position = bucket.stop


@pytest.mark.parametrize("seed", range(5))
def test_parameters_with_weight_decay_come_first_in_backward_order(seed):
    specs = random_specs(seed)
    names = [span.spec.name for b in plan_buffer(specs, 500, 2) for span in b.spans]
    matrices = [
        s.name for s in reversed(specs) if len(s.shape) > 1 and not s.name.endswith(".bias")
    ]
    assert names[: len(matrices)] == matrices


def test_parameter_groups():
    assert spec("a.weight", (3, 4)).group == ParamGroup(weight_decay=True, embedding=False)
    assert spec("a.weight", (3,)).group == ParamGroup(weight_decay=False, embedding=False)
    assert spec("a.bias", (3, 4)).group == ParamGroup(weight_decay=False, embedding=False)
    assert spec("embedding.word_embeddings.weight", (3, 4)).group == ParamGroup(
        weight_decay=True, embedding=True
    )
    assert spec("output_layer.weight", (3, 4)).group == ParamGroup(
        weight_decay=True, embedding=True
    )
    assert spec("embedding.position_embeddings.weight", (3, 4)).group.embedding is False


def test_gpt_without_overlap_has_four_buckets():
    specs = [spec("embedding.word_embeddings.weight", (50, 8), sharding=SPLIT)]
    for layer in range(3):
        specs += [
            spec(f"layers.{layer}.norm.weight", (8,), partial_grad=True),
            spec(f"layers.{layer}.fc1.weight", (32, 8), sharding=SPLIT),
            spec(f"layers.{layer}.fc1.bias", (32,), sharding=SPLIT),
            spec(f"layers.{layer}.fc2.weight", (8, 32), sharding=SPLIT),
        ]
    specs.append(spec("output_layer.weight", (50, 8), sharding=SPLIT))
    buckets = plan_buffer(specs, 10**9, 4)
    assert [b.spans[0].spec.name for b in buckets] == [
        "output_layer.weight",
        "layers.2.fc2.weight",
        "embedding.word_embeddings.weight",
        "layers.2.norm.weight",
    ]
    vectors = buckets[-1]
    assert len(find_ranges(vectors, lambda info: info.partial_grad)) == 1
    assert len(find_ranges(vectors, lambda info: info.sharding.is_split)) == 1
    assert len(find_ranges(buckets[1], lambda info: info.sharding.is_split)) == 1


@pytest.mark.parametrize("seed", range(10))
def test_ranges_cover_the_selected_parameters(seed):
    for bucket in plan_buffer(random_specs(seed), 3000, 2):
        ranges = find_ranges(bucket, lambda info: info.sharding.is_split)
        covered = [any(lo <= i < hi for lo, hi in ranges) for i in range(bucket.numel)]
        for span in bucket.spans:
            assert all(
                c == span.spec.info.sharding.is_split for c in covered[span.start : span.stop]
            )
        assert all(hi < lo for (_, hi), (lo, _) in zip(ranges, ranges[1:], strict=False)), "merged"


def test_intersect():
    assert intersect([(0, 64), (128, 256)], 32, 192) == [(0, 32), (96, 160)]
    assert intersect([(0, 64)], 64, 128) == []
