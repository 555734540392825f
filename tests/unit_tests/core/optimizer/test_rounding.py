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
from megatron.core.sharding import Sharding
from tests.support.tiny_ddp_model import backward_pass, build, snapshot
from tests.unit_tests.core.optimizer.torch_training import (
    ADAM,
    ONE,
    read_main_params,
    train_ours,
    train_with_torch_optim,
    without_padding,
)

DTYPES = {"fp16": torch.float16, "fp8": torch.float8_e4m3fn}
LIMITS = {"fp16": 32752.0, "fp8": 448.0}


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
    for index in range(200):
        magnitude = 10.0 ** (index % 30 - 25)
        values = torch.randn(257, generator=generator).pow(3) * magnitude
        stored = torch.zeros(257, dtype=DTYPES[dtype])
        scale = torch.ones(())
        store_with_new_scale(stored, values, scale)
        expected, expected_scale = round_as_transformer_engine(values.numpy(), dtype)
        assert np.array_equal(stored.float().numpy(), expected)
        assert scale.item() == float(expected_scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_storing_stored_values_changes_nothing(dtype):
    """For each fp32 mantissa of the largest value, the stored value leads to the same scale."""
    limit = LIMITS[dtype]
    mantissas = torch.arange(1 << 23, dtype=torch.int32)
    for exponent in (1, 127):
        largest = (mantissas + (exponent << 23)).view(torch.float32)
        scale = compute_scale(largest, DTYPES[dtype])
        stored = (largest * scale.reciprocal()).half()
        if exponent > 1:  # otherwise the scale is the smallest normal number
            assert torch.all(stored == limit)
        restored = stored.float() * scale
        assert torch.equal(compute_scale(restored, DTYPES[dtype]), scale)


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


def make_dtype_options(rounded):
    """Return the options of the optimizer for the dtypes of its tensors."""
    return {f"{name}_dtype": dtype for name, dtype in rounded.items()}


ROUNDED = [
    {"exp_avg": "fp16"},
    {"exp_avg": "fp8", "exp_avg_sq": "fp16"},
    {"exp_avg": "bf16", "exp_avg_sq": "fp8", "main_params": "fp16"},
]


@pytest.mark.parametrize("rounded", ROUNDED, ids=str)
def test_steps_match_torch_optim_with_rounding_bitwise(rounded):
    """The reference rounds the state of torch.optim.AdamW in numpy after each of 10 steps."""
    config = {**ADAM, **make_dtype_options(rounded), "clip_grad": 0.0}
    chunk, optimizer, _ = train_ours(config, 10, dtype=torch.bfloat16)

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

    # Main parameters, and the effect of rounding on them
    unrounded, _, _ = train_with_torch_optim(ADAM, 10, torch.bfloat16, clip=0.0)
    num_changed = 0
    for name, value in read_main_params(chunk, optimizer).items():
        assert torch.equal(value, without_padding(expected[name], value)), name
        num_changed += not torch.equal(value, without_padding(unrounded[name], value))
    assert num_changed > 0

    # Moments and weights
    tensors = snapshot(chunk, optimizer)
    for name, param in expected.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            value = tensors[f"optimizer.state.{moment}.{name}"]
            expected_value = reference.state[param][moment]
            assert torch.equal(value, without_padding(expected_value, value)), name

    for name, param in chunk.module.named_parameters():
        assert torch.equal(param, expected[name].bfloat16()), name


def collect_tensors(optimizer):
    """Return copies of the state and its scales."""
    tensors = {}
    for index, shard in enumerate(optimizer.shards):
        for prefix, data in (*shard.tensors.items(), *shard.scales.items()):
            tensors[index, prefix, data.dtype] = data.clone()
    return tensors


@pytest.mark.parametrize("rounded", ROUNDED, ids=str)
def test_skipped_step_changes_nothing(rounded):
    config = OptimizerConfig(lr=0.01, **make_dtype_options(rounded))
    chunk, optimizer = build(ONE, config=config, dtype=torch.bfloat16)
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
    """Recorder of the largest number of elements of a new tensor."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
        input_addresses = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            is_view = result.untyped_storage().data_ptr() in input_addresses
            if not is_view:
                self.numel = max(self.numel, result.numel())
        return result


def round_trip(values, dtype):
    """Return the values after storing them in a dtype, None for fp32."""
    if dtype is None:
        return values
    if dtype == "bf16":
        return values.bfloat16().float()
    scale = compute_scale(values.abs().max(), DTYPES[dtype])
    stored = (values * scale.reciprocal()).to(DTYPES[dtype])
    return stored.float() * scale


@pytest.mark.parametrize("rounded", [{"exp_avg": "bf16", "exp_avg_sq": "bf16"}, ROUNDED[2]])
def test_large_parameters_are_updated_in_slices(rounded):
    """Slices give the values of one update of whole tensors, without large temporary tensors."""
    module = Wide()
    module.initialize(seed=7)
    chunk = DistributedDataParallel(module, DistributedDataParallelConfig(), ONE.dp)
    config = OptimizerConfig(lr=0.01, clip_grad=0.0, **make_dtype_options(rounded))
    optimizer = MegatronOptimizer([chunk], config, ONE)

    # The reference has the initial main parameters, which are rounded, and the same gradients.
    main = {}
    for name, param in module.named_parameters():
        main[name] = round_trip(param.detach().float(), rounded.get("main_params"))
    reference = torch.optim.AdamW(main.values(), lr=0.01, weight_decay=0.01, fused=True)
    for param, values in zip(module.parameters(), main.values(), strict=True):
        generator = torch.Generator().manual_seed(param.numel())
        param.main_grad.copy_(torch.randn(param.shape, generator=generator).pow(3))
        values.grad = param.main_grad.clone()

    reference.step()

    with LargestTemporary() as largest:
        optimizer.step()
    assert largest.numel <= 1 << 22

    params = read_main_params(chunk, optimizer)
    tensors = snapshot(chunk, optimizer)
    for name, values in main.items():
        expected = round_trip(values, rounded.get("main_params"))
        assert torch.equal(params[name], expected), name
        for moment in ("exp_avg", "exp_avg_sq"):
            expected = round_trip(reference.state[values][moment], rounded.get(moment))
            assert torch.equal(tensors[f"optimizer.state.{moment}.{name}"], expected), name
