"""AdEMAMix, Lion and Muon against plain loops over whole matrices, and Muon with split matrices."""

import dataclasses
import math

import pytest
import torch

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.orthogonalization import (
    Orthogonalizer,
    compute_scale,
    orthogonalize,
)
from megatron.core.optimizer.rules.ademamix import compute_slow_beta, compute_slow_weight
from megatron.core.optimizer.update_rules import UPDATE_RULES
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState
from megatron.core.sharding import Sharding
from tests.support.compare import assert_same
from tests.support.tiny_ddp_model import HIDDEN, LAYERS, assemble, build, train

ONE = ParallelState.for_rank(ParallelConfig())
ADEMAMIX = {
    "optimizer": "ademamix", "lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0, "ademamix_beta3": 0.99,
    "ademamix_alpha": 4.0, "ademamix_beta3_warmup": 6, "ademamix_alpha_warmup": 4,
}  # fmt: skip
MUON = {
    "optimizer": "muon", "lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0, "muon_momentum": 0.9,
    "muon_extra_scale_factor": 0.2, "muon_nesterov": True,
}  # fmt: skip


def step_on_noise(config, steps=8, bad_step=None):
    """Return initial parameters, random gradients, final parameters, and the optimizer."""
    chunk, optimizer = build(ONE, DistributedDataParallelConfig(), OptimizerConfig(**config))
    generator = torch.Generator().manual_seed(0)
    names = [name for name, _ in chunk.module.named_parameters()]
    params = dict(chunk.module.named_parameters())
    start = {name: p.detach().clone() for name, p in params.items()}
    gradients = []
    for step in range(steps):
        gradients.append(
            {name: torch.randn(p.shape, generator=generator) for name, p in params.items()}
        )
        for name in names:
            params[name].main_grad.copy_(gradients[-1][name])
        if step == bad_step:
            params[names[0]].main_grad.view(-1)[0] = math.inf
        optimizer.step()
    return start, gradients, {name: p.detach() for name, p in params.items()}, optimizer


def has_weight_decay(name):
    return not name.endswith("bias") and name.split(".")[-1] not in ("norm", "scale")


def test_lion_matches_the_paper():
    """Matrices move by signs, other parameters by Adam; a step with overflow changes nothing."""
    config = {"optimizer": "lion", "lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0}
    start, gradients, end, optimizer = step_on_noise(config, bad_step=3)
    del gradients[3]
    states = optimizer.sharded_state_dict(optimizer.chunks[0].sharded_state_dict())
    num_matrices = 0
    for name, param in start.items():
        if f"optimizer.state.exp_avg_sq.{name}" in states:
            continue
        num_matrices += 1
        mean = torch.zeros_like(param, dtype=torch.float64)
        param = param.double()
        for gradient in (g[name].double() for g in gradients):
            direction = torch.sign(0.9 * mean + 0.1 * gradient)
            mean = 0.999 * mean + 0.001 * gradient
            param = param - 0.01 * (direction + 0.1 * param)
        torch.testing.assert_close(end[name].double(), param, rtol=1e-4, atol=1e-6)
    assert num_matrices > 1


def test_ademamix_matches_the_paper():
    start, gradients, end, _ = step_on_noise(ADEMAMIX)
    for name, param in start.items():
        fast = slow = square = torch.zeros_like(param, dtype=torch.float64)
        param = param.double()
        for t, gradient in enumerate((g[name].double() for g in gradients), start=1):
            alpha = min(4.0, 4.0 * t / 4)
            log1 = math.log(0.9)
            log3 = math.log(0.99)
            done = min(1.0, t / 6)
            beta3 = min(0.99, math.exp(log1 * log3 / ((1 - done) * log3 + done * log1)))
            fast = 0.9 * fast + 0.1 * gradient
            slow = beta3 * slow + (1 - beta3) * gradient
            square = 0.999 * square + 0.001 * gradient**2
            direction = (fast / (1 - 0.9**t) + alpha * slow) / (
                (square / (1 - 0.999**t)).sqrt() + 1e-8
            )
            param = param - 0.01 * (direction + (0.1 if has_weight_decay(name) else 0.0) * param)
        torch.testing.assert_close(end[name].double(), param, rtol=1e-4, atol=1e-6)


def test_ademamix_warmup_of_the_slow_mean():
    steps = torch.tensor([0.0, 50.0, 100.0, 1000.0])
    betas = compute_slow_beta(steps, 0.9, 0.9999, 100)
    assert betas[0] == pytest.approx(0.9) and betas.diff().ge(0).all()
    assert betas[2] == betas[3] == pytest.approx(0.9999)
    half_lives = math.log(0.5) / betas.double().log()
    middle = (math.log(0.5) / math.log(0.9) + math.log(0.5) / math.log(0.9999)) / 2
    assert half_lives[1] == pytest.approx(middle, rel=1e-2)  # grows linearly
    assert compute_slow_weight(steps, 8.0, 100).tolist() == pytest.approx([0.0, 4.0, 8.0, 8.0])
    assert compute_slow_weight(steps, 8.0, None).tolist() == [8.0] * 4


@pytest.mark.parametrize("shape", [(16, 16), (24, 8), (8, 40)])
@pytest.mark.parametrize("kind", ["simple", "quintic"])
def test_orthogonalize_keeps_singular_vectors(shape, kind):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    result = orthogonalize(matrix, kind)
    values = u.mT @ result @ v.mT
    torch.testing.assert_close(values, values.diagonal().diag(), rtol=0, atol=1e-9)
    assert values.diagonal().min() > 0.3 and values.diagonal().max() < 1.35


def test_compute_scale():
    assert compute_scale(9, 4, "spectral") == compute_scale(4, 9, "spectral") == 3.0
    assert compute_scale(16, 4, "unit_rms_norm") == compute_scale(16, 4, "shape_scaling") == 2.0
    assert (
        compute_scale(4, 16, "unit_rms_norm") == 0.5
        and compute_scale(4, 16, "shape_scaling") == 1.0
    )


def test_muon_updates_matrices_and_adam_other_parameters():
    start, gradients, end, optimizer = step_on_noise(MUON)
    matrices = [name for name in start if name.endswith("linear.weight")]
    assert len(matrices) == LAYERS and start[matrices[0]].shape == (HIDDEN, HIDDEN)
    for name in matrices:
        param = start[name].double()
        mean = torch.zeros(HIDDEN, HIDDEN, dtype=torch.float64)
        for gradient in (g[name].double() for g in gradients):
            mean = 0.9 * mean + 0.1 * gradient
            update = orthogonalize(0.1 * gradient + 0.9 * mean) * HIDDEN**0.5 * 0.2
            param = param - 0.01 * (update + 0.1 * param)
        torch.testing.assert_close(end[name].double(), param, rtol=1e-4, atol=1e-5)
    _, _, adam, _ = step_on_noise({**MUON, "optimizer": "adam"})
    others = set(start) - set(matrices)
    assert_same({name: end[name] for name in others}, {name: adam[name] for name in others})
    assert not torch.equal(end[matrices[0]], adam[matrices[0]])
    kept = [set(shard.state) for shard in optimizer.shards]
    assert {"momentum_buffer"} in kept and {"exp_avg", "exp_avg_sq"} in kept


@pytest.mark.parametrize("config", [ADEMAMIX, MUON], ids=lambda c: c["optimizer"])
@pytest.mark.parametrize("bad_step", [0, 3])
def test_nonfinite_gradient_changes_nothing(config, bad_step):
    chunk, optimizer = build(ONE, DistributedDataParallelConfig(), OptimizerConfig(**config))
    params = dict(chunk.module.named_parameters())
    for step in range(5):
        before = [t.clone() for shard in optimizer.shards for t in shard.tensors.values()]
        for param in params.values():
            param.main_grad.fill_(math.nan if step == bad_step else 0.1 * (step + 1))
        optimizer.step()
        after = [t for shard in optimizer.shards for t in shard.tensors.values()]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert same == (step == bad_step)
        assert all(t.isfinite().all() for t in after)


@pytest.mark.parametrize("config", [ADEMAMIX, MUON], ids=lambda c: c["optimizer"])
def test_distributed_optimizer_matches_one_process(pool, config):
    alone = train(0, 1, {}, config, 6, 1)
    sharded = {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "ddp_bucket_size": 500,
    }
    for ddp, count in (({}, 1), (sharded, 1)):
        runs = pool.run(train, 2, ddp, config, 6, count)
        for run in runs:
            for name, value in run["params"].items():
                torch.testing.assert_close(
                    value, alone["params"][name], rtol=2e-4, atol=2e-5, msg=name
                )
        state, expected = (assemble([run["state"] for run in group]) for group in (runs, [alone]))
        assert state.keys() == expected.keys()
        for key, value in state.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-5, msg=key)


def orthogonalize_part(rank, world_size, whole, dim, blocks):
    """Orthogonalize this rank's part of a matrix."""
    ps = ParallelState.create(ParallelConfig(tensor_model_parallel_size=world_size))
    config = OptimizerConfig(lr=0.1, muon_scale_mode="unit_rms_norm")
    local = whole.chunk(world_size, dim - 2)[rank]
    sharding = Sharding(dim=dim + whole.dim() - 2, axis=ps.tp, row_blocks=blocks)
    return Orthogonalizer(config).orthogonalize(local, sharding)


@pytest.mark.parametrize(("dim", "blocks"), [(0, ()), (1, ()), (0, (4, 2, 2))])
def test_matrix_split_over_tp_is_orthogonalized_as_a_whole(pool, dim, blocks):
    whole = torch.randn(32, 12, generator=torch.Generator().manual_seed(2))
    parts = pool.run(orthogonalize_part, 2, whole, dim, blocks)
    expected = orthogonalize(whole) * (32 / 12) ** 0.5
    if blocks:  # queries, keys and values of 4 groups
        expected = torch.empty(4, 8, 12)
        for start, stop in ((0, 4), (4, 6), (6, 8)):
            rows = whole.view(4, 8, 12)[:, start:stop]
            matrix = rows.reshape(-1, 12)
            expected[:, start:stop] = (orthogonalize(matrix) * (len(matrix) / 12) ** 0.5).view(
                rows.shape
            )
        expected = expected.view(32, 12)
    torch.testing.assert_close(torch.cat(parts, dim), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dim", [0, 1])
def test_each_expert_is_orthogonalized_separately(pool, dim):
    experts = torch.randn(3, 32, 12, generator=torch.Generator().manual_seed(3))
    parts = pool.run(orthogonalize_part, 2, experts, dim, ())
    expected = torch.stack([orthogonalize(matrix) for matrix in experts]) * (32 / 12) ** 0.5
    torch.testing.assert_close(torch.cat(parts, dim - 2), expected, rtol=1e-4, atol=1e-5)


def test_registry_lists_the_choices_of_the_flag():
    (optimizer,) = [
        field for field in dataclasses.fields(OptimizerConfig) if field.name == "optimizer"
    ]
    assert optimizer.metadata["choices"] == tuple(UPDATE_RULES)
