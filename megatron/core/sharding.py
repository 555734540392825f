"""Sharding of a parameter: the part of the global tensor that each rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron.core.arithmetic import divide
from megatron.core.dist_checkpointing.mapping import Box, Shape, ShardedTensor
from megatron.core.parallel_state import Axis


@dataclass(frozen=True)
class Sharding:
    """Division of a parameter into equal parts: over TP, or over EP and ETP for experts.

    The default is a parameter that every rank holds as a whole. A layer declares the sharding once,
    in `make_parameter`; local shapes, initial values, checkpoints, norms of the whole model and
    Muon's matrices follow from it.
    """

    dim: int | None = None
    """The dimension that is split over `axis`; None if it is replicated."""
    axis: Axis = Axis()
    """TP, or ETP for experts."""
    blocks: int = 1
    """Number of matrices that are stacked along `dim` (gate and up), each of which is split."""
    ep: Axis | None = None
    """For experts: the axis over which dimension 0, the experts of a layer, is distributed."""
    num_rows: int | None = None
    """Rows of the global tensor if the last local rows are padding (vocabulary). Default: all."""
    row_blocks: tuple[int, ...] = ()
    """Rows repeat in blocks of these sizes, which belong to different matrices (query, key and
    value of each group).
    """

    @property
    def is_split(self) -> bool:
        """Return whether a dimension is split over `axis`, which may have a single rank."""
        return self.dim is not None

    @property
    def is_expert(self) -> bool:
        """Return whether replicas are on the expert-data-parallel instead of the DP ranks."""
        return self.ep is not None

    def split_dim_of_matrix(self, num_dims: int) -> int | None:
        """Return which dimension (0 or 1) of each matrix is cut; None if ranks hold whole ones."""
        if self.dim is None or self.axis.size == 1:
            return None
        # The matrix is the last two dimensions; experts have another one before them.
        return self.dim - (num_dims - 2)

    def local_shape(self, shape: Shape) -> Shape:
        """Return the shape of a rank's part of a tensor of `shape`, which includes the padding."""
        local = list(shape)
        if self.ep is not None:
            local[0] = divide(local[0], self.ep.size, "experts over the expert-parallel ranks")
        if self.dim is not None:
            # A rank has an equal part of every block.
            num_parts = self.blocks * self.axis.size
            quantity = (
                f"dimension {self.dim} of a parameter over {self.blocks} blocks and "
                f"{self.axis.size} tensor-parallel ranks"
            )
            block_length = divide(local[self.dim], num_parts, quantity)
            local[self.dim] = block_length * self.blocks
        return tuple(local)

    def global_shape(self, local_shape: Shape) -> Shape:
        """Return the shape of the whole tensor without padding, from the shape of a rank's part."""
        whole = list(local_shape)
        if self.ep is not None:
            whole[0] *= self.ep.size
        if self.dim is not None:
            whole[self.dim] *= self.axis.size
        if self.num_rows is not None:
            whole[0] = self.num_rows
        return tuple(whole)

    def describe(self, key: str, param: Tensor) -> ShardedTensor:
        """Return the global tensor `key` with the boxes that `param` holds of it."""
        local = param.detach()
        shape = self.global_shape(tuple(local.shape))
        boxes = self._make_boxes(local)
        return ShardedTensor(key, shape, local.dtype, boxes, param)

    def _make_boxes(self, local: Tensor) -> tuple[Box, ...]:
        """Return views of `local` that tile it in row-major order, except for its padding."""
        offset = [0] * local.dim()
        if self.ep is not None:
            offset[0] = self.ep.rank * local.shape[0]
        # Replicated over TP: one box, for experts with the rank's range of experts.
        if self.dim is None:
            return (Box(tuple(offset), local),)
        if self._has_scattered_rows():
            return self._make_box_per_block(local, offset)
        offset[self.dim] = self.axis.rank * local.shape[self.dim]
        if self.num_rows is not None:
            # The last ranks may have a few rows of the vocabulary, or padding only.
            rows_without_padding = max(0, self.num_rows - offset[0])
            local = local[:rows_without_padding]
        if len(local) == 0:
            return ()
        return (Box(tuple(offset), local),)

    def _has_scattered_rows(self) -> bool:
        """Return whether the local rows come from separate places of the global tensor."""
        if self.axis.size == 1:
            return False
        # The rows of other ranks are between those of a rank's experts, and between its blocks.
        is_row_of_expert = self.is_expert and self.dim == 1
        return self.blocks > 1 or is_row_of_expert

    def _make_box_per_block(self, local: Tensor, offset: list[int]) -> tuple[Box, ...]:
        """Return one box for each block of each expert, or of the only matrix of a dense layer."""
        assert self.dim is not None
        num_rows = local.shape[self.dim] // self.blocks  # of a block on this rank
        # Experts: views [1, rows, columns]
        matrices = local.split(1) if self.is_expert else (local,)
        boxes = []
        for index, matrix in enumerate(matrices):
            for block in range(self.blocks):
                block_rows = matrix.narrow(self.dim, block * num_rows, num_rows)
                start = list(offset)
                start[0] += index
                start[self.dim] = (block * self.axis.size + self.axis.rank) * num_rows
                boxes.append(Box(tuple(start), block_rows))
        return tuple(boxes)


REPLICATED = Sharding()
