"""Operations on lazy tensors equal those of torch on whole tensors, for every box and as pickles."""

import itertools
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron.conversion.huggingface.safetensors_files import open_safetensors
from megatron.conversion.model_space.lazy_tensors import (
    cast,
    concatenate,
    cut_blocks,
    flatten,
    gather_rows,
    make_zeros,
    repeat,
    reshape,
    scatter_rows,
    select,
    stack,
    transpose,
    unflatten,
    view_box,
    view_tensor,
)
from megatron.conversion.model_space.pieces import map_fused_qkv, map_separate_qkv, map_skipped
from megatron.conversion.quantization.encodings import dequantize
from megatron.conversion.quantization.fp8_writing import quantize_lazily
from megatron.core.dist_checkpointing.mapping import LazyTensor, narrow

MATRIX = torch.arange(24.0).view(6, 4)
OTHER = -torch.arange(8, dtype=torch.bfloat16).view(2, 4)
STACK = torch.arange(24.0).view(2, 3, 4)


def skip_rows(tensor: LazyTensor) -> LazyTensor:
    """Return the last four rows of a matrix of six."""
    return gather_rows([tensor], map_skipped(4, 2))


LAZY_MATRIX = view_tensor(MATRIX)
LAZY_STACK = view_tensor(STACK)
LAZY_TRANSPOSE = view_tensor(MATRIX.t().contiguous())
CASES: dict[str, tuple[LazyTensor, torch.Tensor]] = {
    "cast": (
        cast(LAZY_MATRIX, torch.float16),
        MATRIX.half(),
    ),
    "make_zeros": (
        make_zeros((2, 3), torch.float16),
        torch.zeros(2, 3).half(),
    ),
    "transpose": (
        transpose(LAZY_MATRIX),
        MATRIX.t(),
    ),
    "reshape": (
        reshape(LAZY_MATRIX, (8, 3)),
        MATRIX.view(8, 3),
    ),
    "select": (
        select(LAZY_STACK, 1),
        STACK[1],
    ),
    "flatten": (
        flatten(view_tensor(STACK[1:])),
        STACK[1].reshape(-1),
    ),
    "unflatten": (
        unflatten(view_tensor(STACK.view(-1)), 8, (2, 2, 4)),
        STACK.view(6, 4)[2:].view(2, 2, 4),
    ),
    "view_box": (
        view_box(LAZY_STACK, (0, 1, 1), (2, 2, 3)),
        STACK[:, 1:, 1:],
    ),
    "repeat": (
        repeat(LAZY_MATRIX, 3),
        MATRIX.expand(3, 6, 4),
    ),
    "stack": (
        stack([LAZY_MATRIX, view_tensor(-MATRIX)]),
        torch.stack([MATRIX, -MATRIX]),
    ),
    "concatenate rows": (
        concatenate([LAZY_MATRIX, view_tensor(OTHER)], 0),
        torch.cat([MATRIX, OTHER]),
    ),
    "concatenate columns": (
        concatenate([LAZY_MATRIX, LAZY_MATRIX], 1),
        torch.cat([MATRIX, MATRIX], 1),
    ),
    "gather_rows": (
        skip_rows(LAZY_MATRIX),
        MATRIX[2:],
    ),
    "gather_rows of transpose": (
        skip_rows(transpose(LAZY_TRANSPOSE)),
        MATRIX[2:],
    ),
    "scatter_rows": (
        scatter_rows(LAZY_MATRIX, map_skipped(6, 2), 0),
        torch.cat([torch.zeros(2, 4), MATRIX]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_box_equals_that_of_torch(name: str) -> None:
    original, expected = CASES[name]
    tensor = pickle.loads(pickle.dumps(original))
    assert tensor.shape == tuple(expected.shape)
    assert tensor.dtype == expected.dtype
    assert torch.equal(tensor.read_all(), expected)

    ranges = [itertools.combinations(range(size + 1), 2) for size in expected.shape]
    for bounds in itertools.product(*ranges):
        offset = tuple(start for start, _ in bounds)
        shape = tuple(stop - start for start, stop in bounds)
        assert torch.equal(tensor.read(offset, shape), narrow(expected, offset, shape))


@pytest.mark.parametrize("row_map", [map_separate_qkv(4, 2, 2), map_fused_qkv(4, 2, 2, blocks=1)])
def test_scattered_rows_are_gathered(row_map) -> None:
    num_rows = sum(len(run.rows) for run in row_map)
    matrix = torch.arange(num_rows * 3.0).view(num_rows, 3)
    num_tensors = 1 + max(run.source for run in row_map)
    scattered = [scatter_rows(view_tensor(matrix), row_map, index) for index in range(num_tensors)]
    assert sum(tensor.shape[0] for tensor in scattered) == num_rows
    assert torch.equal(gather_rows(scattered, row_map).read_all(), matrix)


def test_blocks_have_whole_units_and_cover_the_tensor() -> None:
    tensor = replace(make_zeros((10, 4), torch.float32), min_rows=3)
    assert list(cut_blocks(tensor, 16)) == [
        ((0, 0), (3, 4)),
        ((3, 0), (3, 4)),
        ((6, 0), (3, 4)),
        ((9, 0), (1, 4)),
    ]
    assert list(cut_blocks(make_zeros((), torch.float32), 16)) == [((), ())]
    assert list(cut_blocks(make_zeros((2, 0), torch.float32), 16)) == []


def test_quantized_matrix_is_read_as_a_pickle(tmp_path: Path) -> None:
    matrix = torch.randn(200, 130)
    values, scales = quantize_lazily(view_tensor(matrix), "w", 128, 128)
    blocks = [values.read(*box) for box in cut_blocks(values, 1)]
    stored = {"w": torch.cat(blocks), "w_scale_inv": scales.read_all()}
    save_file(stored, tmp_path / "model.safetensors")

    tensors = open_safetensors(tmp_path / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    matrices = dequantize(tensors, settings, torch.float32, tmp_path)
    restored = pickle.loads(pickle.dumps(matrices["w"]))

    assert torch.allclose(restored.read_all(), matrix, rtol=0.07, atol=0.02)
    # Scales do not depend on whether the values were read before.
    assert torch.equal(scales.read_all(), stored["w_scale_inv"])
