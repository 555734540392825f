"""Traces, memory reports, and reads from the device during an iteration."""

import json
import re
import shlex
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch

from megatron.training.data.loaders import build_data
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.initialize import initialize
from megatron.training.run import build_run
from megatron.training.training import train_step
from tests.support.live_tensors import LiveTensors
from tests.support.training_harness import (
    COMMON,
    LLAMA,
    datasets_provider,
    forward_step,
    model_provider,
    parse_args,
    train,
)

FLAGS = "--mock-data --train-iters 5 " + LLAMA


def traced(rank, world_size, flags):
    train(rank, world_size, FLAGS + flags)


def events(path):
    return [
        event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"
    ]


def test_trace_contains_iterations_and_phases(pool, tmp_path):
    flags = (
        "--profile --profile-step-start 2 --profile-step-end 4 --profile-ranks 1 "
        f"--profile-dir {tmp_path}"
    )
    pool.run(traced, 2, flags)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rank_1_iterations_2_to_3.pt.trace.json",
        "rank_1_iterations_2_to_3.txt",
    ]
    names = Counter(
        event["name"] for event in events(tmp_path / "rank_1_iterations_2_to_3.pt.trace.json")
    )
    assert names["forward-backward"] == names["optimizer"] == 2
    assert names["forward-compute"] == 4  # 2 iterations of 2 micro-batches
    assert names["aten::_fused_adamw_"] >= 2
    assert "aten::mm" in (tmp_path / "rank_1_iterations_2_to_3.txt").read_text()


def test_run_that_ends_early_writes_its_trace(pool, tmp_path):
    pool.run(
        traced,
        1,
        f"--profile --profile-step-start 4 --profile-step-end 9 --tensorboard-dir {tmp_path}",
    )
    assert (tmp_path / "rank_0_iterations_4_to_5.pt.trace.json").exists()


def test_unusable_profile_directory_is_an_error(pool, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match="no traces in .*/file/traces: Not a directory; give another --profile-dir"
    ):
        pool.run(traced, 1, f"--profile --profile-dir {tmp_path}/file/traces")


def printed(rank, world_size, flags):
    with redirect_stdout(StringIO()) as out:
        train(rank, world_size, FLAGS + flags)
    return out.getvalue()


def test_run_that_starts_after_the_window_warns(pool, tmp_path):
    checkpoints = f"--save {tmp_path / 'c'} --load {tmp_path / 'c'} "
    pool.run(printed, 1, f"{checkpoints} --exit-interval 3")
    window = f"--profile --profile-step-start 1 --profile-step-end 3 --profile-dir {tmp_path / 't'}"
    (text,) = pool.run(printed, 1, f"{checkpoints} {window}")
    assert "rank 0 trained none of iterations 1 to 2: no trace" in text
    assert not list((tmp_path / "t").iterdir())


def test_memory_is_logged(pool):
    text, other = pool.run(printed, 2, "--log-memory-interval 2")
    lines = re.findall(
        r"memory after iteration (\d), maximum over ranks: max resident ([\d.]+) GB \(rank [01]\), "
        r"resident ([\d.]+) GB",
        text,
    )
    assert not other
    assert [iteration for iteration, _, _ in lines] == ["2", "4"]
    assert all(0.05 < float(resident) <= float(peak) + 0.01 < 20 for _, peak, resident in lines)


# Operations whose result the host has to wait for on CUDA.
WAITS = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "equal",
    "unique",
    "_unique2",
)


def operations(rank, world_size, flags):
    """Return the number of calls of each operation in a training step of 4 micro-batches, after a
    first step.
    """
    config = parse_args(shlex.split(COMMON + FLAGS + flags), world_size)
    tokenizer = build_tokenizer(config.tokenizer)
    ps, device = initialize(config.distributed, config.parallel)
    config.set_vocab_size(tokenizer.vocab_size)
    run = build_run(config, ps, device, model_provider, forward_step)
    data = build_data(run, tokenizer, datasets_provider)
    train_step(run, data.train.batches, 4)
    with LiveTensors() as seen:
        train_step(run, data.train.batches, 4)
    return dict(seen.calls)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, ""),
        (
            1,
            "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers "
            "1",
        ),
        (1, "--calculate-per-token-loss --log-num-zeros-in-grad"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --bf16"),
        (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
        (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    ],
)
def test_step_does_not_synchronize(pool, world_size, flags):
    for calls in pool.run(operations, world_size, flags):
        assert calls["mm"] > 0
        assert {name: calls[name] for name in WAITS if name in calls} == {}


def test_dynamic_loss_scale_synchronizes_once_per_step(pool):
    (calls,) = pool.run(operations, 1, "--fp16")
    assert sum(calls.get(name, 0) for name in WAITS) == 1


def scalar_reads(tensor):
    with LiveTensors() as seen:
        tensor.sum().item()
        torch.nonzero(tensor)
    return seen.calls


def test_synchronizations_are_counted():
    calls = scalar_reads(torch.ones(3))
    assert calls["_local_scalar_dense"] == calls["nonzero"] == 1


def test_errors_name_the_flag():
    for flags, message in {
        "--profile-step-start 5 --profile-step-end 5": "--profile-step-start 5 must be less than",
        "--profile-step-start 0": "--profile-step-start must be at least 1, got 0",
        "--profile-ranks 2": "--profile-ranks 2: the run has ranks 0 to 1",
        "--log-memory-interval 0": "--log-memory-interval must be positive, got 0",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse_args(shlex.split(COMMON + FLAGS + flags), 2)


def test_profiling_does_not_change_results(pool, tmp_path):
    plain, watched = (
        pool.run(losses, 1, flags)[0]
        for flags in (
            "",
            f"--profile --profile-step-start 2 --profile-dir {tmp_path} --log-memory-interval 1",
        )
    )
    assert plain == watched


def losses(rank, world_size, flags):
    return train(rank, world_size, FLAGS + flags).measured.losses
