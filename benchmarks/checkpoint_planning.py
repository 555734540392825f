"""Cost of planning a checkpoint at scale: all ranks of a 70B and a 405B model on one machine.

The plan is a pure function of the ranks' state, so all of it runs here: the description sent by
every rank (the model as built in training, on the meta device; both overlaps, so buckets in reverse
order, each sharded over DP), the plan on rank 0, the file layout, and `.metadata`. Later saves with
the same structure cost none of this.

    python benchmarks/checkpoint_planning.py                 # 70B on 1,024 ranks, 405B on 16,384
    python benchmarks/checkpoint_planning.py --model 70b --world 256
"""

import argparse
import multiprocessing
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from scratch import create_scratch_directory

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron.core.arithmetic import even_range  # noqa: E402
from megatron.core.dist_checkpointing import read_metadata  # noqa: E402
from megatron.core.dist_checkpointing.files import METADATA  # noqa: E402
from megatron.core.dist_checkpointing.format.metadata_codec import MetadataEncoder  # noqa: E402
from megatron.core.dist_checkpointing.mapping import (  # noqa: E402
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
)
from megatron.core.dist_checkpointing.planning.collection import PackedSpec, describe, pack
from megatron.core.dist_checkpointing.planning.save_plan import make_plan  # noqa: E402
from megatron.core.distributed.param_and_grad_buffer import intersect  # noqa: E402
from megatron.core.parallel_state import ParallelState  # noqa: E402
from megatron.planning.meta_model import MetaChunk, build_meta_chunks  # noqa: E402
from megatron.training.config.arguments import parse_flags  # noqa: E402
from megatron.training.config.parsing import make_config, make_flag_parser  # noqa: E402
from megatron.training.config.run_config import Config  # noqa: E402
from pretrain_gpt import model_provider  # noqa: E402

T = TypeVar("T")

LLAMA = """
    --swiglu
    --normalization RMSNorm
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --bf16
    --position-embedding-type rope
    --group-query-attention
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 4096
    --micro-batch-size 1
    --lr 1
    --min-lr 0
    --train-iters 1
    --sequence-parallel
    --mock-data
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --tensor-model-parallel-size 8
"""
LLAMA_70B = """
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
    --vocab-size 32000
    --pipeline-model-parallel-size 4
"""
# 128 layers, so that they can be split evenly over the stages.
LLAMA_405B = """
    --num-layers 128
    --hidden-size 16384
    --ffn-hidden-size 53248
    --num-attention-heads 128
    --vocab-size 128256
    --pipeline-model-parallel-size 16
"""


class Case(NamedTuple):
    """Flags of a model and its layout, and the default number of ranks."""

    flags: str
    world: int


CASES = {
    "70b": Case(LLAMA_70B, 1024),
    "405b": Case(LLAMA_405B, 16384),
}


def make_case_config(case: Case, world: int) -> Config:
    """Return the configuration of a run, with one sequence for each rank and step."""
    flags = LLAMA + case.flags
    given, _ = parse_flags(make_flag_parser(), flags.split())
    given["global_batch_size"] = world
    config = make_config(given, world)
    config.model.vocab_size = given["vocab_size"]
    return config


# ---- The state of every rank ----


def find_entries(weights: ShardedStateDict) -> dict[int, ShardedTensor]:
    """Return the entry of each parameter, by the id of its local tensor."""
    entries = {}
    for entry in weights.values():
        if isinstance(entry, ShardedTensor):
            entries[id(entry.local)] = entry
    return entries


def describe_optimizer(
    chunks: list[MetaChunk], weights: ShardedStateDict, dp: int, dp_size: int
) -> ShardedStateDict:
    """Return the result of `MegatronOptimizer.sharded_state_dict` on data-parallel rank `dp`."""
    entries = find_entries(weights)
    state: ShardedStateDict = {}
    for chunk in chunks:
        params = dict(chunk.module.named_parameters())
        for bucket in chunk.buckets:
            # The elements of the bucket that this rank owns.
            first, last = even_range(bucket.numel, dp, dp_size)
            data = torch.empty(last - first, device="meta")
            for span in bucket.spans:
                entry = entries[id(params[span.spec.name])]
                owned = intersect([(span.start, span.stop)], first, last)
                for start, stop in owned:
                    offset = first + start - span.start
                    for name in ("param", "exp_avg", "exp_avg_sq"):
                        key = f"optimizer.state.{name}.{entry.key}"
                        part = entry.flat_range(key, offset, data[start:stop])
                        if part.boxes:
                            state[key] = part
    return state


def describe_ranks(config: Config, world: int) -> Iterator[tuple[int, PackedSpec]]:
    """Yield each rank and the description that it sends to rank 0."""
    pp_size = config.parallel.pp_size
    tp_size = config.parallel.tp_size
    dp_size = config.parallel.dp_size(world)
    for pp in range(pp_size):
        for tp in range(tp_size):
            # The weights of all data-parallel ranks are the same.
            first_rank = tp + tp_size * dp_size * pp
            ps = ParallelState.for_rank(config.parallel, world, first_rank)
            chunks = list(build_meta_chunks(config, ps, model_provider))
            weights: ShardedStateDict = {}
            for chunk in chunks:
                weights |= chunk.module.sharded_state_dict()
            rng = ShardedObject(f"rng_state/shard_{pp}.{tp}_{pp_size}.{tp_size}", None)
            for dp in range(dp_size):
                state = dict(weights)
                state |= describe_optimizer(chunks, weights, dp, dp_size)
                state["rng"] = rng
                yield first_rank + tp_size * dp, pack(describe(state))


# ---- Measurements ----


def measure(function: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a function and its processor seconds.

    All of it runs in one thread, and other processes do not count.
    """
    began = time.process_time()
    result = function()
    return result, time.process_time() - began


class ReadCost(NamedTuple):
    """Cost of reading entries of `.metadata`."""

    boxes: int
    seconds: float
    megabytes: float


def read_in_new_process(directory: str, keys: list[str] | None) -> ReadCost:
    """Measure reading the entries of `keys` (None: all tensors) in a separate process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_read, directory, keys).result()


def measure_read(directory: str, keys: list[str] | None) -> ReadCost:
    """Measure reading the entries of `keys` (None: all tensors)."""
    before = read_peak_memory()

    def count_boxes() -> int:
        tensors = read_metadata(directory).tensors
        wanted = list(tensors) if keys is None else keys
        count = 0
        for key in wanted:
            count += len(tensors[key].chunks)
        return count

    boxes, seconds = measure(count_boxes)
    return ReadCost(boxes, seconds, 1e3 * (read_peak_memory() - before))


def read_peak_memory() -> float:
    """Return the peak memory of this process in GB.

    `ru_maxrss` of a new process would include its parent's.
    """
    status = Path("/proc/self/status").read_text().split()
    kilobytes = status[status.index("VmHWM:") + 1]
    return int(kilobytes) / 1e6


def print_row(label: str, text: str) -> None:
    print(f"  {label:10} {text}")


def simulate(name: str, world: int, workers: int) -> None:
    """Plan a checkpoint of all ranks, and print the cost of each step."""
    config = make_case_config(CASES[name], world)
    packed: list[bytes] = [b""] * world

    # Every rank describes its state.
    def describe_all() -> None:
        for rank, spec in describe_ranks(config, world):
            packed[rank] = pickle.dumps(spec)

    _, describing = measure(describe_all)
    sent = statistics.mean(map(len, packed)) / 1e3

    # Rank 0 makes the plan, the file layout and `.metadata`.
    specs, receiving = measure(lambda: list(map(pickle.loads, packed)))
    packed.clear()
    before = read_peak_memory()
    plan, planning = measure(lambda: make_plan(specs, workers=workers))

    def cut_results() -> list[bytes]:
        return [pickle.dumps(items) for items in plan.split_by_rank()]

    results, cutting = measure(cut_results)
    returned = statistics.mean(map(len, results)) / 1e3
    metadata, collecting = measure(plan.build_metadata)
    encoded, encoding = measure(lambda: MetadataEncoder(metadata).encode({}))
    after = read_peak_memory()

    # A load reads the entries of its own tensors.
    content = b"".join(encoded)
    keys_of_rank = [key for key, _, _ in specs[-1].read_types()]
    with create_scratch_directory("planning") as directory:
        (directory / METADATA).write_bytes(content)
        of_rank = read_in_new_process(str(directory), keys_of_rank)
        of_all = read_in_new_process(str(directory), None)

    parallel = config.parallel
    loads = [load / 1e9 for load in plan.loads]
    smallest = min(loads)
    largest = max(loads)
    print(
        f"{name} on {world} ranks: TP {parallel.tp_size} x PP {parallel.pp_size} x DP "
        f"{parallel.dp_size(world)}, {sum(loads):.0f} GB, {of_all.boxes} boxes"
    )
    print_row("describe", f"{1e3 * describing / world:.1f} ms, {sent:.0f} kB per rank to rank 0")
    print_row(
        "rank 0",
        f"receives in {receiving:.1f} s, returns {returned:.0f} kB per rank in {cutting:.1f} s",
    )
    print_row(
        "",
        f"plan and file layout {planning:.1f} s; {before:.2f} GB before, {after:.2f} after",
    )
    print_row("", f".metadata collected in {collecting:.1f} s, encoded in {encoding:.1f} s")
    print_row(".metadata", f"{len(content) / 1e6:.1f} MB")
    for label, cost in (("entries of one rank", of_rank), ("all entries", of_all)):
        print_row(
            "",
            f"read {label}: {cost.boxes} boxes in {cost.seconds:.2f} s and {cost.megabytes:.0f} MB",
        )
    imbalance = largest / statistics.mean(loads)
    print_row(
        "per rank",
        f"{smallest:.3f} .. {largest:.3f} GB, largest {imbalance:.3f} x the mean",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--world", type=int, help="number of ranks (default: 1024 for 70b, 16384 for 405b)"
    )
    parser.add_argument("--workers", type=int, default=2, help="files per rank")
    args = parser.parse_args()
    for name in args.model:
        simulate(name, args.world or CASES[name].world, args.workers)


if __name__ == "__main__":
    main()
