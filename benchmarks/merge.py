"""Merge of checkpoints: time relative to reading the inputs once, and peak memory.

The inputs are checkpoints of `pretrain_gpt.py` with fp32 main parameters and optimizer state. A
merge reads the main parameters of every input, and with `--optimizer` the state of one. It takes
turns with a program that only reads the main parameters, block by block (`read`), after one warm-up
turn; the best of each counts. The second ratio leaves out their start-up, which is their time for a
tiny model. Peak memory must stay below 1 GB + the largest fp32 tensor.

    python benchmarks/merge.py                          # 4 inputs: a Llama of 373M parameters, bf16
    python benchmarks/merge.py --layers 2 --hidden 256  # small, to try it out
"""

import argparse
import shutil
import sys
from pathlib import Path

from conversion import count_bytes, format_times, prepare_page_cache, run

OUTPUTS = {  # name -> flags of the tool
    "torch_dist": ["--saver", "torch_dist"],
    "hf": ["--saver", "hf"],
    "legacy": ["--saver", "legacy"],
    "hf, fp32": ["--saver", "hf", "--dtype", "fp32"],
    "torch_dist + optimizer": ["--saver", "torch_dist", "--optimizer", "from=LAST"],
}
READ = """
import sys
from pathlib import Path
from megatron.conversion.convert import open_checkpoint
from megatron.conversion.model_space.source import full_precision_key
from megatron.core.dist_checkpointing.mapping import cut_rows

for path in sys.argv[1:]:
    source = open_checkpoint(Path(path))
    for key in source.tensors:
        if not key.startswith("optimizer."):
            stored = full_precision_key(key, source.tensors)
            info = source.tensors[stored]
            for offset, shape in cut_rows(info.shape, info.dtype.itemsize, 32 << 20):
                source.read(stored, offset, shape)
"""


def train(directory: Path, args: argparse.Namespace, layers: int, hidden: int, vocab: int) -> None:
    heads = max(1, hidden // 64)
    flags = f"""--num-layers {layers} --hidden-size {hidden} --swiglu --bf16
        --num-attention-heads {heads} --ffn-hidden-size {hidden * 11 // 4}
        --seq-length 64 --max-position-embeddings 64 --normalization RMSNorm
        --position-embedding-type rope --disable-bias-linear --lr 1e-4
        --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
        --micro-batch-size 1 --train-iters {args.inputs} --save-interval 1 --eval-iters 0
        --mock-data --tokenizer-type NullTokenizer --vocab-size {vocab - 1} --save {directory}"""
    run([sys.executable, "pretrain_gpt.py", *flags.split()])


def make_merge(source: Path, target: Path, name: str, args: argparse.Namespace) -> list[str]:
    merge = [sys.executable, "tools/checkpoint/merge.py", "--workers", str(args.workers)]
    merge += ["--input", str(source), "--average-last", str(args.inputs), "--output", str(target)]
    return merge + OUTPUTS[name]


def make_read(source: Path) -> list[str]:
    return [sys.executable, "-c", READ, *map(str, sorted(source.glob("iter_*")))]


def measure(root: Path, name: str, args: argparse.Namespace) -> None:
    source = root / "run"
    small = root / "small"
    target = root / "merged"
    merges = []
    reads = []
    start_ups: dict[str, list[float]] = {"merge": [], "read": []}
    memory = 0
    for _ in range(args.turns + 1):
        # The start-up of both programs: the same for a model of a few kilobytes.
        shutil.rmtree(target, ignore_errors=True)
        start_ups["read"].append(run(make_read(small))[0])
        start_ups["merge"].append(run(make_merge(small, target, name, args))[0])

        shutil.rmtree(target)
        prepare_page_cache(source, cold=False)
        reads.append(run(make_read(source))[0])
        seconds, resident, _ = run(make_merge(source, target, name, args))
        merges.append(seconds)
        memory = max(memory, resident)
    nbytes = count_bytes(target)
    shutil.rmtree(target)
    best = min(merges[1:])
    reading = min(reads[1:])
    merge_start_up = min(start_ups["merge"][1:])
    read_start_up = min(start_ups["read"][1:])
    without = (best - merge_start_up) / (reading - read_start_up)
    print(
        f"{f'{args.inputs} torch_dist -> {name}':40}{nbytes / 1e9:6.2f} GB {best:6.2f} s   "
        f"read {reading:6.2f} s   {best / reading:5.2f}x read   "
        f"without start-up ({merge_start_up:.2f}, {read_start_up:.2f} s) {without:.2f}x   "
        f"peak {memory / 1e6:6.0f} MB   "
        f"all turns: {format_times(merges)}; read {format_times(reads)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path("/tmp/benchmark_merge"))
    args = parser.parse_args()
    root: Path = args.directory
    root.mkdir(parents=True, exist_ok=True)
    try:
        train(root / "run", args, args.layers, args.hidden, args.vocab)
        train(root / "small", args, layers=1, hidden=64, vocab=1000)
        nbytes = count_bytes(root / "run")
        largest = args.vocab * args.hidden * 4
        print(
            f"{args.inputs} inputs, {nbytes / 1e9:.2f} GB with optimizer state; largest tensor "
            f"{largest / 1e6:.0f} MB: bound {1000 + largest / 1e6:.0f} MB; {args.workers} workers",
            flush=True,
        )
        for name in OUTPUTS:
            measure(root, name, args)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
