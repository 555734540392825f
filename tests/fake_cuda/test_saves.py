"""Calls of the CUDA runtime during asynchronous saves, from its trace."""

from collections import Counter
from typing import NamedTuple

import pytest

from tests.fake_cuda.launch import launch

PROGRAM = ["-m", "tests.fake_cuda.saves"]
SETTINGS = {
    "FAKE_CUDA_COPY_US": "3000",
    "FAKE_CUDA_KERNEL_US": "5000",
    # Values are not compared, and copies on the device are torch's kernel.
    "FAKE_CUDA_NUMERICS": "0",
}


class Call(NamedTuple):
    """A line of the trace."""

    thread: str
    name: str
    detail: str  # kernel, or text of a mark


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """Return the calls of two saves, of which a part is copied on the device."""
    trace = tmp_path_factory.mktemp("saves") / "calls.txt"
    result = launch(PROGRAM, 1, **SETTINGS, FAKE_CUDA_TRACE=str(trace))
    assert result.returncode == 0, result.stderr[-4000:]
    return [Call(*line.split(maxsplit=2)) for line in trace.read_text().splitlines()]


def select(calls, begin=None, end=None):
    """Return the calls between two marks; without a mark, from the beginning or to the end."""
    marks = {call.detail: index for index, call in enumerate(calls) if call.name == "MARK"}
    selected = calls[marks.get(begin, -1) + 1 : marks.get(end, len(calls))]
    return [call for call in selected if call.name != "MARK"]


def find_training_thread(calls):
    return next(call.thread for call in calls if call.name == "MARK")


def list_kernels(calls):
    return {call.detail for call in calls if call.name == "cudaLaunchKernel"}


def test_memory_is_pinned_before_training(calls):
    assert [call.name for call in select(calls, None, "training")].count("cudaHostRegister") == 1
    names = {call.name for call in select(calls, "training")}
    assert "cudaHostRegister" not in names and "cudaStreamCreateWithPriority" not in names


def test_kernels_of_saves_are_loaded_before_training(calls):
    """CUDA loads a kernel at its first launch."""
    launched = list_kernels(select(calls, "save 1", "end 1"))
    of_training = list_kernels(select(calls, "training", "save 1"))
    assert launched - of_training, "nothing was copied on the device"
    assert launched <= list_kernels(select(calls, None, "save 1"))


def test_memory_of_a_snapshot_is_that_of_activations(calls):
    for number in (1, 2):
        names = {call.name for call in select(calls, f"save {number}", f"end {number}")}
        assert not names & {"cudaMalloc", "cudaFree"}, number


def test_training_only_copies_after_its_wait(calls):
    """The device is idle from the end of the backward pass to these copies."""
    thread = find_training_thread(calls)
    for number in (1, 2):
        waiting = select(calls, f"update {number}", f"end {number}")
        names = [call.name for call in waiting if call.thread == thread]
        last_wait = len(names) - names[::-1].index("cudaEventSynchronize")
        counts = Counter(names[last_wait:])
        assert counts.pop("cudaLaunchKernel") >= 1
        # Two events: after the snapshot for the copies from it, and before the update.
        assert set(counts) <= {"cudaEventCreateWithFlags", "cudaEventRecord", "cudaStreamWaitEvent"}
        assert counts["cudaStreamWaitEvent"] == 2


def test_one_batch_of_copies_is_in_flight_at_an_update(calls):
    """Training waits for these copies."""
    thread = find_training_thread(calls)
    for number in (1, 2):
        before = select(calls, f"save {number}", f"end {number}")
        kernels = [i for i, call in enumerate(before) if call.name == "cudaLaunchKernel"]
        queued = [call for call in before[: kernels[-1]] if call.thread != thread]
        counts = Counter(call.name for call in queued)
        waits = counts["cudaEventSynchronize"]
        assert 0 < counts["cudaMemcpyAsync"] < 24, "nothing was copied on the device"
        assert counts["cudaEventRecord"] - waits <= 1, (number, counts)
