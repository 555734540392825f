"""Write and load checkpoints of HybridModel with real megatron-core 0.19 on CPU.

    python megatron_core_hybrid.py write DIRECTORY
    python megatron_core_hybrid.py load DIRECTORY

Runs in a virtual environment with torch and megatron-core, without this project. For each of
PATTERNS, `write` takes two steps of Adam, saves `DIRECTORY/NAME/iter_0000002` with the optimizer,
and writes tokens, logits and the losses of each depth of prediction to `expected.npz`. `load`
requests weights and optimizer from `DIRECTORY/NAME-ours`, which this project wrote from that
checkpoint, and compares both with the original's, and the losses with `expected.npz`. Layers are local modules with the names of
Transformer Engine's in checkpoints.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron_core_load import CpuForCuda, stand_in_for_cuda, tensors_of
from megatron_core_optimizers import Adam

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

PATTERNS = {
    "dense": "*-*-",
    "dense_first": "*-*E",
    "latent": "+-+E",
    "predicting": "*-*E/*E/*E",
    "latent_predicting": "+-|+-/+-",
}
SEQ = 16
VOCAB = 40
SIZES = {
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 12,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 8,
}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
}


def main() -> None:
    mode, directory = sys.argv[1:]
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29519")
    stand_in_for_cuda(CpuForCuda, Adam)
    torch.cuda.synchronize = lambda *_: None
    hybrid_block.TENorm = WrappedTorchNorm
    dist.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    action = {"write": write, "load": load}[mode]
    for name, pattern in PATTERNS.items():
        action(pattern, Path(directory, name))
    dist.destroy_process_group()


# ---- The model ----


class LatentCoreAttention(DotProductAttention):
    """Local core attention with value heads of another width than queries and keys."""

    def __init__(self, *, v_channels: int = 0, k_channels: int = 0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def build_spec() -> ModuleSpec:
    """Return Megatron-core's `hybrid_stack_spec` with local modules."""
    local = LocalSpecProvider()
    column = local.column_parallel_linear()
    row = local.row_parallel_linear()
    norm = WrappedTorchNorm
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=column, core_attention=local.core_attention(), linear_proj=row
        ),
    )
    latent_attention = ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=column,
            linear_q_up_proj=column,
            linear_kv_down_proj=column,
            linear_kv_up_proj=column,
            core_attention=LatentCoreAttention,
            linear_proj=row,
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
    )
    mlp = partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
    submodules = partial(TransformerLayerSubmodules, self_attn_bda=get_bias_dropout_add)
    prediction = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=column, mtp_model_layer=None, layer_norm=norm
    )
    prediction_layer = ModuleSpec(module=MultiTokenPredictionLayer, submodules=prediction)
    layers = HybridStackSubmodules(
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=submodules(
                input_layernorm=norm,
                self_attention=attention,
                sharded_state_dict_keys_map={
                    "input_layernorm.": "self_attention.linear_qkv.layer_norm_"
                },
            ),
        ),
        mla_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=submodules(input_layernorm=norm, self_attention=latent_attention),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=norm,
                mlp=mlp,
                mlp_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
            ),
        ),
        moe_layer=ModuleSpec(
            module=MoETransformerLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=norm,
                mlp=get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
        mtp_block_spec=ModuleSpec(
            module=MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[prediction_layer]),
        ),
    )
    return ModuleSpec(module=HybridStack, submodules=layers)


def build_model(pattern: str) -> HybridModel:
    depths = pattern.count("/")
    main_pattern = pattern.partition("/")[0].replace("|", "")
    sizes: dict[str, Any] = {"num_query_groups": 2}
    config_type = TransformerConfig
    if "+" in pattern:
        sizes = {"multi_latent_attention": True, **LATENT}
        config_type = MLATransformerConfig
    if "E" in pattern:
        sizes |= EXPERTS
    config = config_type(
        num_layers=len(main_pattern),
        is_hybrid_model=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        init_method_std=0.2,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        mtp_num_layers=depths or None,
        **SIZES,
        **sizes,
    )
    torch.manual_seed(5)
    model = HybridModel(
        config,
        build_spec(),
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        # One process has all stages.
        hybrid_layer_pattern=pattern.replace("|", ""),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        parallel_output=False,
    )
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:  # norms are initialized to 1
                param.uniform_(0.5, 1.5)
    return model


def make_args(pattern: str) -> argparse.Namespace:
    """Return the arguments that a run of Megatron-LM would store."""
    sizes: dict[str, Any] = {"group_query_attention": True, "num_query_groups": 2}
    if "+" in pattern:
        sizes = {"multi_latent_attention": True, "group_query_attention": False, **LATENT}
    if "E" in pattern:
        experts = dict(EXPERTS)
        sizes["num_experts"] = experts.pop("num_moe_experts")
        sizes |= experts
    main_pattern = pattern.partition("/")[0].replace("|", "")
    return argparse.Namespace(
        num_layers=len(main_pattern), hybrid_layer_pattern=pattern, is_hybrid_model=True,
        mtp_num_layers=pattern.count("/") or None, normalization="RMSNorm", swiglu=True,
        layernorm_epsilon=1e-5, add_bias_linear=False, untie_embeddings_and_output_weights=True,
        position_embedding_type="rope", max_position_embeddings=SEQ, seq_length=SEQ,
        make_vocab_size_divisible_by=8, padded_vocab_size=VOCAB, params_dtype=torch.float32,
        bf16=False, fp16=False, tensor_model_parallel_size=1, data_parallel_size=1,
        pipeline_model_parallel_size=1 + pattern.count("|"), world_size=1, optimizer="adam",
        use_distributed_optimizer=True, consumed_train_samples=4, hidden_dropout=0.0,
        attention_dropout=0.0, **SIZES, **sizes,
    )  # fmt: skip


# ---- Training ----


def build_trainer(pattern: str) -> tuple[DistributedDataParallel, Any]:
    model = build_model(pattern)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    ddp = DistributedDataParallel(model.config, ddp_config, model)
    config = OptimizerConfig(
        optimizer="adam", lr=0.01, min_lr=0.001, weight_decay=0.1, use_distributed_optimizer=True
    )
    return ddp, get_megatron_optimizer(config, [ddp])


def train_step(ddp: DistributedDataParallel, optimizer: Any, step: int) -> None:
    """Take a step with gradients that depend on the shapes of the parameters alone."""
    ddp.zero_grad_buffer()
    generator = torch.Generator().manual_seed(step)
    for param in ddp.parameters():
        param.main_grad.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    is_good, _, _ = optimizer.step()
    assert is_good


def compute_outputs(model: HybridModel) -> dict[str, np.ndarray]:
    """Return tokens, logits, and the losses of the next token and of each depth."""
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(VOCAB, (2, SEQ + 1), generator=generator)
    tokens = text[:, :-1].contiguous()
    positions = torch.arange(SEQ).expand(2, SEQ)
    mask = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)
    outputs = {"tokens": tokens, "labels": text[:, 1:].contiguous()}
    MTPLossLoggingHelper.tracker.clear()
    model.train()
    loss_mask = torch.ones(2, SEQ)
    labels = outputs["labels"]
    outputs["losses"] = model(tokens, positions, mask, labels=labels, loss_mask=loss_mask)
    if MTPLossLoggingHelper.tracker:
        outputs["mtp_losses"] = MTPLossLoggingHelper.tracker["loss_values"]
    model.eval()
    outputs["logits"] = model(tokens, positions, mask)
    return {name: value.detach().numpy().copy() for name, value in outputs.items()}


def request(ddp: DistributedDataParallel, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    """Return the sharded state dict of Megatron-LM's trainer."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state = {"model": ddp.module.sharded_state_dict(metadata=metadata)}
    optimizer_state = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state | {"optimizer": optimizer_state}


def write(pattern: str, directory: Path) -> None:
    ddp, optimizer = build_trainer(pattern)
    for step in (1, 2):
        train_step(ddp, optimizer, step)
    state = request(ddp, optimizer, is_loading=False)
    state |= {
        "args": make_args(pattern),
        "checkpoint_version": 3.0,
        "iteration": 2,
        "num_floating_point_operations_so_far": 0.0,
    }
    target = directory / "iter_0000002"
    target.mkdir(parents=True)
    dist_checkpointing.save(state, str(target), ("torch_dist", 1))
    (directory / "latest_checkpointed_iteration.txt").write_text("2")
    np.savez_compressed(directory / "expected.npz", **compute_outputs(ddp.module))


# ---- Our files ----


def load(pattern: str, directory: Path) -> None:
    """Compare our files with Megatron-core's in its model and its optimizer."""
    loaded = {}
    for name in ("theirs", "ours"):
        ddp, optimizer = build_trainer(pattern)
        root = directory if name == "theirs" else directory.with_name(f"{directory.name}-ours")
        path = str(root / "iter_0000002")
        wanted = request(ddp, optimizer, is_loading=True)
        state, unused, missing = dist_checkpointing.load(
            wanted, path, strict=StrictHandling.RETURN_ALL
        )
        surplus = [key for key in unused if "_extra_state" not in key and "common_state" not in key]
        assert not missing, (name, missing, surplus)
        assert not surplus, (name, missing, surplus)
        ddp.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        tensors = {}
        for shard in tensors_of(request(ddp, optimizer, is_loading=False)):
            tensors[shard.key] = shard.data.clone()
        loaded[name] = tensors
    assert loaded["ours"].keys() == loaded["theirs"].keys()
    for key, tensor in loaded["theirs"].items():
        assert torch.equal(loaded["ours"][key], tensor), key
    expected = np.load(directory / "expected.npz")
    for name, value in compute_outputs(ddp.module).items():
        assert np.array_equal(value, expected[name]), name
    print(f"HybridModel {pattern}: {len(loaded['ours'])} tensors and the losses are equal")


if __name__ == "__main__":
    main()
