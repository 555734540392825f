"""Training on text equals training on its token files, at every layout and after a resume."""

import json
import shutil

import pytest

from tests.support.training_harness import LLAMA, get_losses, train
from tools.preprocess_data import main as preprocess_data

LAYOUTS = {"dp2": "", "pp2": "--pipeline-model-parallel-size 2"}
TRAINING = f"{LLAMA} --train-iters 6 --eval-iters 1 --eval-interval 3 --split 8,2,0 "


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A directory with text of 60 documents, and its token files."""
    directory = tmp_path_factory.mktemp("text_data")
    with open(directory / "corpus.jsonl", "w") as file:
        for document in range(60):
            first = document * document
            step = document % 7 + 1
            words = [str((first + i * step) % 60) for i in range(document % 23)]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")

    flags = ["--input", str(directory / "corpus.jsonl")]
    flags += ["--output-prefix", str(directory / "corpus")]
    flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "60", "--append-eod"]
    flags += ["--workers", "1"]
    preprocess_data(flags)
    return directory


@pytest.fixture(scope="module")
def expected(pool, work):
    """Return the measurements of the run on token files."""
    flags = f"{TRAINING} --data-path {work / 'corpus_text_document'} "
    outcomes = pool.run(train, 1, f"{flags} --data-cache-path {work / 'cache'}")
    return outcomes[0].measured


def make_flags(work, cache):
    return f"{TRAINING} --data-path {work / 'corpus.jsonl'} --data-cache-path {cache} "


def test_the_run_is_that_of_the_token_files_and_resumes(pool, work, expected, tmp_path):
    cache = tmp_path / "cache"
    run = tmp_path / "run"
    flags = f"{make_flags(work, cache)} --save {run} --load {run} "
    first = pool.run(train, 1, f"{flags} --exit-interval 4")[0].measured
    shutil.rmtree(cache)
    second = pool.run(train, 1, flags)[0].measured
    assert first.losses + second.losses == expected.losses

    validation = {key: loss for key, loss in expected.points.items() if "validation" in key[0]}
    assert [iteration for _, iteration in validation] == [3, 6]
    assert validation.items() <= (first.points | second.points).items()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_the_same_at_every_layout(pool, work, expected, layout, tmp_path):
    flags = f"{make_flags(work, tmp_path)} {LAYOUTS[layout]}"
    outcomes = pool.run(train, 2, flags)
    losses = get_losses(outcomes)
    assert losses == pytest.approx(expected.losses, abs=1e-5)

    reference = f"{TRAINING} --data-path {work / 'corpus_text_document'} {LAYOUTS[layout]} "
    outcomes_on_files = pool.run(train, 2, f"{reference} --data-cache-path {tmp_path}")
    assert losses == get_losses(outcomes_on_files)
