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
    """Row j >= 1: the document of token number j * S + e - 1 and the offset after the shared tokens
    before it.
    """
    ends = np.cumsum(lengths[documents])
    last_token = np.arange(1, num_samples + 1) * seq_length + extra - 1
    cut = np.minimum(last_token, ends[-1] - 1)  # a partial last sample ends where the documents end
    position = np.searchsorted(ends, cut, side="right")
    offset = cut - (ends[position] - lengths[documents][position]) + 1 - extra
    return np.concatenate([[[0, 0]], np.stack([position, offset], axis=1)])


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_sample_index_matches_definition(extra, partial, seed):
    random = np.random.RandomState(seed)
    lengths = random.randint(1 if partial else 0, 40, size=50).astype(np.int32)
    documents = random.permutation(np.tile(np.arange(10, 45, dtype=np.int32), 3))
    seq_length = [1, 7, 16, 64, 200, 33, 5, 128][seed]
    tokens = int(lengths[documents].sum()) - extra
    num_samples = -(-tokens // seq_length) if partial else tokens // seq_length
    index = build_sample_index(lengths, documents, seq_length, num_samples, extra)

    assert index.dtype == np.int32
    np.testing.assert_array_equal(
        index,
        sample_index_by_definition(lengths, documents, seq_length, num_samples, extra),
    )

    wide = helpers_cpp.build_sample_index_int64(lengths, documents, seq_length, num_samples, extra)
    assert wide.dtype == np.int64
    np.testing.assert_array_equal(wide, index)


def test_sample_index_counts_tokens_in_64_bits():
    lengths = np.full(4, 2**31 - 1, dtype=np.int32)
    documents = np.array([3, 1, 2, 0], dtype=np.int32)
    seq_length = 2**31 + 5  # a sample longer than a document and than int32
    index = build_sample_index(lengths, documents, seq_length, 3, 1)
    np.testing.assert_array_equal(
        index,
        sample_index_by_definition(lengths.astype(np.int64), documents, seq_length, 3, 1),
    )


def test_sample_index_rejects_inconsistent_input():
    lengths = np.array([5, 5], dtype=np.int32)
    with pytest.raises(IndexError, match="documents end in sample 2 of 9"):
        build_sample_index(lengths, np.array([0, 1], dtype=np.int32), 4, 9, 1)
    with pytest.raises(IndexError, match="position 0 of the document index holds sequence 7 of 2"):
        build_sample_index(lengths, np.array([7], dtype=np.int32), 4, 1, 1)


def blend_by_definition(weights, size, limits):
    counts = [0] * len(weights)
    members = []
    samples = []
    for s in range(size):
        behind = [
            w * max(s, 1) - c if c < limit else -np.inf
            for w, c, limit in zip(weights, counts, limits, strict=True)
        ]
        member = behind.index(max(behind))
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
    limits = random.randint(0, 60, size=num_members) + 1 if limited else np.full(num_members, 10**9)
    size = int(limits.sum()) if limited else 700
    members, samples = build_blend_index(weights, size, limits if limited else None)

    assert members.dtype == np.int16
    assert samples.dtype == np.int64

    expected_members, expected_samples = blend_by_definition(
        weights.tolist(),
        size,
        limits.tolist(),
    )
    assert members.tolist() == expected_members
    assert samples.tolist() == expected_samples
    if limited:
        assert np.bincount(members, minlength=num_members).tolist() == limits.tolist()


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
