"""Runs of the golden model that evaluate the golden tasks of lm-eval, for tests and interop."""

from __future__ import annotations

from pathlib import Path

from tests import ROOT
from tests.support.sft_runs import TRAINING, write_tokenizer

LM_EVAL = ROOT / "tests/golden/lm_eval"
TASKS = ("local_questions", "local_text")


def make_task_run(directory: Path) -> str:
    """Return the command line of a run that evaluates after each of its two iterations."""
    tokenizer = write_tokenizer(directory / "tokenizer", None)
    return (
        f"{TRAINING.replace('--sft ', '')} --mock-data --train-iters 2 --eval-iters 1 "
        f"--eval-interval 1 --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer} "
        "--eval-tasks " + ",".join(f"{LM_EVAL / name}.yaml" for name in TASKS) + " "
    )
