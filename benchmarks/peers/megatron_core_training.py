"""Plain training loop of megatron-core: GPTModel with local layers, clipping, fused AdamW.

Prints one step time (ms) per line. Requires a separate virtual environment, because megatron-core
also installs a package named `megatron`. As for transformers, bf16 means bf16 parameters and
moments without fp32 main parameters.
"""

import argparse
import os
import time

import torch
from optimizer import build_optimizer

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils


def make_expert_options(args: argparse.Namespace) -> dict[str, object]:
    """Return the options of `TransformerConfig` for experts in every layer."""
    if not args.experts:
        return {}
    # 0.16.1 imports this name, which is missing without Transformer Engine.
    moe_utils.te_general_gemm = None
    return {
        "num_moe_experts": args.experts,
        "moe_ffn_hidden_size": args.ffn,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        # The other dispatcher makes CUDA streams.
        "moe_token_dispatcher_type": "allgather",
    }


def build_model(args: argparse.Namespace, dtype: torch.dtype) -> GPTModel:
    """Build a Llama-like or Mixtral-like model with local layers."""
    config = TransformerConfig(
        **make_expert_options(args),
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
    num_experts = args.experts or None
    layer_spec = get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=num_experts)
    model = GPTModel(
        config,
        layer_spec,
        vocab_size=args.vocab,
        max_sequence_length=args.seq,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return model.to(dtype)


def initialize(threads: int) -> None:
    """Create the process groups of one process on the CPU."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29533", RANK="0", WORLD_SIZE="1")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    # This tracker does not need CUDA.
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    # The rotary embedding creates its tables on this device.
    torch.cuda.current_device = lambda: "cpu"


def train(args: argparse.Namespace) -> None:
    """Train, and print the time of each step."""
    dtype = torch.float32 if args.dtype == "fp32" else torch.bfloat16
    model = build_model(args, dtype)
    optimizer = build_optimizer(model)
    generator = torch.Generator().manual_seed(1)
    positions = torch.arange(args.seq).expand(args.batch, -1)
    # True where a query (row) must not attend to a key (column).
    mask = torch.ones(args.seq, args.seq, dtype=torch.bool).triu(1)[None, None]
    for _ in range(args.steps):
        began = time.perf_counter()
        tokens = torch.randint(args.vocab, (args.batch, args.seq + 1), generator=generator)
        inputs = tokens[:, :-1].contiguous()
        labels = tokens[:, 1:].contiguous()
        losses = model(inputs, positions, mask, labels=labels)
        loss = losses.float().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        milliseconds = (time.perf_counter() - began) * 1e3
        print(f"{milliseconds:.1f}", flush=True)


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
    initialize(args.threads)
    train(args)


if __name__ == "__main__":
    main()
