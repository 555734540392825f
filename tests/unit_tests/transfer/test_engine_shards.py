"""Transfers to the ranks of an engine against its own loader, with the same weights."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch

from megatron.conversion.huggingface.directory import HuggingFaceSource
from megatron.core.dist_checkpointing import ShardedStateDict, ShardedTensor
from megatron.core.parallel_config import ParallelConfig
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS
from megatron.transfer.engine_shards import view_engine_shards
from megatron.transfer.engine_tensors import list_engine_tensors, view_engine_tensors
from megatron.transfer.routing import plan_transfer
from tests import GOLDEN
from tests.support.memory_source import LLAMA_ARGS
from tests.support.tiny_ddp_model import region
from tests.unit_tests.transfer.engine import Engine
from tests.unit_tests.transfer.layouts import (
    build_state,
    compute_values,
    count_missing_bytes,
    set_values,
)

ARGS = LLAMA_ARGS | {"model_vocab_size": 53}
EXPERTS = ARGS | {"num_experts": 4}


class Case(NamedTuple):
    model: str
    source: ParallelConfig
    source_ranks: list[int]
    engine_ranks: list[int]
    tp: int
    ep: int = 1


TP2_EP2 = ParallelConfig(2, expert_model_parallel_size=2)
CASES = {
    "tp2_to_other_tp2": Case("llama", ParallelConfig(2), [0, 1], [2, 3], 2),
    "pp2_to_colocated_tp4": Case("llama", ParallelConfig(1, 2), [0, 1], [0, 1, 2, 3], 4),
    "tp2_pp2_to_one_of_them": Case("llama", ParallelConfig(2, 2), [0, 1, 2, 3], [3], 1),
    "tp2_ep2_to_tp2": Case("experts", TP2_EP2, [0, 1, 2, 3], [1, 2], 2),
    "one_to_tp2_ep2": Case("experts", ParallelConfig(), [0], [0, 1, 2, 3], 2, 2),
}


def make_engine(case: Case, rank: int) -> Engine:
    args = EXPERTS if case.model == "experts" else ARGS
    index = case.engine_ranks.index(rank)
    return Engine(args, index % case.tp, case.tp, index // case.tp, case.ep)


def transfer_twice(rank: int, _: int, name: str) -> tuple[int, int, int]:
    """Transfer the weights of two steps, and compare them with a reload.

    Returns the bytes that the rank receives and lacks, and those of all ranks.
    """
    case = CASES[name]
    source = {}
    if rank in case.source_ranks:
        index = case.source_ranks.index(rank)
        source = build_state(case.model, case.source, len(case.source_ranks), index)
    engine = None
    target = {}
    if rank in case.engine_ranks:
        engine = make_engine(case, rank)
        target = view_engine_shards(engine.load_weights, engine.args)
    schedule = plan_transfer(source, target, bucket_bytes=5000)
    transfer = schedule.bind(source, target)

    for step in (1, 2):
        set_values(source, step)
        transfer.run()
        if engine is not None:
            reloaded = make_engine(case, rank)
            reloaded.load_weights(make_whole_tensors(engine.args, step).items())
            for name, values in reloaded.parameters.items():
                assert torch.equal(engine.parameters[name], values), name
    return schedule.bytes_received, count_missing_bytes(source, target), schedule.bytes_moved


def make_whole_tensors(args: dict, step: int) -> dict[str, torch.Tensor]:
    """Return the whole tensors of the model at a step, by Hugging Face name."""
    infos = list_engine_tensors(args)
    tensors = {name: torch.zeros(info.shape) for name, info in infos.items()}
    for entry in view_engine_tensors(tensors, args).values():
        assert isinstance(entry, ShardedTensor)
        values = compute_values(entry, step)
        for box in entry.boxes:
            box.tensor.copy_(values[region(box)])
    return tensors


@pytest.mark.parametrize("name", CASES)
def test_replays_equal_a_reload_of_the_engine(pool, name):
    results = pool.run(transfer_twice, 4, name)
    for received, missing, _ in results:
        assert received == missing
    (total,) = {total for _, _, total in results}
    assert total == sum(missing for _, missing, _ in results) > 0


@pytest.mark.parametrize("tp_rank", range(4))
def test_shards_are_slices_of_the_whole_tensors(tp_rank):
    """Rank of TP 4, with 4 heads, 2 query groups, 48 features and 53 padded rows."""
    engine = Engine(ARGS, tp_rank, 4)
    target = view_engine_shards(engine.load_weights, ARGS)
    fill(target, step=1)
    whole = make_whole_tensors(ARGS, step=1)
    prefix = "model.layers.1."
    query, key, value = (whole[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv")
    group = tp_rank // 2
    features = slice(12 * tp_rank, 12 * tp_rank + 12)
    fused = [
        query[8 * tp_rank : 8 * tp_rank + 8],
        key[8 * group : 8 * group + 8],
        value[8 * group : 8 * group + 8],
    ]
    gate_up = [whole[f"{prefix}mlp.{name}_proj.weight"][features] for name in ("gate", "up")]
    padded = torch.cat([whole["lm_head.weight"], torch.zeros(11, 32)])
    assert torch.equal(engine.parameters["1.qkv_proj"], torch.cat(fused))
    assert torch.equal(engine.parameters["1.gate_up_proj"], torch.cat(gate_up))
    down = whole[f"{prefix}mlp.down_proj.weight"]
    assert torch.equal(engine.parameters["1.down_proj"], down[:, features])
    assert torch.equal(engine.parameters["lm_head"], padded[16 * tp_rank : 16 * tp_rank + 16])


def fill(state: ShardedStateDict, step: int) -> None:
    """Copy the values of a step to all boxes, without a transfer."""
    for entry in state.values():
        assert isinstance(entry, ShardedTensor)
        values = compute_values(entry, step)
        for box in entry.boxes:
            box.tensor.copy_(values[region(box)])


# ---- Loaders ----

NAME = "model.layers.0.self_attn.k_proj.weight"  # [16, 32]
SHAPE = (16, 32)


def halve_heads(weight: torch.Tensor) -> list[torch.Tensor]:
    return [weight.view(2, 2, 4, 32)[:, 1], weight.view(2, 2, 4, 32)[:, 0]]


LOADERS = {
    "whole": lambda weight: [weight],
    "transposed": lambda weight: [weight.t()[3:7]],
    "steps": lambda weight: [weight[1::3, ::2], weight[5:6, 1::5]],
    "split axis": halve_heads,
    "flattened": lambda weight: [weight.view(-1)[45:150]],
    "permuted": lambda weight: [weight.view(16, 4, 8).permute(2, 0, 1)],
    "expanded": lambda weight: [weight[2:4].unsqueeze(0).expand(3, 2, 32)],
    "one element": lambda weight: [weight[3, 4]],
    "detached": lambda weight: [weight.data.contiguous().clone().detach()[2:]],
}


@pytest.mark.parametrize("name", LOADERS)
def test_views_of_loaders(name):
    """Fill the memory of arbitrary views, themselves views with gaps."""
    whole = make_whole_tensors(ARGS, step=1)[NAME]
    views = LOADERS[name](whole)
    targets = []
    for view in views:
        targets.append(torch.zeros(*view.shape, 2)[..., 1].transpose(0, -1).transpose(0, -1))

    def load_weights(weights):
        weight = dict(weights)[NAME]
        for target, view in zip(targets, LOADERS[name](weight), strict=True):
            target.copy_(view)

    fill(view_engine_shards(load_weights, ARGS), step=1)
    for target, view in zip(targets, views, strict=True):
        assert torch.equal(target, view)


@pytest.mark.parametrize("columns", [slice(1, None, 2), slice(3, 50)], ids=["odd", "range"])
def test_interleaved_columns_of_packed_experts(columns):
    """Read gpt-oss's gate and up projections, which our parameters have as halves."""
    source = HuggingFaceSource(GOLDEN / "hf" / "gpt_oss")
    args = source.args | {"model_vocab_size": source.tensors[WORD_EMBEDDINGS].shape[0]}
    name = "model.layers.1.mlp.experts.gate_up_proj"
    expected = make_whole_tensors(args, step=1)[name][..., columns]
    target = torch.zeros(expected.shape)

    def load_weights(weights):
        target.copy_(dict(weights)[name][..., columns])

    fill(view_engine_shards(load_weights, args), step=1)
    assert torch.equal(target, expected)


def test_loader_in_threads():
    engine = Engine(ARGS, 1, 2)

    def load_weights(weights):
        with ThreadPoolExecutor(2) as executor:
            futures = [executor.submit(engine.load_weights, [pair]) for pair in weights]
        for future in futures:
            future.result()

    fill(view_engine_shards(load_weights, ARGS), step=1)
    reloaded = Engine(ARGS, 1, 2)
    reloaded.load_weights(make_whole_tensors(ARGS, step=1).items())
    for name, values in reloaded.parameters.items():
        assert torch.equal(engine.parameters[name], values), name


REFUSED = {
    "sum": (lambda target, weight: target.copy_(weight + 1), "the loader computes aten.add"),
    "value": (lambda target, weight: target.fill_(weight[0, 0].item()), "computes aten._local"),
    "cat": (lambda target, weight: torch.cat([weight, weight]), "the loader computes aten.cat"),
    "meta": (lambda target, weight: target.to("meta").copy_(weight), "without memory"),
    "nothing": (lambda target, weight: None, "the loader copied none of"),
    "dtypes": (
        lambda target, weight: (target.copy_(weight), target.bfloat16().copy_(weight)),
        r"linear_qkv.weight: the engine has it in torch.bfloat16, torch.float32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_loaders_are_refused(name):
    load, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        view_engine_shards(lambda weights: load(torch.zeros(SHAPE), dict(weights)[NAME]), ARGS)
