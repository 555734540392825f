"""Remove each wait of the product in turn, and report which tests of races notice.

    python -m tests.fake_cuda.mutations                     # all waits, about 10 minutes
    python -m tests.fake_cuda.mutations executor staging    # of files with these names

A wait is removed in memory, from the function that contains it, in the processes of the runs. A run
notices by an error, or by other losses, weights or checkpoints than those of the complete product.
The first line of each wait is its place; the last line is the number of those that were noticed.
`tests/unit_tests/test_removed_waits.py` checks that the lists below contain all waits of the product.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from tests import ROOT
from tests.fake_cuda.forks import RankError
from tests.fake_cuda.operations import OPERATIONS, run_operation
from tests.fake_cuda.test_races import BASE, DELAYS, RUNS
from tests.fake_cuda.trainings import train_ranks

# Calls that wait, or that make the device wait.
WAITS = ("wait", "wait_stream", "wait_event", "synchronize", "record_stream", "record_event")
EVENTS = ("copied", "events[0]", "events[1]")  # variables whose `record` is that of CUDA events

# Files whose waits concern CUDA streams, and the runs and operations that reach them.
REACHED_BY: dict[str, tuple[str, ...]] = {
    "megatron/core/deferred.py": ("copy_to_host",),
    "megatron/training/data/loaders.py": ("move_batches",),
    "megatron/core/pipeline_parallel/executor.py": ("pp2_interleaved", "pp2"),
    "megatron/core/transformer/attention/exchange.py": ("cp2_p2p", "cp2_all_gather"),
    "megatron/core/transformer/multi_token_prediction.py": ("cp2_multi_token_prediction",),
    "megatron/core/transformer/moe/dispatch.py": ("ep2_alltoall", "ep2_allgather"),
    "megatron/core/distributed/param_and_grad_buffer.py": ("dp2_distributed_optimizer", "dp2"),
    "megatron/core/distributed/distributed_data_parallel.py": ("tp2_sp", "pp2"),
    "megatron/core/tensor_parallel/mappings.py": ("tp2_sp", "tp2", "gather_logits"),
    "megatron/core/tensor_parallel/layers.py": ("tp2_sp", "tp2"),
    "megatron/core/tensor_parallel/cross_entropy.py": ("tp2_sp", "tp2"),
    "megatron/core/dist_checkpointing/saving/saver.py": (
        "save_with_few_buffers",
        "save_at_once",
        "saves",
    ),
    "megatron/core/dist_checkpointing/loading/reader.py": ("load_to_device",),
    "megatron/core/dist_checkpointing/saving/device_staging.py": (
        "save_with_few_buffers",
        "save_with_snapshot_on_device",
        "save_on_full_device",
        "saves",
    ),
}


# Waits that CUDA does not need, with the reason: not removed.
UNNEEDED = {
    "start_max_reduce.wait_for_work: work.wait()": "only for gloo",
    "StageFromDevice.before_change: computed.synchronize()": "gives copies time",
    "StageFromDevice.before_change: current.record_event(torch.cuda.Event(blocking=True))": "as above",
    "StageFromDevice.warm_up: self._stream.wait_stream(torch.cuda.current_stream())": "no save uses the values",
    "StageFromDevice.warm_up: self._start_copies(copy.batch).synchronize()": "as above",
    "_copy_from_host: copied.synchronize()": "bounds pinned memory; torch keeps it until the copy ends",
    "_copy_from_host: copied.record(torch.cuda.current_stream(target.device))": "as above",
    "AsyncSaver.wait_staged: events[0].record()": "measures time",
    "AsyncSaver.wait_staged: events[1].record()": "measures time",
}

# Files whose waits are kept, with the event that they wait for.
NOT_REMOVED = {
    "megatron/conversion/huggingface/config_fields.py": "another process",
    "megatron/core/progress.py": "another thread",
    "megatron/core/dist_checkpointing/planning/coordination.py": "messages of gloo",
    "megatron/core/dist_checkpointing/tiers/copier.py": "another thread",
    "megatron/core/dist_checkpointing/tiers/distributed_local_checkpoint.py": "messages of gloo",
    "megatron/core/dist_checkpointing/saving/retention.py": "another thread",
    "megatron/core/dist_checkpointing/saving/run_saver.py": "another thread",
    "megatron/core/dist_checkpointing/saving/save_barrier.py": "another thread, the store",
    "megatron/core/dist_checkpointing/saving/save_cost.py": "the device, to measure time",
    "megatron/core/dist_checkpointing/saving/staging.py": "another thread",
    "megatron/core/dist_checkpointing/saving/save_thread.py": "another thread, a timer of the device",
    "megatron/transfer/schedule.py": "messages of gloo",
    "megatron/training/operations/collectives.py": "passes on the waits of the product",
    "megatron/training/adapters/encoded_layers.py": "adapters are not trained on the fake runtime",
    "megatron/training/adapters/adapted_layers.py": "adapters are not trained on the fake runtime",
    "megatron/training/operations/hangs.py": "another thread",
    "megatron/training/operations/straggler.py": "the device, to measure time",
    "megatron/training/reporting/intervals.py": "the device, to measure time",
    "megatron/training/reporting/measurements.py": "the device, to measure time",
    "megatron/training/restart/attempts.py": "the store",
    "megatron/training/restart/interruption.py": "another thread",
    "megatron/training/restart/worker.py": "the device, between attempts: see test_restart.py",
}


@dataclass(frozen=True)
class Wait:
    """A call in the source of the product."""

    file: str
    line: int
    column: int
    function: str  # qualified name
    text: str

    @property
    def name(self) -> str:
        return f"{self.function}: {self.text}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.name}"


def find_waits(file: str) -> Iterator[Wait]:
    """Yield the calls of a file that wait."""
    tree = ast.parse((ROOT / file).read_text())

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[Wait]:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                inner = (*names, child.name)
            if is_wait(child):
                text = ast.unparse(child)
                yield Wait(file, child.lineno, child.col_offset, ".".join(names), text)
            yield from visit(child, inner)

    yield from visit(tree, ())


def is_wait(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    if node.func.attr == "record":
        return ast.unparse(node.func.value) in EVENTS
    return node.func.attr in WAITS


class _Removal(ast.NodeTransformer):
    """Replaces a call by its result without waiting."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if (node.lineno, node.col_offset) == (self._wait.line, self._wait.column) and is_wait(node):
            assert isinstance(node.func, ast.Attribute)
            name = ast.Constant(node.func.attr)
            skip = ast.parse("__import__('tests.fake_cuda.mutations', fromlist=['x'])._skip")
            assert isinstance(skip.body[0], ast.Expr)
            call = ast.Call(skip.body[0].value, [node.func.value, name], [])
            return ast.copy_location(call, node)
        return self.generic_visit(node)


def _skip(waiting: Any, name: str) -> Any:
    """Return the result of a wait without waiting."""
    if name == "record_event":  # an event of an earlier moment
        import torch

        return torch.cuda.Event()
    for attribute in ("_received", "_tensor"):
        if hasattr(waiting, attribute):
            return getattr(waiting, attribute)
    return None


def remove(wait: Wait) -> None:
    """Remove a wait from the function that contains it, in this process."""
    tree = _Removal(wait).visit(ast.parse((ROOT / wait.file).read_text()))
    code = compile(ast.fix_missing_locations(tree), str(ROOT / wait.file), "exec")
    module = importlib.import_module(wait.file.removesuffix(".py").replace("/", "."))
    target: Any = module
    for name in wait.function.split("."):
        code = find_code(code, name)
        target = get_function(vars(target)[name])
        if isinstance(target, FunctionType):
            break  # its code contains that of functions in it
    assert target.__code__.co_freevars == code.co_freevars, wait
    target.__code__ = code


def get_function(value: Any) -> Any:
    """Return the function of a method, property or decorated function."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value


def find_code(code: CodeType, name: str) -> CodeType:
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and constant.co_name == name:
            return constant
    raise ValueError(f"no function {name} in {code.co_name}")


def run_without(wait: Wait | None, name: str, delays: str) -> Any:
    """Return the results of a training run or operation without a wait."""
    before: Callable[[], None] | None = None
    if wait is not None:
        before = functools.partial(remove, wait)
    settings = {"FAKE_NCCL_TIMEOUT": "15", **DELAYS.get(delays, {})}
    if name in OPERATIONS:
        return run_operation(name, timeout=90, before=before, **settings)
    num_devices, flags = RUNS[name]
    return train_ranks(num_devices, BASE + flags, timeout=90, before=before, **settings)


run_completely = functools.cache(functools.partial(run_without, None))


def find_notice(wait: Wait, all_delays: list[str]) -> str:
    """Return which run and delays notice that a wait is missing, or an empty string."""
    for name in REACHED_BY[wait.file]:
        expected = run_completely(name, "none")
        for delays in all_delays:
            try:
                if run_without(wait, name, delays) != expected:
                    return f"other results of {name} with late {delays}"
            except RankError as error:
                last = str(error).strip().splitlines()[-1]
                return f"error of {name} with late {delays}: {last[:90]}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="parts of file names; default: all files")
    parser.add_argument("--delays", nargs="*", choices=list(DELAYS), default=list(DELAYS))
    args = parser.parse_args()
    waits = []
    for file in REACHED_BY:
        if not args.files or any(pattern in Path(file).name for pattern in args.files):
            waits += [wait for wait in find_waits(file) if wait.name not in UNNEEDED]
    noticed = 0
    for wait in waits:
        notice = find_notice(wait, args.delays)
        noticed += bool(notice)
        print(f"{wait}\n    {notice or 'NOT NOTICED'}", flush=True)
    print(f"{noticed} of {len(waits)} removed waits noticed")


if __name__ == "__main__":
    # Ranks import their functions by the name of this module.
    from tests.fake_cuda.mutations import main as run_as_module

    run_as_module()
