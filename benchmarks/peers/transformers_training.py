"""A plain training loop of transformers: Llama or Mixtral with SDPA, clipping, fused AdamW. Prints one step time (ms) a
line.

bf16 here is the fastest form, bf16 parameters and moments without fp32 main parameters (which our bf16 has).
"""

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel


def build_model(args: argparse.Namespace) -> PreTrainedModel:
    shape = {
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "intermediate_size": args.ffn,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.groups,
        "max_position_embeddings": args.seq,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    if not args.experts:
        return LlamaForCausalLM(LlamaConfig(**shape))
    router = {"num_local_experts": args.experts, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
    config = MixtralConfig(**shape, **router, output_router_logits=True, experts_implementation=args.experts_by)
    return MixtralForCausalLM(config)


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
    parser.add_argument("--experts", type=int, default=0, help="experts of width --ffn in every layer, 2 for a token")
    parser.add_argument("--experts-by", default="grouped_mm", help="how: eager, batched_mm or grouped_mm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = torch.float32 if args.dtype == "fp32" else torch.bfloat16
    model = build_model(args).to(args.device, dtype)
    if args.compile:
        model.compile()
    decay = [p for p in model.parameters() if p.dim() > 1]
    no_decay = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    synchronize = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    generator = torch.Generator().manual_seed(1)
    for _ in range(args.steps):
        start = time.perf_counter()
        tokens = torch.randint(args.vocab, (args.batch, args.seq + 1), generator=generator).to(args.device)
        labels = tokens[:, 1:].contiguous()
        loss = model(input_ids=tokens[:, :-1], labels=labels, shift_labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        synchronize()
        print(f"{(time.perf_counter() - start) * 1e3:.1f}", flush=True)


if __name__ == "__main__":
    main()
