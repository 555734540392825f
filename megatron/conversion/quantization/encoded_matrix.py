"""A matrix that is stored as several tensors, decoded a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron.conversion.model_space.lazy_tensors import reshape
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape

# (index of the matrix in a stack, first row, number of rows) -> [rows, columns], of any float dtype
DecodeRows = Callable[[Shape, int, int], torch.Tensor]

# Index of an e8m0 scale -> 2 ** (index - 127). The last one, NaN, is refused where it is read.
_POWERS_OF_TWO = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(-127, 129))
_POWERS_OF_TWO[-1] = torch.nan
_E8M0_DTYPES = (torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8))
_MAX_ELEMENTS = 4 << 20  # that are decoded at once


@dataclass(frozen=True)
class EncodedMatrix:
    """The stored tensors of a matrix, or of a stack of matrices, by their role."""

    name: str  # of the decoded tensor
    tensors: Mapping[str, LazyTensor]
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
            expected = " or ".join(map(str, dtypes))
            self.refuse(f"is stored with {self.names[role]} in {dtype}, which must be {expected}")

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
            expected = " or ".join(map(str, ranks))
            self.refuse(
                f"is stored with {self.names[role]} of shape {list(shape)}, which must have "
                f"{expected} dimensions"
            )

    def read_rows(self, role: str, lead: Shape, first: int, count: int) -> torch.Tensor:
        """Return rows of a stored tensor, of the matrix `lead` if it is a stack."""
        tensor = self.tensors[role]
        row_shape = tensor.shape[len(lead) + 1 :]
        offset = (*lead, first, *(0,) * len(row_shape))
        shape = (*(1,) * len(lead), count, *row_shape)
        return tensor.read(offset, shape).view(count, *row_shape)

    def read_scales(self, role: str, lead: Shape, first: int, count: int) -> torch.Tensor:
        """Return rows of scales, those of e8m0 in fp32.

        Raises ValueError for values that cannot be scales. A block of zeros may have the scale 0.
        """
        scales = self.read_rows(role, lead, first, count)
        if scales.dtype in _E8M0_DTYPES:
            scales = _POWERS_OF_TWO[scales.view(torch.uint8).int()].float()
        values = scales.float() if scales.dtype.itemsize == 1 else scales
        is_valid = torch.isfinite(values) & (values >= 0)
        if not is_valid.all():
            position = (~is_valid).nonzero()[0].tolist()
            index = [*lead, first + position[0], *position[1:]]
            raise ValueError(
                f"{self.directory}: {self.names[role]}{index} is {values[tuple(position)].item()}, "
                "but scales are finite and not negative: the weights of this block would be wrong. "
                "The file is damaged, or was written from weights that had diverged: download the "
                "file that contains it again, or convert the unquantized original of the model"
            )
        return scales

    def with_tensor(self, role: str, shape: Shape) -> EncodedMatrix:
        """Return the matrix with a small stored tensor in another shape."""
        tensor = reshape(self.tensors[role], shape)
        return EncodedMatrix(
            self.name,
            {**self.tensors, role: tensor},
            self.names,
            self.settings,
            self.dtype,
            self.directory,
        )

    def decode(self, shape: Shape, decode_rows: DecodeRows, row_step: int = 1) -> LazyTensor:
        """Return the decoded tensor; rows are decoded in multiples of `row_step`."""
        if 0 in shape:
            self.refuse(f"has shape {list(shape)}")
        read = partial(_read_decoded, shape, self.dtype, decode_rows, row_step)
        return LazyTensor(shape, self.dtype, read)


def _read_decoded(
    whole: Shape,
    dtype: torch.dtype,
    decode_rows: DecodeRows,
    row_step: int,
    offset: Shape,
    shape: Shape,
) -> torch.Tensor:
    """Return a box, cut out of rows that are decoded a few at a time."""
    *lead_offset, first_row, first_column = offset
    *lead_shape, num_rows, num_columns = shape
    result = torch.empty(shape, dtype=dtype)
    ranges = [
        range(start, start + extent) for start, extent in zip(lead_offset, lead_shape, strict=True)
    ]
    end_row = first_row + num_rows
    columns = slice(first_column, first_column + num_columns)
    for lead, matrix in zip(product(*ranges), result.view(-1, *shape[-2:]), strict=True):
        for start, stop in split_rows(first_row, end_row, whole[-1], row_step):
            last = min(-(-stop // row_step) * row_step, whole[-2])
            rows = decode_rows(lead, start, last - start)
            # Cut off the rows that are outside of the box.
            begin = max(start, first_row)
            end = min(last, end_row)
            matrix[begin - first_row : end - first_row] = rows[begin - start : end - start, columns]
    return result


def split_rows(first: int, end: int, columns: int, row_step: int = 1) -> Iterator[tuple[int, int]]:
    """Yield first and end of runs of rows that are processed at once; all but the last end at a
    multiple of `row_step`, and all begin at one.
    """
    step = max(_MAX_ELEMENTS // columns // row_step, 1) * row_step
    for start in range(first - first % row_step, end, step):
        yield start, min(start + step, end)


def spread(grid: torch.Tensor, width: int, columns: int) -> torch.Tensor:
    """Return a matrix in which each column of `grid` is repeated `width` times."""
    if grid.shape[1] == 1:
        return grid
    return grid.repeat_interleave(width, dim=1)[:, :columns]
