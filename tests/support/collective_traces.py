"""Collectives and messages of any rank of any layout, recorded in one process.

torch's fake process group completes every operation at once: this process is a rank of a world that
does not exist. Gathered and received tensors contain copies of the rank's own data, so that values
mean nothing, but every operation of a training step is recorded with its group, size and dtype.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.parallel_state import ParallelState
from megatron.training.config.parsing import parse_args
from megatron.training.run import Batch, Run, build_run
from megatron.training.training import train_step
from pretrain_gpt import forward_step, model_provider
from tests.support.training_harness import COMMON

Group = tuple[str, tuple[int, ...]]
"""Description and global ranks of a process group."""


@dataclass(frozen=True)
class Call:
    """An operation that all members of a group must start in the same order."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[int, ...]  # elements of each tensor; empty if they depend on the data
    root: int | None = None


@dataclass(frozen=True)
class Message:
    """A tensor that one rank sends to another one."""

    dtype: torch.dtype
    size: int


@dataclass
class Trace:
    """Operations of one rank in the order in which it starts them."""

    calls: dict[Group, list[Call]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[int, list[Message]] = field(default_factory=lambda: defaultdict(list))
    """By receiving rank."""
    received: dict[int, list[Message]] = field(default_factory=lambda: defaultdict(list))
    """By sending rank."""
    num_communicators: int = 0
    """Groups that this rank is a member of, with that of all ranks."""


class _Recorder(TorchDispatchMode):
    """Adds the operations of c10d to a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            self._record(func, args)
        return func(*args, **(kwargs or {}))

    def _record(self, func: Any, args: tuple[Any, ...]) -> None:
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False))
        group = dist.ProcessGroup.unbox(given["process_group"])
        ranks = tuple(dist.get_process_group_ranks(group))
        tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
        name = func._schema.name.removeprefix("c10d::")
        if name == "send":
            self._trace.sent[ranks[given["dst"]]].append(_make_message(tensors))
        elif name == "recv_":
            self._trace.received[ranks[given["src"]]].append(_make_message(tensors))
        else:
            dtypes = tuple(tensor.dtype for tensor in tensors)
            sizes = tuple(tensor.numel() for tensor in tensors)
            if name == "alltoall_base_" and given.get("output_split_sizes"):
                sizes = ()  # the routing of tokens determines them
            call = Call(name, dtypes, sizes, given.get("root_rank"))
            self._trace.calls[group.group_desc, ranks].append(call)


def _make_message(tensors: Sequence[torch.Tensor]) -> Message:
    (tensor,) = tensors
    return Message(tensor.dtype, tensor.numel())


def trace_training_step(rank: int, world_size: int, flags: str, device: torch.device) -> Trace:
    """Return the communication of a rank in one training step of `pretrain_gpt.py COMMON FLAGS`."""
    config = parse_args(shlex.split(COMMON + flags), world_size)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    try:
        ps = ParallelState.create(config.parallel)
        config.set_vocab_size(config.tokenizer.vocab_size)
        run = build_run(config, ps, device, model_provider, forward_step)
        trace = Trace()
        with _Recorder(trace):
            num_microbatches = run.batches.num_microbatches_at(0)
            train_step(run, _make_batches(run), num_microbatches)
            for chunk in run.chunks:
                chunk.finish_param_sync()

        trace.num_communicators = len(dist.distributed_c10d._world.pg_names)
        return trace
    finally:
        dist.destroy_process_group()


def _make_batches(run: Run) -> Iterator[Batch]:
    """Yield micro-batches of random tokens, with this rank's part of the sequences."""
    config = run.config
    shape = (config.training.micro_batch_size, config.data.seq_length // run.ps.cp.size)
    generator = torch.Generator().manual_seed(run.ps.rank)
    while True:
        tokens = torch.randint(run.vocab_size, shape, generator=generator)
        batch = {
            "tokens": tokens,
            "labels": tokens.roll(-1, dims=1),
            "position_ids": torch.arange(shape[1]).expand(shape),
            "loss_mask": torch.ones(shape),
        }
        yield {key: tensor.to(run.device) for key, tensor in batch.items()}


def find_disagreements(traces: Sequence[Trace]) -> list[str]:
    """Return a description of each group, or pair of ranks, whose members do not match.

    `traces` are those of all ranks. Ranks of a group must start the same operations in the same
    order, and each receive the messages that the other one sends.
    """
    problems = []
    groups = {group: None for trace in traces for group in trace.calls}
    for name, ranks in groups:
        expected = traces[ranks[0]].calls[name, ranks]
        for rank in ranks[1:]:
            calls = traces[rank].calls[name, ranks]
            if calls != expected:
                problems.append(f"{name}: {_compare(ranks[0], expected, rank, calls)}")

    for source, trace in enumerate(traces):
        for target, sent in trace.sent.items():
            received = traces[target].received[source]
            if received != sent:
                problems.append(f"messages: {_compare(source, sent, target, received)}")

    for target, trace in enumerate(traces):
        for source in trace.received:
            if not traces[source].sent[target]:
                problems.append(f"rank {target} receives from {source}, which does not send")
    return problems


def _compare(rank: int, expected: Sequence[object], other: int, found: Sequence[object]) -> str:
    """Return the first difference of two ranks."""
    for index, (ours, theirs) in enumerate(zip(expected, found, strict=False)):
        if ours != theirs:
            return f"operation {index} is {ours} on rank {rank}, {theirs} on rank {other}"
    return f"{len(expected)} operations on rank {rank}, {len(found)} on rank {other}"
