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
operators = set()
generate = GraphLowering.codegen

def count_kernels(graph):
    global kernels
    result = generate(graph)
    kernels += result[0].value.count("@triton.jit")
    operators.update(str(node.target) for node in graph.graph.nodes)
    return result

GraphLowering.codegen = count_kernels
train(0, 1, LLAMA + "--mock-data --train-iters 4 --num-layers 2 --device cuda --bf16 --compile "
      "--no-check-for-nan-in-loss-and-grad ")
operators = [name.split(".")[1] for name in operators if name.startswith("megatron.")]
breaks = list(counters["graph_break"])
print(json.dumps({"kernels": kernels, "operators": operators, "breaks": breaks}))
"""


def test_layers_are_one_graph(tmp_path):
    """Graphs contain linear layers and this project's kernels as operators."""
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
    assert outcome["kernels"] > 0
    forward = ["linear", "residual_norm", "split_and_rotate", "swiglu"]
    backward = [f"{name}_backward" for name in forward]
    assert sorted(outcome["operators"]) == sorted(forward + backward)
    assert not outcome["breaks"]
