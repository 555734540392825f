"""Runs with fill-in-the-middle data read the same samples at any layout and after restarts."""

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from tests.support.training_harness import LLAMA, train

FIM = (
    "--fim-data --fim-rate 0.9 --fim-prefix-token 50 --fim-middle-token 51 --fim-suffix-token 52 "
    "--fim-pad-token 53 "
    "--fim-eod-token 60 "
)


def test_resuming_at_another_layout_reads_the_same_samples(pool, tmp_path):
    random = np.random.RandomState(0)
    with IndexedDatasetBuilder(tmp_path / "corpus", np.uint16) as builder:
        for _ in range(40):
            builder.add(np.append(random.randint(0, 40, size=random.randint(4, 30)), 60))
    data = f"{LLAMA} --train-iters 6 --data-path {tmp_path / 'corpus'} --split 1,0,0 "
    whole = pool.run(train, 1, data + FIM)[0].measured.losses
    plain = pool.run(train, 1, data)[0].measured.losses
    assert whole[0] != plain[0]
    save = f"--save {tmp_path / 'run'} --load {tmp_path / 'run'} --save-interval 2 "
    first = pool.run(train, 1, f"{data} {FIM} {save} --exit-interval 2")[0].measured.losses
    second = pool.run(train, 2, f"{data} {FIM} {save}")[0].measured.losses
    assert first + second == pytest.approx(whole, rel=1e-5)
