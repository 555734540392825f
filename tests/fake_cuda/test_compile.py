"""`--compile` on the fake driver: Triton's kernels are generated and compiled, but do nothing."""

import json
from pathlib import Path

import pytest
import torch

from tests.fake_cuda.launch import run_code

CODE = """
import json
import torch
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering
from tests.support.training_harness import LLAMA, train

kernels = 0
generate = GraphLowering.codegen

def count_kernels(graph):
    global kernels
    result = generate(graph)
    kernels += result[0].value.count("@triton.jit")
    return result

GraphLowering.codegen = count_kernels
train(0, 1, LLAMA + "--mock-data --train-iters 4 --num-layers 2 --device cuda --bf16 --compile "
      "--no-check-for-nan-in-loss-and-grad ")
print(json.dumps({"kernels": kernels, "breaks": list(counters["graph_break"])}))
"""


def test_layers_are_one_graph(tmp_path):
    """Graphs contain linear layers as operators."""
    pytest.importorskip("triton", reason="Triton is not in the environment: pip install triton")
    libraries = str(Path(torch.__file__).parent / "lib")
    result = run_code(
        CODE,
        FAKE_CUDA_NUMERICS="0",
        FAKE_NCCL_DIR=str(tmp_path),
        LD_LIBRARY_PATH=libraries,
        TRITON_LIBCUDA_PATH=libraries,
        TRITON_CACHE_DIR=str(tmp_path / "triton"),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
    )
    assert result.returncode == 0, result.stderr[-4000:]
    outcome = json.loads(result.stdout.splitlines()[-1])
    assert outcome["kernels"] >= 8
    assert not outcome["breaks"]
