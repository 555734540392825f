"""Execution of a pipeline schedule: the pass of each tick, and one exchange with the neighbors.

All messages have the same shape and dtype, known in advance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.deferred import bypass_stream_record, start_messages
from megatron.core.parallel_state import Axis
from megatron.core.pipeline_parallel.schedules import Action, Tick, consumer, schedule


class MessageSpec(NamedTuple):
    """Shape, dtype and device of the activations between stages, and of their gradients."""

    shape: tuple[int, ...]  # [s, b, h]; [s/tp, b, h] with sequence parallelism
    dtype: torch.dtype
    device: torch.device


class StageExchange:
    """The messages of one tick, posted together on construction; `wait` completes them.

    Keep the object until `wait`: gloo abandons a message whose exchange is garbage collected. With
    NCCL the first exchange builds the communicator of the whole group. All ranks get there, because
    the first tick of a rank does not depend on the others.
    """

    def __init__(self, tick: Tick, result: Tensor | None, pp: Axis, spec: MessageSpec) -> None:
        self._tick = tick
        self._pp = pp
        self._device = spec.device
        self._received: Tensor | None = None
        self._operations: list[dist.P2POp] = []  # keeps the tensors alive until `wait`
        self._labels: list[str] = []
        message_device = torch.device("cpu") if pp.sends_from_host else spec.device
        if tick.receive is not None:
            self._received = torch.empty(spec.shape, dtype=spec.dtype, device=message_device)
            self._add(dist.irecv, self._received, tick.receive.peer, "receiving from")
        if tick.send is not None:
            assert result is not None
            message = result.contiguous().to(message_device)
            self._add(dist.isend, message, tick.send.peer, "sending to")
        self._works: list[dist.Work] = []
        if self._operations:
            try:
                self._works = start_messages(self._operations)
            except RuntimeError as error:
                raise self._make_error(" and ".join(self._labels)) from error

    def wait(self) -> Tensor | None:
        """Wait for all messages of the tick and return the received tensor, if any.

        On CUDA this waits in stream order. Raises RuntimeError naming rank, tick and neighbor when
        the backend gives up.
        """
        labels = self._labels
        num_works = len(self._works)
        if num_works != len(labels):  # NCCL has one work per batch, gloo one per message
            labels = [" and ".join(labels)] * num_works
        for work, label in zip(self._works, labels, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                raise self._make_error(label) from error
        self._works = []
        self._operations = []
        if self._received is not None:
            self._received = self._received.to(self._device)
        return self._received

    def _add(self, operation: Callable[..., Any], tensor: Tensor, peer: int, verb: str) -> None:
        """Add a message, and its description for errors."""
        global_peer = self._pp.ranks[peer]
        message = bypass_stream_record(tensor)
        self._operations.append(dist.P2POp(operation, message, global_peer, self._pp.group))
        self._labels.append(f"{verb} {self._format_rank(peer)}")

    def _make_error(self, label: str) -> RuntimeError:
        return RuntimeError(
            f"{self._format_rank(self._pp.rank)}, {self._tick}: {label} failed; that rank has "
            "died, hangs, or is slower than the timeout of the process group"
        )

    def _format_rank(self, pp_rank: int) -> str:
        return f"pipeline rank {pp_rank} (global rank {self._pp.ranks[pp_rank]})"


MicrobatchStep = Callable[[int, int, Tensor | None], Tensor]


def run_schedule(
    forward_step: MicrobatchStep,
    num_chunks: int,
    num_microbatches: int,
    *,
    pp: Axis,
    tensor_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    forward_only: bool = False,
    before_last_backward: Callable[[int], None] | None = None,
    group_size: int | None = None,
) -> None:
    """Run forward and backward of all micro-batches through this rank's model chunks.

    Gradients accumulate in `.grad`. Collective over `pp`, with the same sizes on each rank.

    `forward_step(chunk, microbatch, input)` computes one forward pass. `input` is None on the first
    virtual stage, and the activation of the previous stage on the others. It returns the
    activation, of `tensor_shape` ([s, b, h], or [s/tp, b, h] with sequence parallelism) and
    `dtype`. On the last virtual stage it returns the scalar loss to differentiate: divided by the
    number of micro-batches and multiplied by the loss scale (with `forward_only` it may return
    anything).

    `before_last_backward(chunk)` is called before the last backward pass of each chunk, which
    completes its gradients, so that their reduction can overlap with that pass. For `group_size`
    see `schedule`.

    Raises ValueError for an output that does not fit, and RuntimeError naming the neighbor when one
    does not answer within the timeout of the process group.
    """
    spec = MessageSpec(tuple(tensor_shape), dtype, device)
    stage = _Stage(forward_step, num_chunks, pp, spec, forward_only)
    last_microbatch = num_microbatches - 1
    inputs: dict[Action, StageExchange] = {}  # received, but not consumed yet
    previous: StageExchange | None = None
    for tick in schedule(pp.rank, pp.size, num_chunks, num_microbatches, forward_only, group_size):
        # 1. Run the pass of this tick, with the input that an earlier exchange received.
        result = None
        action = tick.action
        if action is not None:
            received = None
            source = inputs.pop(action, None)
            if source is not None:
                received = source.wait()
            if action.kind == "forward":
                result = stage.forward(action, received)
            else:
                if before_last_backward is not None and action.microbatch == last_microbatch:
                    before_last_backward(action.chunk)
                result = stage.backward(action, received)
        # 2. Complete the previous exchange, which overlapped with that pass; thus at most two
        # exchanges hold memory.
        if previous is not None:
            previous.wait()
        # 3. Post the messages of this tick, which overlap with the pass of the next one.
        previous = StageExchange(tick, result, pp, spec)
        if tick.receive is not None:
            inputs[tick.receive.input_of] = previous
    if previous is not None:
        previous.wait()
    assert not inputs and not stage.in_flight


@dataclass
class _Stage:
    """The model chunks of one rank, and the activations that their backward passes need."""

    forward_step: MicrobatchStep
    num_chunks: int
    pp: Axis
    spec: MessageSpec
    forward_only: bool
    in_flight: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    """(input, root of the graph) by (chunk, micro-batch)."""

    def forward(self, action: Action, activation: Tensor | None) -> Tensor | None:
        """Return the activation for the next virtual stage; None on the last one."""
        trains = not self.forward_only
        if activation is not None and trains:
            # A leaf of the graph of this stage: its gradient goes to the previous stage.
            activation.requires_grad_()
        with torch.set_grad_enabled(trains):
            output = self.forward_step(action.chunk, action.microbatch, activation)
        # The result of the last virtual stage has no consumer.
        is_loss = consumer(self.pp.rank, action, self.pp.size, self.num_chunks) is None
        self._check_output(action, output, is_loss)
        if trains:
            # Keep the graph but not the activation, which is only needed until it is sent.
            root = output if is_loss else _StandIn.apply(output)
            self.in_flight[action.chunk, action.microbatch] = (activation, root)
        if is_loss:
            return None
        return output.detach()

    def backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient for the previous virtual stage; None on the first one."""
        activation, root = self.in_flight.pop((action.chunk, action.microbatch))
        torch.autograd.backward(root, gradient)
        if activation is None:
            return None
        return activation.grad

    def _check_output(self, action: Action, output: Tensor, is_loss: bool) -> None:
        """Raise ValueError if the result of `forward_step` does not fit the schedule."""
        if is_loss:
            if not self.forward_only and output.dim() != 0:
                raise ValueError(
                    f"{action}, the last virtual stage: forward_step must return a scalar loss, "
                    f"got shape {tuple(output.shape)}"
                )
        elif (output.shape, output.dtype) != (self.spec.shape, self.spec.dtype):
            raise ValueError(
                f"{action}: forward_step returned {output.dtype} of shape {tuple(output.shape)}, "
                f"but the stages exchange {self.spec.dtype} of shape {self.spec.shape}: make them "
                "agree (sequence length, micro-batch size, hidden size, sequence parallelism, "
                "parameter dtype)"
            )


class _StandIn(torch.autograd.Function):
    """Replaces an activation in the autograd graph by one element, expanded to its shape.

    The backward pass starts from it, so that the activation can be freed as soon as it is sent.
    """

    @staticmethod
    def forward(ctx: Any, activation: Tensor) -> Tensor:
        return activation.new_zeros(()).expand(activation.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
