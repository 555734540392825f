"""Launch scripts of the examples run with small models on a CPU, and the server responds."""

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest
import sentencepiece
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from tests import ROOT

TOKENIZER = ROOT / "tests/golden/hf/llama"
SMALL = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 "
    "--num-query-groups 2 "
    "--seq-length 32 --max-position-embeddings 64 --global-batch-size 4 --micro-batch-size 1 "
    "--train-iters 4 "
    "--lr-warmup-iters 1 --log-interval 1 --eval-iters 1 --num-workers 0 --num-threads 1 "
    "--make-vocab-size-divisible-by 8 "
)
RUNS = {  # script -> (processes, changes of its layout)
    "examples/single_gpu.sh": (1, ""),
    "examples/one_node_8_gpus.sh": (4, "--recompute-num-layers 1"),
    "examples/slurm/pretrain.sbatch": (
        2,
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1",
    ),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    random = np.random.RandomState(0)
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for length in random.randint(10, 80, size=300):
            builder.add(random.randint(0, 60, size=length))
    return prefix


def environment(**variables):
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "SLURM_JOB_ID")
    return {
        **{k: v for k, v in os.environ.items() if k not in dropped},
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def run_script(script, processes, flags, corpus, run_dir):
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    result = subprocess.run(
        ["bash", script, *shlex.split(f"{SMALL} --device cpu {flags}")],
        cwd=ROOT,
        env=environment(
            LAUNCH=shlex.join(launcher), DATA=str(corpus), TOKENIZER=str(TOKENIZER), RUN_DIR=str(run_dir),
            SLURM_SUBMIT_DIR=str(ROOT),
        ),
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """Checkpoints of the single-GPU example."""
    run_dir = tmp_path_factory.mktemp("single")
    return run_script(
        "examples/single_gpu.sh", *RUNS["examples/single_gpu.sh"], corpus, run_dir
    ), run_dir


def losses(text):
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", text)]


def test_single_gpu_example_trains(trained):
    text, run_dir = trained
    assert len(losses(text)) == 4
    assert (run_dir / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "4"


@pytest.mark.slow
@pytest.mark.parametrize("script", list(RUNS)[1:])
def test_other_examples_train_at_their_layout(script, corpus, tmp_path):
    text = run_script(script, *RUNS[script], corpus, tmp_path)
    assert len(losses(text)) == 4
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "4"


def ask(url, request):
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(request).encode())
        ) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    """A tokenizer.model of as many tokens as the trained model has."""
    path = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        input=str(ROOT / "pretrain_gpt.py"),
        model_prefix=str(path / "tokenizer"),
        vocab_size=256,
        model_type="bpe",
        minloglevel=2,
    )
    return path / "tokenizer.model"


@pytest.mark.parametrize(
    "kind", ["directory", pytest.param("SentencePiece model", marks=pytest.mark.slow)]
)
def test_convert_and_serve(kind, trained, sentencepiece_model, tmp_path):
    source = TOKENIZER if kind == "directory" else sentencepiece_model
    process = subprocess.Popen(
        ["bash", "examples/serve/convert_and_serve.sh", "--port", "0", "--device", "cpu"],
        cwd=ROOT,
        env=environment(
            CHECKPOINTS=str(trained[1] / "checkpoints"), MODEL=str(tmp_path / "hf"), TOKENIZER=str(source),
            PYTHON=sys.executable,
        ),
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = next(
            match[1]
            for line in process.stdout
            if (match := re.search(r"serving .* at (http\S+)", line))
        )
        status, answer = ask(url, {"prompt": "import", "max_new_tokens": 5})
        assert ask(url, {"max_new_tokens": 5})[0] == 400
        assert ask(url, {"prompt": "x", "unknown": 1})[0] == 400
    finally:
        process.kill()
        process.wait()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    tokens = torch.tensor([tokenizer.encode("import")])
    expected = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=5)
    text = tokenizer.decode(expected[0, tokens.shape[1] :], skip_special_tokens=True)
    assert (status, answer) == (200, {"text": text})
