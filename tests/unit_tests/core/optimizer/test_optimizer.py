"""The flat, fused optimizer against torch.optim on a plain copy of the model; one process."""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from tests.support.compare import assert_same
from tests.support.tiny_ddp_model import (
    HIDDEN,
    PADDED_VOCAB,
    VOCAB,
    TinyModel,
    backward_pass,
    batch,
    build,
    run,
    snapshot,
)
from tests.unit_tests.core.optimizer.torch_training import (
    ADAM,
    ONE,
    SGD,
    read_main_params,
    train_ours,
    train_with_torch_optim,
    without_padding,
)


@pytest.mark.parametrize("config", [ADAM, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_25_steps_match_torch_optim_bitwise(config, dtype):
    """Without clipping the gradients are equal, and the fused kernels are elementwise."""
    chunk, optimizer, _ = train_ours({**config, "clip_grad": 0.0}, 25, dtype=dtype)
    expected, _, _ = train_with_torch_optim(config, 25, dtype, clip=0.0)
    for name, value in read_main_params(chunk, optimizer).items():
        assert torch.equal(value, without_padding(expected[name], value)), name
    for name, param in chunk.module.named_parameters():
        assert torch.equal(param, expected[name].to(dtype)), name


@pytest.mark.parametrize("config", [ADAM, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("bucket_size", [None, 1, 600])
@pytest.mark.parametrize("tied", [True, False])
def test_25_clipped_steps_match_torch_optim(config, bucket_size, tied):
    ddp = DistributedDataParallelConfig(ddp_bucket_size=bucket_size)
    chunk, optimizer, results = train_ours({**config, "clip_grad": 4.0}, 25, ddp, tied=tied)
    expected, _, norms = train_with_torch_optim(config, 25, clip=4.0, fused=False, tied=tied)
    # Rounding errors of the parameters add up over the steps; they depend on the processor
    # (measured: 1.3e-6).
    our_norms = [result.grad_norm.item() for _, result in results]

    assert our_norms == pytest.approx(norms, rel=5e-6)
    assert max(norms) > 4.0 > min(norms), "both sides of the clipping threshold"

    for name, value in read_main_params(chunk, optimizer).items():
        expected_value = without_padding(expected[name], value)
        torch.testing.assert_close(value, expected_value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rounded", [("exp_avg",), ("exp_avg_sq",), ("exp_avg", "exp_avg_sq")])
def test_rounded_moments_match_torch_optim_with_rounding_bitwise(rounded):
    """10 steps, each followed by rounding the moments of torch.optim.AdamW to bf16."""
    dtypes = {f"{name}_dtype": "bf16" for name in rounded}
    chunk, optimizer, _ = train_ours({**ADAM, **dtypes, "clip_grad": 0.0}, 10)

    def round_moments(reference, args, kwargs):
        for state in reference.state.values():
            for name in rounded:
                state[name].copy_(state[name].bfloat16())

    hook = register_optimizer_step_post_hook(round_moments)
    try:
        expected, _, _ = train_with_torch_optim(ADAM, 10, clip=0.0)
    finally:
        hook.remove()

    unrounded, _, _ = train_with_torch_optim(ADAM, 10, clip=0.0)
    num_changed = 0
    for name, value in read_main_params(chunk, optimizer).items():
        assert torch.equal(value, without_padding(expected[name], value)), name
        num_changed += not torch.equal(value, without_padding(unrounded[name], value))

    assert num_changed > 0, "rounding must matter"

    for shard in optimizer.shards:
        for name, state in shard.state.items():
            assert state.dtype == (torch.bfloat16 if name in rounded else torch.float32)


def test_moments_match_torch_optim():
    chunk, optimizer, _ = train_ours({**ADAM, "clip_grad": 0.0}, 3)
    expected, reference, _ = train_with_torch_optim(ADAM, 3, clip=0.0)
    tensors = snapshot(chunk, optimizer)
    assert len(tensors) == 4 * len(expected)

    for name, param in expected.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            value = tensors[f"optimizer.state.{moment}.{name}"]
            expected_value = reference.state[param][moment]
            assert torch.equal(value, without_padding(expected_value, value)), name


def test_loss_scale_does_not_change_the_result():
    chunk, _, results = train_ours(ADAM, 5)
    scaled_chunk, _, scaled_results = train_ours({**ADAM, "loss_scale": 1024.0}, 5)
    for plain, scaled in zip(results, scaled_results, strict=True):
        loss, result = plain
        scaled_loss, scaled_result = scaled
        assert scaled_loss == loss
        assert torch.equal(scaled_result.grad_norm, result.grad_norm)

    for param, scaled_param in zip(chunk.parameters(), scaled_chunk.parameters(), strict=True):
        assert torch.equal(scaled_param, param)


def initial_params(dtype=torch.float32, **kwargs):
    model = TinyModel(dtype, **kwargs)
    model.initialize(seed=7)
    return {name: param.detach() for name, param in model.named_parameters()}


def test_decoupled_lr_applies_to_embedding_and_output_layer():
    config = {**SGD, "sgd_momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0}
    chunk, _, _ = train_ours(config, 1, tied=False)
    decoupled_chunk, _, _ = train_ours({**config, "decoupled_lr": 0.1}, 1, tied=False)
    coupled = dict(chunk.module.named_parameters())
    decoupled = dict(decoupled_chunk.module.named_parameters())
    for name, start in initial_params(tied=False).items():
        ratio = 2.0 if name in ("word_embeddings.weight", "output_layer.weight") else 1.0
        update = coupled[name] - start
        decoupled_update = decoupled[name] - start
        torch.testing.assert_close(decoupled_update, ratio * update, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_nonfinite_gradient_changes_nothing(dtype, bad):
    config = {**ADAM, "initial_loss_scale": 64.0, "hysteresis": 1}
    chunk, optimizer, _ = train_ours(config, 2, dtype=dtype)
    before = snapshot(chunk, optimizer)
    plain_before = optimizer.state_dict()

    # A step with one bad value
    backward_pass(chunk, 2, loss_scale=optimizer.loss_scale)
    chunk.module.decoder.layers[1].norm.main_grad[3] = bad
    finalize_model_grads([chunk], ONE)
    result = optimizer.step()

    assert result.skipped
    assert not torch.isfinite(result.grad_norm)
    assert_same(before, snapshot(chunk, optimizer))
    # The skipped step is not counted.
    assert optimizer.state_dict()["optimizer"] == plain_before["optimizer"]
    assert optimizer.loss_scale == (32.0 if dtype == torch.float16 else 1.0)

    # A good step
    ((_, result),) = run(chunk, optimizer, [3])
    assert not result.skipped
    assert count_steps(optimizer) == 3


def count_steps(optimizer):
    groups = optimizer.state_dict()["optimizer"]["param_groups"]
    return groups[0]["step"]


def test_fp16_lowers_its_loss_scale_until_gradients_fit():
    """Training continues once the initial scale, which is too high, has been lowered."""
    config = {**ADAM, "initial_loss_scale": 2.0**24, "hysteresis": 1}
    _, optimizer, results = train_ours(config, 20, dtype=torch.float16)
    skipped = [bool(result.skipped) for _, result in results]
    num_skipped = skipped.index(False)

    assert num_skipped > 0
    assert not any(skipped[num_skipped:])
    assert optimizer.loss_scale == 2.0 ** (24 - num_skipped)
    assert count_steps(optimizer) == 20 - num_skipped

    first_loss, _ = results[0]
    last_loss, _ = results[-1]
    assert last_loss < first_loss


def test_norm_and_zeros_match_the_model():
    chunk, optimizer = build(ONE, tied=False)
    backward_pass(chunk, 0)
    grads = torch.cat([p.main_grad.flatten() for p in chunk.module.parameters()])
    zeros = (grads == 0).sum().item()
    assert zeros > 2 * (PADDED_VOCAB - VOCAB) * HIDDEN - 1

    finalize_model_grads([chunk], ONE)
    norm = grads.double().norm().item()
    result = optimizer.step(count_zeros=True)

    assert result.grad_norm.item() == pytest.approx(norm, rel=1e-6)
    assert result.num_zeros.item() == zeros

    # Zeros are counted on request only.
    _, another_optimizer = build(ONE)
    assert another_optimizer.step().num_zeros is None


def test_per_token_loss_is_divided_by_all_tokens():
    """The loss is a sum over tokens, so larger micro-batches have a larger weight."""
    chunk, optimizer = build(ONE, config=OptimizerConfig(**SGD))
    reference, reference_optimizer = build(ONE, config=OptimizerConfig(**SGD))
    tokens, labels = batch(0)
    chunk.zero_grad_buffer()
    for rows in (slice(0, 2), slice(2, 8)):
        chunk(tokens[rows], labels[rows], reduction="sum").backward()
    finalize_model_grads([chunk], ONE, torch.tensor(tokens.numel()))
    reference.zero_grad_buffer()
    reference(tokens, labels).backward()
    finalize_model_grads([reference], ONE)

    norm = optimizer.step().grad_norm.item()
    expected_norm = reference_optimizer.step().grad_norm.item()
    assert norm == pytest.approx(expected_norm, rel=1e-5)
    for param, expected in zip(chunk.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-6)


def test_missing_learning_rate_is_an_error():
    with pytest.raises(ValueError, match="--lr must be given"):
        build(ONE, config=OptimizerConfig())
