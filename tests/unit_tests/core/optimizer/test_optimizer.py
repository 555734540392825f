"""The flat, fused optimizer against torch.optim on a plain copy of the model; one process."""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import Axis, ParallelState
from tests.support.compare import assert_same
from tests.support.tiny_ddp_model import (
    HIDDEN,
    PADDED_VOCAB,
    VOCAB,
    TinyModel,
    backward_pass,
    batch,
    build,
    microbatches,
    run,
    snapshot,
)

ONE = ParallelState.for_rank(ParallelConfig())
BUCKETS = DistributedDataParallelConfig(ddp_bucket_size=600, overlap_grad_reduce=True)
ADAM = {"lr": 0.01, "weight_decay": 0.1, "adam_beta2": 0.95}
SGD = {"optimizer": "sgd", "lr": 0.05, "weight_decay": 0.01}


def train_ours(config, steps, ddp=BUCKETS, dtype=torch.float32, **kwargs):
    chunk, optimizer = build(ONE, ddp, OptimizerConfig(**config), dtype, **kwargs)
    return chunk, optimizer, run(chunk, optimizer, range(steps))


def make_torch_groups(params, config, model):
    """Return torch.optim groups of the main copies: no weight decay for 1-D parameters."""
    decayed = {name: p.dim() > 1 for name, p in model.named_parameters()}
    weight_decay = config["weight_decay"]
    return [
        {
            "params": [p for name, p in params.items() if decayed[name]],
            "weight_decay": weight_decay,
        },
        {"params": [p for name, p in params.items() if not decayed[name]], "weight_decay": 0.0},
    ]


def train_with_torch_optim(config, steps, dtype=torch.float32, clip=1.0, fused=True, **kwargs):
    """Train with a plain loop and fp32 main copies of the parameters."""
    model = TinyModel(dtype, **kwargs)
    model.initialize(seed=7)
    main = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    groups = make_torch_groups(main, config, model)
    if config.get("optimizer") == "sgd":
        optimizer = torch.optim.SGD(groups, lr=config["lr"], momentum=0.9, fused=fused)
    else:
        optimizer = torch.optim.AdamW(groups, lr=config["lr"], betas=(0.9, 0.95), fused=fused)
    norms = []
    for step in range(steps):
        for value in main.values():
            value.grad = torch.zeros_like(value)
        for tokens, labels in microbatches(step, Axis(), 2):
            model.zero_grad()
            (model(tokens, labels) / 2).backward()
            for name, param in model.named_parameters():
                main[name].grad += param.grad.float()
        norms.append(
            torch.cat([value.grad.flatten().double() for value in main.values()]).norm().item()
        )
        if clip:
            for value in main.values():
                value.grad *= min(1.0, clip / (norms[-1] + 1e-6))
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(main[name])
    return main, optimizer, norms


def main_params(chunk, optimizer):
    """Return the fp32 main parameters by name, read through their boxes."""
    prefix = "optimizer.state.param."
    state = snapshot(chunk, optimizer)
    return {
        key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)
    }


@pytest.mark.parametrize("config", [ADAM, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_25_steps_match_torch_optim_bitwise(config, dtype):
    """Without clipping the gradients are equal, and the fused kernels are elementwise."""
    chunk, optimizer, _ = train_ours({**config, "clip_grad": 0.0}, 25, dtype=dtype)
    expected, _, _ = train_with_torch_optim(config, 25, dtype, clip=0.0)
    for name, value in main_params(chunk, optimizer).items():
        assert torch.equal(value, expected[name][: len(value)]), name
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
    assert [result.grad_norm.item() for _, result in results] == pytest.approx(norms, rel=5e-6)
    assert max(norms) > 4.0 > min(norms), "both sides of the clipping threshold"
    for name, value in main_params(chunk, optimizer).items():
        torch.testing.assert_close(value, expected[name][: len(value)], rtol=1e-5, atol=1e-6)


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
    plain, _, _ = train_with_torch_optim(ADAM, 10, clip=0.0)
    found = main_params(chunk, optimizer)
    for name, value in found.items():
        assert torch.equal(value, expected[name][: len(value)]), name
    assert any(not torch.equal(value, plain[name][: len(value)]) for name, value in found.items())
    for shard in optimizer.shards:
        for name, state in shard.state.items():
            assert state.dtype == (torch.bfloat16 if name in rounded else torch.float32)


def test_moments_match_torch_optim():
    chunk, optimizer, _ = train_ours({**ADAM, "clip_grad": 0.0}, 3)
    expected, reference, _ = train_with_torch_optim(ADAM, 3, clip=0.0)
    whole = snapshot(chunk, optimizer)
    assert len(whole) == 4 * len(expected)
    for name, param in expected.items():
        for state in ("exp_avg", "exp_avg_sq"):
            value = whole[f"optimizer.state.{state}.{name}"]
            assert torch.equal(value, reference.state[param][state][: len(value)]), name


def test_loss_scale_does_not_change_the_result():
    plain_run = train_ours(ADAM, 5)
    scaled = train_ours({**ADAM, "loss_scale": 1024.0}, 5)
    for (loss, result), (scaled_loss, scaled_result) in zip(plain_run[2], scaled[2], strict=True):
        assert loss == scaled_loss
        assert torch.equal(result.grad_norm, scaled_result.grad_norm)
    assert all(map(torch.equal, plain_run[0].parameters(), scaled[0].parameters()))


def initial_params(dtype=torch.float32, **kwargs):
    model = TinyModel(dtype, **kwargs)
    model.initialize(seed=7)
    return {name: param.detach() for name, param in model.named_parameters()}


def test_decoupled_lr_applies_to_embedding_and_output_layer():
    config = {**SGD, "sgd_momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0}
    before = initial_params(tied=False)
    coupled, decoupled = (
        dict(train_ours({**config, **extra}, 1, tied=False)[0].module.named_parameters())
        for extra in ({}, {"decoupled_lr": 0.1})
    )
    for name, start in before.items():
        ratio = 2.0 if name in ("word_embeddings.weight", "output_layer.weight") else 1.0
        torch.testing.assert_close(
            decoupled[name] - start, ratio * (coupled[name] - start), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_nonfinite_gradient_changes_nothing(dtype, bad):
    chunk, optimizer, _ = train_ours(
        {**ADAM, "initial_loss_scale": 64.0, "hysteresis": 1}, 2, dtype=dtype
    )
    before = snapshot(chunk, optimizer)
    plain_before = optimizer.state_dict()
    backward_pass(chunk, 2, loss_scale=optimizer.loss_scale)
    chunk.module.decoder.layers[1].norm.main_grad[3] = bad
    finalize_model_grads([chunk], ONE)
    result = optimizer.step()
    assert result.skipped
    assert not torch.isfinite(result.grad_norm)
    assert_same(before, snapshot(chunk, optimizer))
    assert optimizer.state_dict()["optimizer"] == plain_before["optimizer"], (
        "the skipped step must not be counted"
    )
    assert optimizer.loss_scale == (32.0 if dtype == torch.float16 else 1.0)
    ((_, result),) = run(chunk, optimizer, [3])
    assert not result.skipped
    assert optimizer.state_dict()["optimizer"]["param_groups"][0]["step"] == 3


def test_fp16_lowers_its_loss_scale_until_gradients_fit():
    """Training continues once the initial scale, which is too high, has been lowered."""
    chunk, optimizer, results = train_ours(
        {**ADAM, "initial_loss_scale": 2.0**24, "hysteresis": 1}, 20, dtype=torch.float16
    )
    skipped = [bool(result.skipped) for _, result in results]
    first = skipped.index(False)
    assert first > 0
    assert not any(skipped[first:])
    assert optimizer.loss_scale == 2.0 ** (24 - first)
    assert optimizer.state_dict()["optimizer"]["param_groups"][0]["step"] == 20 - first
    assert results[-1][0] < results[0][0]


def test_norm_and_zeros_match_the_model():
    chunk, optimizer = build(ONE, tied=False)
    backward_pass(chunk, 0)
    grads = torch.cat([p.main_grad.flatten() for p in chunk.module.parameters()])
    zeros = (grads == 0).sum().item()
    assert zeros > 2 * (PADDED_VOCAB - VOCAB) * HIDDEN - 1
    finalize_model_grads([chunk], ONE)
    result = optimizer.step(count_zeros=True)
    assert result.grad_norm.item() == pytest.approx(grads.double().norm().item(), rel=1e-6)
    assert result.num_zeros.item() == zeros
    assert build(ONE)[1].step().num_zeros is None


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
    results = [o.step().grad_norm.item() for o in (optimizer, reference_optimizer)]
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    for param, expected in zip(chunk.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-6)


def test_missing_learning_rate_is_an_error():
    with pytest.raises(ValueError, match="--lr must be given"):
        build(ONE, config=OptimizerConfig())
