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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conversion import copy, count_bytes, format_times, prepare_page_cache, run
from safetensors.torch import save_file

from megatron.conversion.huggingface.directory import HuggingFaceSource
from megatron.conversion.loading import load_from_source
from megatron.conversion.model_space.model import model_config
from megatron.core.models import GPTModel
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState

LAYOUTS = ("TP2", "PP2", "DP2")
HEAD_DIM = 128
LAYERS_PER_FILE = 4


def write_model(directory: Path, args: argparse.Namespace) -> None:
    """Write a Llama with random weights as transformers does: several files with an index."""
    hidden = args.hidden
    heads = hidden // HEAD_DIM
    groups = max(1, heads // 4)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": args.vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    matrices = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (groups * HEAD_DIM, hidden),
        "self_attn.v_proj": (groups * HEAD_DIM, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (4 * hidden, hidden),
        "mlp.up_proj": (4 * hidden, hidden),
        "mlp.down_proj": (hidden, 4 * hidden),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    files: list[dict[str, tuple[int, ...]]] = []
    for layer in range(args.layers):
        if layer % LAYERS_PER_FILE == 0:
            files.append({})
        for name, shape in matrices.items():
            files[-1][f"model.layers.{layer}.{name}.weight"] = shape
    outer = {
        "model.embed_tokens.weight": (args.vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (args.vocab, hidden),
    }
    files.append(outer)

    directory.mkdir(parents=True)
    weight_map = {}
    for number, shapes in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {key: torch.randn(shape).bfloat16() for key, shape in shapes.items()}
        save_file(tensors, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shapes, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config))


# ---- Import into shards ----


def build_shards(directory: Path, layout: str) -> GPTModel:
    """Build this rank's part of the model, without initializing it."""
    sizes: dict[str, Any] = {}
    if layout == "TP2":
        sizes["tensor_model_parallel_size"] = 2
    if layout == "PP2":
        sizes["pipeline_model_parallel_size"] = 2
    ps = ParallelState.for_rank(ParallelConfig(**sizes), 2, dist.get_rank())
    args = HuggingFaceSource(directory).args
    config = model_config(args, args["vocab_size"], str(directory))
    first = config.num_layers // ps.pp.size * ps.pp.rank
    last = first + config.num_layers // ps.pp.size
    model = GPTModel(
        config,
        layers=range(first, last),
        pre_process=ps.pp.rank == 0,
        post_process=ps.pp.rank == ps.pp.size - 1,
        tp=ps.tp,
        device=torch.device("cpu"),
    )
    model.initialize(None)
    return model


def import_on_ranks(args: argparse.Namespace) -> None:
    """Run on two processes: load the model into the shards of each layout, next to `cp`."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    directory: Path = args.directory / "hf"
    copied = args.directory / "copy"
    nbytes = count_bytes(directory)
    for layout in LAYOUTS:
        model = build_shards(directory, layout)
        state = model.sharded_state_dict()
        times: list[float] = []
        copies: list[float] = []
        for turn in range(args.turns + 1):
            dist.barrier()
            began = time.perf_counter()
            load_from_source(state, HuggingFaceSource(directory))
            dist.barrier()
            seconds = time.perf_counter() - began
            copying = 0.0
            if dist.get_rank() == 0:
                copying = copy(directory, copied, durable=False)
                shutil.rmtree(copied)
            if turn:  # the first turn warms up
                times.append(seconds)
                copies.append(copying)
        if dist.get_rank() == 0:
            report(f"hf -> shards, {layout}", nbytes, times, copies)
        del model, state
    dist.destroy_process_group()


def report(
    name: str, nbytes: int, times: list[float], copies: list[float], start_up: float = 0.0
) -> None:
    seconds = statistics.median(times)
    copying = statistics.median(copies)
    line = (
        f"{name:22}{nbytes / 1e9:6.2f} GB {seconds:6.2f} s   cp {copying:5.2f} s   "
        f"{copying / seconds:5.2f}x cp"
    )
    if start_up:
        line += f", {copying / (seconds - start_up):5.2f}x without start-up of {start_up:.1f} s"
    print(f"{line}   all turns: {format_times(times)}; cp {format_times(copies)}", flush=True)


# ---- Conversions ----


def convert(source: Path, target: Path, saver: str) -> float:
    """Return the seconds of a conversion in a process of the tool, from the page cache."""
    shutil.rmtree(target, ignore_errors=True)
    prepare_page_cache(source, cold=False)
    os.sync()
    command = [sys.executable, "tools/checkpoint/convert.py", "--load-dir", str(source)]
    command += ["--save-dir", str(target), "--saver", saver, "--workers", "2"]
    seconds, _, _ = run(command)
    return seconds


def compare_conversion(root: Path, small: Path, source: str, target: str, turns: int) -> None:
    """Compare a conversion with `cp` and fsync of its result."""
    times: list[float] = []
    copies: list[float] = []
    starts: list[float] = []
    for turn in range(turns + 1):
        starts.append(convert(small / source, small / target, target))
        seconds = convert(root / source, root / target, target)
        prepare_page_cache(root / target, cold=False)
        os.sync()
        copying = copy(root / target, root / "copy")
        shutil.rmtree(root / "copy")
        if turn:
            times.append(seconds)
            copies.append(copying)
    nbytes = count_bytes(root / target)
    report(f"{source} -> {target}", nbytes, times, copies, statistics.median(starts))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path("/tmp/benchmark_huggingface"))
    args = parser.parse_args()
    if "RANK" in os.environ:
        import_on_ranks(args)
        return
    shutil.rmtree(args.directory, ignore_errors=True)
    try:
        write_model(args.directory / "hf", args)
        small = args.directory / "small"
        write_model(small / "hf", argparse.Namespace(layers=2, hidden=256, vocab=1000))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *launcher, __file__, *sys.argv[1:]]
        subprocess.run(command, check=True, env=environment)
        compare_conversion(args.directory, small, "hf", "torch_dist", args.turns)
        compare_conversion(args.directory, small, "torch_dist", "hf", args.turns)
    finally:
        shutil.rmtree(args.directory, ignore_errors=True)


if __name__ == "__main__":
    main()
