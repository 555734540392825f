"""Reduce a real command line: the same flags with sizes, paths and lengths that run on a CPU in
seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.training.config.megatron_lm_options import arity_of

MOST = {  # the largest value that is left
    "--tensor-model-parallel-size": 2,
    "--pipeline-model-parallel-size": 2,
    "--context-parallel-size": 2,
    "--micro-batch-size": 2,
    "--eval-iters": 1,
    "--log-interval": 1,
    "--recompute-num-layers": 1,
    "--num-distributed-optimizer-instances": 1,
    "--num-experts": 8,
    "--expert-tensor-parallel-size": 1,
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
    "--distributed-backend": "gloo",
    "--transformer-impl": "local",
    "--distributed-timeout-minutes": "2",
    "--split": "90,9,1",
}
# Lengths and paths, which are given anew; what sizes cannot be kept; and what belongs to the
# machine of the script.
_DROPPED = (
    "--train-iters --train-samples --lr-decay-iters --lr-decay-samples --lr-warmup-iters "
    "--lr-warmup-samples "
    "--lr-warmup-fraction --lr-wsd-decay-iters --lr-wsd-decay-samples --rampup-batch-size "
    "--global-batch-size "
    "--step-batch-size-schedule --eval-global-batch-size "
    "--exit-interval --exit-duration-in-mins --num-layers --finetune --expert-model-parallel-size "
    "--num-layers-per-virtual-pipeline-stage "
    "--num-virtual-stages-per-pipeline-rank --decoder-first-pipeline-num-layers "
    "--decoder-last-pipeline-num-layers "
    "--pipeline-model-parallel-layout --data-path --train-data-path --valid-data-path "
    "--test-data-path "
    "--data-args-path --per-split-data-args-path --data-cache-path --mock-data --tokenizer-type "
    "--tokenizer-model "
    "--vocab-file --merge-file --vocab-size --save --load --save-interval --save-retain-interval "
    "--tensorboard-dir "
    "--wandb-project --wandb-exp-name --wandb-save-dir --wandb-entity --log-memory-interval "
    "--profile "
    "--profile-step-start --profile-step-end --profile-ranks --split --num-workers --fp8-format"
)
DROPPED = _DROPPED.split()


def shrunk(argv: Sequence[str], directory: Path, iterations: int = 4) -> tuple[list[str], int]:
    """Return the flags of a small run that saves to `directory`, and its number of processes."""
    kept: list[str] = []
    sizes: dict[str, int] = {}
    interleaved = False
    for name, values in _options(argv):
        interleaved |= name in (
            "--num-layers-per-virtual-pipeline-stage",
            "--num-virtual-stages-per-pipeline-rank",
        )
        if name in DROPPED:
            continue
        if name in MOST:
            sizes[name] = min(int(values[0]), MOST[name])
            values = [str(sizes[name])]
        elif name in FIXED:
            values = [FIXED[name]]
        elif name == "--num-query-groups":
            values = ["2"]
        kept += [name, *values]
    stages = sizes.get("--pipeline-model-parallel-size", 1)
    model = sizes.get("--tensor-model-parallel-size", 1) * sizes.get("--context-parallel-size", 1)
    if any(word.startswith("--expert-model-parallel-size") for word in argv):
        kept += ["--expert-tensor-parallel-size", "1", "--expert-model-parallel-size", str(model)]
    world = model * stages
    replicas = 2 if world == 1 else 1
    kept += [
        "--num-layers",
        str(2 * stages),
        "--mock-data",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "60",
    ]
    kept += ["--train-iters", str(iterations), "--save", str(directory), "--load", str(directory)]
    kept += [
        "--save-interval",
        "2",
        "--global-batch-size",
        str(4 * sizes.get("--micro-batch-size", 1) * replicas),
    ]
    if interleaved and stages > 1:
        kept += ["--num-layers-per-virtual-pipeline-stage", "1"]
    if "WSD" in kept:
        kept += ["--lr-wsd-decay-iters", "1"]
    return [*kept, "--num-threads", "1", "--num-workers", "0"], world * replicas


def _options(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    options: list[tuple[str, list[str]]] = []
    for word in argv:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            options.append((name, [value] if equals else []))
        elif options and arity_of(options[-1][0]) != "0":
            options[-1][1].append(word)
    return options
