"""`--smoke`: reduce a command line to a run of seconds on this machine.

Layers, experts, parallel axes and options stay, with sizes as small as possible, on generated data.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.core.terminal import print_text
from megatron.training.config.megatron_lm_options import arity_of, is_translated
from megatron.training.config.parsing import make_flag_parser

SMOKE = "--smoke"
TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
CP = "--context-parallel-size"
EP = "--expert-model-parallel-size"
LARGEST = {  # larger values are replaced by these
    TP: 2,
    PP: 2,
    CP: 2,
    "--micro-batch-size": 2,
    "--eval-iters": 1,
    "--log-interval": 1,
    "--recompute-num-layers": 1,
    "--num-distributed-optimizer-instances": 1,
    "--num-experts": 8,
    "--expert-tensor-parallel-size": 1,
    "--num-query-groups": 2,
}
FIXED = {
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--ffn-hidden-size": "48",
    "--kv-channels": "8",
    "--moe-ffn-hidden-size": "24",
    "--moe-shared-expert-intermediate-size": "24",
    "--seq-length": "16",
    "--max-position-embeddings": "16",
    "--lr": "1e-3",
    "--min-lr": "1e-4",
    "--make-vocab-size-divisible-by": "8",
    "--transformer-impl": "local",
    "--distributed-timeout-minutes": "2",
    "--split": "90,9,1",
}
# Flags that are left out: lengths and paths, which are given anew; sizes that depend on others; and
# parts of the machine and the run of the command line.
_DROPPED_NAMES = (
    "train-iters train-samples lr-decay-iters lr-decay-samples lr-warmup-iters "
    "lr-warmup-samples lr-warmup-fraction lr-wsd-decay-iters lr-wsd-decay-samples "
    "rampup-batch-size global-batch-size step-batch-size-schedule eval-global-batch-size "
    "exit-interval exit-duration-in-mins num-layers expert-model-parallel-size "
    "num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank "
    "virtual-pipeline-model-parallel-size decoder-first-pipeline-num-layers "
    "decoder-last-pipeline-num-layers pipeline-model-parallel-layout data-path "
    "train-data-path valid-data-path test-data-path data-args-path "
    "per-split-data-args-path data-cache-path mock-data tokenizer-type tokenizer-model "
    "vocab-file merge-file vocab-size save load save-interval save-interval-secs "
    "save-retain-interval finetune pretrained-checkpoint ckpt-step use-checkpoint-args "
    "exit-on-missing-checkpoint tensorboard-dir log-memory-interval num-workers "
    "distributed-backend smoke"
)
DROPPED = frozenset(f"--{name}" for name in _DROPPED_NAMES.split())
DROPPED_PREFIXES = (
    "--fp8-",
    "--fp4-",
    "--wandb-",
    "--mlflow-",
    "--trackio-",
    "--profile",
    "--save-hf",
    "--sft",
    "--non-persistent-",
    "--ckpt-convert-",
)
INTERLEAVING = (
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--virtual-pipeline-model-parallel-size",
)

Option = tuple[str, list[str]]
"""A flag and its values."""


def shrink(argv: Sequence[str], world_size: int) -> list[str]:
    """Return the flags of the small run on `world_size` processes, and print what has changed.

    Checkpoints are saved to a temporary directory if the command line saves any.
    """
    options = list_options(argv)
    saves = any(name == "--save" for name, _ in options)
    flags = reduce_flags(options, world_size)
    if saves:
        # All ranks of a launcher have the same parent.
        launch = os.getppid() if "WORLD_SIZE" in os.environ else os.getpid()
        directory = str(Path(tempfile.gettempdir()) / f"megatron-smoke-{launch}")
        flags += ["--save", directory, "--load", directory, "--save-interval", "2"]
    if not torch.cuda.is_available():
        flags += ["--distributed-backend", "gloo"]
    if os.environ.get("RANK", "0") == "0":
        print_text(describe_changes(options, list_options(flags)))
    return flags


def reduce_flags(options: Sequence[Option], world_size: int, iterations: int = 3) -> list[str]:
    """Return the flags of a run of `iterations` that does not save."""
    flags: list[str] = []
    sizes = dict.fromkeys((TP, PP, CP, "--micro-batch-size"), 1)
    is_interleaved = False
    has_experts_on_ranks = False
    for name, values in options:
        is_interleaved |= name in INTERLEAVING
        has_experts_on_ranks |= name == EP and values != ["1"]
        if name in LARGEST and len(values) == 1 and values[0].isdecimal():
            value = min(int(values[0]), LARGEST[name])
            if name in sizes:
                sizes[name] = value
            if name not in (TP, PP, CP):
                flags += [name, str(value)]
        elif name in FIXED:
            flags += [name, FIXED[name]]
        elif name not in DROPPED and not name.startswith(DROPPED_PREFIXES):
            flags += [name, *values]  # the parser reports values that are wrong

    # The axes that fit: tensor parallelism first.
    ranks = world_size
    for axis in (TP, PP, CP):
        if ranks % sizes[axis]:
            sizes[axis] = 1
        ranks //= sizes[axis]
        flags += [axis, str(sizes[axis])]
    if has_experts_on_ranks:
        expert_ranks = sizes[TP] * sizes[CP]
        if expert_ranks == 1 and ranks % 2 == 0:
            expert_ranks = 2
        flags += ["--expert-tensor-parallel-size", "1", EP, str(expert_ranks)]
    if sizes[TP] == 1:
        flags = [word for word in flags if word != "--sequence-parallel"]

    num_layers = 2 * sizes[PP]
    batch_size = 4 * sizes["--micro-batch-size"] * ranks
    flags += ["--num-layers", str(num_layers), "--global-batch-size", str(batch_size)]
    if is_interleaved and sizes[PP] > 1:
        flags += ["--num-layers-per-virtual-pipeline-stage", "1"]
    flags += ["--train-iters", str(iterations)]
    if "WSD" in flags:
        flags += ["--lr-wsd-decay-iters", "1"]
    flags += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "60"]
    return [*flags, "--num-threads", "1", "--num-workers", "0"]


def list_options(argv: Sequence[str]) -> list[Option]:
    """Return the flags of a command line with their values, in order."""
    known = {*LARGEST, *FIXED, *DROPPED, EP}
    options: list[Option] = []
    for word in argv:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            hyphenated = name.replace("_", "-")
            if hyphenated in known:
                name = hyphenated
            options.append((name, [value] if equals else []))
        elif options and arity_of(options[-1][0]) != "0":
            options[-1][1].append(word)
    if not any(is_translated(name) for name, _ in options):
        return options
    # Options of Megatron-DeepSpeed: the flags that replace them are reduced like others.
    command_line = make_flag_parser().parse(argv)
    if command_line.problems:
        return options
    options = [option for option in options if not is_translated(option[0])]
    return options + list_options(command_line.replacements)


def describe_changes(before: Sequence[Option], after: Sequence[Option]) -> str:
    """Return a line for each group of flags that --smoke removed, changed or added."""
    old = dict(before)
    new = dict(after)
    removed = [name for name in old if name not in new and name != SMOKE]
    changed = [
        f"{name} {' '.join(values)} (was {' '.join(old[name])})"
        for name, values in new.items()
        if name in old and old[name] != values
    ]
    added = [" ".join([name, *values]) for name, values in new.items() if name not in old]
    return "\n".join(
        f"{SMOKE} {verb}: {', '.join(flags)}"
        for verb, flags in (("removed", removed), ("changed", changed), ("added", added))
        if flags
    )
