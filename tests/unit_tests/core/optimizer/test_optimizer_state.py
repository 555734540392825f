"""State of the optimizer in checkpoints: boxes at any layout, plain data, vocabulary padding."""

import copy
import logging

import pytest
import torch

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import UPDATE_RULES, OptimizerConfig
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState
from tests.support.compare import assert_same
from tests.support.tiny_ddp_model import (
    HIDDEN,
    PADDED_VOCAB,
    VOCAB,
    assemble,
    boxes_of,
    build,
    fill,
    run,
    snapshot,
)

ONE = ParallelState.for_rank(ParallelConfig())
SHARDED = DistributedDataParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=500)
ADAM = {"lr": 0.01, "weight_decay": 0.1, "adam_beta2": 0.95}
SGD = {"optimizer": "sgd", "lr": 0.05, "weight_decay": 0.01}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def fill_with_garbage(chunk, optimizer):
    """Fill parameters and state with NaN, like uninitialized memory."""
    for bucket in chunk.buckets:
        for param in bucket.params:
            param.detach().fill_(float("nan"))
    for shard in optimizer.shards:
        for piece in shard.bucket.pieces():
            for data in shard.tensors.values():
                data[piece.start : piece.stop] = float("nan")


@pytest.mark.parametrize(
    "config", [ADAM, SGD, {**SGD, "sgd_momentum": 0.0}], ids=["adamw", "sgd", "plain sgd"]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_resumed_run_equals_uninterrupted_run(config, dtype):
    config = OptimizerConfig(**config, initial_loss_scale=2.0**16)
    chunk, optimizer = build(ONE, SHARDED, config, dtype)
    run(chunk, optimizer, range(3))
    saved = snapshot(chunk, optimizer)
    plain_state = copy.deepcopy(optimizer.state_dict())
    run(chunk, optimizer, range(3, 6))

    other, other_optimizer = build(ONE, DistributedDataParallelConfig(), config, dtype)
    fill_with_garbage(other, other_optimizer)
    model_state = other.sharded_state_dict()
    fill({**model_state, **other_optimizer.sharded_state_dict(model_state)}, saved)
    other_optimizer.load_state_dict(plain_state, model_state)
    run(other, other_optimizer, range(3, 6))

    assert_same(snapshot(chunk, optimizer), snapshot(other, other_optimizer))
    assert repr(optimizer.state_dict()) == repr(other_optimizer.state_dict())


def test_weight_decay_of_norms_follows_the_checkpoint():
    """As from DeepSpeed's own optimizer: without gradients, all weights shrink by the same factor."""
    config = OptimizerConfig(**ADAM, clip_grad=0.0)
    chunk, optimizer = build(ONE, config=config)
    state = optimizer.state_dict()
    assert [group["wd_mult"] for group in state["optimizer"]["param_groups"]] == [1.0, 0.0]

    for group in state["optimizer"]["param_groups"]:
        group["wd_mult"] = 1.0
    optimizer.load_state_dict(state, chunk.sharded_state_dict())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1]

    before = snapshot(chunk, optimizer)
    optimizer.step()
    after = snapshot(chunk, optimizer)

    for name in chunk.sharded_state_dict():
        torch.testing.assert_close(after[name], before[name] * (1 - 0.01 * 0.1))

    saved = optimizer.state_dict()["optimizer"]["param_groups"]
    assert [group["wd_mult"] for group in saved] == [1.0, 1.0]


def test_weights_are_computed_from_loaded_main_parameters():
    """A bf16 checkpoint resumed in fp32 uses the main parameters, which are more precise."""
    chunk, optimizer = build(ONE, dtype=torch.bfloat16)
    run(chunk, optimizer, range(3))
    saved = snapshot(chunk, optimizer)
    other, other_optimizer = build(ONE)
    model_state = other.sharded_state_dict()
    fill(model_state, saved)
    fill(other_optimizer.sharded_state_dict(model_state), saved)
    other_optimizer.load_state_dict(optimizer.state_dict(), model_state)
    tensors = snapshot(other, other_optimizer)

    for name in model_state:
        assert torch.equal(tensors[name], saved[f"optimizer.state.param.{name}"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reload_after_loading_only_weights(dtype):
    donor, donor_optimizer = build(ONE, dtype=dtype)
    run(donor, donor_optimizer, range(2))
    chunk, optimizer = build(ONE, SHARDED, dtype=dtype)
    fill_with_garbage(chunk, optimizer)
    model_state = chunk.sharded_state_dict()
    fill(model_state, assemble([boxes_of(donor.sharded_state_dict())]))
    optimizer.reload_model_params(model_state)
    expected = dict(donor.module.named_parameters())

    for name, param in chunk.module.named_parameters():
        assert torch.equal(param, expected[name]), name
    for shard in optimizer.shards:
        assert torch.equal(shard.param, shard.bucket.param_shard.float())


@pytest.mark.parametrize("config", [ADAM, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_stays_zero(config, dtype):
    config = OptimizerConfig(**config, initial_loss_scale=2.0**10)
    chunk, optimizer = build(ONE, SHARDED, config, dtype, tied=False)
    run(chunk, optimizer, range(10))
    padded = {id(chunk.module.word_embeddings.weight), id(chunk.module.output_layer.weight)}
    num_checked = 0
    for shard in optimizer.shards:
        bucket = shard.bucket
        for data in (*shard.tensors.values(), bucket.param_shard, bucket.grad_shard):
            is_gap = torch.ones_like(data, dtype=torch.bool)
            for piece in bucket.pieces():
                is_gap[piece.start : piece.stop] = False
                if id(piece.param) in padded:
                    rows = data[piece.start : piece.stop].view(PADDED_VOCAB, -1)
                    assert not rows[VOCAB:].any()
                    num_checked += 1
            assert not data[is_gap].any(), "elements of no parameter"

    assert num_checked >= 2 * 3


def test_state_dict_has_megatron_lms_form():
    config = OptimizerConfig(lr=0.01, decoupled_lr=0.02)
    _, optimizer = build(ONE, config=config, dtype=torch.float16)
    state = optimizer.state_dict()
    assert state["param_state_sharding_type"] == "fully_reshardable"

    groups = state["optimizer"]["param_groups"]
    assert [group["wd_mult"] for group in groups] == [1.0, 0.0, 1.0]
    assert [group["is_decoupled_lr"] for group in groups] == [False, False, True]

    for group in groups:
        assert set(group) == {
            "is_expert_parallel",
            "default_config",
            "wd_mult",
            "lr_mult",
            "is_decoupled_lr",
            "max_lr",
            "min_lr",
            "lr",
            "bias_correction",
            "betas",
            "eps",
            "weight_decay",
            "step",
        }
        assert type(group["step"]) is int

    assert set(state["grad_scaler"]) == {"scale", "growth_tracker", "hysteresis_tracker"}


@pytest.mark.parametrize("steps", [(3, 4), (None, 3)])
def test_missing_or_ambiguous_step_is_an_error(steps):
    chunk, optimizer = build(ONE)
    state = optimizer.state_dict()
    for group, step in zip(state["optimizer"]["param_groups"], steps, strict=True):
        group["step"] = step
        if step is None:
            del group["step"]

    with pytest.raises(ValueError, match="--no-load-optim"):
        optimizer.load_state_dict(state, chunk.sharded_state_dict())


def test_changed_hyperparameters_are_logged(caplog):
    chunk, optimizer = build(ONE)
    other, other_optimizer = build(ONE, config=OptimizerConfig(lr=0.1, adam_beta2=0.95))
    with caplog.at_level(logging.WARNING):
        other_optimizer.load_state_dict(optimizer.state_dict(), other.sharded_state_dict())
    assert "betas: the checkpoint has {(0.9, 0.999)}, continuing with {(0.9, 0.95)}" in caplog.text
    assert "eps" not in caplog.text
    assert other_optimizer.param_groups[0]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 2), (1, 3), (1, 5), (2, 1), (2, 4)])
def test_boxes_match_slices_of_dense_tensors(tp, dp, dtype):
    """Fill all ranks of a layout through their boxes, and compare with slices of dense tensors.

    As this holds for each layout, state is unchanged when it moves between any two of them.
    """
    config = ParallelConfig(tensor_model_parallel_size=tp)
    boxes = []
    for rank in range(tp * dp):
        ps = ParallelState.for_rank(config, tp * dp, rank)
        chunk, optimizer = build(ps, SHARDED, dtype=dtype, tied=False)
        fill_with_garbage(chunk, optimizer)
        model_state = chunk.sharded_state_dict()
        state = optimizer.sharded_state_dict(model_state)
        values = {key: random_values(key, entry.global_shape) for key, entry in state.items()}
        fill(state, values)
        optimizer._zero_padding(model_state)
        names = {id(param): name for name, param in chunk.module.named_parameters()}
        for shard in optimizer.shards:
            for piece in shard.bucket.pieces():
                for prefix, data in shard.tensors.items():
                    actual = data[piece.start : piece.stop]
                    dense = local_values(prefix + names[id(piece.param)], piece, ps).flatten()
                    expected = dense[piece.param_start :][: len(actual)]
                    assert torch.equal(actual, expected)

        boxes.append(boxes_of(state))

    tensors = assemble(boxes)
    assert len(tensors) == 3 * len(names)
    for key, tensor in tensors.items():
        assert torch.equal(tensor, random_values(key, tensor.shape)), key


def random_values(key, shape):
    """Return values that depend on the key only."""
    generator = torch.Generator().manual_seed(sum(key.encode()))
    return torch.rand(shape, generator=generator)


def local_values(key, piece, ps):
    """Return the values of the rank's parameter, computed without boxes."""
    local_rows, *columns = piece.param.shape
    if not piece.info.sharding.is_split:
        return random_values(key, piece.param.shape)
    padded_rows = HIDDEN
    rows = HIDDEN
    if "embeddings" in key or "output" in key:
        padded_rows = PADDED_VOCAB
        rows = VOCAB
    assert local_rows * ps.tp.size == padded_rows

    dense = torch.zeros(padded_rows, *columns)
    dense[:rows] = random_values(key, (rows, *columns))
    return dense.chunk(ps.tp.size)[ps.tp.rank]


@pytest.mark.parametrize("name", UPDATE_RULES)
def test_unchanged_hyperparameters_load_without_warning(name, caplog):
    options = {}
    if name == "ademamix":
        options = {"ademamix_beta3": 0.99, "ademamix_alpha": 4.0}
    chunk, optimizer = build(ONE, config=OptimizerConfig(name, lr=0.01, **options))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state, chunk.sharded_state_dict())
    assert not caplog.records
