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
from dataclasses import dataclass, field
from pathlib import Path

from conversion import count_bytes, format_times, prepare_page_cache, run
from scratch import DIRECTORY_HELP, create_scratch_directory

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
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.model_space.optimizer_states import full_precision_key
from megatron.core.dist_checkpointing.mapping import cut_rows

for path in sys.argv[1:]:
    source = open_checkpoint(Path(path))
    for key in source.tensors:
        if not key.startswith("optimizer."):
            stored = full_precision_key(key, source.tensors)
            info = source.tensors[stored]
            for offset, shape in cut_rows(info.shape, info.dtype.itemsize, 32 << 20):
                source.tensors[stored].read(offset, shape)
"""


@dataclass(frozen=True)
class Model:
    """Sizes of a Llama-like model."""

    layers: int
    hidden: int
    vocab: int


# The time of both programs for this model is their start-up.
SMALL = Model(layers=1, hidden=64, vocab=1000)


def train(directory: Path, model: Model, inputs: int) -> None:
    """Save a checkpoint after each of as many iterations as there are inputs."""
    heads = max(1, model.hidden // 64)
    ffn = model.hidden * 11 // 4
    # The sequence is short because only the size of the parameters matters.
    flags = f"""
        --num-layers {model.layers} --hidden-size {model.hidden} --num-attention-heads {heads}
        --swiglu --ffn-hidden-size {ffn} --seq-length 64 --max-position-embeddings 64
        --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
        --untie-embeddings-and-output-weights --bf16 --hidden-dropout 0 --attention-dropout 0
        --micro-batch-size 1 --train-iters {inputs} --save-interval 1 --lr 1e-4 --eval-iters 0
        --mock-data --tokenizer-type NullTokenizer --vocab-size {model.vocab - 1}
        --save {directory}
    """
    run([sys.executable, "pretrain_gpt.py", *flags.split()])


def make_merge_command(
    source: Path, target: Path, name: str, args: argparse.Namespace
) -> list[str]:
    """Return the command that merges the checkpoints in `source` to one of the outputs."""
    return [
        sys.executable,
        "tools/checkpoint/merge.py",
        "--input",
        str(source),
        "--average-last",
        str(args.inputs),
        "--output",
        str(target),
        *OUTPUTS[name],
        "--workers",
        str(args.workers),
    ]


def make_read_command(source: Path) -> list[str]:
    """Return the command that reads the main parameters of the checkpoints in `source`."""
    checkpoints = sorted(source.glob("iter_*"))
    return [sys.executable, "-c", READ, *map(str, checkpoints)]


@dataclass
class Turns:
    """Measurements of one output, without the turn that warms up."""

    merge_times: list[float] = field(default_factory=list)
    read_times: list[float] = field(default_factory=list)
    merge_start_ups: list[float] = field(default_factory=list)
    read_start_ups: list[float] = field(default_factory=list)
    peak_memory: int = 0
    output_bytes: int = 0


def measure(root: Path, name: str, args: argparse.Namespace) -> Turns:
    """Merge and read in turns."""
    source = root / "run"
    small = root / "small"
    target = root / "merged"
    turns = Turns()
    for turn in range(args.turns + 1):
        # The start-up of both programs.
        read_start_up, _, _ = run(make_read_command(small))
        merge_start_up, _, _ = run(make_merge_command(small, target, name, args))
        shutil.rmtree(target)

        prepare_page_cache(source, cold=False)
        reading, _, _ = run(make_read_command(source))
        merging, memory, _ = run(make_merge_command(source, target, name, args))
        turns.output_bytes = count_bytes(target)
        shutil.rmtree(target)

        turns.peak_memory = max(turns.peak_memory, memory)
        if turn > 0:
            turns.merge_times.append(merging)
            turns.read_times.append(reading)
            turns.merge_start_ups.append(merge_start_up)
            turns.read_start_ups.append(read_start_up)
    return turns


def print_turns(name: str, turns: Turns) -> None:
    """Print the time of a merge relative to that of reading its inputs."""
    # The best of each: other programs can only slow down a turn.
    merging = min(turns.merge_times)
    reading = min(turns.read_times)
    merge_start_up = min(turns.merge_start_ups)
    read_start_up = min(turns.read_start_ups)
    ratio = merging / reading
    ratio_without_start_up = (merging - merge_start_up) / (reading - read_start_up)
    print(
        f"{name:40}{turns.output_bytes / 1e9:6.2f} GB {merging:6.2f} s   "
        f"read {reading:6.2f} s   {ratio:5.2f}x read   without start-up "
        f"({merge_start_up:.2f}, {read_start_up:.2f} s) {ratio_without_start_up:.2f}x   "
        f"peak {turns.peak_memory / 1e6:6.0f} MB   "
        f"all turns: {format_times(turns.merge_times)}; read {format_times(turns.read_times)}",
        flush=True,
    )


def parse_arguments() -> argparse.Namespace:
    """Return the flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--directory", type=Path, help=DIRECTORY_HELP)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    model = Model(args.layers, args.hidden, args.vocab)
    with create_scratch_directory("merge", args.directory) as root:
        train(root / "run", model, args.inputs)
        train(root / "small", SMALL, args.inputs)

        # The fp32 main parameters of an embedding.
        largest = model.vocab * model.hidden * 4 / 1e6
        gigabytes = count_bytes(root / "run") / 1e9
        print(
            f"{args.inputs} inputs, {gigabytes:.2f} GB with optimizer state; largest tensor "
            f"{largest:.0f} MB: bound {1000 + largest:.0f} MB; {args.workers} workers",
            flush=True,
        )
        for name in OUTPUTS:
            turns = measure(root, name, args)
            print_turns(f"{args.inputs} torch_dist -> {name}", turns)


if __name__ == "__main__":
    main()
