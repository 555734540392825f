"""In-process restart with NCCL: the other ranks abort their communicators and train on."""

import contextlib
import os
import re
import signal
import tempfile
import time

import pytest

from tests.support.compare import assert_same
from tests.support.crash_harness import launching, stored_tensors
from tests.support.processes import is_running, wait_until
from tests.support.training_harness import COMMON, DISTRIBUTED_OPTIMIZER, LLAMA

TRAINING = (
    f"{COMMON}{LLAMA}--num-layers 2 --mock-data --hidden-dropout 0.1 --device cuda --train-iters 16 "
    "--async-save --save-interval 3 "
    "--vocab-size 8000 "  # 8 MB of weights, gradients and optimizer: leaks are noticed
)
LAYOUTS = {
    "dp2": DISTRIBUTED_OPTIMIZER,
    "pp2": "--pipeline-model-parallel-size 2 ",
    "tp2_sp": "--tensor-model-parallel-size 2 --sequence-parallel ",
    "ep2": (
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 "
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    ),
}


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    with launching(tmp_path_factory.mktemp("logs")) as launcher:
        yield launcher


@contextlib.contextmanager
def fake_devices(**settings):
    """Provide the environment of two fake devices."""
    with tempfile.TemporaryDirectory(prefix="fake_nccl_", dir="/dev/shm") as directory:
        yield {
            "FAKE_CUDA_DEVICES": "2",
            "FAKE_NCCL_DIR": directory,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **settings,
        }


def start_restartable(launcher, flags, directory, variables):
    flags = f"{flags} --inprocess-restart --save {directory} --load {directory}"
    return launcher.start(2, flags, variables=variables)


def assert_like_undisturbed_run(launcher, job, flags, root):
    """Compare all losses, also those of repeated iterations, and the final checkpoint."""
    with fake_devices() as variables:
        straight = launcher.run(2, f"{flags} --save {root}/straight", variables=variables)
    expected = straight.losses()
    log_lines = re.findall(r"iteration +(\d+)/.*? lm loss: ([\d.E+-]+) ", job.output())
    assert len(log_lines) >= len(expected) == 16
    for iteration, loss in log_lines:
        assert float(loss) == expected[int(iteration)]
    final = "iter_0000016"
    assert_same(stored_tensors(root / "run" / final), stored_tensors(root / "straight" / final))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_keep_their_processes_when_another_is_killed(launcher, tmp_path, layout):
    """Rank 1 is killed twice, then rank 0."""
    flags = TRAINING + LAYOUTS[layout]
    with fake_devices(FAKE_CUDA_RANDOM_US="500") as variables:
        job = start_restartable(launcher, flags, tmp_path / "run", variables)
        for number, lost in enumerate([1, 1, 0]):
            job.until(lambda number=number: len(find_losses(job)) >= 4 * (number + 1))
            workers = job.workers()
            os.kill(workers[lost], signal.SIGKILL)
            wait_until(lambda worker=workers[lost]: not is_running(worker))
            wait_until(lambda: len(job.workers()) == 2)
            assert job.workers()[1 - lost] == workers[1 - lost]
        job.succeed()
    reasons = re.findall(r"in-process restart \d: (.*)", job.output())
    assert reasons == [f"rank {lost} was ended by SIGKILL" for lost in (1, 1, 0)]
    # The memory of earlier attempts, at least 5 MB of each, has been released.
    peaks = [float(peak) for peak in re.findall(r"max allocated ([\d.]+) GB", job.output())]
    assert len(peaks) == 4
    assert max(peaks) - min(peaks) <= 0.005
    assert_like_undisturbed_run(launcher, job, flags, tmp_path)


def find_losses(job):
    return re.findall(r" lm loss: ", job.output())


def test_rank_that_torch_ends_is_replaced(launcher, tmp_path):
    """torch's watchdog ends a process when NCCL reports a lost peer before the job does.

    The monitor of the lost rank is suspended, so that the watchdog is first.
    """
    flags = TRAINING + LAYOUTS["dp2"]
    with fake_devices(FAKE_NCCL_REPORTS_LOSS="1") as variables:
        job = start_restartable(launcher, flags, tmp_path / "run", variables)
        job.until(lambda: len(find_losses(job)) >= 5)
        remaining, lost = job.workers()
        os.kill(job.pids[1], signal.SIGSTOP)
        os.kill(lost, signal.SIGKILL)
        begin = time.monotonic()
        job.until(lambda: "rank 0 was ended by SIGABRT" in job.output())
        assert not is_running(remaining)
        # By default the watchdog would wait for 60 seconds with a lock that the main thread needs.
        assert time.monotonic() - begin < 30
        os.kill(job.pids[1], signal.SIGCONT)
        job.succeed()
    assert_like_undisturbed_run(launcher, job, flags, tmp_path)
