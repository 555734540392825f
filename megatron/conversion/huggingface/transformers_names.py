"""The weights of any source under the names and in the layout of a family of transformers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron.conversion.huggingface.safetensors_files import Stored
from megatron.conversion.huggingface.stored_parameters import StoredParameter
from megatron.conversion.model_space.pieces import pack_rows, read_stored_rows
from megatron.core.dist_checkpointing.mapping import Shape, narrow
from megatron.core.run_checkpoint.source import Source


def name_weights(source: Source, parameters: Iterable[StoredParameter]) -> dict[str, Stored]:
    """Return the weights of `source` by their names in `parameters`."""
    tensors: dict[str, Stored] = {}
    experts: dict[str, list[_NamedTensor]] = {}  # of tensors that contain all experts
    for parameter in parameters:
        dtype = source.tensors[parameter.key].dtype
        for index, (name, shape) in enumerate(
            zip(parameter.names, parameter.stored_shapes(), strict=True)
        ):
            tensor = _NamedTensor(source, parameter, index)
            if parameter.packed is None:
                tensors[name] = Stored(shape, dtype, tensor.read)
            else:
                experts.setdefault(name, []).append(tensor)
                tensors[name] = Stored(shape, dtype, _PackedExperts(experts[name]).read)
    return tensors


@dataclass(frozen=True)
class _NamedTensor:
    """Stored tensor `index` of a parameter of the source, or of one expert of it."""

    source: Source
    parameter: StoredParameter
    index: int

    def read(self, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a box of the stored tensor."""
        parameter = self.parameter
        if parameter.is_scalar:
            return self._read_model((0,), (1,)).view(())
        if parameter.matrix_rows:
            vector = self._read_model((0,), parameter.shape)
            return narrow(vector.view(parameter.stored_shapes()[self.index]), offset, shape)
        if parameter.transposed:
            # Rows of the file are columns of the model.
            columns = self._read_model((0, offset[0]), (parameter.shape[0], shape[0]))
            rows = pack_rows(parameter.row_map, self.index, columns).t()
            return narrow(rows, (0, offset[1]), shape).contiguous()

        def read_rows(first: int, count: int) -> torch.Tensor:
            return self._read_model((first, *offset[1:]), (count, *shape[1:]))

        result = torch.empty(shape, dtype=self.source.tensors[parameter.key].dtype)
        read_stored_rows(parameter.row_map, self.index, offset[0], result, read_rows)
        return result

    def _read_model(self, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a box of the parameter, or of the matrix of the expert."""
        lead = self.parameter.lead
        box = self.source.read(self.parameter.key, lead + offset, (1,) * len(lead) + shape)
        return box.view(shape)


@dataclass(frozen=True)
class _PackedExperts:
    """A stored tensor with the matrices of all experts of a layer."""

    experts: list[_NamedTensor]

    def read(self, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a box of the stored tensor."""
        first = offset[0]
        selected = self.experts[first : first + shape[0]]
        return torch.stack([expert.read(offset[1:], shape[1:]) for expert in selected])
