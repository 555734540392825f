"""Import and export of a Hugging Face model: speed relative to `cp` of the same bytes.

A Llama of 1.6B parameters in bf16 (3.2 GB) is

* imported directly into the shards of two processes (TP2, PP2, and both replicas of DP2), as
  `--load DIRECTORY --finetune` does, without a checkpoint in between;
* imported into a torch_dist checkpoint and exported from it by `tools/checkpoint/convert.py`. Its
  start-up, most of it imports of torch and transformers, is the time of a model of 2 layers.

Loads are compared with `cp`, conversions with `cp` and fsync. Both take turns after a warm-up turn;
medians count. All inputs are in the page cache.

    python benchmarks/huggingface.py
    python benchmarks/huggingface.py --layers 2 --hidden 1024    # small, to try it out
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from conversion import copy, count_bytes, format_times, prepare_page_cache, run
from safetensors.torch import save_file
from scratch import DIRECTORY_HELP, create_scratch_directory

from megatron.conversion.huggingface.directory import HuggingFaceSource
from megatron.conversion.model_space.model import model_config
from megatron.core.dist_checkpointing import ShardedStateDict
from megatron.core.models import GPTModel
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState
from megatron.core.run_checkpoint.native_reader import load_from_source

PROCESSES = 2
LAYOUTS = {
    "TP2": ParallelConfig(tensor_model_parallel_size=2),
    "PP2": ParallelConfig(pipeline_model_parallel_size=2),
    "DP2": ParallelConfig(),
}
HEAD_DIM = 128
LAYERS_PER_FILE = 4


Shapes = dict[str, tuple[int, ...]]  # of tensors, by name


@dataclass(frozen=True)
class Model:
    """Sizes of a Llama."""

    layers: int
    hidden: int
    vocab: int

    @property
    def heads(self) -> int:
        return self.hidden // HEAD_DIM

    @property
    def groups(self) -> int:
        """Key and value heads."""
        return max(1, self.heads // 4)

    @property
    def ffn(self) -> int:
        return 4 * self.hidden

    def make_config(self) -> dict[str, object]:
        """Return the contents of config.json."""
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "vocab_size": self.vocab,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }

    def list_layer_shapes(self, layer: int) -> Shapes:
        """Return the tensors of a layer."""
        hidden = self.hidden
        kv = self.groups * HEAD_DIM
        shapes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (self.ffn, hidden),
            "mlp.up_proj": (self.ffn, hidden),
            "mlp.down_proj": (hidden, self.ffn),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        return {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}

    def list_other_shapes(self) -> Shapes:
        """Return the tensors outside the layers."""
        return {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocab, self.hidden),
        }


# Its conversion takes the time of the tool's start-up.
SMALL = Model(layers=2, hidden=256, vocab=1000)


def split_into_files(model: Model) -> list[Shapes]:
    """Return the tensors of each file."""
    files: list[Shapes] = []
    for layer in range(model.layers):
        if layer % LAYERS_PER_FILE == 0:
            files.append({})
        files[-1] |= model.list_layer_shapes(layer)
    files.append(model.list_other_shapes())
    return files


def write_model(directory: Path, model: Model) -> None:
    """Write a Llama with random weights as transformers does: several files with an index."""
    directory.mkdir(parents=True)
    files = split_into_files(model)
    weight_map = {}
    for number, shapes in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {key: torch.randn(shape).bfloat16() for key, shape in shapes.items()}
        save_file(tensors, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shapes, name)

    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index)
    config = json.dumps(model.make_config())
    (directory / "config.json").write_text(config)


# ---- Results ----


@dataclass
class Turns:
    """Seconds of every turn, without the one that warms up."""

    times: list[float] = field(default_factory=list)
    copy_times: list[float] = field(default_factory=list)
    start_ups: list[float] = field(default_factory=list)

    def print(self, name: str, nbytes: int) -> None:
        """Print the median, relative to that of the copy."""
        seconds = statistics.median(self.times)
        copying = statistics.median(self.copy_times)
        line = (
            f"{name:22}{nbytes / 1e9:6.2f} GB {seconds:6.2f} s   cp {copying:5.2f} s   "
            f"{copying / seconds:5.2f}x cp"
        )
        if self.start_ups:
            start_up = statistics.median(self.start_ups)
            ratio = copying / (seconds - start_up)
            line += f", {ratio:5.2f}x without start-up of {start_up:.1f} s"
        all_times = format_times(self.times)
        all_copies = format_times(self.copy_times)
        print(f"{line}   all turns: {all_times}; cp {all_copies}", flush=True)


# ---- Import into shards ----


def build_shards(directory: Path, layout: str) -> GPTModel:
    """Build this rank's part of the model, without initializing it."""
    parallel = LAYOUTS[layout]
    ps = ParallelState.for_rank(parallel, PROCESSES, dist.get_rank())
    args = HuggingFaceSource(directory).args
    config = model_config(args, args["vocab_size"], str(directory))

    # Every pipeline stage has the same number of layers.
    num_layers = config.num_layers // ps.pp.size
    first = num_layers * ps.pp.rank
    model = GPTModel(
        config,
        layers=range(first, first + num_layers),
        pre_process=ps.pp.rank == 0,
        post_process=ps.pp.rank == ps.pp.size - 1,
        tp=ps.tp,
        device=torch.device("cpu"),
    )
    model.initialize(None)
    return model


def measure_load(state: ShardedStateDict, directory: Path) -> float:
    """Return the seconds until all ranks have loaded a model."""
    dist.barrier()
    began = time.perf_counter()
    load_from_source(state, HuggingFaceSource(directory))
    dist.barrier()
    return time.perf_counter() - began


def import_on_ranks(root: Path, turns: int) -> None:
    """Run on two processes: load the model into the shards of each layout, next to `cp`."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    directory = root / "hf"
    copied = root / "copy"
    nbytes = count_bytes(directory)
    for layout in LAYOUTS:
        model = build_shards(directory, layout)
        state = model.sharded_state_dict()
        results = Turns()
        for turn in range(turns + 1):
            seconds = measure_load(state, directory)
            copying = 0.0
            if dist.get_rank() == 0:
                copying = copy(directory, copied, durable=False)
                shutil.rmtree(copied)
            if turn > 0:
                results.times.append(seconds)
                results.copy_times.append(copying)
        if dist.get_rank() == 0:
            results.print(f"hf -> shards, {layout}", nbytes)
        # Free the memory before the next model is built.
        del model, state
    dist.destroy_process_group()


def start_imports(root: Path, turns: int) -> None:
    """Run the imports in two processes of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(PROCESSES)]
    command += [__file__, "--turns", str(turns), "--directory", str(root)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment)


# ---- Conversions ----


def convert(source: Path, target: Path, saver: str) -> float:
    """Return the seconds of a conversion in a process of the tool, from the page cache."""
    shutil.rmtree(target, ignore_errors=True)
    prepare_page_cache(source, cold=False)
    os.sync()
    command = [sys.executable, "tools/checkpoint/convert.py"]
    command += ["--load-dir", str(source), "--save-dir", str(target)]
    command += ["--saver", saver, "--workers", "2"]
    seconds, _, _ = run(command)
    return seconds


def compare_conversion(root: Path, source: str, target: str, turns: int) -> None:
    """Compare a conversion with `cp` and fsync of its result."""
    small = root / "small"
    copied = root / "copy"
    results = Turns()
    for turn in range(turns + 1):
        start_up = convert(small / source, small / target, target)
        seconds = convert(root / source, root / target, target)
        prepare_page_cache(root / target, cold=False)
        os.sync()
        copying = copy(root / target, copied)
        shutil.rmtree(copied)
        if turn > 0:
            results.start_ups.append(start_up)
            results.times.append(seconds)
            results.copy_times.append(copying)
    results.print(f"{source} -> {target}", count_bytes(root / target))


def parse_arguments() -> argparse.Namespace:
    """Return the flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--directory", type=Path, help=DIRECTORY_HELP)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if "RANK" in os.environ:
        # A process of `start_imports`.
        import_on_ranks(args.directory, args.turns)
        return

    with create_scratch_directory("huggingface", args.directory) as root:
        write_model(root / "hf", Model(args.layers, args.hidden, args.vocab))
        write_model(root / "small" / "hf", SMALL)
        start_imports(root, args.turns)
        compare_conversion(root, "hf", "torch_dist", args.turns)
        compare_conversion(root, "torch_dist", "hf", args.turns)


if __name__ == "__main__":
    main()
