"""Every value of a training step has the type that its use requires, for any data.

One process runs the forward and the backward pass and the reductions of gradients as rank 0 of two
ranks without communication; see `tests/support/sharding_types.py` for the types.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.distributed import finalize_model_grads
from megatron.core.module import param_info
from megatron.core.parallel_state import Axis, ParallelState, forget_groups
from megatron.training.config.parsing import parse_args
from megatron.training.config.run_config import Config
from megatron.training.initialize import initialize
from megatron.training.run import Batch, Loss, Run, build_run, forward_backward
from pretrain_gpt import forward_step, model_provider
from tests.functional_tests.test_dropped_collectives import SKIPPED, TWICE, find_site
from tests.functional_tests.test_layout_equivalence import get_seeds, is_applicable
from tests.support.layout_cases import FEATURES, LAYOUTS, Model, flags_of, has_experts, make_model
from tests.support.sharding_types import (
    REPLICATED,
    UNDEFINED,
    VARYING,
    Checker,
    ShardingError,
    check_types,
    get_declared_type,
    sharded,
    type_parameters,
    with_rank_number,
)

# layout -> (axis of `ParallelState`, sharded dimension of the batch `[b, s]`)
AXES: dict[str, tuple[str, int | None]] = {
    "tp2": ("tp", None),
    "sp2": ("tp", None),
    "sp2_etp1": ("tp", None),
    "dp2": ("dp_cp", 0),
    "ep2": ("ep", 0),
    "ep2_alltoall": ("ep", 0),
    "cp2_heads": ("cp", 1),
    "cp2_ring": ("cp", 1),
    "cp2_gathered": ("cp", 1),
}
NUM_MICROBATCHES = 2
SIZES = "--micro-batch-size 3 --global-batch-size 12"
CONSTANT = FEATURES["batches"]["constant"]
SPLIT_EXPERTS = ("sp2_etp1", "dp2", "ep2", "ep2_alltoall", "cp2_heads", "cp2_ring", "cp2_gathered")


@pytest.fixture(scope="module", autouse=True)
def two_ranks() -> Iterator[None]:
    """Make this process rank 0 of two ranks that do not exist."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()
    forget_groups()


def list_problems(
    model: Model, layout: str, find_mutation: Callable[[str], str] = lambda _: ""
) -> list[str]:
    """Return which gradients do not have the declared type; raises ShardingError before that."""
    name, dim = AXES[layout]
    flags = flags_of(model, LAYOUTS[layout].min_layers).replace(
        FEATURES["batches"]["growing"], CONSTANT
    )
    config = parse_args(shlex.split(f"{flags} {LAYOUTS[layout].flags} {SIZES}"), 2)
    config.set_vocab_size(60, None)
    has_split_experts = config.model.has_experts and layout in SPLIT_EXPERTS
    checker = Checker(varying_sums=has_split_experts, independent=dim == 0)
    run = build_typed_run(config, checker)
    axis = getattr(run.ps, name)
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
        chunk.train()
        type_parameters(checker, chunk, axis)
        for param in chunk.parameters():
            if param.requires_grad:
                checker.add_gradient(param.main_grad)
    batches = [make_batch(config, checker, dim) for _ in range(NUM_MICROBATCHES)]
    with check_types(checker, find_mutation):
        totals = forward_backward(run, iter(batches), NUM_MICROBATCHES)
        num_tokens = totals[0, 1] if config.training.calculate_per_token_loss else None
        finalize_model_grads(run.chunks, run.ps, num_tokens)
    assert checker.collectives
    return list(compare_gradients(run, checker, axis))


def build_typed_run(config: Config, checker: Checker) -> Run:
    ps, device = initialize(config.distributed, config.parallel)

    def step(*args) -> torch.Tensor | Loss:
        output = forward_step(*args)
        is_mean = not config.training.calculate_per_token_loss
        if checker.independent and is_mean and isinstance(output, Loss):
            # The mean over a micro-batch does not depend on other replicas.
            for numbers in (output.num_tokens, output.metric_num_tokens):
                if numbers is not None:
                    checker.set(numbers, REPLICATED)
        return output

    return build_run(config, mark_ranks(ps), device, model_provider, step)


def mark_ranks(ps: ParallelState) -> ParallelState:
    """Return `ps` with ranks whose use in an operation of tensors is noticed."""
    changes = {}
    for field in fields(ps):
        axis = getattr(ps, field.name)
        if isinstance(axis, Axis):
            changes[field.name] = with_rank_number(axis)
    return replace(ps, **changes)


def make_batch(config: Config, checker: Checker, dim: int | None) -> Batch:
    rows, length = config.training.micro_batch_size, config.data.seq_length
    tokens = torch.randint(60, (rows, length))
    positions = torch.arange(length).expand(rows, length).contiguous()
    mask = torch.ones(rows, length)
    batch = {"tokens": tokens, "labels": tokens.clone(), "loss_mask": mask}
    batch["position_ids"] = positions
    if dim == 1:
        batch = {key: values[:, : length // 2].contiguous() for key, values in batch.items()}
    if config.data.reset_attention_mask:
        batch["documents"] = torch.zeros(rows, length, dtype=torch.long)
    for key, values in batch.items():
        if dim is not None and not (key == "documents" and dim == 1):
            checker.set(values, sharded(dim))
    return batch


def compare_gradients(run: Run, checker: Checker, axis: Axis) -> Iterator[str]:
    for chunk in run.chunks:
        for name, param in chunk.named_parameters():
            if not param.requires_grad:
                continue
            value_type = checker.get(param.main_grad)
            declared = get_declared_type(param, axis)
            if value_type == UNDEFINED:
                continue  # no row of this expert
            if value_type == VARYING and param_info(param).sharding.is_expert:
                continue  # the rows of this rank's experts
            if (value_type.name, value_type.dim) != (declared.name, declared.dim):
                yield f"{name}: {value_type} instead of {declared}"


def select(layout: str, number: int | None) -> list[Model]:
    models = [model for model in get_seeds() if is_applicable(model, layout)]
    if number is None:
        return models
    start = list(AXES).index(layout)
    return [models[(start + 5 * i) % len(models)] for i in range(number)]


@pytest.mark.parametrize("layout", AXES)
def test_types_agree(layout):
    for model in select(layout, 1):
        assert not list_problems(model, layout), model


@pytest.mark.slow
@pytest.mark.parametrize("layout", AXES)
def test_types_of_every_feature_agree(layout):
    for model in select(layout, None):
        assert not list_problems(model, layout), model


@contextmanager
def noticed() -> Iterator[list[str]]:
    """Store how a mutation is noticed by the types."""
    problems: list[str] = []
    try:
        yield problems
    except ShardingError as error:
        problems.append(str(error))


# Sites whose missing collective must be noticed by types, without any numbers.
BY_TYPES = {
    "output of RowParallelLinear": ("tp2", "layers.py:compute_linear < core/tensor_parallel/l"),
    "copy to the region of ColumnParallelLinear, backward": (
        "tp2",
        "layers.py:compute_linear_gradients",
    ),
    "output of RowParallelLinear, SP": ("sp2", "layers.py:compute_linear < core/tensor_parallel/l"),
    "vocabulary-parallel embedding": ("tp2", "tensor_parallel/layers.py:forward < "),
    "cross entropy": ("tp2", "cross_entropy.py:"),
    "gradients of the sequence-parallel region": ("sp2", "_all_reduce < "),
    "gradients over DP": ("dp2", "start_grad_reduce"),
    "number of tokens over CP": ("cp2_heads", "_sum_over_context"),
}


def list_sites(model: Model, layout: str) -> dict[str, str]:
    sites: dict[str, str] = {}

    def record(method: str) -> str:
        sites[find_site()] = method
        return ""

    assert not list_problems(model, layout, record)
    return sites


def mutate(model: Model, layout: str, site: str, mutation: str) -> list[str]:
    with noticed() as problems:
        problems += list_problems(model, layout, lambda _: mutation if find_site() == site else "")
    return problems


@pytest.mark.parametrize("case", BY_TYPES)
def test_missing_collective_is_noticed_by_types(case):
    layout, text = BY_TYPES[case]
    model = make_model({})
    sites = [site for site in list_sites(model, layout) if text in site]
    assert sites
    for site in sites:
        assert mutate(model, layout, site, SKIPPED), site
        if "reduce" in site:
            assert mutate(model, layout, site, TWICE), site


# Mutations that only numbers notice (test_dropped_collectives.py), by function
BY_NUMBERS = {"gather_tokens": "which tokens an expert drops depends on the values of all ranks"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "sp2", "dp2"])
def test_mutations_are_noticed_by_types_or_numbers(layout):
    """Print the check that notices each mutation (pytest -s).

    Left to the numbers are exchanges whose types are declared (context parallelism), and experts
    that are split over the ranks of the axis, with which sums of varying values are permitted.
    """
    unexpected = []
    checked = set()
    for model in select(layout, None):
        if layout in SPLIT_EXPERTS and has_experts(model):
            continue
        for site, method in list_sites(model, layout).items():
            if site in checked:
                continue
            checked.add(site)
            for mutation in (SKIPPED, TWICE) if method.endswith("reduce") else (SKIPPED,):
                is_noticed = bool(mutate(model, layout, site, mutation))
                print(f"{layout}: {site} {mutation}: {'types' if is_noticed else 'numbers'}")
                if not is_noticed and not any(name in site for name in BY_NUMBERS):
                    unexpected.append((site, mutation))
    assert checked
    assert not unexpected
