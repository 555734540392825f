"""Record losses and gradients of multi-token prediction in real megatron-core on CPU.

    python megatron_core_mtp.py DIRECTORY

Writes `llama.npz` and `keys.txt`, which lists the keys of a torch_dist checkpoint. Runs in a
virtual environment with torch and megatron-core, without this project.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch

from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
)

SEQ = 12
BATCH = 2
VOCAB = 40
DEPTHS = 2
FACTOR = 0.3


def build_model(per_token: bool) -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
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
        mtp_num_layers=DEPTHS,
        mtp_loss_scaling_factor=FACTOR,
        calculate_per_token_loss=per_token,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    torch.manual_seed(5)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=mtp,
    )
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:  # norms are initialized to 1
                param.uniform_(0.5, 1.5)
    return model


def main() -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29512")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.cuda.current_device = lambda: torch.device("cpu")
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)

    generator = torch.Generator().manual_seed(7)
    text = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=generator)
    mask = torch.ones(BATCH, SEQ)
    mask[0, 4] = 0
    mask[1, 9:11] = 0
    tokens = text[:, :-1].contiguous()
    labels = text[:, 1:].contiguous()
    positions = torch.arange(SEQ).expand(BATCH, SEQ)
    attention_mask = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)
    arrays = {"tokens": tokens, "labels": labels, "loss_mask": mask}
    for name, per_token in (("mean", False), ("per_token", True)):
        model = build_model(per_token)
        model.train()
        MTPLossLoggingHelper.tracker.clear()
        MTPLossAutoScaler.set_loss_scale(torch.ones(1))
        losses = model(tokens, positions, attention_mask, labels=labels, loss_mask=mask)
        total = (losses * mask).sum()
        (total if per_token else total / mask.sum()).backward()
        arrays[f"{name}/losses"] = losses
        arrays[f"{name}/mtp_losses"] = MTPLossLoggingHelper.tracker["values"]
        for key, param in model.named_parameters():
            arrays[f"weights/{key}"] = param
            arrays[f"{name}/gradients/{key}"] = param.grad
    plain = {key: value.detach().numpy().copy() for key, value in arrays.items()}
    directory = Path(sys.argv[1])
    np.savez_compressed(directory / "llama.npz", **plain)
    (directory / "keys.txt").write_text("".join(list_keys(model)))


def list_keys(model: GPTModel) -> list[str]:
    """Return a line per entry of a checkpoint: its key, and the global shape of a tensor."""
    metadata = {
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    lines = []
    for entry in nested_values(model.sharded_state_dict(metadata=metadata)):
        parts = [entry]
        if isinstance(entry, ShardedTensorFactory):  # gate and up
            parts = list(nested_values([entry.build()]))
        for part in parts:
            if isinstance(part, ShardedTensor):
                shape = "x".join(map(str, part.global_shape))
                lines.append(f"{part.key} {shape}\n")
            else:
                lines.append(f"{part.unique_key}\n")
    return sorted(set(lines))


if __name__ == "__main__":
    main()
