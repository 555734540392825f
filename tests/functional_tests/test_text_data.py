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
        for number in range(60):
            words = [(number * number + i * (number % 7 + 1)) % 60 for i in range(number % 23)]
            file.write(json.dumps({"text": " ".join(map(str, words))}) + "\n")
    preprocess_data(
        ["--input", str(directory / "corpus.jsonl"), "--output-prefix", str(directory / "corpus")]
        + ["--tokenizer-type", "NullTokenizer", "--vocab-size", "60", "--append-eod"]
        + ["--workers", "1"]
    )
    return directory


@pytest.fixture(scope="module")
def expected(pool, work):
    """The run on token files."""
    flags = f"{TRAINING} --data-path {work / 'corpus_text_document'} "
    return pool.run(train, 1, f"{flags} --data-cache-path {work / 'cache'}")[0].measured


def make_flags(work, cache):
    return f"{TRAINING} --data-path {work / 'corpus.jsonl'} --data-cache-path {cache} "


def test_the_run_is_that_of_the_token_files_and_resumes(pool, work, expected, tmp_path):
    flags = (
        make_flags(work, tmp_path / "cache")
        + f"--save {tmp_path / 'run'} --load {tmp_path / 'run'} "
    )
    first = pool.run(train, 1, f"{flags} --exit-interval 4")[0].measured
    shutil.rmtree(tmp_path / "cache")
    second = pool.run(train, 1, flags)[0].measured
    assert first.losses + second.losses == expected.losses
    validation = {key: loss for key, loss in expected.points.items() if "validation" in key[0]}
    assert [iteration for _, iteration in validation] == [3, 6]
    assert validation.items() <= (first.points | second.points).items()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_the_same_at_every_layout(pool, work, expected, layout, tmp_path):
    flags = f"{make_flags(work, tmp_path)} {LAYOUTS[layout]}"
    outcomes = pool.run(train, 2, flags)
    assert get_losses(outcomes) == pytest.approx(expected.losses, abs=1e-5)
    reference = f"{TRAINING} --data-path {work / 'corpus_text_document'} {LAYOUTS[layout]} "
    files = pool.run(train, 2, f"{reference} --data-cache-path {tmp_path}")
    assert get_losses(outcomes) == get_losses(files)
