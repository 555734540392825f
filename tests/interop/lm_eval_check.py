"""lm-eval scores exports: log-likelihoods and scores are those of the checkpoint and the run here.

    python -m tests.interop.lm_eval_check PYTHON WORK

PYTHON is an interpreter with lm-eval, and WORK an empty directory.
"""

import json
import os
import shlex
import string
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from megatron.conversion.huggingface.directory_writer import write_huggingface
from tests import ROOT
from tests.support.evaluation_runs import LM_EVAL, TASKS, make_task_run
from tests.support.memory_source import LLAMA_ARGS, MemorySource, random_source
from tests.unit_tests.conversion.filled_model import model_logits

CHARACTERS = " " + string.ascii_letters + string.digits + ".?"
QUESTIONS = (
    {"question": "Two and two", "choices": ["four", "five", "none of these"], "answer": 0},
    {"question": "The color of snow", "choices": ["green", "white"], "answer": 1},
    {"question": "a", "choices": ["b", "a", "c", "dd"], "answer": 3},
)
TASK = """\
task: local_questions
dataset_path: json
dataset_kwargs:
  data_files:
    test: {questions}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer with one token per character."""
    vocabulary = {character: token for token, character in enumerate(CHARACTERS)}
    vocabulary["<eos>"] = len(CHARACTERS)
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(
        directory
    )


def score(source: MemorySource, context: str, continuation: str) -> float:
    """Return the log-likelihood of `continuation` after `context`."""
    tokens = torch.tensor([[CHARACTERS.index(c) for c in context + continuation]])
    log_probs = model_logits(source, tokens[:, :-1])[0].float().log_softmax(-1)
    chosen = log_probs.gather(-1, tokens[0, 1:, None])[:, 0]
    return float(chosen[len(context) - 1 :].sum())


def run_lm_eval(python: str, work: Path, tasks: Path, names: str) -> None:
    """Write the results of lm-eval's program on `work/model` to `work/results`."""
    program = [python, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu"]
    model = f"pretrained={work / 'model'},dtype=float32"
    flags = ["--model_args", model, "--tasks", names, "--include_path", tasks]
    output = ["--log_samples", "--output_path", work / "results"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "home"), "PYTHONPATH": ""}
    command = [*program, *flags, *output]
    subprocess.run(command, check=True, env=os.environ | offline, cwd=ROOT)


def check_run(python: str, work: Path) -> None:
    """Compare the scores of --eval-tasks on two ranks with lm-eval's program on the export."""
    ranks = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    flags = f"{make_task_run(work)} --save-hf {work / 'model'} --log-format json"
    variables = {"HF_HOME": str(work / "home"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*ranks, "pretrain_gpt.py", *shlex.split(flags)],
        check=True,
        cwd=ROOT,
        env=os.environ | variables,
        text=True,
        stdout=subprocess.PIPE,
    )
    events = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    scores = [event["scores"] for event in events if event.get("event") == "tasks"][-1]

    run_lm_eval(python, work, LM_EVAL, ",".join(TASKS))
    (file,) = (work / "results").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    errors = []
    for name, value in scores.items():
        task, metric = name.split()
        errors.append(abs(value - results[task][f"{metric},none"]))

    assert len(errors) == 3, (scores, results)
    assert max(errors) <= 1e-5, (scores, results)

    print(f"{len(errors)} scores of a run within {max(errors):.1e}", flush=True)


def main() -> None:
    python, work = sys.argv[1], Path(sys.argv[2])
    check_export(python, work / "export")
    check_run(python, work / "run")


def check_export(python: str, work: Path) -> None:
    """Compare the log-likelihoods of lm-eval's program with those of the exported checkpoint."""
    work.mkdir()
    source = random_source(LLAMA_ARGS | {"params_dtype": "fp32"}, optimizer=False)
    write_huggingface(source, work / "model")
    write_tokenizer(work / "model")
    questions = work / "questions.jsonl"
    questions.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (work / "tasks").mkdir()
    (work / "tasks" / "local.yaml").write_text(TASK.format(questions=questions))

    run_lm_eval(python, work, work / "tasks", "local_questions")
    (file,) = (work / "results").rglob("samples_local_questions_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(samples) == len(QUESTIONS), samples

    errors = []
    for question, sample in zip(QUESTIONS, sorted(samples, key=lambda s: s["doc_id"]), strict=True):
        for choice, answer in zip(question["choices"], sample["filtered_resps"], strict=True):
            expected = score(source, question["question"], " " + choice)
            errors.append(abs(float(answer[0]) - expected))

    assert max(errors) <= 1e-4, errors

    print(f"{len(errors)} log-likelihoods within {max(errors):.1e}", flush=True)


if __name__ == "__main__":
    main()
