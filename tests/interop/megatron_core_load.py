"""Load a torch_dist checkpoint with real megatron-core on CPU, and compare every value and the
logits.

    torchrun --nproc-per-node N megatron_core_load.py DIRECTORY TP [EP]

Runs in a virtual environment with torch and megatron-core, without this project. DIRECTORY holds
`checkpoint` and `expected.pt` of `megatron_core_write.py`. What is asked for is what Megatron-LM's
trainer asks for: the model is built from the arguments in the checkpoint, keys follow from its
`content_metadata`, generators are wanted at the same TP and PP. Weights, the distributed
optimizer's state (after its own reshuffle into flat shards and back) and parameter groups must be
the same bits, generators must draw the same numbers, logits must be ours within 1e-5 in fp32. With
EP ranks share the experts of a layer, each of which is whole on its rank.
"""

import argparse
import math
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import megatron.core.optimizer as mcore_optimizer
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    distrib_optimizer,
    get_megatron_optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.package_info import __version__
from megatron.core.transformer import TransformerConfig, torch_norm
from megatron.core.transformer.moe import moe_utils

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.016}  # logits are about 1: four steps of bf16


class CpuForCuda(TorchFunctionMode):
    """Redirect CUDA devices in megatron-core to the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(
            result, str
        ):  # the distributed optimizer looks for cuda's names
            return result.replace("torch.", "torch.cuda.")
        return result


class FusedAdam(torch.optim.Optimizer):
    """The form of Apex's optimizer. With torch's Adam megatron-core 0.16.1 cannot load even what it
    writes itself: it looks for a `step` in the state of every parameter, which the files have in
    the groups.
    """

    def __init__(self, params: list[dict], adam_w_mode: bool, **defaults: Any) -> None:
        super().__init__(params, defaults | {"bias_correction": True})


def stand_in_for_cuda(
    mode: type[CpuForCuda] = CpuForCuda, adam: type[FusedAdam] = FusedAdam
) -> None:
    mode().__enter__()
    mcore_optimizer.Adam = distrib_optimizer.Adam = adam
    mcore_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    torch.cuda.current_device = lambda: torch.device("cpu")
    tensor_parallel.random.initialize_rng_tracker(
        inference_rng_tracker=True
    )  # the one that needs no CUDA


def build_model(args: argparse.Namespace, tp: int, ep: int) -> GPTModel:
    """Return the model that the arguments in the checkpoint describe."""
    experts: dict[str, Any] = {}
    if args.num_experts:
        experts = {
            "num_moe_experts": args.num_experts,
            "moe_ffn_hidden_size": args.moe_ffn_hidden_size,
            "moe_router_topk": args.moe_router_topk,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": 1,
            "sequence_parallel": tp > 1,
        }
        moe_utils.te_general_gemm = None  # a name that 0.16.1 has with Transformer Engine alone
        torch_norm.WrappedTorchNorm.__new__ = staticmethod(norm_of_any_sequence)
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.layernorm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else tanh_gelu,
        add_bias_linear=args.add_bias_linear,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        tensor_model_parallel_size=tp,
        bf16=args.params_dtype == torch.bfloat16,
        params_dtype=args.params_dtype,
        pipeline_dtype=args.params_dtype,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        attention_softmax_in_fp32=True,
        **experts,
    )
    spec = get_gpt_layer_local_spec(num_experts=args.num_experts, normalization=args.normalization)
    if args.num_experts:  # the key that Transformer Engine's layers have
        spec.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
    multiple = args.make_vocab_size_divisible_by * tp
    model = GPTModel(
        config,
        spec,
        vocab_size=math.ceil(args.model_vocab_size / multiple) * multiple,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=False,
    )
    return model.to(args.params_dtype)


def norm_of_any_sequence(
    cls: type, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
) -> Any:
    """Return a norm for sequence parallelism, which the local norm refuses."""
    return torch.nn.RMSNorm(hidden_size, eps=eps)


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def build_optimizer(args: argparse.Namespace, model: DistributedDataParallel) -> MegatronOptimizer:
    """Return megatron-core's distributed optimizer with state that only a load can correct."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,  # this and the next are what 0.19 finds its groups by
        min_lr=args.min_lr,
        bf16=args.params_dtype == torch.bfloat16,
        params_dtype=args.params_dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, [model])
    for group in optimizer.param_groups:
        group |= {"lr": 7.0, "betas": (0.1, 0.2), "eps": 1.0}
    return optimizer


def request(
    args: argparse.Namespace,
    metadata: dict,
    model: GPTModel,
    optimizer: MegatronOptimizer,
    *,
    is_loading: bool,
) -> dict:
    """Return the sharded state dict of Megatron-LM's trainer."""
    model_state = model.sharded_state_dict(metadata=metadata)
    state = {"model": model_state}
    state["optimizer"] = optimizer.sharded_state_dict(
        state, is_loading=is_loading, metadata=metadata
    )
    layout = (1, parallel_state.get_tensor_model_parallel_world_size())
    if is_loading and layout == (
        args.pipeline_model_parallel_size,
        args.tensor_model_parallel_size,
    ):
        shard_id = (0, parallel_state.get_tensor_model_parallel_rank())
        replica = parallel_state.get_data_parallel_rank()
        state["rng_state"] = ShardedObject("rng_state", [], layout, shard_id, replica_id=replica)
    return state


def tensors_of(state: dict) -> list[ShardedTensor]:
    """Return all tensors of a sharded state dict, as they are in files."""
    apply_factories(state)
    tensors = []
    stack = [state]
    while stack:
        value = stack.pop()
        if isinstance(value, ShardedTensor):
            tensors.append(value)
        elif isinstance(value, dict | list | tuple):
            stack += value.values() if isinstance(value, dict) else value
    return tensors


def compare(state: dict, expected: dict[str, torch.Tensor]) -> set[str]:
    """Compare every shard with the global tensor (rows of padding: zero); return the keys."""
    keys = set()
    for shard in tensors_of(state):
        lead = shard.global_offset[: shard.prepend_axis_num]
        offset = shard.global_offset[shard.prepend_axis_num :]
        slices = [
            *lead,
            *(slice(o, o + n) for o, n in zip(offset, shard.local_shape, strict=True)),
        ]  # lead: the layer
        want = expected[shard.key][tuple(slices)]
        padded = torch.zeros(shard.local_shape, dtype=want.dtype)
        padded[tuple(slice(n) for n in want.shape)] = want
        assert shard.data.dtype == want.dtype, (
            f"{shard.key}: {shard.data.dtype}, {want.dtype} expected"
        )
        assert torch.equal(shard.data, padded), (
            f"{shard.key} at {shard.global_offset}: other values"
        )
        keys.add(shard.key)
    return keys


def stacked(tensors: dict[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    """Return the tensors with one tensor for all layers."""
    result = {key: tensor for key, tensor in tensors.items() if ".layers." not in key}
    for key in tensors:
        if ".layers.0." in key:
            layers = [
                tensors[key.replace(".layers.0.", f".layers.{layer}.")]
                for layer in range(num_layers)
            ]
            result[key.replace(".layers.0.", ".layers.")] = torch.stack(layers)
    return result


def check_groups(optimizer: MegatronOptimizer, stored: list[dict]) -> None:
    """Check that the parameter groups equal those of the run with the same weight decay."""
    by_multiplier = {group["wd_mult"]: group for group in stored}
    for group in optimizer.param_groups:
        want = by_multiplier[group["wd_mult"]]
        for name in ("lr", "max_lr", "min_lr", "weight_decay", "betas", "eps", "step"):
            assert group[name] == want[name], (
                f"param group {name}: {group[name]}, {want[name]} expected"
            )


def check_scheduler(optimizer: MegatronOptimizer, stored: dict, expected: dict) -> None:
    """Check that megatron-core's schedule continues at the same learning rate."""
    rates = [group["lr"] for group in optimizer.param_groups]
    scheduler = OptimizerParamScheduler(
        optimizer,
        0.0,
        1.0,
        0.5,
        0,
        1,
        "constant",
        0.0,
        0.0,
        0,
        "constant",
        use_checkpoint_opt_param_scheduler=True,
    )
    scheduler.load_state_dict(stored)
    for name in (
        "num_steps",
        "max_lr",
        "min_lr",
        "lr_warmup_steps",
        "lr_decay_steps",
        "lr_decay_style",
    ):
        assert getattr(scheduler, name) == expected[name], (
            f"{name}: {getattr(scheduler, name)}, not {expected[name]}"
        )
    now = [group["lr"] for group in optimizer.param_groups]
    assert all(abs(a - b) <= 1e-12 for a, b in zip(rates, now, strict=True)), (
        f"{now}, {rates} expected"
    )


def check_generators(state: dict, expected: list[float]) -> None:
    """Restore the CPU generators as Megatron-LM does; check that they draw our next numbers."""
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    drawn = [random.random(), float(np.random.random()), torch.rand(()).item()]
    assert drawn == expected, f"random numbers: {drawn}, {expected} expected"


@torch.no_grad()
def check_logits(model: GPTModel, expected: dict, dtype: torch.dtype) -> float:
    tokens = expected["tokens"]
    want = expected["logits"].float()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)[None, None]
    logits = model.eval()(tokens, positions, mask).float()
    error = (logits[..., : want.shape[-1]] - want).abs().max().item()
    assert error <= TOLERANCE[dtype], f"logits differ by {error}; the largest is {want.abs().max()}"
    return error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("tp", type=int)
    parser.add_argument("ep", type=int, nargs="?", default=1)
    options = parser.parse_args()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    stand_in_for_cuda()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tp,
        expert_model_parallel_size=options.ep,
        expert_tensor_parallel_size=1,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)

    root = options.directory / "checkpoint"
    path = str(root / f"iter_{int((root / 'latest_checkpointed_iteration.txt').read_text()):07d}")
    expected = torch.load(options.directory / "expected.pt", weights_only=True)
    common = dist_checkpointing.load_common_state_dict(path)
    args = common["args"]
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)

    if "non_homogeneous_layers" not in metadata:
        expected["tensors"] = stacked(expected["tensors"], args.num_layers)

    model = build_model(args, options.tp, options.ep)
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )
    optimizer = build_optimizer(args, ddp)

    # Phase 1: load, as strictly as it can be.
    wanted = request(args, metadata, model, optimizer, is_loading=True)
    state, unused, missing = dist_checkpointing.load(wanted, path, strict=StrictHandling.RETURN_ALL)
    assert not missing, f"not in the checkpoint: {missing}"
    surplus = {key for key in unused if not key.endswith("_extra_state") and key != "rng_state"}
    assert not surplus, f"in the checkpoint, but not asked for: {surplus}"

    # Phase 2: the weights, before the optimizer puts its main parameters in their place.
    model.load_state_dict(state["model"])
    weights = compare(model.sharded_state_dict(metadata=metadata), expected["tensors"])
    error = check_logits(model, expected, args.params_dtype)

    # Phase 3: the optimizer, and all that goes on with it.
    optimizer.load_state_dict(state["optimizer"])
    keys = compare(request(args, metadata, model, optimizer, is_loading=False), expected["tensors"])
    assert keys == expected["tensors"].keys(), keys ^ expected["tensors"].keys()
    assert weights == {key for key in keys if not key.startswith("optimizer.")}, weights
    check_groups(optimizer, expected["param_groups"])
    check_scheduler(optimizer, common["opt_param_scheduler"], expected["opt_param_scheduler"])
    if "rng_state" in state:
        rank = (
            parallel_state.get_tensor_model_parallel_rank()
        )  # of replicas those of the first one are stored
        check_generators(state["rng_state"][0], expected["next_numbers"][rank])
    if dist.get_rank() == 0:
        layout = f"TP{options.tp} DP{dist.get_world_size() // options.tp} EP{options.ep}"
        rng = ", random numbers go on" if "rng_state" in state else ""
        print(
            f"megatron-core {__version__}: {options.directory.name}, {layout}: {len(keys)} "
            f"tensors, same bits{rng}; "
            f"logits up to {expected['logits'].abs().max():.1f} within {error:.1e}: ok"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
