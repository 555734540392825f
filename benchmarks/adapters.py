"""Speed of LoRA: an 8B model with random weights, bf16, sequences of 4096 tokens, on one GPU.

    python benchmarks/adapters.py                # needs 80 GB on the device, 17 GB on the disk
    python benchmarks/adapters.py --smoke        # a tiny model on the CPU, to try it out
    python benchmarks/adapters.py --only nf4 --iterations 8 --directory /dev/shm

NeMo Automodel publishes 12.5k tokens/s for this case on one H100.
"""

import argparse
import math
import re
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu import Report, Shape, read_iteration_times, run  # noqa: E402
from megatron.conversion.huggingface.directory_writer import write_huggingface  # noqa: E402
from megatron.conversion.model_space.model import model_config, model_tensors  # noqa: E402
from megatron.core.dist_checkpointing.mapping import LazyTensor  # noqa: E402
from megatron.core.dist_checkpointing.mapping import Shape as TensorShape  # noqa: E402
from megatron.training.config.parsing import parse_args  # noqa: E402

# Random values that all weights repeat: drawing those of 8B parameters would take minutes.
NUM_VALUES = 1 << 24
PUBLISHED = 12_500  # tokens/s, NeMo Automodel
# The sizes of Llama 3.1 8B, and a small model
LARGE = Shape(
    layers=32,
    hidden=4096,
    ffn=14336,
    heads=32,
    groups=8,
    vocab=128_256,
    seq=4096,
    batch=2,
)
SMALL = Shape(layers=2, hidden=128, ffn=256, heads=4, groups=2, vocab=256, seq=64, batch=2)
VARIANTS = {
    "all linear layers": ["--lora-rank", "16", "--lora-alpha", "32"],
    "all linear layers, base in nf4": [
        *("--lora-rank", "16", "--lora-alpha", "32", "--lora-base-encoding", "nf4"),
    ],
    "q and v": ["--lora-rank", "16", "--lora-alpha", "32", "--lora-targets", "q_proj", "v_proj"],
}


@dataclass
class RandomModel:
    """A checkpoint whose weights are drawn when they are read."""

    args: dict[str, Any]
    tensors: dict[str, LazyTensor]
    training: None = None
    description: str = "random weights"
    unused: list[str] = field(default_factory=list)


def write_base_model(shape: Shape, directory: Path) -> None:
    """Write a model of transformers with random weights in bf16."""
    args = vars(parse_args(shape.list_flags(1), 1).model) | {"seq_length": shape.seq}
    values = (torch.randn(NUM_VALUES) * 0.02).bfloat16()

    def draw(offset: TensorShape, shape: TensorShape) -> torch.Tensor:
        """Return a box of random weights; those of norms are 1."""
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        num_elements = math.prod(shape)
        repeats = math.ceil(num_elements / NUM_VALUES)
        return values.repeat(repeats)[:num_elements].view(shape)

    tensors = {}
    for key, tensor_shape in model_tensors(model_config(args, shape.vocab, "base")).items():
        tensors[key] = LazyTensor(tensor_shape, torch.bfloat16, draw)
    write_huggingface(RandomModel(args, tensors), directory)


def measure(name: str, base: Path, shape: Shape, options: argparse.Namespace) -> str:
    """Train adapters, and return a line with speed and peak memory."""
    command = shape.build_command(options.iterations, options.device)
    command += [*VARIANTS[name], "--pretrained-checkpoint", str(base)]
    output = run(Report(None), command)
    milliseconds = statistics.median(read_iteration_times(output))
    speed = shape.seq * shape.batch / milliseconds * 1000
    memory = re.search(r"max (?:allocated|resident) ([\d.]+) GB", output)
    assert memory is not None, "the log has no line with the peak memory"

    line = f"  LoRA, {name}: {milliseconds:.1f} ms, {speed:,.0f} tokens/s, {memory[1]} GB"
    if shape is LARGE:
        line += f", {speed / PUBLISHED:.2f} of NeMo Automodel's published {PUBLISHED:,}"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--output", type=Path, help="file to append results to")
    parser.add_argument("--only", default="", help="part of the names of cases to run")
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--directory", type=Path, help="for the base model, e.g. in memory")
    options = parser.parse_args()
    options.device = "cpu" if options.smoke else "cuda"
    shape = SMALL if options.smoke else LARGE
    report = Report(options.output)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        base = Path(directory) / "base"
        write_base_model(shape, base)
        report.add(f"{shape}, {options.device}, torch {torch.__version__}")
        for name in [name for name in VARIANTS if options.only in name]:
            with report.measuring(name):
                report.add(measure(name, base, shape, options))

    sys.exit(1 if report.num_failures else 0)


if __name__ == "__main__":
    main()
