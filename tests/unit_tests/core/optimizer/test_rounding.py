"""Optimizer tensors in fp16 and fp8, compared with Transformer Engine's formulas in numpy."""

import numpy as np
import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.module import MegatronModule, Normal, ParamInfo, make_parameter
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer.flat_shard import compute_scale, store_with_new_scale
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState
from megatron.core.sharding import Sharding
from tests.support.tiny_ddp_model import backward_pass, build, snapshot
from tests.unit_tests.core.optimizer.test_optimizer import (
    ADAM,
    main_params,
    train_ours,
    train_with_torch_optim,
)

DTYPES = {"fp16": torch.float16, "fp8": torch.float8_e4m3fn}
LIMITS = {"fp16": 32752.0, "fp8": 448.0}
ONE = ParallelState.for_rank(ParallelConfig())


def round_to_fp8(values):
    """Round float32 values of at most 448 to multiples of the spacing of e4m3, ties to even."""
    exact = values.astype(np.float64)
    _, exponent = np.frexp(exact)
    # Three bits after the leading one; below 2**-6 the spacing is that of subnormal numbers.
    spacing = 2.0 ** (np.maximum(exponent - 1, -6) - 3)
    return (np.rint(exact / spacing) * spacing).astype(np.float32)


def round_as_transformer_engine(values, dtype, scale=None):
    """Return the stored values as float32, and the scale, as FusedAdam computes them."""
    if scale is None:
        scale = np.float32(np.abs(values).max()) / np.float32(LIMITS[dtype])
    scaled = values * (np.float32(1.0) / scale)
    if dtype == "fp16":
        return scaled.astype(np.float16).astype(np.float32), scale
    return round_to_fp8(scaled), scale


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_values_are_those_of_transformer_engine(dtype):
    generator = torch.Generator().manual_seed(3)
    for number in range(200):
        size = 10.0 ** (number % 30 - 25)
        values = torch.randn(257, generator=generator).pow(3) * size
        stored = torch.zeros(257, dtype=DTYPES[dtype])
        scale = torch.ones(())
        store_with_new_scale(stored, values, scale)
        expected, expected_scale = round_as_transformer_engine(values.numpy(), dtype)
        assert np.array_equal(stored.float().numpy(), expected)
        assert scale.item() == float(expected_scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_storing_stored_values_changes_nothing(dtype):
    """For each fp32 mantissa of the largest value, the same scale follows from what is stored."""
    limit = LIMITS[dtype]
    mantissas = torch.arange(1 << 23, dtype=torch.int32)
    for exponent in (1, 127):
        largest = (mantissas + (exponent << 23)).view(torch.float32)
        scale = compute_scale(largest, DTYPES[dtype])
        stored = (largest * scale.reciprocal()).half()
        if exponent > 1:  # otherwise the scale is the smallest normal number
            assert torch.all(stored == limit)
        assert torch.equal(compute_scale(stored.float() * scale, DTYPES[dtype]), scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [0.0, 1e-44, 3e-38])
def test_zeros_and_subnormal_values(dtype, largest):
    values = torch.tensor([0.0, largest, -largest / 2])
    stored = torch.zeros(3, dtype=DTYPES[dtype])
    scale = torch.ones(())
    store_with_new_scale(stored, values, scale)
    restored = stored.float() * scale
    assert torch.isfinite(restored).all()
    assert (restored - values).abs().max() <= 2.0**-126


ROUNDED = [
    {"exp_avg": "fp16"},
    {"exp_avg": "fp8", "exp_avg_sq": "fp16"},
    {"exp_avg": "bf16", "exp_avg_sq": "fp8", "main_params": "fp16"},
]


@pytest.mark.parametrize("rounded", ROUNDED, ids=str)
def test_steps_match_torch_optim_with_rounding_bitwise(rounded):
    """10 steps, each followed by rounding the state of torch.optim.AdamW in numpy."""
    dtypes = {f"{name}_dtype": dtype for name, dtype in rounded.items()}
    chunk, optimizer, _ = train_ours({**ADAM, **dtypes, "clip_grad": 0.0}, 10, dtype=torch.bfloat16)

    def round_tensor(values, dtype):
        if dtype == "bf16":
            values.copy_(values.bfloat16())
            return
        scale = compute_scale(values.abs().max(), DTYPES[dtype]).numpy()
        stored, _ = round_as_transformer_engine(values.numpy(), dtype, scale)
        values.copy_(torch.from_numpy(stored * scale))

    def round_main_parameters(reference, args, kwargs):
        if "main_params" in rounded:
            for group in reference.param_groups:
                for param in group["params"]:
                    round_tensor(param.detach(), rounded["main_params"])

    def round_state(reference, args, kwargs):
        round_main_parameters(reference, args, kwargs)
        for state in reference.state.values():
            for name in rounded.keys() & state.keys():
                round_tensor(state[name], rounded[name])

    # Before the first step, the main parameters are those of the model, rounded.
    hooks = [
        register_optimizer_step_pre_hook(round_main_parameters),
        register_optimizer_step_post_hook(round_state),
    ]
    try:
        expected, reference, _ = train_with_torch_optim(ADAM, 10, torch.bfloat16, clip=0.0)
    finally:
        for hook in hooks:
            hook.remove()
    plain, _, _ = train_with_torch_optim(ADAM, 10, torch.bfloat16, clip=0.0)
    found = main_params(chunk, optimizer)
    for name, value in found.items():
        assert torch.equal(value, expected[name][: len(value)]), name
    assert any(not torch.equal(value, plain[name][: len(value)]) for name, value in found.items())
    whole = snapshot(chunk, optimizer)
    for name, param in expected.items():
        for state in ("exp_avg", "exp_avg_sq"):
            value = whole[f"optimizer.state.{state}.{name}"]
            assert torch.equal(value, reference.state[param][state][: len(value)]), name
    for name, param in chunk.module.named_parameters():
        assert torch.equal(param, expected[name].bfloat16()), name


def collect_tensors(optimizer):
    tensors = {}
    for number, shard in enumerate(optimizer.shards):
        for prefix, data in (*shard.tensors.items(), *shard.scales.items()):
            tensors[number, prefix, data.dtype] = data.clone()
    return tensors


@pytest.mark.parametrize("rounded", ROUNDED, ids=str)
def test_skipped_step_changes_nothing(rounded):
    dtypes = {f"{name}_dtype": dtype for name, dtype in rounded.items()}
    chunk, optimizer = build(ONE, config=OptimizerConfig(lr=0.01, **dtypes), dtype=torch.bfloat16)
    for step in range(3):
        backward_pass(chunk, step)
        optimizer.step()
    before = collect_tensors(optimizer)
    backward_pass(chunk, 3)
    optimizer.shards[0].bucket.grad_shard[5] = float("inf")
    assert optimizer.step().skipped
    for key, data in collect_tensors(optimizer).items():
        assert torch.equal(data.float(), before[key].float()), key


class Wide(MegatronModule):
    """One parameter of several slices, and a small one."""

    def __init__(self):
        super().__init__()
        info = ParamInfo(Normal(0.1), Sharding())
        self.wide = make_parameter((2100, 4001), torch.bfloat16, None, info)
        self.narrow = make_parameter((40, 3), torch.bfloat16, None, info)


class LargestTemporary(TorchDispatchMode):
    """Records the largest number of elements of a new tensor."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
        known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("rounded", [{"exp_avg": "bf16", "exp_avg_sq": "bf16"}, ROUNDED[2]])
def test_large_parameters_are_updated_in_slices(rounded):
    """Slices give the values of one update of whole tensors, without large temporary tensors."""
    dtypes = {f"{name}_dtype": dtype for name, dtype in rounded.items()}
    module = Wide()
    module.initialize(seed=7)
    ddp = DistributedDataParallelConfig()
    chunk = DistributedDataParallel(module, ddp, ONE.dp)
    optimizer = MegatronOptimizer([chunk], OptimizerConfig(lr=0.01, clip_grad=0.0, **dtypes), ONE)
    main = {}
    for name, param in module.named_parameters():
        main[name] = param.detach().float()
        if "main_params" in rounded:
            stored, scale = torch.zeros_like(param, dtype=torch.float16), torch.ones(())
            store_with_new_scale(stored.view(-1), main[name].view(-1), scale)
            main[name] = stored.float() * scale
    reference = torch.optim.AdamW(main.values(), lr=0.01, weight_decay=0.01, fused=True)
    for param, values in zip(module.parameters(), main.values(), strict=True):
        generator = torch.Generator().manual_seed(param.numel())
        param.main_grad.copy_(torch.randn(param.shape, generator=generator).pow(3))
        values.grad = param.main_grad.clone()
    reference.step()

    with LargestTemporary() as largest:
        optimizer.step()
    assert largest.numel <= 1 << 22
    found = main_params(chunk, optimizer)
    moments = snapshot(chunk, optimizer)
    kinds = {"exp_avg": moments, "exp_avg_sq": moments}
    for name, values in main.items():
        expected = {"param": values, **reference.state[values]}
        for kind in ("param", *kinds):
            dtype = rounded.get("main_params" if kind == "param" else kind)
            wanted = expected[kind]
            if dtype == "bf16":
                wanted = wanted.bfloat16().float()
            elif dtype is not None:
                scale = compute_scale(wanted.abs().max(), DTYPES[dtype])
                stored = (wanted * scale.reciprocal()).to(DTYPES[dtype])
                wanted = stored.float() * scale
            actual = found[name] if kind == "param" else moments[f"optimizer.state.{kind}.{name}"]
            assert torch.equal(actual, wanted), (name, kind)
