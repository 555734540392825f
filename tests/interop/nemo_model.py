"""Models of megatron-core on a CPU, as the writers of NeMo's files build them."""

from typing import Any

import torch
import torch.distributed as dist
from megatron_core_load import CpuForCuda, FusedAdam, stand_in_for_cuda

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel

# Fields of TransformerConfig: no GPU kernels, no dropout, larger weights
CPU_SETTINGS: dict[str, Any] = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.2,
    "use_cpu_initialization": True,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "attention_softmax_in_fp32": True,
    "persist_layer_norm": False,
}


def start_process(adam: type[FusedAdam] = FusedAdam) -> None:
    """Initialize megatron-core for one process without CUDA."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    stand_in_for_cuda(CpuForCuda, adam)
    torch.cuda.synchronize = lambda *_: None
    tensor_parallel.model_parallel_cuda_manual_seed(1)


@torch.no_grad()
def perturb(model: GPTModel) -> None:
    """Add noise to all parameters, because biases and norms are constants."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.02)


@torch.no_grad()
def compute_logits(model: GPTModel) -> dict[str, torch.Tensor]:
    """Return random `tokens` [b, s], and their `logits` [b, s, vocab]."""
    sequence = model.max_sequence_length
    tokens = torch.randint(model.vocab_size, (2, sequence))
    positions = torch.arange(sequence).expand(2, sequence)
    mask = torch.ones(1, 1, sequence, sequence).tril() < 0.5
    return {"tokens": tokens, "logits": model.eval()(tokens, positions, mask)}
