"""The equivalence suite notices every collective that is missing, and every sum that is taken twice.

Mutations are applied where torch passes a collective to the process group, to all calls of one
site: the first two functions of the product on the stack.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import ROOT
from tests.functional_tests.test_layout_equivalence import (
    Curve,
    compare,
    get_seeds,
    is_applicable,
    train_case,
    train_one_process,
)
from tests.support.layout_cases import LAYOUTS, ONE_AXIS, flags_of

PRODUCT = str(ROOT / "megatron")
MAPPINGS = "core/tensor_parallel/mappings.py"
# Votes and reports, which do not take part in training.
CONTROL = ("core/deferred.py", "training/data", "training/exit.py", "core/dist_checkpointing")
SKIPPED = "skipped"
TWICE = "twice"
# Mutations that do not change a result, by function
WITHOUT_EFFECT = {
    ("reduce_losses", TWICE): "a ratio of two sums",
    ("_reduce_maximum", TWICE): "a maximum",
    ("finish_step", TWICE): "the load of an expert is compared with the mean load",
}


class Done:
    """The handle of a collective that has not been started."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def keep(group: dist.ProcessGroup, tensors: list[torch.Tensor], *rest: object) -> Done:
    return Done()


def repeat_own_part(
    group: dist.ProcessGroup, whole: torch.Tensor, part: torch.Tensor, *rest: object
) -> Done:
    whole.view(group.size(), -1).copy_(part.reshape(1, -1).expand(group.size(), -1))
    return Done()


def take_own_part(
    group: dist.ProcessGroup, part: torch.Tensor, whole: torch.Tensor, *rest: object
) -> Done:
    part.view(-1).copy_(whole.view(group.size(), -1)[group.rank()])
    return Done()


def return_to_sender(
    group: dist.ProcessGroup, received: torch.Tensor, sent: torch.Tensor, *rest: object
) -> Done:
    received.zero_()
    count = min(received.numel(), sent.numel())
    received.view(-1)[:count].copy_(sent.reshape(-1)[:count])
    return Done()


# method of the process group -> what happens instead
SKIP: dict[str, Callable[..., Done]] = {
    "allreduce": keep,
    "reduce": keep,
    "broadcast": keep,
    "_allgather_base": repeat_own_part,
    "_reduce_scatter_base": take_own_part,
    "alltoall_base": return_to_sender,
    # The names since torch 2.13
    "all_gather_single": repeat_own_part,
    "reduce_scatter_single": take_own_part,
    "all_to_all_single": return_to_sender,
}
SKIP = {name: skip for name, skip in SKIP.items() if hasattr(dist.ProcessGroup, name)}


def find_site() -> str:
    """Return the two innermost functions of the product on the stack, except general mappings."""
    functions: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(functions) < 2:
        path = frame.f_code.co_filename
        if path.startswith(PRODUCT) and not path.endswith(MAPPINGS):
            functions.append(f"{path[len(PRODUCT) + 1 :]}:{frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(functions)


@contextmanager
def mutated(site: str, mutation: str, sites: dict[str, str]) -> Iterator[None]:
    """Mutate the collectives of one site, and store the method that each site calls in `sites`."""
    originals: dict[str, Any] = {}

    def replace(method: str) -> None:
        originals[method] = vars(dist.ProcessGroup)[method]
        original = getattr(dist.ProcessGroup, method)

        def call(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
            name = find_site()
            sites[name] = method
            if name != site:
                return original(group, *args, **options)
            if mutation == SKIPPED:
                return SKIP[method](group, *args)
            original(group, *args, **options).wait()
            return original(group, *args, **options)

        setattr(dist.ProcessGroup, method, call)

    for method in SKIP:
        replace(method)
    try:
        yield
    finally:
        for method, original in originals.items():
            setattr(dist.ProcessGroup, method, original)


def train_mutated(
    rank: int, world_size: int, flags: str, site: str, mutation: str
) -> tuple[Curve, dict[str, str]]:
    sites: dict[str, str] = {}
    with mutated(site, mutation, sites):
        curve = train_case(rank, world_size, flags)
    return curve, sites


def is_noticed(pool, flags: str, layout: str, site: str, mutation: str) -> bool:
    processes = LAYOUTS[layout].processes
    command = f"{flags} {LAYOUTS[layout].flags}"
    try:
        results = pool.run(train_mutated, processes, command, site, mutation, timeout=60)
        difference = compare([curve for curve, _ in results], train_one_process(pool, flags))
    except (AssertionError, RuntimeError, ValueError):
        return True  # replicas differ, or the run ends with an error
    return max(difference.curves, difference.states) >= 1


def has_no_effect(site: str, mutation: str) -> bool:
    functions = [function.split(":")[1] for function in site.split(" < ")]
    return any((function, mutation) in WITHOUT_EFFECT for function in functions)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*ONE_AXIS, "sp2_ep2_etp2", "pp2_zero2"])
def test_every_mutation_is_noticed(pool, layout):
    missed = {}
    checked = set()
    for model in get_seeds():
        if not is_applicable(model, layout):
            continue
        flags = flags_of(model, LAYOUTS[layout].min_layers)
        command = f"{flags} {LAYOUTS[layout].flags}"
        results = pool.run(train_mutated, LAYOUTS[layout].processes, command, "", SKIPPED)
        sites: dict[str, str] = {}
        for _, of_rank in results:
            sites |= of_rank
        for site, method in sites.items():
            if any(part in site for part in CONTROL) or site in checked:
                continue
            mutations = [SKIPPED, TWICE] if method == "allreduce" else [SKIPPED]
            missing = [
                mutation
                for mutation in mutations
                if not has_no_effect(site, mutation)
                and not is_noticed(pool, flags, layout, site, mutation)
            ]
            # A later model may notice what this one cannot: sums of zeros, for example.
            if missing:
                missed[site] = missing
            else:
                checked.add(site)
                missed.pop(site, None)
    assert checked
    assert not missed, missed
