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
from tests.support.tiny_ddp_model import HIDDEN, LAYERS, assemble, build, train

ONE = ParallelState.for_rank(ParallelConfig())
ADEMAMIX = {
    "optimizer": "ademamix",
    "lr": 0.01,
    "weight_decay": 0.1,
    "clip_grad": 0.0,
    "ademamix_beta3": 0.99,
    "ademamix_alpha": 4.0,
    "ademamix_beta3_warmup": 6,
    "ademamix_alpha_warmup": 4,
}
MUON = {
    "optimizer": "muon",
    "lr": 0.01,
    "weight_decay": 0.1,
    "clip_grad": 0.0,
    "muon_momentum": 0.9,
    "muon_extra_scale_factor": 0.2,
    "muon_nesterov": True,
}


def step_on_noise(config, steps=8, bad_step=None):
    """Return initial parameters, random gradients, final parameters, and the optimizer."""
    chunk, optimizer = build(ONE, DistributedDataParallelConfig(), OptimizerConfig(**config))
    generator = torch.Generator().manual_seed(0)
    params = dict(chunk.module.named_parameters())
    first_param = next(iter(params.values()))
    start = {name: param.detach().clone() for name, param in params.items()}
    gradients = []
    for step in range(steps):
        step_gradients = {}
        for name, param in params.items():
            gradient = torch.randn(param.shape, generator=generator)
            param.main_grad.copy_(gradient)
            step_gradients[name] = gradient
        gradients.append(step_gradients)
        if step == bad_step:
            first_param.main_grad.view(-1)[0] = math.inf
        optimizer.step()

    end = {name: param.detach() for name, param in params.items()}
    return start, gradients, end, optimizer


def list_gradients(gradients, name):
    """Return the gradients of a parameter in all steps, in double precision."""
    return [step_gradients[name].double() for step_gradients in gradients]


def assert_end(end, name, expected, atol=1e-6):
    """Compare a parameter after the last step with one in double precision."""
    torch.testing.assert_close(end[name].double(), expected, rtol=1e-4, atol=atol)


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
        for gradient in list_gradients(gradients, name):
            direction = torch.sign(0.9 * mean + 0.1 * gradient)
            mean = 0.999 * mean + 0.001 * gradient
            decayed = direction + 0.1 * param
            param = param - 0.01 * decayed
        assert_end(end, name, param)

    assert num_matrices > 1


def test_ademamix_matches_the_paper():
    start, gradients, end, _ = step_on_noise(ADEMAMIX)
    for name, param in start.items():
        fast = slow = square = torch.zeros_like(param, dtype=torch.float64)
        weight_decay = 0.1 if has_weight_decay(name) else 0.0
        param = param.double()
        for t, gradient in enumerate(list_gradients(gradients, name), start=1):
            # Means
            beta3 = interpolate_beta3(t)
            fast = 0.9 * fast + 0.1 * gradient
            slow = beta3 * slow + (1 - beta3) * gradient
            square = 0.999 * square + 0.001 * gradient**2

            # Step
            alpha = min(4.0, 4.0 * t / 4)
            corrected_fast = fast / (1 - 0.9**t)
            corrected_square = square / (1 - 0.999**t)
            denominator = corrected_square.sqrt() + 1e-8
            direction = (corrected_fast + alpha * slow) / denominator
            param = param - 0.01 * (direction + weight_decay * param)

        assert_end(end, name, param)


def interpolate_beta3(t):
    """Return the coefficient of the slow mean, which grows from 0.9 to 0.99 in 6 steps."""
    log1 = math.log(0.9)
    log3 = math.log(0.99)
    done = min(1.0, t / 6)
    denominator = (1 - done) * log3 + done * log1
    beta3 = math.exp(log1 * log3 / denominator)
    return min(0.99, beta3)


def test_ademamix_warmup_of_the_slow_mean():
    steps = torch.tensor([0.0, 50.0, 100.0, 1000.0])
    betas = compute_slow_beta(steps, 0.9, 0.9999, 100)
    assert betas[0] == pytest.approx(0.9)
    assert betas.diff().ge(0).all()
    assert betas[2] == pytest.approx(0.9999)
    assert betas[2] == betas[3]

    # The half-life grows linearly.
    log_half = math.log(0.5)
    half_lives = log_half / betas.double().log()
    first = log_half / math.log(0.9)
    last = log_half / math.log(0.9999)
    assert half_lives[1] == pytest.approx((first + last) / 2, rel=1e-2)

    weights = compute_slow_weight(steps, 8.0, 100)
    assert weights.tolist() == pytest.approx([0.0, 4.0, 8.0, 8.0])

    constant_weights = compute_slow_weight(steps, 8.0, None)
    assert constant_weights.tolist() == [8.0] * 4


@pytest.mark.parametrize("shape", [(16, 16), (24, 8), (8, 40)])
@pytest.mark.parametrize("kind", ["simple", "quintic"])
def test_orthogonalize_keeps_singular_vectors(shape, kind):
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    result = orthogonalize(matrix, kind)
    values = u.mT @ result @ v.mT
    diagonal = values.diagonal()

    torch.testing.assert_close(values, diagonal.diag(), rtol=0, atol=1e-9)
    assert diagonal.min() > 0.3
    assert diagonal.max() < 1.35


def test_compute_scale():
    scales = {
        (9, 4, "spectral"): 3.0,
        (4, 9, "spectral"): 3.0,
        (16, 4, "unit_rms_norm"): 2.0,
        (16, 4, "shape_scaling"): 2.0,
        (4, 16, "unit_rms_norm"): 0.5,
        (4, 16, "shape_scaling"): 1.0,
    }
    for arguments, expected in scales.items():
        assert compute_scale(*arguments) == expected


def test_muon_updates_matrices_and_adam_other_parameters():
    start, gradients, end, optimizer = step_on_noise(MUON)
    matrices = [name for name in start if name.endswith("linear.weight")]
    assert len(matrices) == LAYERS

    scale = HIDDEN**0.5 * 0.2
    for name in matrices:
        param = start[name].double()
        assert param.shape == (HIDDEN, HIDDEN)
        mean = torch.zeros_like(param)
        for gradient in list_gradients(gradients, name):
            mean = 0.9 * mean + 0.1 * gradient
            nesterov = 0.1 * gradient + 0.9 * mean
            update = orthogonalize(nesterov) * scale
            param = param - 0.01 * (update + 0.1 * param)
        assert_end(end, name, param, atol=1e-5)

    _, _, adam, _ = step_on_noise({**MUON, "optimizer": "adam"})
    for name in start:
        is_same = torch.equal(end[name], adam[name])
        assert is_same == (name not in matrices)
    state_names = [set(shard.state) for shard in optimizer.shards]

    assert {"momentum_buffer"} in state_names
    assert {"exp_avg", "exp_avg_sq"} in state_names


def list_tensors(optimizer):
    """Return the parameters and the state of an optimizer."""
    tensors = []
    for shard in optimizer.shards:
        tensors += shard.tensors.values()
    return tensors


@pytest.mark.parametrize("config", [ADEMAMIX, MUON], ids=lambda c: c["optimizer"])
@pytest.mark.parametrize("bad_step", [0, 3])
def test_nonfinite_gradient_changes_nothing(config, bad_step):
    chunk, optimizer = build(ONE, DistributedDataParallelConfig(), OptimizerConfig(**config))
    params = dict(chunk.module.named_parameters())
    for step in range(5):
        before = [tensor.clone() for tensor in list_tensors(optimizer)]
        gradient = math.nan if step == bad_step else 0.1 * (step + 1)
        for param in params.values():
            param.main_grad.fill_(gradient)
        optimizer.step()
        after = list_tensors(optimizer)
        is_same = all(map(torch.equal, before, after))
        assert is_same == (step == bad_step)
        for tensor in after:
            assert tensor.isfinite().all()


@pytest.mark.parametrize("config", [ADEMAMIX, MUON], ids=lambda c: c["optimizer"])
def test_distributed_optimizer_matches_one_process(pool, config):
    alone = train(0, 1, {}, config, 6, 1)
    expected_params = alone["params"]
    expected_state = assemble([alone["state"]])
    sharded = {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "ddp_bucket_size": 500,
    }
    for ddp in ({}, sharded):
        runs = pool.run(train, 2, ddp, config, 6, 1)
        for run in runs:
            for name, value in run["params"].items():
                expected = expected_params[name]
                torch.testing.assert_close(value, expected, rtol=2e-4, atol=2e-5, msg=name)
        state = assemble([run["state"] for run in runs])
        assert state.keys() == expected_state.keys()
        for key, value in state.items():
            expected = expected_state[key]
            torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-5, msg=key)


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
        groups = []
        for rows in whole.view(4, 8, 12).split(blocks, dim=1):
            matrix = rows.reshape(-1, 12)
            scale = (len(matrix) / 12) ** 0.5
            result = orthogonalize(matrix) * scale
            groups.append(result.view(rows.shape))
        expected = torch.cat(groups, 1).view(32, 12)

    torch.testing.assert_close(torch.cat(parts, dim), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dim", [0, 1])
def test_each_expert_is_orthogonalized_separately(pool, dim):
    experts = torch.randn(3, 32, 12, generator=torch.Generator().manual_seed(3))
    parts = pool.run(orthogonalize_part, 2, experts, dim, ())
    scale = (32 / 12) ** 0.5
    expected = torch.stack([orthogonalize(matrix) * scale for matrix in experts])
    torch.testing.assert_close(torch.cat(parts, dim - 2), expected, rtol=1e-4, atol=1e-5)


def test_registry_lists_the_choices_of_the_flag():
    fields = {field.name: field for field in dataclasses.fields(OptimizerConfig)}
    choices = fields["optimizer"].metadata["choices"]
    assert choices == tuple(UPDATE_RULES)
