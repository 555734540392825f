"""Ranks of large layouts start the same collectives in the same order, on every communicator.

A run of that many processes would hang where they do not. Here each rank is traced alone.
"""

import copy
import functools

import pytest
import torch

from tests.support.collective_traces import find_disagreements, trace_training_step
from tests.support.training_harness import DISTRIBUTED_OPTIMIZER

MODEL = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--ffn-hidden-size 64 --num-attention-heads 16 --hidden-size 64 --seq-length 32 "
    "--mock-data --train-iters 9 --micro-batch-size 1 "
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --num-layers 4 "
INTERLEAVED = "--num-layers 8 --num-virtual-stages-per-pipeline-rank 2 "


def make_layout(tp, pp):
    """Return the flags of TP x PP x CP 2; with DP 2 there are 4 * TP * PP ranks."""
    return (
        f"--tensor-model-parallel-size {tp} --sequence-parallel --pipeline-model-parallel-size {pp} "
        f"--context-parallel-size 2 --global-batch-size 8 {DISTRIBUTED_OPTIMIZER}"
    )


SMALL = make_layout(tp=2, pp=2)
LARGE = make_layout(tp=8, pp=4)
SMALL_EXPERTS = f"{SMALL}{EXPERTS}--expert-model-parallel-size 2 "
LARGE_EXPERTS = f"{LARGE}{EXPERTS}--expert-model-parallel-size 4 "
ALL_TO_ALL = "--moe-token-dispatcher-type alltoall "

LAYOUTS = {  # name -> (ranks, communicators of a rank, flags)
    "interleaved": (16, 6, f"{SMALL}{INTERLEAVED}"),
    "tied_embeddings": (16, 6, f"{SMALL}--num-layers 4 --cp-comm-type a2a "),
    "experts": (16, 9, f"{SMALL_EXPERTS}{ALL_TO_ALL}"),
}
LARGE_LAYOUTS = {
    "interleaved": (128, 7, f"{LARGE}{INTERLEAVED}"),
    "experts_allgather": (128, 9, LARGE_EXPERTS),
    "experts_alltoall": (128, 9, f"{LARGE_EXPERTS}{ALL_TO_ALL}--cp-comm-type all_gather "),
}


@functools.cache
def trace_all_ranks(num_ranks, flags):
    cpu = torch.device("cpu")
    return [trace_training_step(rank, num_ranks, MODEL + flags, cpu) for rank in range(num_ranks)]


def check_layout(num_ranks, num_communicators, flags):
    traces = trace_all_ranks(num_ranks, flags)
    assert find_disagreements(traces) == []
    assert max(trace.num_communicators for trace in traces) == num_communicators
    return traces


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_agree(layout):
    check_layout(*LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LARGE_LAYOUTS)
def test_all_ranks_of_a_large_layout_agree(layout):
    check_layout(*LARGE_LAYOUTS[layout])


def test_other_orders_and_sizes_are_found():
    """Exchange two collectives, and remove a message."""
    num_ranks, _, flags = LAYOUTS["interleaved"]
    traces = trace_all_ranks(num_ranks, flags)
    group = next(group for group in traces[0].calls if group[0] == "tp")
    swapped = copy.deepcopy(traces)
    calls = swapped[1].calls[group]
    first, second = 0, next(i for i, call in enumerate(calls) if call != calls[0])
    calls[first], calls[second] = calls[second], calls[first]
    (problem,) = find_disagreements(swapped)
    assert problem.startswith("tp: operation 0 is Call")
    assert problem.endswith("on rank 1")

    shortened = copy.deepcopy(traces)
    sender, messages = next(iter(shortened[0].received.items()))
    messages.pop()
    (problem,) = find_disagreements(shortened)
    assert f"on rank {sender}, {len(messages)} on rank 0" in problem
