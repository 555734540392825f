"""`pretrain_gpt.py --dry-run` prints the plan of a run, or all problems, without starting it."""

import os
import shlex
import subprocess
import sys

import pytest

from tests import ROOT
from tests.support.programs import run_program
from tests.support.training_harness import COMMON


def dry_run(flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = shlex.split(COMMON + flags)
    return run_program(ROOT / "pretrain_gpt.py", "--dry-run", *words, **environment)


def test_dry_run_prints_summary_and_plan(tmp_path):
    layout = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"
    result = dry_run(
        f"--mock-data --train-iters 4 {layout} --save {tmp_path / 'save'}", WORLD_SIZE="8"
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "TP 2 x PP 2 x DP 2 on 8 ranks" in result.stdout
    assert "weights" in result.stdout
    assert not (tmp_path / "save").exists()
    alone = dry_run(f"--mock-data --train-iters 4 {layout}")
    assert "TP 2 x PP 2 x DP 1 on 4 ranks" in alone.stdout  # one replica without a launcher
    experts = (
        "--num-experts 4 --expert-model-parallel-size 4 --pipeline-model-parallel-size 2 "
        "--disable-bias-linear"
    )
    spread = dry_run(f"--mock-data --train-iters 4 {experts}")
    assert "PP 2 x DP 4, experts ETP 1 x EP 4 x DP 1 on 8 ranks" in spread.stdout


def test_dry_run_reports_all_errors(tmp_path):
    result = dry_run("--train-iters 4 --fp16 --bf16 --zzz")
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 4
    assert "  - unknown flag --zzz" in result.stderr


def test_dry_run_reports_missing_resources_of_a_launch(tmp_path):
    missing = tmp_path / "missing"
    result = dry_run(
        f"--train-iters 4 --fp16 --bf16 --zzz --data-path {missing} --load {missing} --finetune "
        "--wandb-project tests --transformer-impl transformer_engine --tokenizer-type "
        f"GPTSentencePieceTokenizer --tokenizer-model {missing}"
    )
    assert (result.returncode, result.stdout) == (2, "")
    expected = ["--zzz", "--bf16 and --fp16", "--tokenizer-model", "--load", "--wandb-project"]
    expected += ["--transformer-impl", "no dataset at"]
    for text in expected:
        assert sum(f"- {text}" in line or text in line for line in result.stderr.splitlines()) == 1


def test_dry_run_compares_memory_and_disk_with_the_machine(tmp_path):
    flags = "--mock-data --train-iters 4 --num-layers 96 --hidden-size 32768 --device cpu"
    result = dry_run(f"{flags} --save {tmp_path / 'save'}")
    assert (result.returncode, result.stdout) == (2, "")
    memory, disk = result.stderr.splitlines()[1:]
    assert "a rank needs" in memory
    assert "of memory and has" in memory
    assert f"--save {tmp_path / 'save'}: a checkpoint has" in disk


PROGRAM = """
import sys, pretrain_gpt
pretrain_gpt.main()
print("COMPILER" if "torch._dynamo" in sys.modules else "NO COMPILER")
"""


@pytest.mark.parametrize(
    "ways",
    [
        "p2p",
        pytest.param("a2a", marks=pytest.mark.slow),
        pytest.param("all_gather", marks=pytest.mark.slow),
    ],
)
def test_training_imports_no_compiler_without_compile(tmp_path, ways):
    """Importing the compiler takes as long as importing torch; functions that it must not compile
    are marked only with --compile.
    """
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    flags = (
        "--mock-data --train-iters 1 --lr-warmup-iters 0 --context-parallel-size 2 "
        f"--cp-comm-type {ways}"
    )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(program),
    ]
    result = subprocess.run(
        [*torchrun, *shlex.split(f"{COMMON} {flags} --device cpu --reset-attention-mask")],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.stdout.count("NO COMPILER") == 2, result.stdout + result.stderr


def test_start_up_avoids_slow_unneeded_imports():
    """DTensor and sympy come with DCP's package, a third of the time of a start; the others take
    seconds.

    In older versions sympy comes with recomputation, too.
    """
    heavy = (
        "torch.distributed.checkpoint torch.distributed.tensor sympy transformers tensorboard "
        "matplotlib tiktoken "
        "yaml sentencepiece tokenizers"
    )
    program = (
        "import sys, torch.utils.checkpoint; before = set(sys.modules); import pretrain_gpt; "
        f"print(sorted((sys.modules.keys() - before) & set({heavy.split()})))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def test_arguments_of_a_checkpoint_for_several_processes():
    """A dry run needs neither RANK nor a process group."""
    golden = ROOT / "tests/golden/megatron_lm/mcore_0.16.1/llama_fp32_tp2pp2"
    flags = f"--use-checkpoint-args --load {golden}/torch_dist_fully_reshardable"
    result = dry_run(f"--mock-data --train-iters 4 {flags}", WORLD_SIZE="2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "DP 2 on 2 ranks" in result.stdout
    assert "as in the checkpoint" in result.stdout
