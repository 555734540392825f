"""Runs that resume from an asynchronous save on fake devices continue with the same bits."""

import pytest

from tests.fake_cuda.forks import run_ranks
from tests.fake_cuda.test_races import EXPERTS
from tests.fake_cuda.trainings import train_and_hash
from tests.support.training_harness import DISTRIBUTED_OPTIMIZER, LLAMA

BASE = f"{LLAMA}--mock-data --train-iters 4 --num-layers 2 --deterministic-mode --device cuda "
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1 "
ALL_TO_ALL = f"{EXPERTS}--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "

RUNS = {  # name -> (devices, flags)
    "dropout": (1, DROPOUT),
    "dropout_tp2_sp": (2, f"{DROPOUT}--tensor-model-parallel-size 2 --sequence-parallel "),
    "hidden_dropout_cp2": (2, "--hidden-dropout 0.1 --context-parallel-size 2 "),
    "fp16_overflow": (
        2,
        f"{DISTRIBUTED_OPTIMIZER}--fp16 --initial-loss-scale 1048576 --hysteresis 1 ",
    ),
    "muon": (2, "--optimizer muon --tensor-model-parallel-size 2 "),
    "experts_alltoall": (2, f"{ALL_TO_ALL}--bf16 "),
}


@pytest.mark.parametrize("name", RUNS)
def test_resuming_is_bitwise(name, tmp_path):
    num_devices, flags = RUNS[name]
    flags = BASE + flags
    saving = f"{flags}--async-save --save {tmp_path} --save-interval 2 "
    random = {"FAKE_CUDA_RANDOM_US": "500"}
    uninterrupted = run_ranks(train_and_hash, num_devices, saving, **random)
    loading = f"{flags}--load {tmp_path} --ckpt-step 2 "
    resumed = run_ranks(train_and_hash, num_devices, loading)
    assert [outcome["tensors"] for outcome in resumed] == [
        outcome["tensors"] for outcome in uninterrupted
    ]
    for after, whole in zip(resumed, uninterrupted, strict=True):
        assert repr(after["losses"]) == repr(whole["losses"][2:])
        assert after["skipped"] == whole["skipped"][2:]
    if name == "fp16_overflow":
        assert uninterrupted[0]["skipped"][0] and not uninterrupted[0]["skipped"][-1]
