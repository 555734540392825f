"""Optimizer state in bf16, fp16 and fp8 is stored in fp32 and continues as if not interrupted."""

import shlex
from typing import NamedTuple

import pytest
import torch

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.training.checkpoint.contents import get_state_to_save
from tests.support.training_harness import (
    COMMON,
    DISTRIBUTED_OPTIMIZER,
    MODELS,
    datasets_provider,
    forward_step,
    model_provider,
    parse_args,
    pretrain,
    train,
    whole,
)

PLAIN = (
    f"--mock-data --train-iters 4 {MODELS['gpt2']} --num-layers 2 --bf16 --save-interval 2 "
    "--use-precision-aware-optimizer "
)
FLAGS = f"{PLAIN} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
SCALED = f"{PLAIN} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 --main-params-dtype fp16 "
LAYOUTS = {
    "one": (1, ""),
    "dp2": (2, DISTRIBUTED_OPTIMIZER),
    "dp2_replicated": (2, ""),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
}


@pytest.mark.parametrize(
    ("first", "second"),
    [("dp2", "dp2"), ("dp2", "dp2_replicated"), ("dp2_replicated", "dp2"), ("one", "pp2")],
)
def test_resume_with_rounded_moments_is_bitwise(pool, first, second, tmp_path):
    ranks, flags = LAYOUTS[first]
    at_once = whole(pool.run(train, ranks, f"{FLAGS} {flags}"))
    pool.run(train, ranks, f"{FLAGS} {flags} --exit-interval 2 --save {tmp_path}")
    ranks, flags = LAYOUTS[second]
    resumed = whole(pool.run(train, ranks, f"{FLAGS} {flags} --load {tmp_path}"))

    assert at_once.keys() == resumed.keys()
    for key, tensor in at_once.items():
        assert torch.equal(tensor, resumed[key]), key


@pytest.mark.parametrize("save", ["", "--async-save"])
@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_resume_with_scaled_state_is_bitwise(pool, layout, save, tmp_path):
    """At the layout of the save, a load computes the same scales."""
    ranks, flags = LAYOUTS[layout]
    flags = f"{SCALED} {flags}"
    at_once = whole(pool.run(train, ranks, flags))
    saved = whole(pool.run(train, ranks, f"{flags} --exit-interval 2 --save {tmp_path} {save}"))
    loaded = whole(pool.run(train, ranks, f"{flags} --load {tmp_path} --skip-train"))
    resumed = whole(pool.run(train, ranks, f"{flags} --load {tmp_path}"))

    for key, tensor in at_once.items():
        assert torch.equal(tensor, resumed[key]), key
        assert torch.equal(saved[key], loaded[key]), key


class Precision(NamedTuple):
    """Rounding error of a scaled state: values much smaller than the largest one are multiples of a
    spacing.
    """

    relative: float
    spacing: float  # relative to the largest value


FP8 = Precision(2**-4, 2**-9 / 448)
FP16 = Precision(2**-11, 2**-24 / 32752)
PRECISIONS = {"exp_avg": FP8, "exp_avg_sq": FP16, "param": FP16}


def test_scaled_state_loads_at_another_layout(pool, tmp_path):
    """The scales of other shards round again, by at most half of the distance of two values."""
    saved = whole(pool.run(train, 1, f"{SCALED} --save {tmp_path}"))
    load = f"--load {tmp_path} --skip-train"
    loaded = whole(pool.run(train, 2, f"{SCALED} {DISTRIBUTED_OPTIMIZER} {load}"))
    plain = whole(pool.run(train, 1, f"{PLAIN} {load}"))
    for key, tensor in saved.items():
        assert torch.equal(plain[key], tensor), key
        for state, precision in PRECISIONS.items():
            if key.startswith(f"optimizer.state.{state}."):
                magnitude = tensor.abs()
                bound = precision.relative * magnitude + precision.spacing * magnitude.max()
                error = (loaded[key] - tensor).abs()
                assert torch.all(error <= bound), key


def collect_copies(rank, world_size, flags):
    """Return the keys of the tensors of a checkpoint that are copies of the state."""
    config = parse_args(shlex.split(COMMON + flags), world_size)
    run = pretrain(config, model_provider, datasets_provider, forward_step)
    live = {get_address(tensor) for tensor in list_tensors(run)}
    copies = []
    for key, entry in get_state_to_save(run).items():
        if isinstance(entry, ShardedTensor):
            is_weight = key in run.known_state.model
            assert entry.dtype == (torch.bfloat16 if is_weight else torch.float32)
            for box in entry.boxes:
                if get_address(box.tensor) not in live:
                    copies.append(key)
    return copies


def get_address(tensor):
    return tensor.untyped_storage().data_ptr()


def list_tensors(run):
    for chunk in run.chunks:
        yield from chunk.parameters()
    for shard in run.optimizer.shards:
        yield from shard.tensors.values()


@pytest.mark.parametrize("flags", [FLAGS, SCALED], ids=["bf16", "scaled"])
def test_saves_do_not_copy_the_state(pool, flags):
    """Copies in fp32 would take 8 bytes per parameter of the device until a save is written."""
    (copies,) = pool.run(collect_copies, 1, flags)
    assert copies == []


@pytest.fixture(scope="module")
def rounded_run(pool, tmp_path_factory):
    """Return the directory and the final state of a run with moments in bf16."""
    directory = tmp_path_factory.mktemp("rounded")
    saved = whole(pool.run(train, 1, f"{FLAGS} --save {directory}"))
    return directory, saved


def test_rounded_moments_are_stored_in_fp32(rounded_run):
    _, saved = rounded_run
    for key, tensor in saved.items():
        if "exp_avg" in key:
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, tensor.bfloat16().float()), key
            assert torch.any(tensor != 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rounded_moments_load_at_another_layout(pool, rounded_run, layout):
    directory, saved = rounded_run
    ranks, flags = LAYOUTS[layout]
    loaded = whole(pool.run(train, ranks, f"{FLAGS} {flags} --load {directory} --skip-train"))
    for key, tensor in saved.items():
        assert torch.equal(tensor, loaded[key]), key


def test_fp32_moments_are_rounded_on_load(pool, tmp_path):
    saved = whole(pool.run(train, 1, f"{PLAIN} --save {tmp_path}"))
    loaded = whole(pool.run(train, 1, f"{FLAGS} --load {tmp_path} --skip-train"))
    for key, tensor in saved.items():
        expected = tensor
        if "exp_avg" in key:
            expected = tensor.bfloat16().float()
        assert torch.equal(loaded[key], expected), key


def test_bf16_main_gradients_are_those_of_grad_reduce_in_bf16(pool):
    flags = FLAGS + LAYOUTS["dp2"][1]
    by_dtype = whole(pool.run(train, 2, f"{flags} --main-grads-dtype bf16"))
    by_flag = whole(pool.run(train, 2, f"{flags} --grad-reduce-in-bf16"))
    in_fp32 = whole(pool.run(train, 2, flags))
    for key, tensor in by_flag.items():
        assert torch.equal(by_dtype[key], tensor), key
    assert not all(torch.equal(by_dtype[key], tensor) for key, tensor in in_fp32.items())
