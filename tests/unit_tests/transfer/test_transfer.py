"""Transfers between layouts against a load of the same weights from a checkpoint."""

import pickle
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.core.dist_checkpointing import (
    Box,
    CheckpointError,
    ShardedStateDict,
    ShardedTensor,
    load,
    save,
)
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState
from megatron.transfer.routing import plan_transfer
from tests.support import tiny_ddp_model
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.unit_tests.transfer.layouts import (
    build_state,
    check_values,
    count_missing_bytes,
    set_values,
)

ONE = ParallelConfig()
TP2 = ParallelConfig(2)
PP2 = ParallelConfig(1, 2)
TP2_PP2 = ParallelConfig(2, 2)
EP2 = ParallelConfig(expert_model_parallel_size=2)
TP2_EP2 = ParallelConfig(2, expert_model_parallel_size=2)


class Case(NamedTuple):
    model: str
    source: ParallelConfig
    source_ranks: list[int]
    target: ParallelConfig
    target_ranks: list[int]
    bucket_bytes: int = 1 << 20


CASES = {
    "tp2_pp2_to_one_of_them": Case("llama", TP2_PP2, [0, 1, 2, 3], ONE, [0]),
    "one_to_other_tp2": Case("llama", ONE, [0], TP2, [2, 3], 1000),
    "pp2_to_colocated_replicas": Case("llama", PP2, [0, 1], TP2, [0, 1, 2, 3], 5000),
    "replicas_to_pp2": Case("llama", TP2, [0, 1, 2, 3], PP2, [3, 0]),
    "ep2_to_one": Case("experts", EP2, [0, 1], ONE, [2]),
    "one_to_tp2_ep2": Case("experts", ONE, [1], TP2_EP2, [0, 1, 2, 3]),
}


def build(model: str, parallel: ParallelConfig, ranks: list[int], rank: int) -> ShardedStateDict:
    if rank not in ranks:
        return {}
    return build_state(model, parallel, len(ranks), ranks.index(rank))


def transfer_twice(rank: int, _: int, name: str, directory: Path) -> tuple[int, int, int]:
    """Transfer the weights of two steps and compare them with a load.

    Returns the bytes that the rank receives and lacks, and those of all ranks.
    """
    case = CASES[name]
    source = build(case.model, case.source, case.source_ranks, rank)
    target = build(case.model, case.target, case.target_ranks, rank)
    schedule = plan_transfer(source, target, bucket_bytes=case.bucket_bytes)
    schedule = pickle.loads(pickle.dumps(schedule))
    transfer = schedule.bind(source, target)
    for step in (1, 2):
        set_values(source, step)
        transfer.run()
        if target:
            check_values(target, step)

    save(source, directory, common={})
    reloaded = build(case.model, case.target, case.target_ranks, rank)
    load(reloaded, directory)

    for key, entry in target.items():
        loaded = reloaded[key]
        assert isinstance(entry, ShardedTensor)
        assert isinstance(loaded, ShardedTensor)
        assert all(
            torch.equal(box.tensor, other.tensor)
            for box, other in zip(entry.boxes, loaded.boxes, strict=True)
        )
    return schedule.bytes_received, count_missing_bytes(source, target), schedule.bytes_moved


@pytest.mark.parametrize("name", CASES)
def test_replays_equal_a_load(pool, name, tmp_path):
    results = pool.run(transfer_twice, 4, name, tmp_path / "checkpoint")
    for received, missing, _ in results:
        assert received == missing
    (total,) = {total for _, _, total in results}
    assert total == sum(missing for _, missing, _ in results) > 0


def transfer_while_training(rank: int, _: int) -> None:
    """Train with ZeRO-1, and transfer main parameters and moments to whole tensors on rank 1."""
    ps = ParallelState.create(ParallelConfig())
    chunk, optimizer = tiny_ddp_model.build(
        ps,
        DistributedDataParallelConfig(use_distributed_optimizer=True),
        OptimizerConfig(lr=0.05),
    )
    target: ShardedStateDict = {}
    schedule = None
    for step in range(2):
        tiny_ddp_model.backward_pass(chunk, step)
        finalize_model_grads([chunk], ps)
        optimizer.step()
        model_state = chunk.sharded_state_dict()
        source = model_state | optimizer.sharded_state_dict(model_state)
        boxes: list[dict] = [{}, {}]
        dist.all_gather_object(boxes, tiny_ddp_model.boxes_of(source))
        expected = tiny_ddp_model.assemble(boxes)
        if schedule is None:
            if rank == 1:
                for key, values in expected.items():
                    target[key] = ShardedTensor.replicated(key, torch.zeros_like(values))
            schedule = plan_transfer(source, target)
            # Weights are on both ranks, and of each optimizer tensor half of the elements.
            assert 0 < schedule.bytes_moved < sum(v.nbytes for v in expected.values()) / 2

        schedule.run(source, target)
        for key, entry in target.items():
            assert isinstance(entry, ShardedTensor)
            assert entry.local is not None
            assert torch.equal(entry.local, expected[key]), key


def test_replay_after_a_step_transfers_the_new_optimizer_state(pool):
    pool.run(transfer_while_training, 2)


def read_checkpoint_on_rank_0(rank: int, _: int, directory: Path) -> tuple[int, int]:
    """Fill a layout of all ranks from a checkpoint that only rank 0 can read."""
    values = random_source(LLAMA_ARGS, vocab_size=53, optimizer=False).values
    target = build_state("llama", TP2, 2, rank)
    path = directory if rank == 0 else None
    schedule = plan_transfer(path, target, bucket_bytes=5000)
    schedule.run(path, target)

    for key, entry in target.items():
        assert isinstance(entry, ShardedTensor)
        for box in entry.boxes:
            assert torch.equal(box.tensor, values[key][tiny_ddp_model.region(box)]), key
    return schedule.bytes_sent, schedule.bytes_received


def test_source_is_a_checkpoint_that_one_rank_reads(pool, tmp_path):
    model = tmp_path / "model"
    write_huggingface(random_source(LLAMA_ARGS, vocab_size=53, optimizer=False), model)
    results = pool.run(read_checkpoint_on_rank_0, 2, model)
    (sent, none_received), (none_sent, received) = results
    target = build_state("llama", TP2, 2, rank=1)
    needed = sum(box.tensor.nbytes for entry in target.values() for box in entry.boxes)
    assert (sent, received, none_sent, none_received) == (needed, needed, 0, 0)


def fail_on_rank_1(rank: int, _: int) -> list[str]:
    """Return the errors of calls with invalid arguments on rank 1 alone."""
    state = make_state(ShardedTensor.replicated("w", torch.zeros(4, 5)))
    wider = make_state(ShardedTensor.replicated("w", torch.zeros(4, 6)))
    schedule = plan_transfer(state, state)
    on_rank_1 = rank == 1
    messages = []
    for call in (
        lambda: plan_transfer("/absent" if on_rank_1 else None, None),
        lambda: plan_transfer(state, state, bucket_bytes=0 if on_rank_1 else 1000),
        lambda: schedule.run(state, wider if on_rank_1 else state),
    ):
        with pytest.raises(ValueError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_failure_of_one_rank_is_raised_on_all(pool):
    first, second = pool.run(fail_on_rank_1, 2)
    assert first == second
    assert first[0].startswith("rank 1: /absent")
    assert first[1].startswith("rank 1: bucket_bytes=0 must be positive")
    assert first[2].startswith("rank 1: w: the target has boxes (4, 6)")


# ---- One process ----


def make_state(*tensors: ShardedTensor) -> ShardedStateDict:
    return {tensor.key: tensor for tensor in tensors}


def test_dtypes_are_cast_as_by_a_load():
    values = torch.randn(5, 3)
    source = make_state(ShardedTensor.replicated("w", values))
    target = make_state(ShardedTensor.replicated("w", torch.zeros(5, 3, dtype=torch.bfloat16)))
    plan_transfer(source, target).run(source, target)
    assert torch.equal(target["w"].local, values.bfloat16())


def test_overlapping_source_boxes_are_complete():
    values = torch.arange(20.0).view(4, 5)
    boxes = tuple(
        Box(offset, values[offset[0] : offset[0] + 3, offset[1] : offset[1] + 4])
        for offset in ((0, 0), (1, 1), (0, 1), (1, 0))
    )
    source = make_state(ShardedTensor("w", (4, 5), values.dtype, boxes))
    target = make_state(ShardedTensor.replicated("w", torch.zeros(4, 5)))
    schedule = plan_transfer(source, target)
    schedule.run(source, target)

    assert torch.equal(target["w"].local, values)
    assert sum(copied.source.shape[0] * copied.source.shape[1] for copied in schedule.copies) == 20


def test_other_shape_names_the_tensor():
    source = make_state(ShardedTensor.replicated("w", torch.zeros(4, 5)))
    target = make_state(
        ShardedTensor.replicated("w", torch.zeros(4, 6)),
        ShardedTensor.replicated("absent", torch.zeros(1)),
    )
    with pytest.raises(CheckpointError) as error:
        plan_transfer(source, target)
    assert "w: the source has shape (4, 5), the target (4, 6)" in str(error.value)
    assert "absent: the target needs it, and no rank has it in its source" in str(error.value)


def test_incomplete_source_names_the_elements():
    source = make_state(ShardedTensor.split("w", torch.zeros(2, 5), 0, rank=0, size=2))
    target = make_state(ShardedTensor.replicated("w", torch.zeros(4, 5)))
    with pytest.raises(CheckpointError, match=r"w: rank 0 needs .* \(2, 5\) at \(2, 0\)"):
        plan_transfer(source, target)


def test_replay_with_other_tensors_is_refused():
    source = make_state(ShardedTensor.replicated("w", torch.zeros(4, 5)))
    schedule = plan_transfer(source, source)
    other = make_state(ShardedTensor.split("w", torch.zeros(2, 5), 0, rank=0, size=2))
    with pytest.raises(ValueError, match=r"w: the target has boxes \(2, 5\) .* plan it again"):
        schedule.run(source, other)
    with pytest.raises(ValueError, match="w: the source does not have it"):
        schedule.run({}, source)
