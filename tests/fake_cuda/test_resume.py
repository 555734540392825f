"""Runs that resume from an asynchronous save on fake devices continue with the same bits."""

import contextlib
import os
import random
import time

import pytest

from tests.fake_cuda.forks import RankError, run_ranks
from tests.fake_cuda.test_races import EXPERTS
from tests.fake_cuda.trainings import train_and_hash, train_on_node, train_with_idle_experts
from tests.support.idle_experts import IDLE_EXPERTS
from tests.support.object_server import object_server
from tests.support.training_harness import DISTRIBUTED_OPTIMIZER, LLAMA

BASE = "--mock-data --train-iters 4 --num-layers 2 --deterministic-mode --device cuda "
LATENT = (
    "--multi-latent-attention --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --qk-layernorm --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 6 "
)
ADEMAMIX = "--optimizer ademamix --ademamix-beta3 0.99 --ademamix-alpha 5 "
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1 "
TP2 = "--tensor-model-parallel-size 2 "
CP2 = "--context-parallel-size 2 "
ALL_TO_ALL = f"{EXPERTS}--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
RANDOM_DELAYS = {"FAKE_CUDA_RANDOM_US": "500"}

RUNS = {  # name -> (devices, flags)
    "dropout": (1, f"{LLAMA}{DROPOUT}"),
    "dropout_tp2_sp": (2, f"{LLAMA}{DROPOUT}{TP2}--sequence-parallel "),
    "hidden_dropout_cp2": (2, f"{LLAMA}--hidden-dropout 0.1 {CP2}"),
    "dropout_cp2_a2a": (2, f"{LLAMA}{DROPOUT}{CP2}--cp-comm-type a2a "),
    "hidden_dropout_tp2_sp_cp2": (
        4,
        f"{LLAMA}--hidden-dropout 0.1 {TP2}--sequence-parallel {CP2}",
    ),
    "fp16_overflow": (
        2,
        f"{LLAMA}{DISTRIBUTED_OPTIMIZER}--fp16 --initial-loss-scale 1048576 --hysteresis 1 ",
    ),
    "muon": (2, f"{LLAMA}--optimizer muon {TP2}"),
    "ademamix": (2, f"{LLAMA}{ADEMAMIX}{DISTRIBUTED_OPTIMIZER}"),
    "experts_alltoall": (2, f"{LLAMA}{ALL_TO_ALL}--bf16 "),
    "latent_attention": (2, f"{LATENT}{TP2}--sequence-parallel "),
}


def assert_continued(resumed, uninterrupted):
    """Assert the same final state and metrics as without an interruption after iteration 2."""
    assert [outcome["tensors"] for outcome in resumed] == [
        outcome["tensors"] for outcome in uninterrupted
    ]
    for after, whole in zip(resumed, uninterrupted, strict=True):
        assert repr(after["losses"]) == repr(whole["losses"][2:])
        assert after["skipped"] == whole["skipped"][2:]


@pytest.mark.parametrize("name", RUNS)
def test_resuming_is_bitwise(name, tmp_path):
    num_devices, flags = RUNS[name]
    flags = BASE + flags
    saving = f"{flags}--async-save --save {tmp_path} --save-interval 2 "
    uninterrupted = run_ranks(train_and_hash, num_devices, saving, **RANDOM_DELAYS)
    resumed = run_ranks(train_and_hash, num_devices, f"{flags}--load {tmp_path} --ckpt-step 2 ")

    assert_continued(resumed, uninterrupted)
    if name == "fp16_overflow":
        assert uninterrupted[0]["skipped"][0]
        assert not uninterrupted[0]["skipped"][-1]


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_resuming_with_a_rank_without_tokens(dispatcher, tmp_path):
    """All tokens choose the experts of rank 0."""
    flags = (
        f"{BASE}{LLAMA}{EXPERTS}{IDLE_EXPERTS}--expert-model-parallel-size 2 "
        f"--moe-token-dispatcher-type {dispatcher} "
    )
    saving = f"{flags}--async-save --save {tmp_path} --save-interval 2 "
    uninterrupted = run_ranks(train_with_idle_experts, 2, saving, **RANDOM_DELAYS)
    assert [outcome["largest_expert"] for outcome in uninterrupted] == [1, 1]

    resumed = run_ranks(train_with_idle_experts, 2, f"{flags}--load {tmp_path} --ckpt-step 2 ")
    assert_continued(resumed, uninterrupted)


def test_resuming_from_object_storage():
    flags = f"{BASE}{LLAMA}{DISTRIBUTED_OPTIMIZER}"
    with object_server():
        credentials = {key: value for key, value in os.environ.items() if key.startswith("AWS_")}
        saving = f"{flags}--async-save --save s3://bucket/run --save-interval 2 "
        uninterrupted = run_ranks(train_and_hash, 2, saving, **RANDOM_DELAYS, **credentials)
        loading = f"{flags}--load s3://bucket/run --ckpt-step 2 "
        resumed = run_ranks(train_and_hash, 2, loading, **credentials)

    assert_continued(resumed, uninterrupted)


def test_resuming_from_disks_of_nodes(tmp_path):
    """The shared directory contains no checkpoint: the newest one is that of iteration 2."""
    flags = (
        f"{BASE}{LLAMA}{DISTRIBUTED_OPTIMIZER}--save {tmp_path}/saved --load {tmp_path}/saved "
        "--non-persistent-ckpt-type local --non-persistent-save-interval 2 --async-save "
        "--replication --replication-factor 2 --replication-jump 1 "
    )
    first_half = f"{flags}--exit-interval 2 "
    run_ranks(train_on_node, 2, first_half, str(tmp_path), None, **RANDOM_DELAYS)
    resumed = run_ranks(train_on_node, 2, flags, str(tmp_path), None)
    uninterrupted = run_ranks(train_and_hash, 2, f"{BASE}{LLAMA}{DISTRIBUTED_OPTIMIZER}")
    assert_continued(resumed, uninterrupted)


@pytest.mark.parametrize("seed", [1, *[pytest.param(s, marks=pytest.mark.slow) for s in (2, 3, 4)]])
def test_kills_at_random_moments(seed, tmp_path):
    """All processes are killed while they save in the background, and started again."""
    flags = f"{BASE}{LLAMA}{DISTRIBUTED_OPTIMIZER}--train-iters 12 --log-interval 100 "
    begin = time.monotonic()
    uninterrupted = run_ranks(train_and_hash, 2, flags)
    duration = time.monotonic() - begin
    draws = random.Random(seed)
    saving = f"{flags}--async-save --save {tmp_path} --load {tmp_path} --save-interval 1 "
    for _ in range(4):
        with contextlib.suppress(RankError):
            timeout = draws.uniform(0.3, 1.0) * duration
            run_ranks(train_and_hash, 2, saving, timeout=timeout, FAKE_CUDA_COPY_US="1000")

    resumed = run_ranks(train_and_hash, 2, saving)
    assert [outcome["tensors"] for outcome in resumed] == [
        outcome["tensors"] for outcome in uninterrupted
    ]
