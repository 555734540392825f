"""Program with one rank per fake device: correct and incorrect sequences of collectives.

torchrun --nproc-per-node 2 -m tests.fake_cuda.collectives SCENARIO
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)


def same_as_gloo(rank: int, size: int) -> None:
    """Compare every collective with gloo on the CPU."""
    gloo = dist.new_group(backend="gloo")
    for dtype in DTYPES:
        # Small integers: every order of the sums gives the same bits.
        values = torch.arange(4 * size).add(10 * rank).to(dtype)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            expected = values.clone()
            dist.all_reduce(expected, op, group=gloo)
            gathered = values.cuda()
            dist.all_reduce(gathered, op)
            assert torch.equal(gathered.cpu(), expected), (dtype, op)

        expected = values.new_empty(size * len(values))
        dist.all_gather_into_tensor(expected, values, group=gloo)
        gathered = torch.empty_like(expected, device="cuda")
        dist.all_gather_into_tensor(gathered, values.cuda())
        assert torch.equal(gathered.cpu(), expected), dtype

        reduced = values.clone()
        dist.all_reduce(reduced, group=gloo)
        part = torch.empty(4, dtype=dtype, device="cuda")
        dist.reduce_scatter_tensor(part, values.cuda())
        assert torch.equal(part.cpu(), reduced[4 * rank : 4 * rank + 4]), dtype

        gathered = values.cuda()
        dist.broadcast(gathered, src=size - 1)
        assert torch.equal(gathered.cpu(), values - 10 * rank + 10 * (size - 1)), dtype

    average = torch.full((3,), float(rank), device="cuda")
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert average.tolist() == [(size - 1) / 2] * 3

    # Rank r sends r + 1 elements to each rank.
    sent = torch.full((size * (rank + 1),), float(rank), device="cuda")
    received = torch.empty(size * (size + 1) // 2, device="cuda")
    dist.all_to_all_single(received, sent, [peer + 1 for peer in range(size)], [rank + 1] * size)
    assert received.tolist() == [float(peer) for peer in range(size) for _ in range(peer + 1)]


def other_order(rank: int, size: int) -> None:
    """Reduce two tensors of different sizes in another order on rank 1."""
    tensors = [torch.ones(4, device="cuda"), torch.ones(8, device="cuda")]
    for tensor in tensors if rank == 0 else reversed(tensors):
        dist.all_reduce(tensor)


def send_before_receive(rank: int, size: int) -> None:
    """Send on both ranks before either receives, which hangs without a buffer."""
    tensor = torch.ones(4, device="cuda")
    dist.send(tensor, 1 - rank)
    dist.recv(tensor, 1 - rank)


def batched_messages(rank: int, size: int) -> None:
    """Send and receive in one batch, which does not hang."""
    sent = torch.full((4,), float(rank), device="cuda")
    received = torch.empty_like(sent)
    operations = [
        dist.P2POp(dist.isend, sent, 1 - rank),
        dist.P2POp(dist.irecv, received, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.tolist() == [1.0 - rank] * 4


def two_streams(rank: int, size: int) -> None:
    """Reduce on a stream with a late copy, then on another stream that does not wait for it.

    The second operation uses the same communicator, so that it follows the first one.
    """
    late = torch.zeros(4, device="cuda")
    other = torch.full((4,), float(rank), device="cuda")
    torch.cuda.synchronize()
    late.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    dist.all_reduce(late)
    reduced = torch.cuda.Event()
    reduced.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        dist.all_reduce(other)
        torch.cuda.current_stream().synchronize()
        assert reduced.query()

    assert late.tolist() == [float(size)] * 4
    assert other.tolist() == [1.0] * 4


def agree_during_training(rank: int, size: int) -> None:
    """Agree on a plan while an all-reduce is queued after a late copy."""
    ranks = Coordination.of(None)
    assert ranks.all_true(True)

    torch.cuda.synchronize()
    late = torch.zeros(4, device="cuda")
    late.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    dist.all_reduce(late)

    assert not ranks.all_true(rank > 0)
    assert not torch.cuda.current_stream().query()


def groups_after_axes(rank: int, size: int) -> None:
    """Create a group of an end and a middle stage of a pipeline, after the groups of its axes."""
    ParallelState.create(ParallelConfig(pipeline_model_parallel_size=size))
    members = list(range(rank // 2 * 2, rank // 2 * 2 + 2))
    group = dist.new_group(
        members,
        timedelta(seconds=20),
        backend="gloo",
        use_local_synchronization=True,
    )
    values = torch.ones(1)
    dist.all_reduce(values, group=group)
    assert values.item() == 2


SCENARIOS = {
    function.__name__: function
    for function in (
        same_as_gloo,
        other_order,
        send_before_receive,
        batched_messages,
        two_streams,
        agree_during_training,
        groups_after_axes,
    )
}


def main() -> None:
    rank = int(os.environ["RANK"])
    on_same_device = sys.argv[1] == "one_device"
    device = torch.device("cuda", 0 if on_same_device else rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    if not on_same_device:
        SCENARIOS[sys.argv[1]](rank, dist.get_world_size())
    torch.cuda.synchronize()
    print(f"rank {rank} is done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
