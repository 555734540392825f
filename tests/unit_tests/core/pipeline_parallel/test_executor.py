"""The executor equals the same model without a pipeline bitwise, in gradients and losses."""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.pipeline_parallel import pipeline_layer_ranges, run_schedule

SHAPE = (3, 2, 8)  # [s, b, h]
CPU = torch.device("cpu")


class Layer(nn.Module):
    """x + tanh(W x + b); the seed is the global layer number, so that every layout has the same
    model.
    """

    def __init__(self, number: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.linear = nn.Linear(SHAPE[-1], SHAPE[-1], dtype=dtype)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def data(microbatch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + microbatch)
    x, target = torch.randn(2, *SHAPE, generator=generator).to(dtype)
    return x, target


def loss_of(output: Tensor, target: Tensor, num_microbatches: int) -> Tensor:
    return (output - target).square().mean() / num_microbatches


def gradients(layers: dict[int, Layer]) -> dict[str, Tensor | None]:
    return {
        f"{i}.{name}": param.grad
        for i, layer in layers.items()
        for name, param in layer.named_parameters()
    }


def run_serial(
    rank: int, world_size: int, num_layers: int, num_microbatches: int, dtype: torch.dtype
) -> tuple:
    layers = {i: Layer(i, dtype) for i in range(num_layers)}
    losses = []
    for microbatch in range(num_microbatches):
        x, target = data(microbatch, dtype)
        for layer in layers.values():
            x = layer(x)
        losses.append(loss_of(x, target, num_microbatches))
        losses[-1].backward()
    return torch.stack(losses).detach(), gradients(layers)


class Stage:
    """The chunks of one rank, and the `forward_step` that runs them."""

    def __init__(
        self, pp: Axis, ranges: list[list[range]], num_microbatches: int, dtype: torch.dtype
    ) -> None:
        self.pp = pp
        self.num_microbatches = num_microbatches
        self.dtype = dtype
        self.chunks = [{i: Layer(i, dtype) for i in chunk} for chunk in ranges[pp.rank]]
        self.losses: list[Tensor] = []

    def is_first(self, chunk: int) -> bool:
        return self.pp.is_first and chunk == 0

    def is_last(self, chunk: int) -> bool:
        return self.pp.is_last and chunk == len(self.chunks) - 1

    def forward_step(self, chunk: int, microbatch: int, activation: Tensor | None) -> Tensor:
        x, target = data(microbatch, self.dtype)
        assert (activation is None) == self.is_first(chunk)

        x = x if activation is None else activation
        for layer in self.chunks[chunk].values():
            x = layer(x)
        if not self.is_last(chunk):
            return x
        self.losses.append(loss_of(x, target, self.num_microbatches))
        return self.losses[-1]

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: grad for chunk in self.chunks for name, grad in gradients(chunk).items()}

    def run(self, **options: object) -> None:
        run_schedule(
            self.forward_step,
            len(self.chunks),
            self.num_microbatches,
            pp=self.pp,
            tensor_shape=SHAPE,
            dtype=self.dtype,
            device=CPU,
            **options,
        )


def make_stage(
    world_size: int, layout: tuple, num_microbatches: int, dtype: torch.dtype, timeout: float = 60
) -> Stage:
    config = ParallelConfig(pipeline_model_parallel_size=layout[1])
    state = ParallelState.create(config, timeout=timedelta(seconds=timeout))
    return Stage(state.pp, pipeline_layer_ranges(*layout), num_microbatches, dtype)


def run_pipeline(
    rank: int,
    world_size: int,
    layout: tuple,
    num_microbatches: int,
    dtype: torch.dtype,
    **options: object,
) -> tuple:
    stage = make_stage(world_size, layout, num_microbatches, dtype)
    stage.run(**options)
    if options.get("forward_only"):
        assert not any(loss.requires_grad for loss in stage.losses)
    return torch.stack(stage.losses).detach() if stage.losses else None, stage.gradients()


@pytest.mark.parametrize(
    "layout,num_microbatches",
    [
        ((4, 2), 1),
        ((4, 2), 5),
        ((4, 2, 2), 4),
        ((6, 2, 3), 2),
        ((5, 2, 1, 2), 3),
        ((6, 2, 2, 2, 4), 4),
        ((6, 3), 4),
        ((4, 4), 2),
        ((4, 4), 9),
        ((8, 4, 2), 8),
        ((12, 4, 3), 4),
        ((9, 4, 1, 1, 2), 6),
    ],
    ids=str,
)
def test_pipeline_equals_serial_model_bitwise(pool, layout, num_microbatches):
    compare(pool, layout, layout[1], num_microbatches, torch.float32)


def test_pipeline_equals_serial_model_in_bfloat16(pool):
    compare(pool, (4, 2, 2), 2, 4, torch.bfloat16)


def test_two_pipelines_run_concurrently(pool):
    compare(pool, (4, 2), 4, 4, torch.float32)


@pytest.mark.parametrize("num_microbatches,group_size", [(5, 3), (8, 4)])
def test_groups_larger_than_the_pipeline(pool, num_microbatches, group_size):
    compare(pool, (4, 2, 2), 2, num_microbatches, torch.float32, group_size)


def compare(
    pool,
    layout: tuple,
    world_size: int,
    num_microbatches: int,
    dtype: torch.dtype,
    group_size: int | None = None,
) -> None:
    [(losses, expected)] = pool.run(run_serial, 1, layout[0], num_microbatches, dtype)
    results = pool.run(
        partial(run_pipeline, group_size=group_size),
        world_size,
        layout,
        num_microbatches,
        dtype,
    )
    seen = set()
    for pipeline_losses, actual in results:
        assert pipeline_losses is None or torch.equal(pipeline_losses, losses)
        for name, grad in actual.items():
            assert torch.equal(grad, expected[name]), name
            seen.add(name)

    assert seen == set(expected)

    replicas = world_size // layout[1]
    assert sum(pipeline_losses is not None for pipeline_losses, _ in results) == replicas


@pytest.mark.parametrize("layout", [(4, 2), (4, 2, 2), (5, 4, 1, 2)], ids=str)
def test_forward_only_computes_losses_without_gradients(pool, layout):
    num_layers, world_size = layout[:2]
    [(expected, _)] = pool.run(run_serial, 1, num_layers, 6, torch.float32)
    run_forward = partial(run_pipeline, forward_only=True)
    results = pool.run(run_forward, world_size, layout, 6, torch.float32)
    losses, _ = results[-1]

    assert torch.equal(losses, expected)
    for _, gradients in results:
        assert all(gradient is None for gradient in gradients.values())


def count_gradients_after_callback(
    rank: int, world_size: int, layout: tuple, num_microbatches: int
) -> list:
    stage = make_stage(world_size, layout, num_microbatches, torch.float32)
    events: list[tuple[str, int]] = []
    for index, chunk in enumerate(stage.chunks):
        weight = next(iter(chunk.values())).linear.weight
        weight.register_post_accumulate_grad_hook(
            lambda _, index=index: events.append(("gradient", index))
        )

    stage.run(before_last_backward=lambda chunk: events.append(("callback", chunk)))
    return [
        [kind for kind, index in events if index == chunk] for chunk in range(len(stage.chunks))
    ]


@pytest.mark.parametrize("layout", [(2, 2), (4, 2, 2)], ids=str)
def test_before_last_backward_is_called_once_per_chunk(pool, layout):
    for chunks in pool.run(count_gradients_after_callback, 2, layout, 4):
        for events in chunks:
            assert events == ["gradient"] * 3 + ["callback", "gradient"]


def count_live_outputs(rank: int, world_size: int, layout: tuple, num_microbatches: int) -> int:
    """Return the maximum number of outputs of earlier passes that are alive in a forward pass."""
    stage = make_stage(world_size, layout, num_microbatches, torch.float32)
    outputs: list[StorageWeakRef] = []
    peak = 0

    def forward_step(chunk: int, microbatch: int, activation: Tensor | None) -> Tensor:
        nonlocal peak
        peak = max(peak, sum(not storage.expired() for storage in outputs))
        output = Stage.forward_step(stage, chunk, microbatch, activation)
        if not stage.is_last(chunk):
            outputs.append(StorageWeakRef(output.untyped_storage()))
        return output

    stage.forward_step = forward_step  # type: ignore[method-assign]
    stage.run()
    assert len(outputs) == num_microbatches * sum(
        not stage.is_last(chunk) for chunk in range(len(stage.chunks))
    )
    return peak


@pytest.mark.parametrize("layout", [(4, 4), (8, 4, 2)], ids=str)
def test_activations_are_freed_once_sent(pool, layout):
    # In flight are up to 4 microbatches (1F1B) and 11 (interleaved) on the first rank.
    assert max(pool.run(count_live_outputs, 4, layout, 8)) <= 2


def run_without_one_rank(rank: int, world_size: int) -> str | None:
    stage = make_stage(world_size, (2, 2), 4, torch.float32, timeout=1)
    if rank == 1:
        return None
    with pytest.raises(RuntimeError) as caught:
        stage.run()
    return str(caught.value)


def test_error_names_a_hanging_neighbor(pool):
    message, _ = pool.run(run_without_one_rank, 2)
    assert message.startswith(
        "pipeline rank 0 (global rank 0), tick 0 (warmup, forward of microbatch 0, chunk 0): "
    )
    assert "sending to pipeline rank 1 (global rank 1) failed" in message


def run_with_dying_rank(rank: int, world_size: int, report: Path) -> None:
    stage = make_stage(world_size, (2, 2), 8, torch.float32)
    forward_step = stage.forward_step

    def dies_at_microbatch_3(chunk: int, microbatch: int, activation: Tensor | None) -> Tensor:
        if rank == 1 and microbatch == 3:
            os._exit(1)
        return forward_step(chunk, microbatch, activation)

    stage.forward_step = dies_at_microbatch_3  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as caught:
        stage.run()

    report.write_text(str(caught.value))


def test_error_names_a_dead_neighbor(separate_pool, tmp_path):
    report = tmp_path / "report"
    with pytest.raises(RuntimeError, match="exit code 1"):
        separate_pool.run(run_with_dying_rank, 2, report)
    assert "pipeline rank 1 (global rank 1) failed" in report.read_text()


def run_one_stage(
    forward_step: Callable[..., Tensor], num_microbatches: int = 3, **options: object
) -> None:
    arguments = {
        "pp": Axis(),
        "tensor_shape": SHAPE,
        "dtype": torch.float32,
        "device": CPU,
    } | options
    run_schedule(forward_step, 1, num_microbatches, **arguments)


def test_one_stage_needs_no_process_group():
    losses, expected = run_serial(0, 1, 2, 3, torch.float32)
    stage = Stage(Axis(), [[range(2)]], 3, torch.float32)
    run_one_stage(stage.forward_step)
    assert torch.equal(torch.stack(stage.losses), losses)
    assert all(torch.equal(grad, expected[name]) for name, grad in stage.gradients().items())


def test_gradients_are_computed_under_no_grad():
    weight = torch.ones((), requires_grad=True)
    with torch.no_grad():
        run_one_stage(lambda chunk, microbatch, _: weight * 2)
    assert weight.grad == 6


@pytest.mark.parametrize(
    "output,pp,message",
    [
        (
            torch.zeros(3, 2, 7),
            Axis(0, 2, (0, 1)),
            r"torch.float32 of shape \(3, 2, 7\).*\(3, 2, 8\).*sequence par",
        ),
        (
            torch.zeros(3, 2, 8).half(),
            Axis(0, 2, (0, 1)),
            "torch.float16 of shape .* exchange torch.float32",
        ),
        (torch.zeros(3), Axis(), r"must return a scalar loss, got shape \(3,\)"),
    ],
)
def test_output_of_wrong_shape_or_dtype_is_an_error(output, pp, message):
    with pytest.raises(ValueError, match=f"forward of microbatch 0, chunk 0.*{message}"):
        run_one_stage(lambda chunk, microbatch, _: output, pp=pp)


def test_forward_only_accepts_any_output():
    outputs = []
    run_one_stage(
        lambda chunk, microbatch, _: outputs.append(microbatch) or torch.zeros(5),
        forward_only=True,
    )
    assert outputs == [0, 1, 2]
