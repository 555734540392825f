"""Optimizer state in bf16, fp16 and fp8 is stored in fp32 and continues as if not interrupted."""

import shlex

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


def test_scaled_state_loads_at_another_layout(pool, tmp_path):
    """The scales of other shards round again, by at most half of the distance of two values."""
    saved = whole(pool.run(train, 1, f"{SCALED} --save {tmp_path}"))
    loaded = whole(
        pool.run(train, 2, f"{SCALED} {DISTRIBUTED_OPTIMIZER} --load {tmp_path} --skip-train")
    )
    plain = whole(pool.run(train, 1, f"{PLAIN} --load {tmp_path} --skip-train"))
    precision = {"exp_avg.": 2**-4, "exp_avg_sq.": 2**-11, "param.": 2**-11}
    for key, tensor in saved.items():
        assert torch.equal(plain[key], tensor), key
        for kind, relative in precision.items():
            if key.startswith(f"optimizer.state.{kind}"):
                # Values much smaller than the largest one are multiples of a spacing.
                spacing = 2**-9 / 448 if kind == "exp_avg." else 2**-24 / 32752
                bound = relative * tensor.abs() + spacing * tensor.abs().max()
                assert torch.all((loaded[key] - tensor).abs() <= bound), key


def collect_copies(rank, world_size, flags):
    """Return the keys of the tensors of a checkpoint that are copies of the state."""
    config = parse_args(shlex.split(COMMON + flags), world_size)
    run = pretrain(config, model_provider, datasets_provider, forward_step)
    live = {tensor.untyped_storage().data_ptr() for tensor in find_tensors(run)}
    copies = []
    for key, entry in get_state_to_save(run).items():
        if isinstance(entry, ShardedTensor):
            assert entry.dtype == (
                torch.bfloat16 if key in run.known_state.model else torch.float32
            )
            for box in entry.boxes:
                if box.tensor.untyped_storage().data_ptr() not in live:
                    copies.append(key)
    return copies


def find_tensors(run):
    for chunk in run.chunks:
        yield from chunk.parameters()
    for shard in run.optimizer.shards:
        yield from shard.tensors.values()


@pytest.mark.parametrize("flags", [FLAGS, SCALED], ids=["bf16", "scaled"])
def test_saves_do_not_copy_the_state(pool, flags):
    """Copies in fp32 would take 8 bytes per parameter of the device until a save is written."""
    (copies,) = pool.run(collect_copies, 1, flags)
    assert copies == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rounded_moments_load_at_another_layout(pool, layout, tmp_path):
    """The state is fp32 with values of bf16, and loads unchanged; so does fp32 state, rounded."""
    saved = whole(pool.run(train, 1, f"{FLAGS} --save {tmp_path}"))
    moments = {key: value for key, value in saved.items() if "exp_avg" in key}
    for key, tensor in moments.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, tensor.bfloat16().float()), key
        assert tensor.abs().sum() > 0
    ranks, flags = LAYOUTS[layout]
    loaded = whole(pool.run(train, ranks, f"{FLAGS} {flags} --load {tmp_path} --skip-train"))
    for key, tensor in saved.items():
        assert torch.equal(tensor, loaded[key]), key


def test_fp32_moments_are_rounded_on_load(pool, tmp_path):
    saved = whole(pool.run(train, 1, f"{PLAIN} --save {tmp_path}"))
    loaded = whole(pool.run(train, 1, f"{FLAGS} --load {tmp_path} --skip-train"))
    for key, tensor in saved.items():
        expected = tensor.bfloat16().float() if "exp_avg" in key else tensor
        assert torch.equal(loaded[key], expected), key


def test_bf16_main_gradients_are_those_of_grad_reduce_in_bf16(pool):
    flags = FLAGS + LAYOUTS["dp2"][1]
    named = whole(pool.run(train, 2, f"{flags} --main-grads-dtype bf16"))
    other = whole(pool.run(train, 2, f"{flags} --grad-reduce-in-bf16"))
    plain = whole(pool.run(train, 2, flags))
    assert all(torch.equal(named[key], other[key]) for key in other)
    assert any(not torch.equal(named[key], plain[key]) for key in plain)
