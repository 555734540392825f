"""The average of the weights (--ema-decay) against torch's, in one process."""

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.parallel_state import ParallelConfig, ParallelState
from tests.support.compare import assert_same
from tests.support.tiny_ddp_model import assemble, backward_pass, boxes_of, build, run, snapshot

ONE = ParallelState.for_rank(ParallelConfig())
SHARDED = DistributedDataParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=500)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DECAY = 0.9


def make_config(**fields):
    return OptimizerConfig(
        lr=0.01,
        weight_decay=0.1,
        ema_decay=DECAY,
        initial_loss_scale=2.0**10,
        **fields,
    )


def get_average(chunk, optimizer):
    """Return the average by parameter."""
    state = assemble([boxes_of(optimizer.average_state(chunk.sharded_state_dict()))])
    return {key.removeprefix("ema."): value for key, value in state.items()}


def get_main_parameters(chunk, optimizer):
    prefix = "optimizer.state.param."
    parameters = {}
    for key, value in snapshot(chunk, optimizer).items():
        if key.startswith(prefix):
            parameters[key.removeprefix(prefix)] = value
    return parameters


def make_module(parameters):
    """Return a module with these parameters, for torch's averaging."""
    module = torch.nn.Module()
    for index, value in enumerate(parameters.values()):
        module.register_parameter(str(index), torch.nn.Parameter(value.clone()))
    return module


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ddp", [DistributedDataParallelConfig(), SHARDED], ids=["whole", "zero"])
def test_average_equals_torchs_bitwise(ddp, dtype):
    chunk, optimizer = build(ONE, ddp, make_config(), dtype, tied=False)
    module = make_module(get_main_parameters(chunk, optimizer))
    expected = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    expected.update_parameters(module)  # the first call copies
    for step in range(8):
        run(chunk, optimizer, [step])
        expected.update_parameters(make_module(get_main_parameters(chunk, optimizer)))
    average = get_average(chunk, optimizer)

    for value, reference in zip(average.values(), expected.module.parameters(), strict=True):
        assert value.dtype == torch.float32
        assert torch.equal(value, reference)


@pytest.mark.parametrize("rule", ["adam", "sgd", "muon"])
def test_skipped_step_leaves_the_average_unchanged(rule):
    chunk, optimizer = build(ONE, SHARDED, make_config(optimizer=rule))
    run(chunk, optimizer, range(2))
    before = get_average(chunk, optimizer)
    backward_pass(chunk, 2)
    finalize_model_grads([chunk], ONE)
    chunk.buckets[0].grad_shard[0] = float("inf")

    assert optimizer.step().skipped
    assert_same(get_average(chunk, optimizer), before)

    run(chunk, optimizer, [3])
    assert any(
        not torch.equal(value, before[name])
        for name, value in get_average(chunk, optimizer).items()
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_averaged_weights_are_exchanged_and_restored_bitwise(dtype):
    chunk, optimizer = build(ONE, SHARDED, make_config(), dtype)
    run(chunk, optimizer, range(4))
    before = snapshot(chunk, optimizer)
    average = get_average(chunk, optimizer)
    with optimizer.averaged_weights():
        inside = assemble([boxes_of(chunk.sharded_state_dict())])

    for name, value in average.items():
        assert torch.equal(inside[name], value.to(dtype)), name
        assert not torch.equal(inside[name], before[name]), name
    assert_same(snapshot(chunk, optimizer), before)
    assert_same(get_average(chunk, optimizer), average)


def test_training_is_not_affected():
    chunk, optimizer = build(ONE, SHARDED, make_config())
    other, other_optimizer = build(ONE, SHARDED, OptimizerConfig(lr=0.01, weight_decay=0.1))
    run(chunk, optimizer, range(3))
    with optimizer.averaged_weights():
        pass
    run(chunk, optimizer, range(3, 5))
    run(other, other_optimizer, range(5))

    assert_same(snapshot(chunk, optimizer), snapshot(other, other_optimizer))
    assert other_optimizer.average_state(other.sharded_state_dict()) == {}
