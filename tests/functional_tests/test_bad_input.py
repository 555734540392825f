"""Mistakes of users: a clear error that names the value, without loss of data."""

import os
import shlex
import signal
import struct
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.core.dist_checkpointing import CheckpointDirectory
from megatron.core.dist_checkpointing.planning import coordination
from megatron.training.config.parsing import parse_args
from megatron.training.run import Loss
from megatron.training.training import pretrain
from pretrain_gpt import datasets_provider, forward_step, model_provider
from tests import ROOT
from tests.support.training_harness import COMMON, LAYOUTS, MODELS, train

MOCK = f"--mock-data --train-iters 4 {MODELS['llama']}"


@pytest.fixture
def prefix(tmp_path):
    with IndexedDatasetBuilder(str(tmp_path / "text"), np.uint16) as builder:
        for start in range(20):
            builder.add(np.arange(start, start + 40))
    return tmp_path / "text"


def train_on(pool, prefix, more=""):
    data = f"--data-path {prefix} --split 100,0,0 --train-iters 3 --data-cache-path {prefix}_cache"
    return pool.run(train, 1, f"{data} {MODELS['llama']} {more}")


def test_intact_data_loads(pool, prefix):
    assert len(train_on(pool, prefix)[0].measured.losses) == 3


def test_missing_data_path_is_named(pool, prefix):
    with pytest.raises(ValueError, match=r"nowhere/text.*"):
        train_on(pool, "/nowhere/text")


def test_empty_bin_file_is_rejected(pool, prefix):
    Path(f"{prefix}.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"text\.bin"):
        train_on(pool, prefix)


def test_truncated_bin_file_is_rejected(pool, prefix):
    whole = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"text\.bin"):
        train_on(pool, prefix)


def test_index_of_another_dtype_is_rejected(pool, prefix):
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    assert struct.unpack_from("<B", index, 17) == (8,)  # uint16
    index[17] = 4  # int32
    Path(f"{prefix}.idx").write_bytes(index)
    with pytest.raises(ValueError, match=r"text\.(bin|idx)"):
        train_on(pool, prefix)


def test_token_outside_the_vocabulary_is_rejected(pool, prefix):
    with pytest.raises(ValueError, match=r"59|vocab"):
        train_on(pool, prefix, "--vocab-size 20")


def test_torchrun_reports_a_data_error_as_root_cause(prefix):
    flags = (
        f"{COMMON} {MODELS['llama']} --data-path {prefix} --split 100,0,0 --train-iters 3 "
        "--vocab-size 20 "
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += [
        "pretrain_gpt.py",
        *shlex.split(flags),
        "--num-workers",
        "1",
        "--dataloader-type",
        "cyclic",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    message = f"{prefix}.bin holds token"
    ours = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(ours) == 1
    assert message in ours[0]
    assert "Original Traceback" not in done.stderr
    root_cause = done.stderr.split("Root Cause (first observed failure):")[1]
    (shown,) = (line for line in root_cause.splitlines() if line.startswith("  traceback : "))
    assert shown == f"  traceback : {ours[0]}"


def test_corrupt_tracker_falls_back_to_the_newest_checkpoint(pool, tmp_path):
    pool.run(train, 1, f"{MOCK} --save {tmp_path} --exit-interval 2")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("iteration 2")
    assert pool.run(train, 1, f"{MOCK} --load {tmp_path} --skip-train")[0].iteration == 2
    tracker.unlink()
    assert pool.run(train, 1, f"{MOCK} --load {tmp_path} --skip-train")[0].iteration == 2
    tracker.write_text("3")  # its checkpoint is gone
    assert pool.run(train, 1, f"{MOCK} --load {tmp_path} --skip-train")[0].iteration == 2
    assert (
        pool.run(train, 1, f"{MOCK} --load {tmp_path} --skip-train --ckpt-step 2")[0].iteration == 2
    )
    with pytest.raises(ValueError, match=r"--ckpt-step 7.*complete are: iter_0000002"):
        pool.run(train, 1, f"{MOCK} --load {tmp_path} --ckpt-step 7")
    (tmp_path / "iter_0000002/.metadata").unlink()
    with pytest.raises(
        ValueError, match=r"(?s)names 3, but it does not exist.*no complete checkpoint"
    ):
        pool.run(train, 1, f"{MOCK} --load {tmp_path}")


@pytest.mark.parametrize("path", ["empty", "absent"])
def test_missing_checkpoint_is_an_error_only_if_required(pool, tmp_path, path):
    """A run starts from random weights only if no flag requires a checkpoint, and with a warning."""
    (tmp_path / "empty").mkdir()
    directory = tmp_path / path
    other = tmp_path / "other"
    for meant in (
        "--finetune",
        "--ckpt-step 3",
        "--exit-on-missing-checkpoint",
        "--use-checkpoint-args",
    ):
        with pytest.raises(
            ValueError,
            match=rf"{path} holds no checkpoint|--use-checkpoint-args: .* (holds|contains) "
            r"no|--ckpt-step 3|absent does not exist",
        ):
            pool.run(train, 1, f"{MOCK} --load {directory} --save {other} {meant}")
    if path == "absent":
        with pytest.raises(ValueError, match="absent does not exist. To start from random"):
            pool.run(train, 2, f"{MOCK} --load {directory}")
    else:
        assert pool.run(train, 2, f"{MOCK} --load {directory} --exit-interval 1")[0].iteration == 1
    (other / "half").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds no checkpoint, but it is not empty"):
        pool.run(train, 1, f"{MOCK} --load {other}")
    (other / "model.bin").write_text("")
    with pytest.raises(ValueError, match="model.bin is a file: give the directory of a checkpoint"):
        pool.run(train, 1, f"{MOCK} --load {other / 'model.bin'}")
    restart = f"{MOCK} --load {directory} --save {directory}"
    with pytest.raises(ValueError, match="--exit-on-missing-checkpoint"):
        pool.run(train, 1, f"{restart} --exit-on-missing-checkpoint")
    assert pool.run(train, 1, f"{restart} --exit-interval 2")[0].iteration == 2
    assert pool.run(train, 1, restart)[0].iteration == 4


def test_checkpoint_of_another_model_is_rejected(pool, tmp_path):
    pool.run(train, 1, f"{MOCK} --save {tmp_path} --exit-interval 2")
    with pytest.raises(ValueError) as error:
        pool.run(
            train, 1, f"{MOCK} --load {tmp_path} --hidden-size 64 --num-layers 6 --qk-layernorm"
        )
    for line in (
        "num_layers: 4 in the checkpoint, 6 now",
        "hidden_size: 32 in the checkpoint, 64 now",
        "qk_layernorm: False in the checkpoint, True now",
        "--use-checkpoint-args",
    ):
        assert line in str(error.value)
    with pytest.raises(ValueError, match=r"word_embeddings"):
        pool.run(train, 1, f"{MOCK} --load {tmp_path} --vocab-size 80")


def nan_on_the_last_rank(rank, world_size, flags):
    calls = 0

    def broken_forward_step(chunk, batch, activation):
        nonlocal calls
        output = forward_step(chunk, batch, activation)
        calls += isinstance(output, Loss)
        if rank == world_size - 1 and calls > 2:  # in the second iteration
            return Loss(output.total * float("nan"), output.num_tokens)
        return output

    config = parse_args(shlex.split(COMMON + flags), world_size)
    run = pretrain(config, model_provider, datasets_provider, broken_forward_step)
    return [bool(torch.isfinite(p).all()) for chunk in run.chunks for p in chunk.parameters()]


@pytest.mark.parametrize("layout", ["dp2", "pp2", "dp2_distributed_optimizer"])
def test_nan_ends_the_run_with_rank_and_iteration(pool, tmp_path, layout):
    world_size, flags = LAYOUTS[layout]
    flags = (
        f"{MOCK} {flags} --micro-batch-size 2 --global-batch-size {8 if 'dp' in layout else 4} "
        f"--save {tmp_path}"
    )
    with pytest.raises(ValueError, match=r"iteration 2: the loss is not finite on rank 1"):
        pool.run(nan_on_the_last_rank, world_size, flags)
    assert not [path for path in tmp_path.iterdir() if "iter" in path.name], (
        "nothing is saved of a broken model"
    )
    finite = pool.run(
        nan_on_the_last_rank, world_size, f"{flags} --no-check-for-nan-in-loss-and-grad"
    )
    assert all(all(rank) for rank in finite)  # updates were left out


@pytest.mark.parametrize("save", ["--save-interval 1", "--save-interval 1 --async-save"])
def test_iteration_with_nan_is_not_saved(pool, tmp_path, save):
    """A checkpoint of an iteration that is not finite is never committed; the one before is."""
    world_size, flags = LAYOUTS["dp2_distributed_optimizer"]
    flags = f"{MOCK} {flags} --micro-batch-size 2 --global-batch-size 8 --save {tmp_path} {save}"
    with pytest.raises(ValueError, match=r"iteration 2: the loss is not finite on rank 1"):
        pool.run(nan_on_the_last_rank, world_size, flags)
    assert CheckpointDirectory(tmp_path).list_iterations() == [1]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"


def test_user_errors_end_with_one_message_and_no_traceback(launcher):
    """Both ranks find the same errors before they join the process group; rank 0 reports them."""
    job = launcher.start(
        2, f"{COMMON} {MOCK} --tensor-model-parallel-size 2 --num-query-groups 3 --unfused"
    )
    job.until(job.has_ended)
    job.kill(1)
    assert job.wait()[0] == 1
    assert job.output().splitlines() == [
        "error: 3 problems",
        "  - unknown flag --unfused: --help lists all flags, and --ignore-unknown-flags drops those of "
        "a fork",
        "  - --num-attention-heads 4 is not a multiple of --num-query-groups 3: change one of them",
        "  - --num-query-groups 3 with --group-query-attention is not a multiple of "
        "--tensor-model-parallel-size 2: change one of them",
    ]
    assert job.output(1) == ""


LONG = f"{COMMON} --mock-data --train-iters 100000 {MODELS['llama']} "


def test_sigterm_saves_and_exits(tmp_path, launcher):
    job = launcher.start(1, f"{LONG} --exit-signal-handler --save {tmp_path}")
    job.until_iteration(3)
    job.signal(0, signal.SIGTERM)
    job.succeed()
    assert "SIGTERM was received" in job.output()
    saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert f"exiting after iteration {saved}" in job.output()
    assert launcher.run(1, f"{LONG} --load {tmp_path} --skip-train").resumed_at() == saved


@pytest.mark.parametrize("layout", ["dp2_distributed_optimizer", "pp2"])
def test_killed_rank_stops_the_others_with_the_reason(launcher, layout):
    """At once: the limit of a job's wait is far below the timeout of the collectives."""
    job = launcher.start(2, f"{LONG} {LAYOUTS[layout][1]} --distributed-timeout-minutes 30")
    job.until_iteration(2)
    job.kill(1)
    job.until(job.has_ended, "the end of rank 0")
    assert job.wait()[0] not in (0, None)
    assert "rank 0 of 2" in job.output()
    assert "another rank has died" in job.output()


def train_elsewhere(rank, world_size, root, flags):
    """Every rank has its own disk under the same name."""
    os.chdir(root / str(rank))
    try:
        with mock.patch.object(coordination, "VISIBLE_WITHIN", 0.0):
            return train(rank, world_size, flags)
    finally:
        os.chdir(ROOT)


def test_save_directory_must_be_shared_by_all_ranks(pool, tmp_path):
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
    message = (
        r"is not shared by all ranks: files that rank 0 on (\S+) writes there are not visible on \1 "
        r"\(rank 1, 2\)"
    )
    with pytest.raises(ValueError, match=message):
        pool.run(train_elsewhere, 3, tmp_path, f"{MOCK} --global-batch-size 12 --save checkpoints")


@pytest.mark.parametrize(
    ("layout", "ranks"), [("", "1, 3"), ("--pipeline-model-parallel-size 4", "3")]
)
def test_all_nodes_must_have_the_same_version_of_the_data(pool, tmp_path, layout, ranks):
    """Rank 1 reads no data if it has a stage in the middle of a pipeline."""
    for rank in range(4):
        directory = tmp_path / str(rank)
        directory.mkdir()
        with IndexedDatasetBuilder(str(directory / "text"), np.uint16) as builder:
            for _ in range(40):
                builder.add(np.arange(20 + rank % 2))
    message = rf"rank {ranks}: the train data on \S+ differs from that of rank 0"
    flags = f"{MODELS['llama']} {layout} --data-path text --split 1 --train-iters 4"
    with pytest.raises(ValueError, match=message):
        pool.run(train_elsewhere, 4, tmp_path, flags)
