"""Matrices that stay encoded in memory: bytes of codes, and scales of groups of columns.

    value = (table[code] - zero point) * scale

    codes          1, 2, 4 or 8 bits; integers of 3 bits are stored in 4
    scales         one per row and group, in the dtype of the files
    zero points    likewise; one byte
    matrix scales  a factor or divisor of the scales of a row, in nvfp4

`ElementFormat` defines the arithmetic, so one representation serves all encodings. The values are
bitwise those that `megatron/conversion/quantization` decodes.

Groups are usually neighboring columns, but need not be (act order of GPTQ). A rank of row-parallel
layers may have parts of groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.dist_checkpointing.mapping import Shape
from megatron.core.encoded_elements import (
    ElementFormat,
    Elements,
    join_scales,
    make_values,
    pack_scales,
    unpack_scales,
)

# Elements that are encoded or decoded at once, which limits temporary memory to about 200 MB
_MAX_ELEMENTS = 1 << 24


@dataclass
class ColumnGroups:
    """Columns with one scale per row. Ranks number the groups of their own columns."""

    indices: Tensor  # int64 [columns]
    first_columns: Tensor  # int64 [groups]
    are_ranges: bool  # of neighboring columns, equally many in each

    @classmethod
    def from_indices(cls, indices: Tensor) -> ColumnGroups:
        """Return the groups of columns with the same index."""
        unique, local_indices = indices.unique(return_inverse=True)
        columns = torch.arange(len(indices))
        first_columns = torch.full_like(unique, len(indices), dtype=torch.long)
        first_columns.scatter_reduce_(0, local_indices, columns, "amin")
        size = max(len(indices) // len(unique), 1)
        are_ranges = torch.equal(local_indices, columns // size)
        return cls(local_indices, first_columns, are_ranges)

    @classmethod
    def ranges(cls, num_columns: int, size: int) -> ColumnGroups:
        """Return groups of `size` neighboring columns, which divides their number."""
        columns = torch.arange(num_columns)
        return cls(columns // size, columns[::size], are_ranges=True)

    def fit(self, indices: Tensor) -> bool:
        """Return whether the columns of each group have one index in each row of `indices`."""
        expected = indices[:, self.first_columns][:, self.indices]
        return torch.equal(indices, expected)


@dataclass
class EncodedWeight:
    """A matrix `[..., rows, columns]`, or a stack of matrices, in the encoding `element_format`."""

    element_format: ElementFormat
    groups: ColumnGroups
    table: Tensor  # values of a byte, [256, codes_per_byte], in the dtype of products
    packed: Tensor  # uint8 [..., rows, bytes]; the first code of a byte is in its high bits
    scales: Tensor  # [..., rows, groups]
    zero_points: Tensor | None  # [..., rows, groups]
    matrix_scales: Tensor | None  # fp32 [..., rows, 1]: layers consist of several matrices
    group_of_column: Tensor | None  # int64 [columns], unless groups are ranges

    @classmethod
    def allocate(
        cls,
        element_format: ElementFormat,
        shape: Shape,
        groups: ColumnGroups,
        device: torch.device,
    ) -> EncodedWeight:
        """Return a matrix of zeros."""
        *lead, columns = shape
        num_groups = len(groups.first_columns)
        table = make_table(element_format.values)
        num_bytes = -(-columns // table.shape[1])
        zero_points: Tensor | None = None
        if element_format.zero_point_dtype is not None:
            dtype = element_format.zero_point_dtype
            zero_points = torch.zeros(*lead, num_groups, dtype=dtype, device=device)
        matrix_scales: Tensor | None = None
        if element_format.matrix_scale is not None:
            matrix_scales = torch.zeros(*lead, 1, device=device)
        return cls(
            element_format=element_format,
            groups=groups,
            table=table.to(device, element_format.dtype),
            packed=torch.zeros(*lead, num_bytes, dtype=torch.uint8, device=device),
            scales=torch.zeros(*lead, num_groups, dtype=element_format.scale_dtype, device=device),
            zero_points=zero_points,
            matrix_scales=matrix_scales,
            group_of_column=None if groups.are_ranges else groups.indices.to(device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the components of all elements."""
        tensors = (self.packed, self.scales, self.zero_points, self.matrix_scales)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def store_rows(self, start: int, elements: Elements) -> None:
        """Store rows from `start` on, counted in the stack: components of shape [rows, columns].

        Scales and zero points are those of the first column of each group.
        """
        rows = slice(start, start + len(elements.codes))
        codes = elements.codes.to(self.device)
        _as_rows(self.packed)[rows] = pack_codes(codes, self.table.shape[1])

        columns = self.groups.first_columns
        scales = elements.scales[:, columns]
        _as_rows(self.scales)[rows] = pack_scales(scales, self.scales.dtype).to(self.device)
        if self.zero_points is not None:
            assert elements.zero_points is not None
            zero_points = elements.zero_points[:, columns]
            _as_rows(self.zero_points)[rows] = zero_points.to(self.device, self.zero_points.dtype)
        if self.matrix_scales is not None:
            assert elements.matrix_scales is not None
            matrix_scales = elements.matrix_scales[:, :1]
            _as_rows(self.matrix_scales)[rows] = matrix_scales.to(self.device)

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the values in `dtype`."""
        lead = self.packed.shape[:-1]
        columns = len(self.groups.indices)
        values = torch.empty(*lead, columns, dtype=dtype, device=self.device)
        value_rows = _as_rows(values)
        run_length = max(_MAX_ELEMENTS // columns, 1)
        for start in range(0, len(value_rows), run_length):
            rows = slice(start, start + run_length)
            self._decode_rows(rows, value_rows[rows])
        return values

    def _decode_rows(self, rows: slice, out: Tensor) -> None:
        """Write the values of some rows of the stack to `out` [rows, columns]."""
        dtype = self.element_format.dtype

        # Values of the codes: [rows, bytes, codes_per_byte] -> [rows, columns]
        packed = _as_rows(self.packed)[rows]
        values = F.embedding(packed.int(), self.table).flatten(1)
        values = values[:, : out.shape[1]]

        # Scales and zero points: [rows, groups]
        scales = self._read_scales(rows).to(dtype)
        zero_points: Tensor | None = None
        if self.zero_points is not None:
            zero_points = _as_rows(self.zero_points)[rows].to(dtype)

        # Broadcast them to [rows, groups, columns of a group], or to [rows, columns].
        if self.group_of_column is None:
            num_groups = scales.shape[1]
            values = values.unflatten(1, (num_groups, -1))
            out = out.unflatten(1, (num_groups, -1))
            scales = scales.unsqueeze(2)
            zero_points = None if zero_points is None else zero_points.unsqueeze(2)
        else:
            columns = self.group_of_column
            scales = scales[:, columns]
            zero_points = None if zero_points is None else zero_points[:, columns]

        if zero_points is not None:
            values -= zero_points
        self._multiply(values, scales, out)

    def _read_scales(self, rows: slice) -> Tensor:
        """Return the scales of groups, with those of matrices: [rows, groups]."""
        scales = unpack_scales(_as_rows(self.scales)[rows])
        matrix_scales: Tensor | None = None
        if self.matrix_scales is not None:
            matrix_scales = _as_rows(self.matrix_scales)[rows]
        return join_scales(scales, matrix_scales, self.element_format)

    def _multiply(self, values: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the products to `out`, rounded as the format specifies. Overwrites `values`."""
        factor = self.element_format.factor
        roundings = list(self.element_format.roundings)
        while roundings and roundings[-1] == out.dtype:
            roundings.pop()  # `out` rounds

        # Without other steps, one kernel multiplies and rounds.
        if factor is None and not roundings:
            torch.mul(values, scales, out=out)
            return
        values *= scales
        if factor is not None:
            values *= factor
        for rounded_dtype in roundings:
            values = values.to(rounded_dtype)
        out.copy_(values)


def pack_codes(codes: Tensor, per_byte: int) -> Tensor:
    """Return codes `[rows, columns]` as bytes `[rows, columns / per_byte]`, rounded up."""
    codes = F.pad(codes, (0, -codes.shape[1] % per_byte))
    packed = codes[:, ::per_byte]
    for index in range(1, per_byte):
        packed = packed << 8 // per_byte | codes[:, index::per_byte]
    return packed


def make_table(values: tuple[float, ...]) -> Tensor:
    """Return the values of each byte, `[256, codes_per_byte]`. Codes have 1, 2, 4 or 8 bits."""
    bits = 1
    while 2**bits < len(values):
        bits *= 2
    padded = F.pad(make_values(values), (0, 2**bits - len(values)))
    per_byte = 8 // bits
    return torch.cartesian_prod(*[padded] * per_byte).view(-1, per_byte)


def _as_rows(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as `[rows, columns]`."""
    return tensor.view(-1, tensor.shape[-1])
