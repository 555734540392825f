"""Exports next to checkpoints: staged bytes in strided places of other files, and failures."""

import itertools
import math
import os
import random
import signal
import time
from dataclasses import replace

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor, is_complete
from megatron.core.dist_checkpointing.files import clean_up
from megatron.core.dist_checkpointing.mapping import Box
from megatron.core.dist_checkpointing.saving.model_export import (
    ExportFile,
    ExportPlan,
    StagedTarget,
    locate_boxes,
)
from megatron.core.dist_checkpointing.saving.saver import AsyncSaver
from tests.support.processes import is_running

HEADER = b"header of any length"
ROWS = 3000
COLUMNS = 1700  # 20 MB in fp32, more than two slots
EXPERTS = 5


def make_state():
    """Return a matrix in two boxes of columns, stacked experts, and a vector."""
    matrix = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
    experts = torch.randn(EXPERTS, 40, 24).to(torch.bfloat16)
    vector = torch.randn(77)
    half = COLUMNS // 2
    boxes = (Box((0, 0), matrix[:, :half].contiguous()), Box((0, half), matrix[:, half:].clone()))
    state = {
        "matrix": ShardedTensor("matrix", (ROWS, COLUMNS), torch.float32, boxes),
        "experts": ShardedTensor.replicated("experts", experts),
        "vector": ShardedTensor.replicated("vector", vector),
        "not exported": ShardedTensor.replicated("not exported", torch.randn(10)),
    }
    return state, matrix, experts, vector


def make_plan(add_small_files=lambda directory: None):
    """Even rows of the matrix, then odd ones; transposed experts; the vector in another file."""
    row = COLUMNS * 4
    start = len(HEADER)
    # Model rows [0, ROWS / 2) are rows 0, 2, 4, ... of the file, the others 1, 3, 5, ...
    half = (ROWS // 2, COLUMNS)
    halves = [((0, 0), half), ((ROWS // 2, 0), half)]
    starts = [(0, start), (0, start + row)]
    matrix = locate_boxes(halves, starts, [(2 * row, 4)] * 2, "ab")
    end = start + ROWS * row
    extents = [((expert, 0, 0), (1, 40, 24)) for expert in range(EXPERTS)]
    starts = [(0, end + expert * 40 * 24 * 2) for expert in range(EXPERTS)]  # [24, 40] each
    experts = locate_boxes(extents, starts, [(0, 2, 40 * 2)] * EXPERTS, "ab")
    vector = locate_boxes([((0,), (77,))], [(1, 0)], [(4,)], "ab")
    tables = {"matrix": matrix, "experts": experts, "vector": vector}
    dtypes = {"matrix": torch.float32, "experts": torch.bfloat16, "vector": torch.float32}
    files = {
        "a": ExportFile(HEADER, end + EXPERTS * 40 * 24 * 2),
        "b": ExportFile(b"", 77 * 4),
    }
    return ExportPlan(dtypes, tables, files, add_small_files)


def to_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def save(root, plan, iteration=1, keep_last=None, staging_mem_limit=None):
    """Save the state with an export, and return the report."""
    state, *_ = make_state()
    target = StagedTarget(root=root / "exports", plan=plan, keep_last=keep_last)
    with AsyncSaver(staging_mem_limit=staging_mem_limit) as saver:
        saver.save(
            state,
            root / f"iter_{iteration:07d}",
            common={},
            export=lambda save_id: target.start(iteration, lambda: None, save_id),
        )
        (report,) = saver.finish()

    assert report.error is None
    assert is_complete(report.directory)
    return report


@pytest.mark.parametrize("staging_mem_limit", [None, 16 << 20], ids=["all staged", "two slots"])
def test_bytes_are_in_their_places(tmp_path, staging_mem_limit):
    torch.manual_seed(1)
    _, matrix, experts, vector = make_state()
    torch.manual_seed(1)
    report = save(tmp_path, make_plan(), staging_mem_limit=staging_mem_limit)
    assert report.exported == tmp_path / "exports/iter_0000001"

    content = torch.empty_like(matrix)
    content[0::2] = matrix[: ROWS // 2]
    content[1::2] = matrix[ROWS // 2 :]
    expected = HEADER + to_bytes(content) + to_bytes(experts.transpose(1, 2))

    assert (report.exported / "a").read_bytes() == expected
    assert (report.exported / "b").read_bytes() == to_bytes(vector)
    assert [path.name for path in (tmp_path / "exports").iterdir()] == ["iter_0000001"]


@pytest.mark.parametrize(
    ("position", "dtype"),
    [
        (0, torch.bfloat16),
        (4096, torch.float32),
        (20, torch.bfloat16),
        (4094, torch.bfloat16),
        (7, torch.float64),
    ],
)
def test_large_runs_begin_at_any_position(tmp_path, position, dtype):
    """Direct writes of whole pages, with ends that share their pages with other tensors."""
    torch.manual_seed(2)
    sizes = (1, 70_001, 900_000, 3, 1_500_000)  # elements, with direct writes for all but two
    tensors = {}
    tables = {}
    for index, size in enumerate(sizes):
        key = f"tensor {index}"
        tensors[key] = torch.randn(size)
        start = position + sum(sizes[:index]) * dtype.itemsize
        tables[key] = locate_boxes([((0,), (size,))], [(0, start)], [(dtype.itemsize,)], "a")

    header = bytes(range(1, 251)) * 17
    files = {"a": ExportFile(header[:position], position + sum(sizes) * dtype.itemsize)}
    plan = ExportPlan(dict.fromkeys(tables, dtype), tables, files, lambda directory: None)
    target = StagedTarget(root=tmp_path / "exports", plan=plan)
    state = {key: ShardedTensor.replicated(key, tensor) for key, tensor in tensors.items()}
    with AsyncSaver() as saver:
        saver.save(
            state,
            tmp_path / "iter_0000001",
            common={},
            export=lambda save_id: target.start(1, lambda: None, save_id),
        )
        (report,) = saver.finish()

    assert report.error is None
    assert report.warning is None

    content = (report.exported / "a").read_bytes()
    assert content[:position] == header[:position]
    assert content[position:] == to_bytes(torch.cat(list(tensors.values())).to(dtype))


def test_incomplete_export_is_not_committed(tmp_path):
    """A tensor that the plan misses a part of."""
    plan = make_plan()
    tables = {**plan.tables, "matrix": plan.tables["matrix"].take(slice(1))}
    report = save(tmp_path, replace(plan, tables=tables))
    assert report.exported is None

    missing = math.prod((ROWS // 2, COLUMNS)) * 4
    assert f"have written {plan.nbytes - missing} of {plan.nbytes} bytes" in report.warning
    assert list((tmp_path / "exports").iterdir()) == []


def test_failure_after_writing_leaves_the_checkpoint(tmp_path):
    def fail(directory):
        raise OSError("no room for the tokenizer")

    report = save(tmp_path, make_plan(fail))
    assert report.exported is None
    assert "no room for the tokenizer" in report.warning
    assert list((tmp_path / "exports").iterdir()) == []


def test_directory_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "exports").write_text("a file")
    report = save(tmp_path, make_plan())
    assert report.exported is None
    assert "the model was not exported" in report.warning


def test_newest_exports_are_kept(tmp_path):
    plan = make_plan()
    for iteration in (1, 2, 3, 9):
        save(tmp_path, plan, iteration)
    # A run that has returned to iteration 3 replaces it, and keeps the exports of another branch.
    save(tmp_path, plan, 3, keep_last=2)
    names = sorted(path.name for path in (tmp_path / "exports").iterdir())
    assert names == ["iter_0000002", "iter_0000003", "iter_0000009"]


def save_forever(directory, iteration):
    """Save in a child process until it is killed; return its process id."""
    child = os.fork()
    if child:
        return child

    try:
        for index in itertools.count(iteration):
            save(directory, make_plan(), index, keep_last=2)
    finally:
        os._exit(1)


def test_kill_leaves_complete_exports_or_none(tmp_path):
    """After a kill at a random moment, an export with its name is complete."""
    rng = random.Random(5)
    exports = tmp_path / "exports"
    _, matrix, *_ = make_state()
    first_row = matrix[0].numpy().tobytes()
    last_row = matrix[-1].numpy().tobytes()
    plan = make_plan()
    iteration = 1
    for _ in range(5):
        child = save_forever(tmp_path, iteration)
        second_export = exports / f"iter_{iteration + 1:07d}"
        while not second_export.exists():
            assert is_running(child), "the child ended by itself"
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.3))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the child ended by itself"

        complete_exports = sorted(exports.glob("iter_*"))
        assert complete_exports
        for directory in complete_exports:
            assert sorted(path.name for path in directory.iterdir()) == ["a", "b"]
            for name, file in plan.files.items():
                assert (directory / name).stat().st_size == file.size
            content = (directory / "a").read_bytes()
            assert content[len(HEADER) :].startswith(first_row)
            row = len(HEADER) + (ROWS - 1) * len(last_row)
            assert content[row : row + len(last_row)] == last_row

        iteration = int(complete_exports[-1].name.removeprefix("iter_")) + 1
        clean_up(exports)
        assert sorted(exports.iterdir()) == complete_exports
