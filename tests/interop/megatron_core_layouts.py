"""Train models of megatron-core at one layout on CPU, and store losses, norms and gradients.

    torchrun --nproc-per-node N megatron_core_layouts.py DIRECTORY LAYOUT

Runs in a virtual environment with torch and megatron-core, without this project. The layout "one"
comes first: it stores the shapes of all global tensors, from which every layout fills its
parameters. `LAYOUT.pt` gets the values that `layout_table.py` compares. Norms of sequence parallelism, which
the local layers refuse, are torch's, marked as megatron-core marks its own.
"""

from __future__ import annotations

import os
import sys
import traceback
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_lm_train import replace_cuda

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer import TransformerConfig, torch_norm

SEQ = 16
VOCAB = 64
SAMPLES = 4
STEPS = 3
EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.02,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_token_dispatcher_type": "allgather",
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2": {},
    "ep2": {"expert_model_parallel_size": 2},
    "tp2_sp_ep2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}
# case -> (fields of the model, whether tokens are masked, whether padding is given to the router)
CASES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "dense": ({}, False, False),
    "masked tokens": ({}, True, False),
    "masked tokens, per-token loss": ({"calculate_per_token_loss": True}, True, False),
    "learned sinks, clipped": ({"softmax_type": "learnable"}, False, False),
    "MTP, masked, per-token loss": (
        {"mtp_num_layers": 1, "calculate_per_token_loss": True},
        True,
        False,
    ),
    "experts": (EXPERTS, False, False),
    "experts, padding, per-token loss": (
        EXPERTS | {"calculate_per_token_loss": True},
        True,
        True,
    ),
    "experts, global_aux_loss": (
        EXPERTS | {"moe_router_load_balancing_type": "global_aux_loss"},
        False,
        False,
    ),
}


def make_norm(
    cls: type, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
) -> torch.nn.RMSNorm:
    norm = torch.nn.RMSNorm(hidden_size, eps=eps)
    norm.weight.sequence_parallel = config.sequence_parallel
    return norm


def build_model(fields: dict[str, Any], layout: dict[str, Any]) -> DistributedDataParallel:
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **fields,
        **layout,
    )
    config.finalize_model_grads_func = finalize_model_grads
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm")
    is_last = parallel_state.is_pipeline_last_stage()
    mtp = None
    if config.mtp_num_layers and is_last:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=is_last,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=mtp,
    )
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=False)
    return DistributedDataParallel(config, ddp, model)


def list_params(model: DistributedDataParallel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters by the names that they have in one process."""
    module = model.module
    config = module.config
    first_layer = module.decoder.layers[0].layer_number - 1
    num_local = (config.num_moe_experts or 1) // config.expert_model_parallel_size
    first_expert = parallel_state.get_expert_model_parallel_rank() * num_local
    for name, param in module.named_parameters():
        words = name.split(".")
        for index, word in enumerate(words[1:], 1):
            if word.isdigit() and words[index - 1] == "layers" and words[0] == "decoder":
                words[index] = str(int(word) + first_layer)
            if word.isdigit() and words[index - 1] == "local_experts":
                words[index] = str(int(word) + first_expert)
        yield ".".join(words), param


def find_part(name: str, param: torch.Tensor, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
    """Return the part of the global tensor on this rank."""
    slices = [slice(None)] * len(shape)
    for dim, (local, whole) in enumerate(zip(param.shape, shape, strict=True)):
        if local != whole:
            rank = parallel_state.get_tensor_model_parallel_rank()
            slices[dim] = slice(rank * local, (rank + 1) * local)
    return tuple(slices)


@torch.no_grad()
def fill(model: DistributedDataParallel, shapes: dict[str, tuple[int, ...]]) -> None:
    for name, param in list_params(model):
        shape = shapes.setdefault(name, tuple(param.shape))
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(shape, generator=generator) * 0.1
        if len(shape) == 1:
            whole += 1.0
        param.copy_(whole[find_part(name, param, shape)])


def make_samples(masked: bool) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    samples = []
    for index in range(SAMPLES):
        text = torch.randint(VOCAB, (1, SEQ + 1), generator=generator)
        mask = torch.ones(1, SEQ)
        if masked:  # another number in each sample, the last positions only
            mask[0, SEQ - 3 * index - 1 :] = 0
        samples.append({"tokens": text[:, :-1], "labels": text[:, 1:], "mask": mask})
    return samples


def forward_step(
    padding: bool, batches: Iterator[dict[str, torch.Tensor]], model: Any
) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    positions = torch.arange(SEQ)[None]
    hidden = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)
    options = {"padding_mask": batch["mask"] == 0} if padding else {}
    losses = model(
        batch["tokens"],
        positions,
        hidden,
        labels=batch["labels"],
        loss_mask=batch["mask"],
        **options,
    )

    def compute_loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
        total = (losses.float() * batch["mask"]).sum()
        num_tokens = batch["mask"].sum().int()
        return total, num_tokens, {"sum": total.detach().clone(), "tokens": num_tokens.clone()}

    return losses, compute_loss


def train(
    fields: dict[str, Any],
    masked: bool,
    padding: bool,
    layout: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
) -> dict[str, Any]:
    """Return losses and norms of gradients, and all gradients of the first step."""
    model = build_model(fields, layout)
    fill(model, shapes)
    config = OptimizerConfig(
        optimizer="adam",
        lr=2e-3,
        weight_decay=0.1,
        clip_grad=0.1,
        adam_eps=1e-4,
    )
    optimizer = get_megatron_optimizer(config, [model])
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.param_groups:
            for param in group["params"]:
                part.optimizer.state[param] = {
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }

    dp_rank = parallel_state.get_data_parallel_rank()
    dp_size = parallel_state.get_data_parallel_world_size()
    samples = make_samples(masked)[dp_rank::dp_size]
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=partial(forward_step, padding),
            data_iterator=iter(samples),
            model=[model],
            num_microbatches=len(samples),
            seq_length=SEQ,
            micro_batch_size=1,
            forward_only=False,
        )
        losses.append(average_loss(reports, bool(fields.get("calculate_per_token_loss"))))
        if step == 0:
            gradients = gather_gradients(model, shapes)
        _, norm, _ = optimizer.step()
        norms.append(float(norm))
    return {"losses": losses, "norms": norms, "gradients": gradients}


def average_loss(reports: list[dict[str, torch.Tensor]], per_token: bool) -> float:
    totals = torch.zeros(2, dtype=torch.float64)
    for report in reports:
        tokens = report["tokens"].double()
        share = report["sum"].double()
        totals += torch.stack((share, tokens) if per_token else (share / tokens, tokens / tokens))

    # Ranks of TP and EP add the same numbers; other stages add nothing.
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def gather_gradients(
    model: DistributedDataParallel, shapes: dict[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    local = [
        (name, find_part(name, param, shapes[name]), param.main_grad.clone())
        for name, param in list_params(model)
    ]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local)
    gradients: dict[str, torch.Tensor] = {}
    for name, part, gradient in (entry for entries in parts for entry in entries):
        gradients.setdefault(name, torch.zeros(shapes[name]))[part] = gradient
    return gradients


def smooth_labels() -> dict[str, Any]:
    """Return the loss with label smoothing, which no flag of the trainer enables."""
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(SEQ, 1, VOCAB, generator=generator)
    labels = torch.randint(VOCAB, (SEQ, 1), generator=generator)
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    local = whole.chunk(size, -1)[rank].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(local, labels, 0.2)
    losses.mean().backward()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local.grad)
    gradient = torch.cat(parts[:size], -1)
    return {"losses": [losses.mean().item()], "norms": [], "gradients": {"logits": gradient}}


def main() -> None:
    directory, name = Path(sys.argv[1]), sys.argv[2]
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    replace_cuda()
    torch._dynamo.config.disable = True
    torch_norm.WrappedTorchNorm.__new__ = staticmethod(make_norm)
    dist.init_process_group("gloo")
    layout = LAYOUTS[name]
    sizes = {key: value for key, value in layout.items() if key != "sequence_parallel"}
    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    shapes_file = directory / "one.pt"
    shapes = {} if name == "one" else torch.load(shapes_file, weights_only=False)["shapes"]
    results: dict[str, Any] = {"shapes": shapes}
    cases = CASES
    if "expert_model_parallel_size" in layout:
        cases = {case: value for case, value in CASES.items() if "experts" in case}

    for case, (fields, masked, padding) in cases.items():
        case_shapes = shapes.setdefault(case, {})
        try:
            results[case] = train(fields, masked, padding, layout, case_shapes)
        except Exception as error:  # refused by megatron-core, or impossible on a CPU
            if os.environ.get("VERBOSE"):
                traceback.print_exc()
            results[case] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

    if "expert_model_parallel_size" not in layout and name not in ("pp2", "cp2"):
        results["label smoothing"] = smooth_labels()
    if dist.get_rank() == 0:
        torch.save(results, directory / f"{name}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
