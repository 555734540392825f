"""Threads, device and seeds of a rank."""

import os
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import Reader
from megatron.core.optimizer.orthogonalization import _set_matmul_precision
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState
from megatron.core.run_checkpoint.common_state import rng_key as megatron_rng_key
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.training.checkpoint.contents import (
    get_rng_state,
    megatron_rng_state,
    rng_key,
    set_rng_state,
)
from megatron.training.config.run_options import DistributedConfig
from megatron.training.fatal_errors import lost_ranks_explained
from megatron.training.initialize import (
    choose_device,
    find_queue_hint,
    initialize,
    join,
    num_threads,
    seed_everything,
)
from tests import ROOT

GOLDEN = ROOT / "tests/golden" / "megatron_lm"
MEGATRON_LM = GOLDEN / "mcore_0.16.1/llama_fp32_tp2pp2/torch_dist_fully_reshardable/iter_0000005"


def test_number_of_threads(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert num_threads(DistributedConfig()) == max(1, cores // 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert num_threads(DistributedConfig()) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert num_threads(DistributedConfig()) == 3
    assert num_threads(DistributedConfig(num_threads=5)) == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_missing_devices_are_errors():
    assert choose_device(DistributedConfig()) == torch.device("cpu")
    with pytest.raises(ValueError, match="--device cuda"):
        choose_device(DistributedConfig(device="cuda"))
    with pytest.raises(ValueError, match="--distributed-backend nccl"):
        choose_device(DistributedConfig(distributed_backend="nccl"))


def test_precision_of_bf16_matrix_products(monkeypatch):
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    try:
        for disabled in (True, False):
            join(DistributedConfig(device="cpu", disable_bf16_reduced_precision_matmul=disabled))
            assert matmul.allow_bf16_reduced_precision_reduction is not disabled
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


def test_precision_of_products_after_muon(monkeypatch):
    """torch raises if the precision was set by two of its interfaces."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    before = torch.get_float32_matmul_precision()
    try:
        for tf32 in (True, False):
            join(DistributedConfig(device="cpu", tf32=tf32))
            with _set_matmul_precision("medium", torch.device("cuda")):
                assert torch.get_float32_matmul_precision() == "medium"
            assert torch.backends.cuda.matmul.allow_tf32 is tf32
    finally:
        torch.set_float32_matmul_precision(before)


def test_hint_about_hardware_queues(monkeypatch):
    hopper = (9, 0)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    hint = find_queue_hint(2, hopper)
    assert hint is not None
    assert "CUDA_DEVICE_MAX_CONNECTIONS is unset" in hint
    assert find_queue_hint(1, hopper) is None
    assert find_queue_hint(2, (10, 0)) is None
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert find_queue_hint(2, hopper) is None


@pytest.mark.parametrize(
    "devices,local_rank,backend,index",
    [
        (8, 5, None, 5),
        (1, 0, None, 0),
        (1, 3, None, 0),  # srun --gpus-per-task=1: each process sees its own device alone
        (2, 5, "gloo", 1),  # processes share devices
        (2, 2, None, "local rank 2, but only 2 CUDA devices here"),
        (4, 7, "nccl", "local rank 7, but only 4 CUDA devices here"),
    ],
)
def test_device_of_a_local_rank(monkeypatch, devices, local_rank, backend, index):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    config = DistributedConfig(distributed_backend=backend)
    if isinstance(index, str):
        with pytest.raises(ValueError, match=index):
            choose_device(config)
    else:
        assert choose_device(config) == torch.device("cuda", index)


def test_tf32_follows_the_flag():
    ranks = ParallelConfig()
    for expected in (True, False):
        initialize(DistributedConfig(tf32=expected, device="cpu"), ranks)
        assert torch.backends.cuda.matmul.allow_tf32 is expected
    dist.destroy_process_group()


def draws(rank, world_size=8, seed=1, iteration=0):
    """Draw numbers outside and inside tensor-parallel regions on a rank of TP2 x DP2 x PP2."""
    ps = ParallelState.for_rank(ParallelConfig(2, 2), world_size, rank)
    rng = TensorParallelRng(0, ps.tp.rank)
    seed_everything(seed, ps, rng, iteration)
    outside = (torch.rand(2).tolist(), np.random.rand())
    with rng.fork():
        return outside, torch.rand(2).tolist()


def test_ranks_draw_equal_numbers_only_within_a_replica():
    outside = [draws(rank)[0] for rank in range(8)]
    inside = [draws(rank)[1] for rank in range(8)]
    for rank in range(0, 8, 2):  # the tensor-parallel pairs
        assert outside[rank] == outside[rank + 1]
        assert inside[rank] != inside[rank + 1]
    assert len({str(values) for values in outside}) == 4
    assert len({str(values) for values in inside}) == 8
    assert draws(3) == draws(3) != draws(3, seed=2) != draws(3, iteration=5)


def test_generator_states_are_restored():
    rng = TensorParallelRng(7, 0)
    state = get_rng_state(rng)

    def draw():
        with rng.fork():
            inside = torch.rand(3).tolist()
        return inside, torch.rand(3).tolist(), np.random.rand(3).tolist()

    first = draw()
    assert draw() != first
    set_rng_state(state, rng)
    assert draw() == first


def test_generator_key_contains_coordinates_and_layout():
    ps = ParallelState.for_rank(ParallelConfig(2, 2), 8, 5)
    assert rng_key(ps) == "rng_state/shard_1.1.0_2.2.2"
    assert megatron_rng_key((1, 0), ParallelConfig(4, 2)) == "rng_state/shard_0.1_2.4"


def test_megatron_generators_have_its_form():
    ps = ParallelState.for_rank(ParallelConfig(2, 2), 4, 3)
    (theirs,) = Reader(MEGATRON_LM).read_object(megatron_rng_key((1, 1), ParallelConfig(2, 2)))
    random.seed(5)
    torch.manual_seed(6)
    (ours,) = megatron_rng_state(get_rng_state(TensorParallelRng(7, 1)), ps, seed=1234)
    assert ours.keys() == theirs.keys() | {"state_of_run"}  # an addition that it ignores
    assert ours["rng_tracker_states"].keys() == theirs["rng_tracker_states"].keys()
    for name in ("cuda_rng_state", "torch_rng_state"):
        assert (ours[name].dtype, ours[name].shape) == (theirs[name].dtype, theirs[name].shape)
    assert ours["random_rng_state"] == random.getstate()
    assert torch.equal(ours["torch_rng_state"], torch.get_rng_state())
    np.random.set_state(ours["np_rng_state"])
    if not torch.cuda.is_available():
        model_parallel = ours["rng_tracker_states"]["model-parallel-rng"].tolist()
        assert model_parallel[:8] == list((1234 + 100 + 2718 + 1).to_bytes(8, "little"))


def test_only_failures_of_communication_are_explained_as_lost_ranks():
    ps = ParallelState.for_rank(ParallelConfig(), 2, 1)
    reason = r"rank 1 of 2 .*another rank has died.*minutes 3.*Connection closed"
    with pytest.raises(RuntimeError, match=reason), lost_ranks_explained(ps, 3):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    with pytest.raises(RuntimeError, match=r"^out of memory$"), lost_ranks_explained(ps, 3):
        raise RuntimeError("out of memory")
