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
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron.core.arithmetic import even_range  # noqa: E402
from megatron.core.dist_checkpointing import read_metadata  # noqa: E402
from megatron.core.dist_checkpointing.files import METADATA  # noqa: E402
from megatron.core.dist_checkpointing.format.metadata_encoder import encode_metadata  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.planning.planner import PackedSpec, describe, make_plan, pack  # noqa: E402
from megatron.core.dist_checkpointing.planning.save_plan import place_items  # noqa: E402
from megatron.core.distributed.param_and_grad_buffer import intersect  # noqa: E402
from megatron.core.parallel_state import ParallelState  # noqa: E402
from megatron.training.config.arguments import parse_flags  # noqa: E402
from megatron.training.config.parsing import make_config, make_flag_parser  # noqa: E402
from megatron.training.config.run_config import Config  # noqa: E402
from megatron.training.planning.meta_model import MetaChunk, build_meta_chunks  # noqa: E402
from pretrain_gpt import model_provider  # noqa: E402

T = TypeVar("T")

LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--bf16 "
    "--position-embedding-type rope --group-query-attention --num-query-groups 8 --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --lr 1 --min-lr 0 --train-iters 1 "
    "--sequence-parallel "
    "--mock-data --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--tensor-model-parallel-size 8 "
)


class Case(NamedTuple):
    flags: str
    world: int


CASES = {
    "70b": Case(
        "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
        "--vocab-size 32000 "
        "--pipeline-model-parallel-size 4",
        1024,
    ),
    "405b": Case(  # 128 layers, so that they can be split evenly over the stages
        "--num-layers 128 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 "
        "--vocab-size 128256 "
        "--pipeline-model-parallel-size 16",
        16384,
    ),
}


def config_of(flags: str, world: int) -> Config:
    given, _ = parse_flags(make_flag_parser(), (LLAMA + flags).split())
    config = make_config(given | {"global_batch_size": world}, world)
    config.model.vocab_size = given["vocab_size"]
    return config


def optimizer_state(
    chunks: list[MetaChunk], weights: ShardedStateDict, dp: int, dp_size: int
) -> ShardedStateDict:
    """Return the result of `MegatronOptimizer.sharded_state_dict` on data-parallel rank `dp`."""
    entry_of = {
        id(entry.local): entry for entry in weights.values() if isinstance(entry, ShardedTensor)
    }
    state: ShardedStateDict = {}
    for chunk in chunks:
        params = dict(chunk.module.named_parameters())
        for bucket in chunk.buckets:
            first, last = even_range(bucket.numel, dp, dp_size)
            data = torch.empty(last - first, device="meta")
            for span in bucket.spans:
                entry = entry_of[id(params[span.spec.name])]
                for start, stop in intersect([(span.start, span.stop)], first, last):
                    for name in ("param", "exp_avg", "exp_avg_sq"):
                        key = f"optimizer.state.{name}.{entry.key}"
                        part = entry.flat_range(key, first + start - span.start, data[start:stop])
                        if part.boxes:
                            state[key] = part
    return state


def describe_ranks(config: Config, world: int) -> Iterator[tuple[int, PackedSpec]]:
    """Return the description that every rank sends to rank 0."""
    pp_size = config.parallel.pp_size
    tp_size = config.parallel.tp_size
    dp_size = config.parallel.dp_size(world)
    for pp in range(pp_size):
        for tp in range(tp_size):
            ps = ParallelState.for_rank(config.parallel, world, tp + tp_size * dp_size * pp)
            chunks = list(build_meta_chunks(config, ps, model_provider))
            weights: ShardedStateDict = {}
            for chunk in chunks:
                weights |= chunk.module.sharded_state_dict()
            for dp in range(dp_size):
                rng: ShardedStateDict = {
                    "rng": ShardedObject(f"rng_state/shard_{pp}.{tp}_{pp_size}.{tp_size}", None)
                }
                state = weights | optimizer_state(chunks, weights, dp, dp_size) | rng
                yield tp + tp_size * (dp + dp_size * pp), pack(describe(state))


def timed(function: Callable[[], T]) -> tuple[T, float]:
    """Return processor seconds: all of it runs in one thread, and other processes do not count."""
    began = time.process_time()
    result = function()
    return result, time.process_time() - began


class ReadCost(NamedTuple):
    boxes: int
    seconds: float
    megabytes: float


def read_apart(directory: str, keys: list[str] | None) -> ReadCost:
    """Measure reading the entries of `keys` (None: all tensors) in a separate process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_read, directory, keys).result()


def _read(directory: str, keys: list[str] | None) -> ReadCost:
    before = peak_memory()

    def read() -> int:
        tensors = read_metadata(directory).tensors
        tables = [tensors[key].chunks for key in (tensors if keys is None else keys)]
        return sum(map(len, tables))

    boxes, seconds = timed(read)
    return ReadCost(boxes, seconds, 1e3 * (peak_memory() - before))


def peak_memory() -> float:
    """Return the peak memory of this process in GB.

    `ru_maxrss` of a new process would include its parent's.
    """
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) / 1e6


def simulate(name: str, world: int, workers: int) -> None:
    config = config_of(CASES[name].flags, world)
    packed: list[bytes] = [b""] * world

    def describe_all() -> None:
        for rank, spec in describe_ranks(config, world):
            packed[rank] = pickle.dumps(spec)

    _, describing = timed(describe_all)
    sent = statistics.mean(map(len, packed))
    specs, receiving = timed(lambda: [pickle.loads(data) for data in packed])
    packed.clear()
    before = peak_memory()
    plan, planning = timed(lambda: make_plan(specs))
    placed, laying_out = timed(lambda: place_items(plan, workers))
    results, cutting = timed(
        lambda: [pickle.dumps(placed.select_rank(rank)) for rank in range(world)]
    )
    metadata, collecting = timed(placed.build_metadata)
    encoded, encoding = timed(lambda: encode_metadata(metadata))
    planned = peak_memory()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / METADATA).write_bytes(b"".join(encoded))
        wanted = read_apart(directory, [key for key, _, _ in specs[-1].read_types()])
        everything = read_apart(directory, None)

    loads = plan.loads
    parallel = config.parallel
    print(
        f"{name} on {world} ranks: TP {parallel.tp_size} x PP {parallel.pp_size} x DP "
        f"{parallel.dp_size(world)}, "
        f"{sum(loads) / 1e9:.0f} GB, {everything.boxes} boxes"
    )
    print(f"  describe   {1e3 * describing / world:.1f} ms, {sent / 1e3:.0f} kB per rank to rank 0")
    back = statistics.mean(map(len, results)) / 1e3
    print(
        f"  rank 0     receives in {receiving:.1f} s, returns {back:.0f} kB per rank in "
        f"{cutting:.1f} s"
    )
    print(
        f"             plan {planning:.1f} s, layout {laying_out:.1f} s; {before:.2f} GB before, "
        f"{planned:.2f} after"
    )
    print(f"             .metadata collected in {collecting:.1f} s, encoded in {encoding:.1f} s")
    print(f"  .metadata  {sum(map(len, encoded)) / 1e6:.1f} MB")
    for label, cost in (("entries of one rank", wanted), ("all entries", everything)):
        print(
            f"             read {label}: {cost.boxes} boxes in {cost.seconds:.2f} s and "
            f"{cost.megabytes:.0f} MB"
        )
    largest = max(loads) / statistics.mean(loads)
    print(
        f"  per rank   {min(loads) / 1e9:.3f} .. {max(loads) / 1e9:.3f} GB, largest {largest:.3f} "
        "x the mean"
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
