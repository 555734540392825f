"""The stream of samples depends only on consumed samples and seed, and equals Megatron-LM's
batches.
"""

import itertools
import os
import signal
import sys
import textwrap

import numpy as np
import pytest
import torch

from megatron.core.datasets import GPTDatasetConfig, build_datasets
from megatron.training.config.arguments import FlagParser
from megatron.training.config.batch_schedule import BatchSchedule
from megatron.training.config.run_options import DataLoaderConfig
from megatron.training.data.cyclic_stream import CyclicStream
from megatron.training.data.loaders import (
    DataIterator,
    compute_order_fingerprint,
)
from tests import ROOT
from tests.support.interpreters import Interpreter
from tests.support.processes import children_of, is_running, wait_until

GOLDEN = ROOT / "tests" / "golden" / "megatron_lm"


class Numbers:
    """Sample i is the number i, as often as wanted."""

    fingerprint = "numbers"

    def __init__(self, size, width=1):
        self.size = size
        self.width = width

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        return {"tokens": np.full(self.width, index)}


def consume(dataset, iterations, consumed, micro_batch_size, dp_size, global_batch_size, config):
    """The samples of `iterations` global batches in the order of the stream, and how many are
    consumed then.
    """
    replicas = [
        DataIterator(dataset, consumed, micro_batch_size, config, r, dp_size)
        for r in range(dp_size)
    ]
    schedule = BatchSchedule(((0, global_batch_size),), micro_batch_size, dp_size)
    seen = []
    for _ in range(iterations):
        for _ in range(schedule.num_microbatches_at(consumed)):
            for replica in replicas:
                seen += next(replica)["tokens"].flatten().tolist()
        consumed += schedule.global_batch_size_at(consumed)
    for replica in replicas:
        replica.close()
    return seen, consumed


def test_fingerprint_of_the_order_covers_the_type_of_the_loader():
    """The number of samples determines the permutations of a cyclic loader only."""
    single = DataLoaderConfig()
    assert compute_order_fingerprint(Numbers(7), single) == compute_order_fingerprint(
        Numbers(8), single
    )
    cyclic = DataLoaderConfig(dataloader_type="cyclic")
    orders = [(7, single), (7, cyclic), (8, cyclic), (7, DataLoaderConfig("cyclic", seed=1))]
    prints = {compute_order_fingerprint(Numbers(size), config) for size, config in orders}
    assert len(prints) == len(orders)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("micro_batch_size", "dp_size"), [(2, 1), (2, 2), (1, 4), (4, 1)])
def test_training_batches_equal_megatrons(tmp_path, micro_batch_size, dp_size, num_workers):
    if num_workers and dp_size > 2:
        pytest.skip("enough processes in the other cases")
    data = GOLDEN / "data" / "pysrc_a_text_document"
    config = GPTDatasetConfig(
        seq_length=64,
        seed=1234,
        data_path=[str(data)],
        split="100,0,0",
        data_cache_path=str(tmp_path),
    )
    train, _, _ = build_datasets(config, (80, 0, 0), 256, 257)
    loader = DataLoaderConfig(num_workers=num_workers)
    replicas = [
        DataIterator(train, 0, micro_batch_size, loader, rank, dp_size) for rank in range(dp_size)
    ]
    batches = [
        next(replica) for _ in range(80 // (micro_batch_size * dp_size)) for replica in replicas
    ]
    for key in ("tokens", "labels", "loss_mask", "position_ids"):
        expected = np.load(GOLDEN / "batches" / f"{key}.npy")
        np.testing.assert_array_equal(
            torch.cat([batch[key] for batch in batches]).numpy(), expected
        )
    assert {key: value.dtype for key, value in batches[0].items()} == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "position_ids": torch.int64,
        "loss_mask": torch.float32,
    }
    for replica in replicas:
        replica.close()


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_layout_and_batch_size_can_change_without_loss_or_repetition(kind):
    dataset = Numbers(96)
    config = DataLoaderConfig(kind, num_workers=0, seed=3)
    one_run, _ = consume(dataset, 12, 0, 1, 1, 8, config)
    stream = []
    consumed = 0
    for iterations, micro_batch_size, dp_size, global_batch_size in [
        (2, 2, 2, 8),
        (3, 1, 4, 16),
        (1, 4, 2, 8),
        (6, 2, 1, 4),
    ]:
        part, consumed = consume(
            dataset, iterations, consumed, micro_batch_size, dp_size, global_batch_size, config
        )
        stream += part
    assert consumed == 96
    assert stream == one_run
    assert sorted(stream) == list(range(96))
    assert (stream == list(range(96))) == (kind == "single")


def test_cyclic_epochs_are_different_permutations():
    stream = CyclicStream(10, seed=5)
    epochs = [stream(10 * epoch, 10 * epoch + 10) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert stream(7, 25) == [*epochs[0], *epochs[1], *epochs[2]][7:25]
    assert CyclicStream(10, seed=6)(0, 10) != epochs[0]
    assert CyclicStream(10, seed=5)(0, 10) == epochs[0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_exhausted_data_is_an_error(num_workers):
    iterator = DataIterator(Numbers(10), 3, 2, DataLoaderConfig(num_workers=num_workers), 1, 2)
    assert next(iterator)["tokens"].tolist() == [[5], [6]]
    with pytest.raises(
        ValueError,
        match="of 10 samples, 3 were consumed .* micro-batch of 2 for each of 2 replicas",
    ):
        next(iterator)


def test_reading_ahead_does_not_use_the_random_number_generators():
    state = torch.get_rng_state()
    for num_workers in (0, 1):
        iterator = DataIterator(Numbers(10), 0, 2, DataLoaderConfig(num_workers=num_workers))
        next(iterator)
        iterator.close()
    assert torch.equal(torch.get_rng_state(), state)


def test_errors_of_samples_reach_the_training_process():
    class Broken(Numbers):
        def __getitem__(self, index):
            raise ValueError(f"sample {index} is broken")

    for num_workers in (0, 1):
        iterator = DataIterator(Broken(10), 0, 1, DataLoaderConfig(num_workers=num_workers))
        with pytest.raises(ValueError, match="^sample 0 is broken$"):
            next(iterator)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_survive_the_signals_of_a_launcher_and_end_with_close():
    before = set(children_of(os.getpid()))
    iterator = DataIterator(Numbers(10_000), 0, 1, DataLoaderConfig(num_workers=2))
    assert next(iterator)["tokens"].item() == 0
    workers = set(children_of(os.getpid())) - before
    assert len(workers) == 2
    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        for worker in workers:
            os.kill(worker, signal_number)
        assert [next(iterator)["tokens"].item() for _ in range(20)]
    assert workers <= set(children_of(os.getpid()))
    iterator.close()
    wait_until(lambda: not workers & set(children_of(os.getpid())))


SCRIPT = """
    from tests.unit_tests.training.data.test_loaders import Numbers
    from megatron.training.config.run_options import DataLoaderConfig
    from megatron.training.data.loaders import DataIterator
    iterator = DataIterator(Numbers(10_000, {width}), 0, 1, DataLoaderConfig(num_workers=2))
    print(next(iterator)["tokens"][0, 0].item(), flush=True)
    {end}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("end", "code", "width"),
    [
        ("pass", 0, 1),
        ("raise RuntimeError('stop')", 1, 1),
        ("import time; time.sleep(60)", -9, 1),
        (
            "import time; time.sleep(60)",
            -9,
            100_000,
        ),  # batches that fill the pipe after its reader has ended
    ],
)
def test_no_worker_outlives_the_training_process(end, code, width):
    script = textwrap.dedent(SCRIPT).format(end=end, width=width)
    process = Interpreter(script, directory=ROOT, environment=os.environ)
    assert process.stdout.readline() == "0\n"
    if code == -9:
        workers = children_of(process.pid)
        assert len(workers) == 2
        process.kill()
        wait_until(lambda: not any(map(is_running, workers)))
    assert process.wait(timeout=300) == code


def test_invalid_options():
    line = FlagParser({"": DataLoaderConfig}).parse(["--num-workers", "-1"])
    assert line.problems == ["--num-workers must be at least 0, got -1"]


def test_iteration_is_lazy_and_endless_when_cyclic():
    iterator = DataIterator(Numbers(3), 0, 2, DataLoaderConfig("cyclic", num_workers=0))
    samples = [
        s for batch in itertools.islice(iterator, 9) for s in batch["tokens"].flatten().tolist()
    ]
    assert sorted(samples) == sorted([0, 1, 2] * 6)
