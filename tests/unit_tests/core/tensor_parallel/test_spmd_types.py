"""The checker `spmd-types` agrees with the types of the linear layers and of their collectives.

A second opinion on `tests/support/sharding_types.py`, which covers all layers. docs/correctness.md
lists what this package does not check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import LinearLayout, _Linear
from megatron.core.tensor_parallel.mappings import Pending

spmd = pytest.importorskip("spmd_types", exc_type=ImportError)
checker = pytest.importorskip("spmd_types.checker", exc_type=ImportError)
R, P, S = spmd.R, spmd.P, spmd.S

S_LENGTH, BATCH, INPUTS, OUTPUTS = 4, 3, 8, 6
COLLECTIVES: dict[str, Callable[[Tensor, Axis], Tensor]] = {
    "start_all_reduce": lambda x, tp: spmd.all_reduce(x, tp.group, src=P, dst=R),
    "start_sequence_all_gather": lambda x, tp: spmd.all_gather(x, tp.group, src=S(0), dst=R),
    "start_sequence_reduce_scatter": lambda x, tp: spmd.reduce_scatter(
        x,
        tp.group,
        src=P,
        dst=S(0),
    ),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


class Context:
    """The context of an autograd function whose passes are checked as two plain functions."""

    needs_input_grad = (True, True, True, False)
    saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


@contextmanager
def typechecked(mesh: DeviceMesh, missing: str = "", twice: str = "") -> Iterator[Axis]:
    """Check global types, with the product's collectives as those of `spmd_types`."""

    def start(name: str) -> Callable[[Tensor, Axis], Pending]:
        def call(tensor: Tensor, tp: Axis) -> Pending:
            if name == missing:
                return Pending(tensor, None)
            result = COLLECTIVES[name](tensor, tp)
            if name == twice:
                result = COLLECTIVES[name](result, tp)
            return Pending(result, None)

        return call

    tp = Axis(0, 2, (0, 1), mesh.get_group("tp"))
    patches = {name: start(name) for name in COLLECTIVES}
    with (
        mock.patch.multiple(mappings, **patches),
        spmd.set_current_mesh(mesh),
        checker.typecheck(local=False),
        torch.no_grad(),
    ):
        yield tp


def make(mesh: DeviceMesh, kind: Any, *shape: int) -> Tensor:
    """Return a tensor of a global shape with a type on TP."""
    local = list(shape)
    if isinstance(kind, type(S(0))):
        local[kind.dim] //= 2
    tensor = torch.randn(local)
    spmd.assert_type(tensor, {mesh.get_group("dp"): R, mesh.get_group("tp"): kind})
    return tensor


def run_linear(mesh: DeviceMesh, tp: Axis, column: bool, sequence_parallel: bool) -> None:
    """Check the types of the output and of all gradients of a linear layer."""
    whole = S(0) if sequence_parallel else R
    x_type, y_type = (whole, S(2)) if column else (S(2), whole)
    weight_type, bias_type = (S(0), S(0)) if column else (S(1), R)
    x = make(mesh, x_type, S_LENGTH, BATCH, INPUTS)
    weight = make(mesh, weight_type, OUTPUTS, INPUTS)
    bias = make(mesh, bias_type, OUTPUTS)
    context = Context()
    layout = LinearLayout(tp, column, sequence_parallel)
    y = _Linear.forward(context, x, weight, bias, layout)
    dy = make(mesh, y_type, S_LENGTH, BATCH, OUTPUTS)
    dx, dw, db, _ = _Linear.backward(context, dy)

    assert (y.shape, dx.shape, dw.shape) == (dy.shape, x.shape, weight.shape)
    for tensor, value_type in ((y, y_type), (dx, x_type), (dw, weight_type), (db, bias_type)):
        spmd.assert_type(tensor, {mesh.get_group("dp"): R, mesh.get_group("tp"): value_type})


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("column", [False, True])
def test_types_of_linear_layers(mesh, column, sequence_parallel):
    with typechecked(mesh) as tp:
        run_linear(mesh, tp, column, sequence_parallel)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("column", [False, True])
def test_missing_and_repeated_collectives_are_noticed(mesh, column, sequence_parallel):
    names = list(COLLECTIVES)
    used = names[1:] if sequence_parallel else names[:1]
    for name in used:
        for mutation in ("missing", "twice"):
            with (
                pytest.raises((spmd.SpmdTypeError, AssertionError)),
                typechecked(mesh, **{mutation: name}) as tp,
            ):
                run_linear(mesh, tp, column, sequence_parallel)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("operation", "source", "target"),
    [("_copy", R, R), ("_all_reduce", P, R), ("all_gather_sequence", S(0), R),
     ("_reduce_scatter_sequence", P, S(0))],
)  # fmt: skip
def test_types_of_conjugate_operations(mesh, operation, source, target):
    with typechecked(mesh) as tp:
        x = make(mesh, source, S_LENGTH, BATCH, INPUTS)
        y = getattr(mappings, operation)(x, tp)
        spmd.assert_type(y, {mesh.get_group("dp"): R, mesh.get_group("tp"): target})
