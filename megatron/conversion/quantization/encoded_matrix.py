"""A matrix that is stored as several tensors, decoded a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron.conversion.model_space.lazy_tensors import reshape
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.encoded_elements import (
    ElementFormat,
    Elements,
    decode_elements,
    unpack_scales,
)

# (index of the matrix in a stack, first row, number of rows) -> [rows, columns] in any float dtype.
# The index is () for a matrix that is not in a stack.
DecodeRows = Callable[[Shape, int, int], torch.Tensor]
# The same arguments -> elements of [rows, columns], or of [rows, groups, columns of a group].
ReadRows = Callable[[Shape, int, int], Elements]

# dtypes of scales in e8m0: eight bits of exponent, without sign and mantissa.
E8M0_DTYPES = (torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8))
# Maximum number of elements that are decoded or encoded at once.
_MAX_ELEMENTS = 1 << 20


def divide_up(total: int, size: int) -> int:
    """Return the quotient, rounded up."""
    return -(-total // size)


@dataclass(frozen=True)
class EncodedMatrix:
    """The stored tensors of a quantized matrix, or of a stack of quantized matrices.

    A tensor has a role in its encoding: "values", "scales", "zero_points", ...
    """

    name: str  # of the decoded tensor
    tensors: Mapping[str, LazyTensor]  # role -> stored tensor
    names: Mapping[str, str]  # role -> name in the files
    settings: Mapping[str, Any]  # `quantization_config` in config.json, checked
    dtype: torch.dtype  # of the decoded tensor
    directory: Path

    def refuse(self, cause: str) -> NoReturn:
        """Raise ValueError for tensors that cannot be decoded."""
        raise ValueError(
            f"{self.directory}: {self.name} {cause}: the file is damaged, or config.json is of "
            "another model. Convert the unquantized original of the model"
        )

    def check_dtype(self, role: str, *dtypes: torch.dtype) -> None:
        """Raise ValueError if a stored tensor has none of `dtypes`."""
        dtype = self.tensors[role].dtype
        if dtype not in dtypes:
            name = self.names[role]
            expected = " or ".join(map(str, dtypes))
            self.refuse(f"is stored with {name} in {dtype}, which must be {expected}")

    def check_shape(self, role: str, *shapes: Shape) -> None:
        """Raise ValueError if a stored tensor has none of `shapes`."""
        shape = self.tensors[role].shape
        if shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            name = self.names[role]
            self.refuse(f"is stored with {name} of shape {list(shape)}, which must be {expected}")

    def check_rank(self, role: str, *ranks: int) -> None:
        """Raise ValueError if a stored tensor has none of these numbers of dimensions."""
        shape = self.tensors[role].shape
        if len(shape) not in ranks:
            name = self.names[role]
            expected = " or ".join(map(str, ranks))
            self.refuse(
                f"is stored with {name} of shape {list(shape)}, which must have {expected} "
                "dimensions"
            )

    def read_rows(self, role: str, lead: Shape, first: int, count: int) -> torch.Tensor:
        """Return rows of a stored tensor: [count, ...].

        `lead` is the index of the matrix in its stack, () without a stack.
        """
        tensor = self.tensors[role]
        row_shape = tensor.shape[len(lead) + 1 :]
        row_offset = (0,) * len(row_shape)
        lead_shape = (1,) * len(lead)
        rows = tensor.read((*lead, first, *row_offset), (*lead_shape, count, *row_shape))
        return rows.view(count, *row_shape)

    def read_scales(self, role: str, lead: Shape, first: int, count: int) -> torch.Tensor:
        """Return rows of scales; scales in e8m0 are converted to fp32.

        Raises ValueError for values that cannot be scales. A block of zeros may have the scale 0.
        """
        scales = self.read_rows(role, lead, first, count)
        if scales.dtype in E8M0_DTYPES:
            scales = unpack_scales(scales)
        self._check_scales(scales, role, lead, first)
        return scales

    def _check_scales(self, scales: torch.Tensor, role: str, lead: Shape, first: int) -> None:
        """Raise ValueError for scales, read from row `first`, that are negative or not finite."""
        # Scales in fp8 are compared in fp32.
        values = scales.float() if scales.dtype.itemsize == 1 else scales
        is_valid = torch.isfinite(values) & (values >= 0)
        if is_valid.all():
            return
        row, *indices = (~is_valid).nonzero()[0].tolist()
        value = values[(row, *indices)].item()
        index = [*lead, first + row, *indices]
        raise ValueError(
            f"{self.directory}: {self.names[role]}{index} is {value}, "
            "but scales are finite and not negative: the weights of this block would be wrong. "
            "The file is damaged, or was written from weights that had diverged: download the "
            "file that contains it again, or convert the unquantized original of the model"
        )

    def with_tensor(self, role: str, shape: Shape) -> EncodedMatrix:
        """Return the matrix with a small stored tensor in another shape."""
        tensor = reshape(self.tensors[role], shape)
        return replace(self, tensors={**self.tensors, role: tensor})

    def decode(self, shape: Shape, decode_rows: DecodeRows, row_step: int = 1) -> LazyTensor:
        """Return the decoded tensor [..., rows, columns] of `shape`.

        A read calls `decode_rows` for at most `_MAX_ELEMENTS` elements at a time. First rows and,
        except at the end of the matrix, numbers of rows are multiples of `row_step`.
        """
        if 0 in shape:
            self.refuse(f"has shape {list(shape)}")
        read = partial(_read_decoded, shape, self.dtype, decode_rows, row_step)
        return LazyTensor(shape, self.dtype, read)


@dataclass(frozen=True)
class MatrixElements:
    """The elements of a matrix, or of a stack of matrices, whose components are read by row."""

    matrix: EncodedMatrix
    shape: Shape  # [..., rows, columns]
    element_format: ElementFormat
    read_rows: ReadRows
    # Columns with one scale: the number of neighbors, or an index for each column. None if they
    # differ between rows, e.g. for blocks that begin in one row and end in the next one.
    column_groups: int | torch.Tensor | None
    row_groups: int | torch.Tensor = 1  # likewise
    row_step: int = 1  # see EncodedMatrix.decode
    arrange: Callable[[LazyTensor], LazyTensor] | None = None  # e.g. transposes the matrix

    def decode(self, dtype: torch.dtype) -> LazyTensor:
        """Return the decoded tensor."""
        decode_rows = partial(_decode_rows, self.read_rows, self.element_format)
        return self._view(decode_rows, dtype)

    def view_component(self, name: str) -> LazyTensor:
        """Return a field of `Elements` for each element, fp32."""
        read_component = partial(_read_component, self.read_rows, name)
        return self._view(read_component, torch.float32)

    def view_groups(self) -> LazyTensor:
        """Return an index for each element, which is the same where elements have one scale."""
        assert self.column_groups is not None
        read_groups = partial(_read_groups, self.row_groups, self.column_groups, self.shape[-1])
        return self._view(read_groups, torch.float64)

    def _view(self, decode_rows: DecodeRows, dtype: torch.dtype) -> LazyTensor:
        """Return a tensor of values of the elements."""
        matrix = replace(self.matrix, dtype=dtype)
        tensor = matrix.decode(self.shape, decode_rows, self.row_step)
        return tensor if self.arrange is None else self.arrange(tensor)


def _decode_rows(
    read_rows: ReadRows, element_format: ElementFormat, lead: Shape, first: int, count: int
) -> torch.Tensor:
    """Decode rows: [count, columns]."""
    elements = read_rows(lead, first, count)
    return decode_elements(elements, element_format).flatten(1)


def _read_component(
    read_rows: ReadRows, name: str, lead: Shape, first: int, count: int
) -> torch.Tensor:
    """Return a component of rows: [count, columns]."""
    elements = read_rows(lead, first, count)
    component: torch.Tensor = getattr(elements, name)
    if name == "codes":
        component = component.view(torch.uint8)
    return component.expand(elements.codes.shape).flatten(1)


def _read_groups(
    row_groups: int | torch.Tensor,
    column_groups: int | torch.Tensor,
    columns: int,
    lead: Shape,
    first: int,
    count: int,
) -> torch.Tensor:
    """Return indices of the scales of rows: [count, columns]."""
    row_indices = _index_groups(row_groups, first, count)
    column_indices = _index_groups(column_groups, 0, columns)
    num_groups = int(column_indices.max()) + 1
    return row_indices[:, None] * num_groups + column_indices


def _index_groups(groups: int | torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Return the indices of the groups of rows or columns: [count]."""
    if isinstance(groups, int):
        return torch.arange(first, first + count) // groups
    return groups[first : first + count]


def _read_decoded(
    decoded_shape: Shape,
    dtype: torch.dtype,
    decode_rows: DecodeRows,
    row_step: int,
    offset: Shape,
    shape: Shape,
) -> torch.Tensor:
    """Return a box of a decoded tensor, cut out of rows that are decoded a few at a time.

    Args:
        decoded_shape: shape of the whole tensor, [..., rows, columns].
        dtype: dtype of the result.
        decode_rows: function that decodes whole rows.
        row_step: number of rows that are decoded together.
        offset: first element of the box in each dimension.
        shape: shape of the box.
    """
    *lead_offset, first_row, first_column = offset
    *lead_shape, num_rows, num_columns = shape
    end_row = first_row + num_rows
    columns = slice(first_column, first_column + num_columns)
    lead_ranges = []
    for first, extent in zip(lead_offset, lead_shape, strict=True):
        lead_ranges.append(range(first, first + extent))

    result = torch.empty(shape, dtype=dtype)
    matrices = result.view(-1, num_rows, num_columns)
    for lead, matrix in zip(product(*lead_ranges), matrices, strict=True):
        for start, stop in split_rows(first_row, end_row, decoded_shape[-1], row_step):
            # Decode whole steps, then cut off the rows that are outside of the box.
            last = min(divide_up(stop, row_step) * row_step, decoded_shape[-2])
            rows = decode_rows(lead, start, last - start)
            begin = max(start, first_row)
            end = min(last, end_row)
            matrix[begin - first_row : end - first_row] = rows[begin - start : end - start, columns]
    return result


def split_rows(first: int, end: int, columns: int, row_step: int = 1) -> Iterator[tuple[int, int]]:
    """Yield the first row and the end of each run of rows that is processed at once.

    Runs begin at multiples of `row_step`, the first one at or before `first`. All runs but the last
    end at one, too.
    """
    max_rows = _MAX_ELEMENTS // columns
    num_steps = max(max_rows // row_step, 1)
    run_length = num_steps * row_step
    for start in range(first - first % row_step, end, run_length):
        yield start, min(start + run_length, end)


def unpack_nibbles(packed: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """Return the codes of 4 bits in the bytes of each row: [rows, 2 * bytes].

    The code in the low bits of a byte is the first one, unless `high_first` is set.
    """
    # A byte becomes a word of 16 bits, whose low byte is the first code.
    words = packed.to(torch.int16)
    if high_first:
        words = (words >> 4) | (words << 8)
    else:
        words |= words << 4
    words &= 0x0F0F
    return words.view(torch.uint8)


def repeat_columns(grid: torch.Tensor, width: int, columns: int) -> torch.Tensor:
    """Return a matrix in which each column of `grid` is repeated `width` times.

    The last column is repeated fewer times if there are fewer than `columns` columns left. A grid
    of one column is returned as it is, since it is broadcast.
    """
    if grid.shape[1] == 1:
        return grid
    return grid.repeat_interleave(width, dim=1)[:, :columns]
