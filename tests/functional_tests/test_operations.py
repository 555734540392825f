"""Slow ranks, hangs and wrong results are reported with the rank that causes them."""

import contextlib
import logging
import re
import signal
import socket
import time
from dataclasses import dataclass, field

import pytest
import torch

from megatron.training.operations import straggler
from megatron.training.operations.reexecution import WrongResultError
from megatron.training.operations.replicas import check_weights
from megatron.training.operations.rerun import REJECTED, UNDETERMINED
from megatron.training.reporting.recorded_launches import read_record
from megatron.training.training import pretrain
from pretrain_gpt import datasets_provider, forward_step, model_provider
from tests.support.crash_harness import free_port
from tests.support.training_harness import COMMON, LAYOUTS, LLAMA, parse_args, train

FLAGS = (
    f"{LLAMA} --num-layers 2 --mock-data --hidden-dropout 0.1 --global-batch-size 12 "
    "--lr-warmup-iters 0 "
)
FAULTY_RANK = 1


# ---- Faults ----


class Fault:
    """A forward step with a fault in some of its calls, which are counted from 1."""

    def __init__(self, calls):
        self._calls = calls
        self._count = 0

    def __call__(self, chunk, batch, activation):
        self._count += 1
        if self._count not in self._calls:
            return forward_step(chunk, batch, activation)
        return self.fail(chunk, batch, activation)


class Slow(Fault):
    def fail(self, chunk, batch, activation):
        time.sleep(0.1)
        return forward_step(chunk, batch, activation)


class Request(Fault):
    """Sends a request to a port of this machine."""

    def __init__(self, calls, port):
        super().__init__(calls)
        self._port = port

    def fail(self, chunk, batch, activation):
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert b"reports are on" in connection.recv(4096)
        return forward_step(chunk, batch, activation)


class NotANumber(Fault):
    def fail(self, chunk, batch, activation):
        loss = forward_step(chunk, batch, activation)
        return loss._replace(total=loss.total * float("nan"))


class FlippedBit(Fault):
    """Changes a bit of one element of the gradient of the last norm."""

    def fail(self, chunk, batch, activation):
        param = dict(chunk.module.named_parameters())["decoder.final_layernorm.weight"]

        def flip(grad):
            hook.remove()
            bits = grad.clone().view(torch.int32)
            bits[0] ^= 1 << 12  # sums of micro-batches round lower ones away
            return bits.view(torch.float32)

        hook = param.register_hook(flip)
        return forward_step(chunk, batch, activation)


# ---- Runs in the worker pool ----


@dataclass
class Observed:
    """Log and losses of a rank, and the error that has ended it."""

    messages: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    error: str = ""
    exit_code: int = 0


class Recorder(logging.Handler):
    def __init__(self, messages):
        super().__init__()
        self._messages = messages

    def emit(self, record):
        self._messages.append(record.getMessage())


@contextlib.contextmanager
def messages_recorded(messages):
    handler = Recorder(messages)
    logging.getLogger("megatron").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("megatron").removeHandler(handler)


def train_with_fault(rank, world_size, flags, fault=None):
    observed = Observed()
    step = fault if fault is not None and rank == FAULTY_RANK else forward_step
    with messages_recorded(observed.messages):
        try:
            outcome = train(rank, world_size, flags, forward_step=step)
            observed.losses = outcome.measured.losses
        except WrongResultError as error:
            observed.error = str(error)
            observed.exit_code = error.exit_code
    return observed


def find_messages(observed, text):
    return [message for message in observed.messages if text in message]


def test_slowed_rank_is_named(pool, tmp_path):
    flags = f"{FLAGS} --train-iters 3 --log-straggler --straggler-minmax-count 2 --save {tmp_path}"
    observed = pool.run(train_with_fault, 2, flags, Slow(range(1000)))[0]
    assert re.search(r"MxRtt/Rnk: [\d.]+ms/1 ", find_messages(observed, "MxRtt/Rnk")[-1])
    assert find_messages(observed, "Bottom 2 Ranks with lowest")
    messages = find_messages(observed, "is the slowest")
    assert messages[-1].startswith("iteration 3: rank 1 (")
    # The report reads it from the record.
    (launch,) = read_record(tmp_path)
    values = [row["values"] for row in launch.points if "slowest-rank" in row["values"]]
    assert values[-1]["slowest-rank"] == 1
    assert values[-1]["slowest-rank-ratio"] > 1.1


def train_with_short_intervals(rank, world_size, flags, fault):
    interval = straggler.INTERVAL
    straggler.INTERVAL = 0.0
    try:
        return train_with_fault(rank, world_size, flags, fault)
    finally:
        straggler.INTERVAL = interval


def test_slowed_rank_is_named_before_the_log_interval(pool):
    flags = f"{FLAGS} --train-iters 3 --log-straggler --log-interval 100"
    observed = pool.run(train_with_short_intervals, 2, flags, Slow(range(1000)))[0]
    messages = find_messages(observed, "is the slowest")
    assert messages[-1].startswith("iteration 3: rank 1 (")


def test_reports_of_stragglers_can_be_turned_on(pool):
    port = free_port()
    flags = (
        f"{FLAGS} --train-iters 3 --log-straggler --disable-straggler-on-startup "
        f"--straggler-ctrlr-port {port}"
    )
    observed = pool.run(train_with_fault, 2, flags, Request({1}, port))[0]
    # The ranks agree on the request with the first, disabled report.
    assert len(find_messages(observed, "MxRtt/Rnk")) == 2


# A step of two replicas has three micro-batches. The check of iteration 2 executes the step of the
# previous replica (calls 4 to 6) and that of the rank (7 to 9), and after a disagreement both again.
CHECKED = f"{FLAGS} --train-iters 4 --gradient-check-interval 2 "


@pytest.mark.parametrize("layout", ["dp2", "dp2_distributed_optimizer"])
def test_checked_steps_have_the_same_losses(pool, layout):
    flags = LAYOUTS[layout][1]
    expected = pool.run(train_with_fault, 2, f"{FLAGS} --train-iters 4 {flags}")[0].losses
    observed = pool.run(train_with_fault, 2, CHECKED + flags)[0]
    assert observed.losses == expected
    assert not find_messages(observed, "wrong gradients")
    twice = f"{FLAGS} --train-iters 4 {flags} --rerun-mode report_determinism_stats"
    observed = pool.run(train_with_fault, 2, twice)[0]
    assert observed.losses == expected
    assert len(find_messages(observed, "2 samples, all identical")) == 4


@pytest.mark.parametrize("call", [5, 8], ids=["of_another_rank", "of_its_own"])
def test_flipped_bit_is_located_and_the_step_repeated(pool, call):
    flags = f"{FLAGS} --train-iters 4 "
    expected = pool.run(train_with_fault, 2, flags)[0].losses
    observed = pool.run(train_with_fault, 2, CHECKED, FlippedBit({call}))[0]
    (message,) = find_messages(observed, "wrong gradients")
    assert re.match(
        r"iteration 2: rank 1 \(.*\) has computed wrong gradients of "
        r"decoder\.final_layernorm\.weight \(bucket \d\)",
        message,
    )
    assert observed.losses == expected


def test_rank_that_always_flips_a_bit_is_located_among_three(pool):
    observed = pool.run(train_with_fault, 3, CHECKED, FlippedBit(range(1000)))[0]
    assert observed.error.startswith("iteration 2: rank 1 (")
    assert observed.exit_code == 1
    assert "decoder.final_layernorm.weight" in observed.error


def test_flipped_bit_is_located_in_a_tensor_parallel_replica(pool):
    world_size, layout = LAYOUTS["tp2_dp2"]
    observed = pool.run(train_with_fault, world_size, CHECKED + layout, FlippedBit({4}))[0]
    (message,) = find_messages(observed, "wrong gradients")
    assert message.startswith("iteration 2: rank 1 (")


# Calls of a rejected step: itself (1 to 3), again (4 to 6), and that of the previous replica.
@pytest.mark.parametrize(
    "calls, diagnosis",
    [({2}, "transient error"), (range(1000), "persistent error")],
)
def test_loss_that_is_not_finite_is_attributed(pool, calls, diagnosis):
    flags = f"{FLAGS} --train-iters 2 --rerun-mode validate_results"
    observed = pool.run(train_with_fault, 2, flags, NotANumber(calls))[0]
    assert observed.exit_code == REJECTED
    assert re.match(rf"iteration 1: loss nan on rank 1 \(.*\): {diagnosis}", observed.error)


@pytest.mark.parametrize(
    "world_size, outcome, diagnosis, exit_code",
    [
        (2, "transient_error", "transient error", REJECTED),
        (2, "persistent_error", "persistent error", REJECTED),
        (2, "correct_result", "correct result", REJECTED),
        (1, "persistent_error", "there is no replica", UNDETERMINED),
    ],
)
def test_injected_errors_are_diagnosed(pool, world_size, outcome, diagnosis, exit_code):
    flags = (
        f"{FLAGS} --train-iters 2 --rerun-mode validate_results --error-injection-rate 1 "
        f"--error-injection-type {outcome}"
    )
    observed = pool.run(train_with_fault, world_size, flags)[0]
    assert diagnosis in observed.error
    assert observed.exit_code == exit_code


def compare_changed_weights(rank, world_size, flags):
    """Return the error of a comparison after a change of a weight on one rank."""
    argv = (COMMON + flags).split()
    run = pretrain(parse_args(argv, world_size), model_provider, datasets_provider, forward_step)
    check_weights(run)
    if rank == FAULTY_RANK:
        run.chunks[0].buckets[0].param_data[0] += 1
    with pytest.raises(ValueError) as error:
        check_weights(run)
    return str(error.value)


def test_changed_weight_of_a_replica_is_located(pool):
    flags = f"{FLAGS} --train-iters 1 --check-weight-hash-across-dp-replicas-interval 1"
    errors = pool.run(compare_changed_weights, 3, flags)
    assert len(set(errors)) == 1
    assert re.search(r"replicas differ: \S+ \(bucket 0\) on rank 1\. Continue", errors[0])


# ---- Processes ----


def test_stopped_rank_is_reported_by_the_others(launcher):
    flags = f"{COMMON} {FLAGS} --train-iters 1000000 --hang-report-seconds 0.5"
    job = launcher.start(2, flags)
    job.until_iteration(3)
    job.signal(FAULTY_RANK, signal.SIGSTOP)
    job.until(lambda: "; missing:" in job.output(), "the report")
    report = job.output().partition("; missing:")[2]
    assert re.search(
        r"rank 1 \(.*\) does not respond: iteration \d+, .* collective \w+ \d+", report
    )
    assert re.search(r"rank 0: iteration \d+, waits in collective allreduce \d+ of ", report)
    own = job.output().partition("rank 0 of 2 (")[2]
    assert "no progress for" in own
    assert "thread MainThread:" in own
    assert "in train_step" in own
    job.signal(FAULTY_RANK, signal.SIGCONT)
    job.until(lambda: "continues after" in job.output(), "the end of the hang")
