"""Checkpoints of DeepSpeed's engine with the names of Megatron-DeepSpeed, from ranks of TP and PP.

Model-parallel ranks are numbered stage by stage: stage * TP + tensor-parallel rank. Parameters are
joined over the tensor-parallel ranks, after which they are those of a universal checkpoint. The
weights in layer_XX-model_YY-model_states.pt are not read: main parameters are more precise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.conversion.deepspeed.engine_files import EngineFiles, check_states, find_step
from megatron.conversion.deepspeed.names import map_to_model_space
from megatron.conversion.deepspeed.universal_files import NamedStates
from megatron.conversion.model_space.lazy_tensors import concatenate, gather_rows, make_zeros
from megatron.conversion.model_space.pieces import RowRun
from megatron.core.dist_checkpointing.mapping import LazyTensor

# Ends of model-space keys whose parameters are split over columns, or equal on all ranks. All
# others are split over rows.
_SPLIT_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_REPLICATED = (
    "norm.weight",
    "norm.bias",
    "layer_norm_weight",
    "layer_norm_bias",
    "linear_proj.bias",
    "linear_fc2.bias",
    "position_embeddings.weight",
)


class MegatronEngineFiles(NamedStates):
    """The parameters of all ranks."""

    def __init__(self, files: EngineFiles) -> None:
        super().__init__(files.directory, files.description)
        self._files = files
        first = files.ranks[0]
        self.set_state(first.state, self.description)
        self._tensor_parallel = self._find_tensor_parallel_size()
        if first.moments:
            check_states(first, self.description)

        # Parameter groups have the names of all stages.
        self.state["param_shapes"] = self._join_members()

        # A tied embedding is on the first and the last stage; the first one is used.
        self._first_ranks: dict[str, int] = {}
        num_ranks = len(files.ranks)
        for index in range(0, num_ranks, self._tensor_parallel):
            for name in files.ranks[index].param:
                self._first_ranks.setdefault(name, index)
        self.names = map_to_model_space(list(self._first_ranks), self.description)
        self._keys = {name: key for key, name in self.names.items()}
        self.shapes = {}
        for key in self.names:
            self.shapes[key] = self.open_tensor(key, "param").shape

    def _find_tensor_parallel_size(self) -> int:
        """Return the number of ranks that split the parameters of a stage."""
        sizes = self.state.get("checkpoint_parallel_dimensions") or {}
        size = self.args.get("tensor_model_parallel_size") or sizes.get("tp_degree") or 1
        num_ranks = len(self._files.ranks)
        if type(size) is not int or num_ranks % size:
            raise ValueError(
                f"{self.description} has files of {num_ranks} model-parallel ranks, which are not "
                f"stages of {size} tensor-parallel ranks"
            )
        return size

    def _join_members(self) -> list[list[str]]:
        """Return the names in each parameter group, of all ranks."""
        ranks = self._files.ranks
        num_groups = len(ranks[0].members)
        members: list[list[str]] = []
        for group in range(num_groups):
            names: list[str] = []
            for rank in ranks:
                if len(rank.members) != num_groups:
                    raise ValueError(
                        f"{self.description}: its ranks have different numbers of parameter groups"
                    )
                names += rank.members[group]
            members.append(names)
        return members

    def open_tensor(self, key: str, state: str) -> LazyTensor:
        """Return a state of a parameter, joined over the tensor-parallel ranks."""
        name = self.names[key]
        first = self._first_ranks[name]
        last = first + self._tensor_parallel
        slices = []
        for rank in self._files.ranks[first:last]:
            param = rank.param.get(name)
            if param is None:
                raise ValueError(f"{self.description}: a tensor-parallel rank lacks {name}")
            if state == "param":
                slices.append(param)
                continue
            # A frozen parameter has no moments.
            moments = rank.moments.get(state, {})
            zeros = make_zeros(param.shape, torch.float32)
            slices.append(moments.get(name, zeros))
        return self._join(self._keys[name], slices)

    def _join(self, key: str, slices: Sequence[LazyTensor]) -> LazyTensor:
        """Return the parameter that tensor-parallel ranks have slices of."""
        if len(slices) == 1 or key.endswith(_REPLICATED):
            return slices[0]
        if len({tensor.shape for tensor in slices}) > 1:
            raise ValueError(f"{self.description}: slices of {key} have different shapes")
        if key.endswith(_SPLIT_COLUMNS):
            return concatenate(slices, 1)
        if ".linear_fc1." in key and self.args.get("swiglu"):
            # Each rank has rows of the gate, then of the other projection.
            half = slices[0].shape[0] // 2
            runs = []
            for start in (0, half):
                rows = range(start, start + half)
                for index in range(len(slices)):
                    runs.append(RowRun(index, rows))
            return gather_rows(slices, tuple(runs))
        return concatenate(slices, 0)

    def has_padding_marks(self) -> bool:
        """Return False: padding of the vocabulary is recorded in the state, or not at all."""
        return False

    def read_optimizer_state(self) -> dict[str, Any] | None:
        """Return the parameter groups."""
        return {"param_groups": self._files.ranks[0].groups}

    def find_states(self) -> tuple[str, ...]:
        """Return the states that the optimizer has of each parameter."""
        return ("param", *self._files.ranks[0].moments)

    def read_step(self) -> int:
        """Return the optimizer's step."""
        return find_step(self._files.ranks[0], self.description)
