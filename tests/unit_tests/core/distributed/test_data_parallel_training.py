"""Data-parallel training over gloo equals the run of one process.

This holds for each combination of reduction, sharding and overlap.
"""

import functools

import pytest
import torch

from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState
from tests.support.compare import assert_same
from tests.support.tiny_ddp_model import (
    assemble,
    backward_pass,
    batch,
    boxes_of,
    build,
    fill,
    train,
)

STEPS = 22
ADAM = {"lr": 0.005, "weight_decay": 0.1, "adam_eps": 1e-5, "clip_grad": 3.0}
SMALL = {"ddp_bucket_size": 500}
PLAIN = dict(SMALL)
SHARDED = {**SMALL, "use_distributed_optimizer": True}
VARIANTS = {
    "all-reduce": PLAIN,
    "all-reduce overlapped": {**PLAIN, "overlap_grad_reduce": True},
    "sharded": SHARDED,
    "sharded, reduction overlapped": {**SHARDED, "overlap_grad_reduce": True},
    "sharded, gather overlapped": {**SHARDED, "overlap_param_gather": True},
    "sharded, both overlapped": {
        **SHARDED,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "sharded, one bucket": {
        "use_distributed_optimizer": True,
        "overlap_param_gather": True,
        "ddp_num_buckets": 1,
    },
}


@functools.cache
def one_process(tied=True, dtype=torch.float32):
    return train(0, 1, {}, ADAM, STEPS, count=1, dtype=dtype, tied=tied)


def mean(runs, what):
    return torch.tensor([run[what] for run in runs]).mean(0)


def assert_close_run(runs, expected):
    """Assert equality up to rounding, as sums are in another order.

    (With Adam's eps at 1e-8, an element whose gradient is rounding noise would move by the learning
    rate.)
    """
    torch.testing.assert_close(
        mean(runs, "losses"),
        mean([expected], "losses"),
        rtol=1e-6,
        atol=1e-6,
    )

    for run in runs:
        torch.testing.assert_close(
            mean([run], "norms"),
            mean([expected], "norms"),
            rtol=3e-6,
            atol=0,
        )
        for name, value in run["params"].items():
            torch.testing.assert_close(value, expected["params"][name], rtol=1e-5, atol=1e-6)

    for key, value in assemble([run["state"] for run in runs]).items():
        torch.testing.assert_close(value, assemble([expected["state"]])[key], rtol=1e-4, atol=1e-6)


# Four ranks run one variant of each kind of reduction; --run-slow runs all.
WITH_FOUR_RANKS = ("all-reduce overlapped", "sharded, both overlapped")
CASES = [(2, variant) for variant in VARIANTS]
for name in VARIANTS:
    CASES.append(pytest.param(4, name, marks=[] if name in WITH_FOUR_RANKS else [pytest.mark.slow]))


@pytest.mark.parametrize(("world_size", "variant"), CASES)
def test_training_equals_one_process_on_the_global_batch(pool, world_size, variant):
    runs = pool.run(train, world_size, VARIANTS[variant], ADAM, STEPS)
    assert runs[0]["buckets"] >= (5 if "one" not in variant else 3)
    for run in runs[1:]:
        assert_same(runs[0]["params"], run["params"])
        assert runs[0]["norms"] == run["norms"]
    assert_close_run(runs, one_process())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_overlaps_are_bitwise_equal(pool, dtype, tied):
    for reduction in ("all-reduce", "sharded"):
        expected, *others = (
            pool.run(train, 2, ddp, ADAM, 8, 2, dtype, tied)
            for name, ddp in VARIANTS.items()
            if name.startswith(reduction) and "one" not in name
        )
        assert others
        for runs in others:
            for run, reference in zip(runs, expected, strict=True):
                assert run["norms"] == reference["norms"]
                assert run["losses"] == reference["losses"]
                assert_same(run["params"], reference["params"])
                assert_same_boxes(run["state"], reference["state"])


def assert_same_boxes(left, right):
    assert left.keys() == right.keys()
    for key, (_, boxes) in left.items():
        for (offset, data), (other_offset, other) in zip(boxes, right[key][1], strict=True):
            assert offset == other_offset, key
            assert torch.equal(data, other), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sharding_is_bitwise_equal(pool, dtype):
    """Use two ranks, whose sums have only one order, and no clipping, because the norm is summed in
    another order.
    """
    config = {**ADAM, "clip_grad": 0.0}
    replicated, sharded = (pool.run(train, 2, ddp, config, 8, 2, dtype) for ddp in (PLAIN, SHARDED))

    assert_same(sharded[0]["params"], replicated[0]["params"])
    assert_same(assemble([run["state"] for run in sharded]), assemble([replicated[0]["state"]]))
    assert sharded[0]["norms"] == pytest.approx(replicated[0]["norms"], rel=1e-6)


def test_reduction_in_bf16_follows_fp32(pool):
    """All reductions in bf16 agree bitwise, and the losses follow the run that reduces in fp32."""
    config = {**ADAM, "clip_grad": 0.0}
    in_fp32 = pool.run(train, 2, SHARDED, config, 8, 2, torch.bfloat16)
    names = ("all-reduce", "all-reduce overlapped", "sharded", "sharded, both overlapped")
    ways = [{**VARIANTS[name], "grad_reduce_in_bf16": True} for name in names]
    expected, *others = (pool.run(train, 2, way, config, 8, 2, torch.bfloat16) for way in ways)

    for runs in others:
        assert_same(runs[0]["params"], expected[0]["params"])
    assert expected[0]["norms"] != in_fp32[0]["norms"]
    assert mean(expected, "losses").tolist() == pytest.approx(
        mean(in_fp32, "losses").tolist(),
        rel=2e-2,
    )


def test_sharded_sgd_equals_one_process(pool):
    config = {"optimizer": "sgd", "lr": 0.05, "weight_decay": 0.01}
    runs = pool.run(train, 4, VARIANTS["sharded, both overlapped"], config, STEPS, 1)
    assert_close_run(runs, train(0, 1, {}, config, STEPS, 1))


def train_and_evaluate(rank, world_size, ddp):
    """Evaluate directly after a step, then continue."""
    ps = ParallelState.create(ParallelConfig())
    chunk, optimizer = build(ps, DistributedDataParallelConfig(**ddp), OptimizerConfig(**ADAM))
    tokens, labels = batch(1000)
    losses = []
    for step in range(4):
        backward_pass(chunk, step)
        finalize_model_grads([chunk], ps)
        optimizer.step()
        with torch.no_grad():
            chunk.eval()
            losses.append(chunk(tokens, labels).item())
            chunk.train()
    return losses


def test_evaluation_after_overlapped_gather(pool):
    losses = pool.run(train_and_evaluate, 2, SHARDED)
    assert losses[0] == losses[1]
    assert pool.run(train_and_evaluate, 2, VARIANTS["sharded, both overlapped"]) == losses


def resume(rank, world_size, ddp, stored, plain, start, steps):
    ps = (
        ParallelState.create(ParallelConfig())
        if world_size > 1
        else ParallelState.for_rank(ParallelConfig())
    )
    chunk, optimizer = build(ps, DistributedDataParallelConfig(**ddp), OptimizerConfig(**ADAM))
    if stored is not None:
        model_state = chunk.sharded_state_dict()
        fill(optimizer.sharded_state_dict(model_state), stored)
        optimizer.load_state_dict(plain, model_state)

    for step in range(start, start + steps):
        backward_pass(chunk, step)
        finalize_model_grads([chunk], ps)
        optimizer.step()

    model_state = chunk.sharded_state_dict()
    return boxes_of(optimizer.sharded_state_dict(model_state)), optimizer.state_dict()


def test_resume_at_another_dp_size(pool):
    """The state is the same bit for bit after a change of DP; the same layout continues bit for
    bit.
    """
    both = VARIANTS["sharded, both overlapped"]
    saved = pool.run(resume, 4, both, None, None, 0, 3)
    whole = assemble([boxes for boxes, _ in saved])
    plain = saved[0][1]
    for world_size, ddp in ((1, PLAIN), (2, both), (3, SHARDED), (2, PLAIN)):
        loaded = pool.run(resume, world_size, ddp, whole, plain, 3, 0)
        assert_same(assemble([boxes for boxes, _ in loaded]), whole)
        assert loaded[0][1] == plain

    uninterrupted = pool.run(resume, 4, both, None, None, 0, 6)
    resumed = pool.run(resume, 4, both, whole, plain, 3, 3)
    assert_same(*(assemble([boxes for boxes, _ in runs]) for runs in (uninterrupted, resumed)))


def skip_one(rank, world_size, ddp):
    """Train with an overflow on one rank; return whether the step was skipped."""
    ps = ParallelState.create(ParallelConfig())
    config = OptimizerConfig(**ADAM, initial_loss_scale=64.0, hysteresis=1)
    chunk, optimizer = build(ps, DistributedDataParallelConfig(**ddp), config, torch.float16)
    outcomes = []
    for step in range(3):
        if step == 1 and rank == world_size - 1:
            chunk.module.decoder.layers[0].linear.bias.register_hook(
                lambda grad: grad * float("inf")
            )
        backward_pass(chunk, step, loss_scale=optimizer.loss_scale)
        finalize_model_grads([chunk], ps)
        outcomes.append((bool(optimizer.step().skipped), optimizer.loss_scale))
    return outcomes


@pytest.mark.parametrize("ddp", [PLAIN, SHARDED], ids=["all-reduce", "sharded"])
def test_all_ranks_skip_a_step_together(pool, ddp):
    expected = [(False, 64.0), (True, 32.0), (True, 16.0)]
    assert pool.run(skip_one, 2, ddp) == [expected, expected]
