"""Plain training loop of megatron-core: GPTModel with local layers, clipping, fused AdamW.

Prints one step time (ms) per line. Requires a separate virtual environment, because megatron-core
also installs a package named `megatron`. As for transformers, bf16 means bf16 parameters and
moments without fp32 main parameters.
"""

import argparse
import os
import time

import torch

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils


def build_model(args: argparse.Namespace, dtype: torch.dtype) -> GPTModel:
    experts = {}
    if args.experts:
        moe_utils.te_general_gemm = (
            None  # 0.16.1 imports this name, which is missing without Transformer Engine
        )
        experts = {
            "num_moe_experts": args.experts,
            "moe_ffn_hidden_size": args.ffn,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.01,
            "moe_token_dispatcher_type": "allgather",  # the other one makes CUDA streams
        }
    config = TransformerConfig(
        **experts,
        num_layers=args.layers,
        hidden_size=args.hidden,
        ffn_hidden_size=args.ffn,
        num_attention_heads=args.heads,
        num_query_groups=args.groups,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=args.experts or None),
        vocab_size=args.vocab,
        max_sequence_length=args.seq,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).to(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=1408)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument(
        "--experts",
        type=int,
        default=0,
        help="experts of width --ffn in every layer, 2 for a token",
    )
    args = parser.parse_args()

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29533", RANK="0", WORLD_SIZE="1")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    tensor_parallel.random.initialize_rng_tracker(
        inference_rng_tracker=True
    )  # the one that needs no CUDA
    torch.cuda.current_device = lambda: "cpu"  # where its rotary embedding puts its tables, unasked
    dtype = torch.float32 if args.dtype == "fp32" else torch.bfloat16
    model = build_model(args, dtype)
    decay = [p for p in model.parameters() if p.dim() > 1]
    no_decay = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(1)
    positions = torch.arange(args.seq).expand(args.batch, -1)
    mask = torch.ones(args.seq, args.seq, dtype=torch.bool).triu(1)[None, None]
    for _ in range(args.steps):
        start = time.perf_counter()
        tokens = torch.randint(args.vocab, (args.batch, args.seq + 1), generator=generator)
        loss = (
            model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
            .float()
            .mean()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        print(f"{(time.perf_counter() - start) * 1e3:.1f}", flush=True)


if __name__ == "__main__":
    main()
