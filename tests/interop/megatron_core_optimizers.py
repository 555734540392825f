"""Write torch_dist checkpoints of Muon and Lion with real megatron-core on CPU.

    torchrun --nproc-per-node 2 megatron_core_optimizers.py DIRECTORY FORM

Runs in an environment with torch, megatron-core and emerging-optimizers, without this project. FORM
is one of FORMS. Two ranks (data parallelism) take two steps with gradients that depend on the
parameter's shape alone, and save `iter_0000002`. `expected.npz` has the weights
after one more step (`next/KEY`), under the names of local modules.
"""

import argparse
import os
import sys
import typing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
import torch.distributed as dist

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
if not hasattr(typing, "override"):  # Python 3.11
    typing.override = lambda function: function
try:
    import triton  # noqa: F401
except ImportError:  # its kernels run on a GPU only
    import torch._dynamo
    import torch._inductor.compile_fx  # torch's imports of triton must fail

    sys.modules["triton"] = sys.modules["triton.language"] = MagicMock(__version__="3.0.0")

from megatron_core_load import CpuForCuda
from megatron_lm_train import TrainingAdam

import megatron.core.optimizer as mcore_optimizer
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import (
    LayerWiseDistributedOptimizer,
    tag_params_for_buffer_routing,
)
from megatron.core.transformer import TransformerConfig

LAYERS = 2
HIDDEN = 16
HEADS = 4
GROUPS = 2
FFN = 24
VOCAB = 40
SEQ = 32
# optimizer, layer-wise distribution, flat buckets of the other parameters, dtype
FORMS = {
    "muon_replicated": ("muon", False, False, torch.bfloat16),
    "muon_layer_wise": ("muon", True, False, torch.bfloat16),
    "muon_layer_wise_buckets": ("muon", True, True, torch.bfloat16),
    "lion": ("lion", False, False, torch.float32),
}


class Adam(TrainingAdam):
    """TrainingAdam that allocates its moments in the first step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[param].setdefault(name, torch.zeros_like(param))
        super().step(closure)


def build_model(dtype: torch.dtype) -> GPTModel:
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    torch.manual_seed(5)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return model.to(dtype)


def make_args(optimizer: str, is_layer_wise: bool, dtype: torch.dtype) -> argparse.Namespace:
    """Return the arguments that a run of Megatron-LM would store."""
    return argparse.Namespace(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=HEADS,
        group_query_attention=True, num_query_groups=GROUPS, kv_channels=HIDDEN // HEADS,
        normalization="RMSNorm", layernorm_epsilon=1e-5, swiglu=True, add_bias_linear=False,
        untie_embeddings_and_output_weights=True, position_embedding_type="rope",
        max_position_embeddings=SEQ, seq_length=SEQ, make_vocab_size_divisible_by=8,
        padded_vocab_size=VOCAB, params_dtype=dtype, bf16=dtype == torch.bfloat16, fp16=False,
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, data_parallel_size=2,
        world_size=2, optimizer=optimizer, use_distributed_optimizer=is_layer_wise,
        use_layer_wise_distributed_optimizer=is_layer_wise, consumed_train_samples=4,
    )  # fmt: skip


def set_gradients(model: DistributedDataParallel, step: int) -> None:
    """Set gradients that are equal on both ranks, and thus need no reduction."""
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        gradient = torch.randn(param.shape, generator=generator) * 0.1
        param.main_grad.copy_(gradient)


def train_step(model: DistributedDataParallel, optimizer: Any, step: int) -> None:
    model.zero_grad_buffer()
    set_gradients(model, step)
    is_good, _, _ = optimizer.step()
    assert is_good


def get_weights(model: GPTModel) -> dict[str, np.ndarray]:
    """Return the weights in fp32 by name."""
    weights = {}
    for name, param in model.named_parameters():
        weights[name] = param.detach().float().numpy().copy()
    return weights


def main() -> None:
    directory = Path(sys.argv[1])
    name, is_layer_wise, has_buckets, dtype = FORMS[sys.argv[2]]
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    CpuForCuda().__enter__()
    mcore_optimizer.Adam = distrib_optimizer.Adam = Adam
    mcore_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    # Gloo gathers no tensors of different sizes; megatron-core has this alternative for tests.
    LayerWiseDistributedOptimizer.allgather_params = LayerWiseDistributedOptimizer.broadcast_params
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    tensor_parallel.model_parallel_cuda_manual_seed(1)

    # Matrices have buffers of their own if flat buckets hold the other parameters.
    model = build_model(dtype)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=has_buckets
    )
    layout = None
    if has_buckets:
        tag_params_for_buffer_routing([model])
        params = list(model.parameters())
        layout = LayerWiseDistributedOptimizer.compute_full_param_layout(
            params, None, dist.get_world_size(), ddp_config
        )
    ddp = DistributedDataParallel(model.config, ddp_config, model, full_param_layout=layout)
    config = OptimizerConfig(
        optimizer=name,
        lr=0.01,
        min_lr=0.001,
        weight_decay=0.1,
        clip_grad=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_layer_wise_distributed_optimizer=is_layer_wise,
        use_distributed_optimizer=False,
    )
    optimizer = get_megatron_optimizer(config, [ddp])
    for step in (1, 2):
        train_step(ddp, optimizer, step)

    # Save in the form of Megatron-LM's trainer.
    metadata = {
        "distrib_optim_sharding_type": "dp_reshardable" if has_buckets else None,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    if not has_buckets:
        del metadata["distrib_optim_sharding_type"]
    model_state = model.sharded_state_dict(metadata=metadata)
    state = {"model": model_state}
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
    state |= {
        "args": make_args(name, is_layer_wise, dtype),
        "checkpoint_version": 3.0,
        "iteration": 2,
        "num_floating_point_operations_so_far": 0.0,
    }
    target = directory / "iter_0000002"
    if dist.get_rank() == 0:
        target.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(target), ("torch_dist", 1))
    train_step(ddp, optimizer, 3)
    arrays = {f"next/{key}": value for key, value in get_weights(model).items()}
    if dist.get_rank() == 0:
        np.savez_compressed(directory / "expected.npz", **arrays)
        (directory / "latest_checkpointed_iteration.txt").write_text("2")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
