"""The layout of the contiguous buffers, as a pure function."""

import itertools
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
    for index in range(rng.randint(1, 30)):
        num_dims = rng.randint(1, 3)
        shape = tuple(rng.randint(1, 40) for _ in range(num_dims))
        suffix = rng.choice(["weight", "bias", "word_embeddings.weight"])
        random_spec = spec(
            f"p{index}.{suffix}",
            shape,
            sharding=rng.choice([REPLICATED, SPLIT]),
            partial_grad=rng.random() < 0.5,
            shared_embedding=rng.random() < 0.1,
        )
        specs.append(random_spec)
    return specs


def list_names(buckets):
    """Return the names of the parameters in their order in the buffer."""
    names = []
    for bucket in buckets:
        names += [span.spec.name for span in bucket.spans]
    return names


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_shards", [1, 3, 8])
@pytest.mark.parametrize("bucket_size", [1, 1000, 10**9])
def test_each_parameter_has_one_aligned_position(seed, num_shards, bucket_size):
    specs = random_specs(seed)
    buckets = plan_buffer(specs, bucket_size, num_shards)
    names = sorted(spec.name for spec in specs)
    assert sorted(list_names(buckets)) == names

    shard_step = num_shards * ALIGNMENT
    position = 0
    for bucket in buckets:
        assert bucket.start == position, "buckets are adjacent"
        assert bucket.numel % shard_step == 0, "shards are equal and aligned"

        end = 0
        for span in bucket.spans:
            assert span.stop - span.start == span.spec.numel
            assert span.start % ALIGNMENT == 0
            assert 0 <= span.start - end < ALIGNMENT
            assert span.spec.group == bucket.group
            end = span.stop

        assert end <= bucket.numel < end + shard_step + ALIGNMENT
        if any(span.spec.info.shared_embedding for span in bucket.spans):
            assert len(bucket.spans) == 1

        numel_before_last = sum(span.spec.numel for span in bucket.spans[:-1])
        assert numel_before_last < bucket_size, "it should have been closed before"

        position = bucket.stop


@pytest.mark.parametrize("seed", range(5))
def test_parameters_with_weight_decay_come_first_in_backward_order(seed):
    specs = random_specs(seed)
    names = list_names(plan_buffer(specs, 500, 2))
    matrices = []
    for random_spec in reversed(specs):
        is_matrix = len(random_spec.shape) > 1
        is_bias = random_spec.name.endswith(".bias")
        if is_matrix and not is_bias:
            matrices.append(random_spec.name)

    assert names[: len(matrices)] == matrices


def test_parameter_groups():
    matrix = (3, 4)
    decayed = ParamGroup(weight_decay=True, embedding=False)
    not_decayed = ParamGroup(weight_decay=False, embedding=False)
    embedding = ParamGroup(weight_decay=True, embedding=True)

    assert spec("a.weight", matrix).group == decayed
    assert spec("a.weight", (3,)).group == not_decayed
    assert spec("a.bias", matrix).group == not_decayed
    assert spec("embedding.word_embeddings.weight", matrix).group == embedding
    assert spec("output_layer.weight", matrix).group == embedding
    assert not spec("embedding.position_embeddings.weight", matrix).group.embedding


def is_split(info):
    return info.sharding.is_split


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
    first_names = [bucket.spans[0].spec.name for bucket in buckets]
    assert first_names == [
        "output_layer.weight",
        "layers.2.fc2.weight",
        "embedding.word_embeddings.weight",
        "layers.2.norm.weight",
    ]

    vectors = buckets[-1]
    assert len(find_ranges(vectors, lambda info: info.partial_grad)) == 1
    assert len(find_ranges(vectors, is_split)) == 1
    assert len(find_ranges(buckets[1], is_split)) == 1


@pytest.mark.parametrize("seed", range(10))
def test_ranges_cover_the_selected_parameters(seed):
    for bucket in plan_buffer(random_specs(seed), 3000, 2):
        ranges = find_ranges(bucket, is_split)
        covered = set()
        for start, stop in ranges:
            covered |= set(range(start, stop))
        for span in bucket.spans:
            positions = set(range(span.start, span.stop))
            if is_split(span.spec.info):
                assert positions <= covered
            else:
                assert positions.isdisjoint(covered)
        for (_, stop), (next_start, _) in itertools.pairwise(ranges):
            assert stop < next_start, "adjacent ranges are one"


def test_intersect():
    assert intersect([(0, 64), (128, 256)], 32, 192) == [(0, 32), (96, 160)]
    assert intersect([(0, 64)], 64, 128) == []
