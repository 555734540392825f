"""The C++ index builders against their definitions in plain numpy."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from megatron.core.datasets import helpers_cpp
from megatron.core.datasets.index_cache import build_blend_index, build_sample_index
from tests import ROOT


def sample_index_by_definition(lengths, documents, seq_length, num_samples, extra):
    """Return the document and the offset in it that each sample begins at.

    Row j >= 1 is the document of token j * S + e - 1, and the offset after the shared tokens before
    it. S is the length of a sequence, and e the number of extra tokens.
    """
    document_lengths = lengths[documents]
    ends = np.cumsum(document_lengths)
    last_tokens = np.arange(1, num_samples + 1) * seq_length + extra - 1
    # A partial last sample ends where the documents end.
    last_tokens = np.minimum(last_tokens, ends[-1] - 1)
    positions = np.searchsorted(ends, last_tokens, side="right")
    starts = ends[positions] - document_lengths[positions]
    offsets = last_tokens - starts + 1 - extra
    rows = np.stack([positions, offsets], axis=1)
    return np.concatenate([[[0, 0]], rows])


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_sample_index_matches_definition(extra, partial, seed):
    random = np.random.RandomState(seed)
    shortest = 1 if partial else 0
    lengths = random.randint(shortest, 40, size=50).astype(np.int32)
    epoch = np.arange(10, 45, dtype=np.int32)
    documents = random.permutation(np.tile(epoch, 3))
    seq_length = [1, 7, 16, 64, 200, 33, 5, 128][seed]
    num_tokens = int(lengths[documents].sum()) - extra
    num_samples = num_tokens // seq_length
    if partial:
        num_samples = -(-num_tokens // seq_length)

    arguments = (lengths, documents, seq_length, num_samples, extra)
    index = build_sample_index(*arguments)
    assert index.dtype == np.int32
    np.testing.assert_array_equal(index, sample_index_by_definition(*arguments))

    wide_index = helpers_cpp.build_sample_index_int64(*arguments)
    assert wide_index.dtype == np.int64
    np.testing.assert_array_equal(wide_index, index)


def test_sample_index_counts_tokens_in_64_bits():
    lengths = np.full(4, 2**31 - 1, dtype=np.int32)
    documents = np.array([3, 1, 2, 0], dtype=np.int32)
    seq_length = 2**31 + 5  # a sample longer than a document and than int32
    index = build_sample_index(lengths, documents, seq_length, 3, 1)
    wide_lengths = lengths.astype(np.int64)
    expected = sample_index_by_definition(wide_lengths, documents, seq_length, 3, 1)
    np.testing.assert_array_equal(index, expected)


def test_sample_index_rejects_inconsistent_input():
    lengths = np.array([5, 5], dtype=np.int32)
    with pytest.raises(IndexError, match="documents end in sample 2 of 9"):
        build_sample_index(lengths, np.array([0, 1], dtype=np.int32), 4, 9, 1)
    with pytest.raises(IndexError, match="position 0 of the document index holds sequence 7 of 2"):
        build_sample_index(lengths, np.array([7], dtype=np.int32), 4, 1, 1)


def blend_by_definition(weights, size, limits):
    """Return the member of each sample, and the sample's number in it.

    The next sample is of the member whose count is the most below its share, if it has more.
    """
    counts = [0] * len(weights)
    members = []
    samples = []
    for index in range(size):
        deficits = []
        for weight, count, limit in zip(weights, counts, limits, strict=True):
            deficit = weight * max(index, 1) - count
            deficits.append(deficit if count < limit else -np.inf)
        member = deficits.index(max(deficits))
        members.append(member)
        samples.append(counts[member])
        counts[member] += 1
    return members, samples


@pytest.mark.parametrize("num_members", [1, 2, 3, 8, 9, 30])
@pytest.mark.parametrize("limited", [False, True])
def test_blend_index_matches_definition(num_members, limited):
    random = np.random.RandomState(num_members)
    weights = random.dirichlet(np.ones(num_members))
    if num_members == 8:
        weights = np.full(8, 1 / 8)  # all ties
    if limited:
        limits = random.randint(0, 60, size=num_members) + 1
        size = int(limits.sum())
        members, samples = build_blend_index(weights, size, limits)
        assert np.bincount(members, minlength=num_members).tolist() == limits.tolist()
    else:
        limits = np.full(num_members, 10**9)
        size = 700
        members, samples = build_blend_index(weights, size, None)
    assert members.dtype == np.int16
    assert samples.dtype == np.int64

    expected = blend_by_definition(weights.tolist(), size, limits.tolist())
    expected_members, expected_samples = expected
    assert members.tolist() == expected_members
    assert samples.tolist() == expected_samples


def test_blend_index_rejects_more_samples_than_limits():
    with pytest.raises(IndexError, match="used up after 5 of 6"):
        build_blend_index(np.array([0.5, 0.5]), 6, np.array([2, 3]))


def test_builders_release_the_interpreter_lock():
    counted = 0
    done = threading.Event()

    def build():
        build_blend_index(np.full(64, 1 / 64), 2_000_000)
        done.set()

    thread = threading.Thread(target=build)
    thread.start()
    while not done.is_set():
        time.sleep(0.001)
        counted += 1
    thread.join()
    assert counted > 3  # with the lock held, this thread would have slept through the whole build


def test_training_without_compiled_helpers_names_the_command_that_builds_them():
    # `None` makes the import of a module fail, as in a fresh clone.
    program = """
import runpy, sys
sys.modules["megatron.core.datasets.helpers_cpp"] = None
runpy.run_path("pretrain_gpt.py", run_name="__main__")
"""
    flags = """
        --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8
        --max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data
        --tokenizer-type NullTokenizer --vocab-size 9
    """
    run = subprocess.run(
        [sys.executable, "-c", program, *flags.split()],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1

    message = run.stderr.splitlines()
    assert len(message) == 1, run.stderr
    assert message[0].startswith("error: the C++ dataset helpers")
    assert "`make setup`" in message[0]
