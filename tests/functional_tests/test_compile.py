"""Runs with --compile have the losses and checkpoints of runs without it."""

import os
import subprocess
import sys

import pytest

from tests import ROOT
from tests.support.training_harness import COMMON, DISTRIBUTED_OPTIMIZER, GPT2, LLAMA, train

FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 "
RUNS = {
    "llama": (1, LLAMA),
    "gpt2 with dropout": (1, GPT2 + "--hidden-dropout 0.1 --attention-dropout 0.1 "),
    "norms of heads, window": (1, LLAMA + "--qk-layernorm --window-size 5,0 --rotary-percent 0.5 "),
    "full recomputation, evaluated": (1, LLAMA + FULL + "--eval-iters 1 --eval-interval 2 "),
    "selective recomputation": (
        1,
        LLAMA + "--recompute-granularity selective --recompute-modules core_attn mlp ",
    ),
    "tensor parallel": (2, LLAMA + "--tensor-model-parallel-size 2 --sequence-parallel "),
    "pipeline": (
        2,
        LLAMA + "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 ",
    ),
    "data parallel": (2, LLAMA + DISTRIBUTED_OPTIMIZER),
    "context parallel, ring": (2, LLAMA + "--context-parallel-size 2 "),
    "context parallel, heads": (2, LLAMA + "--context-parallel-size 2 --cp-comm-type a2a "),
}


# Runs whose attention is not traced: it exchanges data, or draws from a generator of its own.
BROKEN_GRAPHS = ("context parallel, ring", "context parallel, heads", "gpt2 with dropout")


def outcome(rank, world_size, flags):
    common = (
        COMMON.replace("--hidden-dropout 0 --attention-dropout 0 ", "")
        if "dropout" in flags
        else COMMON
    )
    return train(rank, world_size, "--mock-data --train-iters 3 " + flags, common)


def outcome_and_breaks(rank, world_size, flags):
    """Return the outcome and the reasons for which graphs end within a layer."""
    from torch._dynamo.utils import counters

    counters.clear()
    return outcome(rank, world_size, flags), list(counters["graph_break"])


IN_EVERY_RUN = "full recomputation, evaluated"  # the others are slow: each compiles for seconds


@pytest.mark.parametrize(
    "name",
    [name if name == IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.slow) for name in RUNS],
)
def test_compiled_layers_keep_losses_and_keys(pool, name):
    world_size, flags = RUNS[name]
    eager = pool.run(outcome, world_size, flags)
    compiled = pool.run(outcome_and_breaks, world_size, flags + "--compile", timeout=300)
    for one, (other, breaks) in zip(eager, compiled, strict=True):
        assert not breaks or name in BROKEN_GRAPHS
        assert other.measured.points == pytest.approx(one.measured.points, rel=1e-5)  # evaluations
        assert other.measured.losses == pytest.approx(one.measured.losses, rel=1e-5)
        assert other.measured.grad_norms == pytest.approx(one.measured.grad_norms, rel=1e-4)
        assert [row[:3] for row in other.boxes] == [row[:3] for row in one.boxes]


@pytest.mark.slow
def test_compiled_bf16_losses_are_close(pool):
    """Fused operations round once where separate ones round each time."""
    ((eager,), (compiled,)) = (
        pool.run(outcome, 1, LLAMA + f"--bf16 {c}", timeout=300) for c in ("", "--compile")
    )
    assert compiled.measured.losses == pytest.approx(eager.measured.losses, rel=1e-3)
    assert compiled.measured.losses != eager.measured.losses  # it was compiled


def test_missing_compiler_is_reported(tmp_path):
    flags = [*(COMMON + LLAMA).split(), "--mock-data", "--train-iters", "3", "--compile"]
    environment = {**os.environ, "CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(
        "error: --compile: torch.compile does not work here"
    )
