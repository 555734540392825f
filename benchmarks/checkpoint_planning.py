"""What planning a checkpoint costs at scale: 1,024 and 8,192 ranks of a 70B model, simulated on one machine.

The plan is a pure function of what the ranks hold, so all of it can be computed here: the descriptions of all ranks
(weights at TP 8 x PP 4, a ZeRO-1 shard of the fp32 main parameters and both moments), the plan on rank 0, the layout of
all files, `.metadata`. Every save after the first costs none of this.

    python benchmarks/checkpoint_planning.py                 # 1024 and 8192 ranks
    python benchmarks/checkpoint_planning.py --world 256
"""

import argparse
import pickle
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron.core.dist_checkpointing.format.metadata import decode_metadata, encode_metadata  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.planning.file_layout import layout_files, plan_metadata  # noqa: E402
from megatron.core.dist_checkpointing.planning.planner import LocalSpec, describe, make_plan  # noqa: E402

LAYERS, HIDDEN, FFN, HEADS, GROUPS, VOCAB = 80, 8192, 28672, 64, 8, 32000  # Llama 2 70B
TP, PP = 8, 4


def model_state(tp: int, pp: int) -> ShardedStateDict:
    """The bf16 weights of one model-parallel rank."""

    def split(key: str, rows: int, columns: int, dim: int, blocks: int = 1) -> ShardedTensor:
        shape = [rows // TP if dim == 0 else rows, columns // TP if dim == 1 else columns]
        tensor = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        if dim == 0:
            return ShardedTensor.split_rows(key, tensor, tp, TP, blocks)
        return ShardedTensor.split(key, tensor, dim, tp, TP)

    def norm(key: str) -> ShardedTensor:
        return ShardedTensor.replicated(key, torch.empty(HIDDEN, dtype=torch.bfloat16, device="meta"))

    head = HIDDEN // HEADS
    tensors = [split("embedding.word_embeddings.weight", VOCAB, HIDDEN, 0)] if pp == 0 else []
    for layer in range(pp * LAYERS // PP, (pp + 1) * LAYERS // PP):
        prefix = f"decoder.layers.{layer}."
        tensors += [
            norm(prefix + "self_attention.linear_qkv.layer_norm_weight"),
            split(prefix + "self_attention.linear_qkv.weight", (HEADS + 2 * GROUPS) * head, HIDDEN, 0),
            split(prefix + "self_attention.linear_proj.weight", HIDDEN, HEADS * head, 1),
            norm(prefix + "mlp.linear_fc1.layer_norm_weight"),
            split(prefix + "mlp.linear_fc1.weight", 2 * FFN, HIDDEN, 0, 2),
            split(prefix + "mlp.linear_fc2.weight", HIDDEN, FFN, 1),
        ]
    if pp == PP - 1:
        tensors += [norm("decoder.final_layernorm.weight"), split("output_layer.weight", VOCAB, HIDDEN, 0)]
    return {tensor.key: tensor for tensor in tensors}


def optimizer_state(weights: list[ShardedTensor], dp: int, dp_size: int) -> ShardedStateDict:
    """The ZeRO-1 shard `dp` of the flat buffer of all weights."""
    total = sum(weight.local.numel() for weight in weights)
    start, stop = total * dp // dp_size, total * (dp + 1) // dp_size
    state: ShardedStateDict = {}
    position = 0
    for weight in weights:
        first, last = max(start, position), min(stop, position + weight.local.numel())
        if first < last:
            data = torch.empty(last - first, device="meta")
            for name in ("param", "exp_avg", "exp_avg_sq"):
                key = f"optimizer.state.{name}.{weight.key}"
                state[key] = weight.flat_range(key, first - position, data)
        position += weight.local.numel()
    return state


def describe_ranks(world: int) -> list[LocalSpec]:
    """What every rank would send to rank 0."""
    dp_size = world // (TP * PP)
    specs: dict[int, LocalSpec] = {}
    for pp in range(PP):
        for tp in range(TP):
            weights = model_state(tp, pp)
            for dp in range(dp_size):
                rng = {"rng": ShardedObject(f"rng_state/shard_{pp}.{tp}_{PP}.{TP}", None)}
                state = weights | optimizer_state(list(weights.values()), dp, dp_size) | rng
                specs[tp + TP * (dp + dp_size * pp)] = describe(state)
    return [specs[rank] for rank in range(world)]


def simulate(world: int, workers: int) -> None:
    began = time.perf_counter()
    specs = describe_ranks(world)
    describing = time.perf_counter() - began
    boxes = sum(len(tensor.boxes) for spec in specs for tensor in spec.tensors)
    payload = [len(pickle.dumps(spec)) for spec in specs[:: max(1, world // 64)]]

    began = time.perf_counter()
    plans = make_plan(specs)
    planning = time.perf_counter() - began
    loads = [plan.nbytes for plan in plans]

    began = time.perf_counter()
    layouts = [layout_files(plan, rank, workers) for rank, plan in enumerate(plans)]
    metadata = plan_metadata(specs, layouts)
    laying_out = time.perf_counter() - began
    began = time.perf_counter()
    encoded = encode_metadata(metadata)
    encoding = time.perf_counter() - began
    began = time.perf_counter()
    decode_metadata(encoded, ".metadata")
    decoding = time.perf_counter() - began

    chunks = sum(len(tensor.chunks) for tensor in metadata.tensors.values())
    mean = statistics.mean(loads)
    print(f"{world} ranks: TP {TP} x PP {PP} x DP {world // (TP * PP)}, {sum(loads) / 1e9:.0f} GB")
    print(f"  described  {boxes} boxes in {describing:.1f} s ({1e3 * describing / world:.1f} ms per rank)")
    print(f"             {statistics.mean(payload) / 1e3:.0f} kB per rank to rank 0")
    print(f"  plan       {planning:.1f} s, layout of {chunks} chunks {laying_out:.1f} s")
    print(f"  .metadata  {len(encoded) / 1e6:.1f} MB, written in {encoding:.1f} s, read in {decoding:.1f} s")
    print(
        f"  per rank   {min(loads) / 1e9:.3f} .. {max(loads) / 1e9:.3f} GB, largest {max(loads) / mean:.3f} x the mean"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="*", default=[1024, 8192], help="numbers of ranks")
    parser.add_argument("--workers", type=int, default=2, help="files per rank")
    args = parser.parse_args()
    for world in args.world:
        if world % (TP * PP):
            raise SystemExit(f"--world {world} is not a multiple of TP {TP} x PP {PP}")
        simulate(world, args.workers)


if __name__ == "__main__":
    main()
