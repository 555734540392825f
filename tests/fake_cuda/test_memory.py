"""Memory of training runs: the plan, allocations in the middle of a run, pinned memory, devices."""

import json

import pytest

from megatron.core.dist_checkpointing.background import PAGE, SLOT_SIZE
from tests.fake_cuda.launch import launch

MODEL = (
    "--num-layers 6 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-3 --hidden-dropout 0 "
    "--attention-dropout 0 --num-workers 0 --num-threads 1 --log-interval 100 --eval-iters 0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 15999 --device cuda "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --no-check-for-nan-in-loss-and-grad "
)
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
SAVES = "--async-save --save-interval 2 --keep-last-n 1 "
TP2 = "--tensor-model-parallel-size 2 "
CP2 = "--context-parallel-size 2 "
PP2 = "--pipeline-model-parallel-size 2 "
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "

ROUNDED = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --use-precision-aware-optimizer "
SCALED = "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 --main-params-dtype fp16 "

RUNS = {  # name -> (devices, flags)
    "bf16": (1, f"--bf16 {SAVES}"),
    "rounded_moments": (1, f"--bf16 {ROUNDED}{SAVES}"),
    "dp2_distributed_optimizer": (2, f"--bf16 {SHARDED}{SAVES}"),
}
SLOW_RUNS = {
    "fp32": (1, SAVES),
    "fp16": (1, "--fp16 --initial-loss-scale 1024 "),
    "recompute": (1, f"--bf16 {FULL_RECOMPUTE}"),
    "muon": (1, "--bf16 --optimizer muon "),
    "ademamix": (1, "--bf16 --optimizer ademamix --ademamix-beta3 0.99 --ademamix-alpha 5 "),
    "tp2_sp": (2, f"--bf16 {TP2}--sequence-parallel {SAVES}"),
    "pp2": (2, f"--bf16 {PP2}"),
    "pp2_interleaved": (2, f"--bf16 {PP2}--num-layers 8 --num-virtual-stages-per-pipeline-rank 2 "),
    "cp2": (2, f"--bf16 {CP2}{SHARDED}"),
    "cp2_all_gather": (2, f"--bf16 {CP2}--cp-comm-type all_gather"),
    "cp2_a2a": (2, f"--bf16 {CP2}--cp-comm-type a2a"),
    "pp2_cp2": (4, f"--bf16 {PP2}{CP2}"),
    "window": (1, "--bf16 --window-size 256,0 "),
    "average": (1, f"--bf16 --ema-decay 0.9 {SAVES}"),
    "lion": (1, f"--bf16 --optimizer lion {SAVES}"),
    "multi_token_prediction": (1, f"--bf16 --mtp-num-layers 1 {SAVES}"),
    "scaled_state": (1, f"--bf16 {SCALED}{SAVES}"),
    "parallel_residual": (1, "--bf16 --parallel-residual "),
}


def measure(num_devices, flags):
    """Return the measurements of each rank."""
    program = ["-m", "tests.fake_cuda.memory", *MODEL.split(), *flags.split()]
    settings = {
        "FAKE_CUDA_MAX_ELEMENTS": "500000",
        # The plan does not include the workspaces of cuBLAS, here the smallest possible ones.
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "CUBLASLT_WORKSPACE_SIZE": "1",
    }
    result = launch(program, num_devices, timeout=240, **settings)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    ranks = sorted(map(json.loads, lines), key=lambda rank: rank["rank"])
    assert len(ranks) == num_devices
    return ranks


@pytest.mark.parametrize(
    "name", [*RUNS, *[pytest.param(name, marks=pytest.mark.slow) for name in SLOW_RUNS]]
)
def test_memory(name, tmp_path):
    num_devices, flags = (RUNS | SLOW_RUNS)[name]
    if SAVES in flags:
        flags += f"--save {tmp_path} "
    for rank in measure(num_devices, flags):
        # The peak of tensors is as planned.
        assert rank["planned"] == pytest.approx(rank["peak"], rel=0.05)
        # After some iterations the caching allocator has all memory of the device. Of the host it
        # may still pin small blocks, depending on how many micro-batches are in flight.
        before = rank["after_warm_up"]
        after = rank["at_the_end"]
        assert after["device_allocations"] == before["device_allocations"]
        assert after["peak_pinned_bytes"] - before["peak_pinned_bytes"] < 2 << 20
        # A process uses its own device only.
        assert rank["used_devices"] == 1 << rank["rank"]
        # Buffers of saves have the size of the checkpoint, in slots of up to two files at once.
        slots = rank["checkpoint"] // SLOT_SIZE + 3 if SAVES in flags else 0
        assert after["peak_pinned_bytes"] < slots * (SLOT_SIZE + PAGE) + (4 << 20)
