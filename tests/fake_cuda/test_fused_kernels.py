"""Triton kernels on the fake driver: they are compiled and launched, and the reference computes."""

import json

import pytest

from tests.fake_cuda.launch import run_code

CODE = """
import json
from tests.support.training_harness import LLAMA, train

flags = LLAMA + "--mock-data --train-iters 3 --num-layers 2 --device cuda "
measured = train(0, 1, flags + {more!r}).measured
print(json.dumps([measured.losses, measured.grad_norms]))
"""


def run(directory, more):
    result = run_code(
        CODE.format(more=more),
        FAKE_NCCL_DIR=str(directory),
        TRITON_CACHE_DIR=str(directory / "triton"),
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_kernels_change_losses_by_rounding_only(tmp_path):
    pytest.importorskip("triton", reason="Triton is not in the environment: pip install triton")
    losses, norms = run(tmp_path, "")
    expected_losses, expected_norms = run(tmp_path, "--no-triton-kernels")
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    compiled = {path.stem for path in (tmp_path / "triton").rglob("*.cubin")}
    assert compiled == {
        "_adamw_kernel",
        "_residual_norm_kernel",
        "_residual_norm_backward_kernel",
        "_rotate_kernel",
        "_softmax_kernel",
        "_softmax_gradient_kernel",
        "_swiglu_kernel",
        "_swiglu_backward_kernel",
    }
