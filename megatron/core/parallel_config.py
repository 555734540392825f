"""Sizes of the parallel axes and the order of ranks on them.

This module does not import torch, because tools parse these flags before they import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.flags import FlagSection, flag


class Place(NamedTuple):
    """Coordinates of a rank on the axes that span the world."""

    tp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0


@dataclass(frozen=True)
class ParallelConfig(FlagSection):
    """Sizes of the parallel axes; data parallelism takes the remaining ranks."""

    tensor_model_parallel_size: int = flag(1, positive=True, divides="num_attention_heads")
    """Number of ranks over which the matrices of each layer are split."""
    pipeline_model_parallel_size: int = flag(1, positive=True)
    """Number of pipeline stages."""
    virtual_pipeline_model_parallel_size: int | None = flag(
        None,
        "--virtual-pipeline-model-parallel-size",
        "--num-virtual-stages-per-pipeline-rank",
        positive=True,
    )
    """Number of model chunks per pipeline stage (interleaved schedule)."""
    microbatch_group_size_per_vp_stage: int | None = flag(
        None, "--microbatch-group-size-per-virtual-pipeline-stage", positive=True
    )
    """Micro-batches that pass a model chunk of a stage before the next chunk. Default: the number
    of stages.
    """
    sequence_parallel: bool = flag(False)
    """Split activations outside tensor-parallel regions along the sequence."""
    use_tp_pp_dp_mapping: bool = flag(False)
    """Order ranks as TP, CP, PP, DP, so that the stages of a replica are neighbors, instead of
    TP, CP, DP, PP.
    """
    context_parallel_size: int = flag(1, positive=True)
    """Number of ranks over which each sequence is split."""
    cp_comm_type: list[str] = flag(
        ("p2p",),
        choices=("p2p", "all_gather", "a2a"),
        aliases={"a2a+p2p": "p2p"},
        alias_note="p2p is used: other messages, the same results",
    )
    """Exchange of keys and values between context-parallel ranks: in a ring (p2p), all at once
    (all_gather), or by exchanging positions for heads (a2a). One value for all layers, or one value
    per layer.
    """
    expert_model_parallel_size: int = flag(1, positive=True, requires={"experts": True})
    """Number of ranks over which the experts of a layer are distributed."""
    expert_tensor_parallel_size: int | None = flag(None, positive=True, meaning="etp_size")
    """Number of ranks over which the matrices of each expert are split. Default: the
    tensor-parallel size.
    """

    def __post_init__(self) -> None:
        types: Any = self.cp_comm_type
        types = [types] if isinstance(types, str) else list(types)
        object.__setattr__(self, "cp_comm_type", types)
        super().__post_init__()

    @property
    def tp_size(self) -> int:
        return self.tensor_model_parallel_size

    @property
    def pp_size(self) -> int:
        return self.pipeline_model_parallel_size

    @property
    def cp_size(self) -> int:
        return self.context_parallel_size

    def cp_comm_type_of(self, layer_number: int) -> str:
        """Return the communication type of layer `layer_number`."""
        if len(self.cp_comm_type) == 1:
            return self.cp_comm_type[0]
        return self.cp_comm_type[layer_number]

    @property
    def vpp_size(self) -> int:
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def replica_size(self) -> int:
        """Number of ranks that process the same sample."""
        return self.tp_size * self.cp_size * self.pp_size

    @property
    def ep_size(self) -> int:
        return self.expert_model_parallel_size

    @property
    def etp_size(self) -> int:
        if self.expert_tensor_parallel_size is None:
            return self.tp_size
        return self.expert_tensor_parallel_size

    @property
    def splits_experts(self) -> bool:
        """True if experts are split differently from the matrices of dense layers."""
        return (self.etp_size, self.ep_size) != (self.tp_size, 1)

    def edp_size(self, world_size: int) -> int:
        """Return the number of replicas of each expert.

        Raises ValueError if the sizes do not divide `world_size`.
        """
        self.dp_size(world_size)
        ranks = self.etp_size * self.ep_size * self.pp_size
        if world_size % ranks != 0:
            raise ValueError(
                f"world size {world_size} is not a multiple of expert tensor ({self.etp_size}) x "
                f"expert ({self.ep_size}) x pipeline ({self.pp_size}) = {ranks} ranks: change "
                "--expert-tensor-parallel-size / --expert-model-parallel-size, or the number of "
                "processes"
            )
        same_pipelines = self.etp_size * self.ep_size == self.tp_size * self.cp_size
        if self.use_tp_pp_dp_mapping and not same_pipelines:
            raise ValueError(
                f"--use-tp-pp-dp-mapping with --expert-model-parallel-size {self.ep_size}: the "
                "pipelines of experts and of dense layers would consist of different ranks; remove "
                "--use-tp-pp-dp-mapping"
            )
        return world_size // ranks

    def dp_size(self, world_size: int) -> int:
        """Return the data-parallel size.

        Raises ValueError if the sizes of the other axes do not divide `world_size`.
        """
        if world_size % self.replica_size != 0:
            context = ""
            context_flag = ""
            if self.cp_size > 1:
                context = f" x context ({self.cp_size})"
                context_flag = "--context-parallel-size / "
            raise ValueError(
                f"world size {world_size} is not a multiple of tensor ({self.tp_size}){context} x "
                f"pipeline ({self.pp_size}) = {self.replica_size} ranks: start a multiple of "
                f"{self.replica_size} processes or change --tensor-model-parallel-size / "
                f"{context_flag}--pipeline-model-parallel-size"
            )
        # Chunks of a stage exist only in a pipeline.
        if self.vpp_size > 1 and self.pp_size == 1:
            raise ValueError(
                f"--virtual-pipeline-model-parallel-size {self.vpp_size} needs "
                "--pipeline-model-parallel-size > 1"
            )
        return world_size // self.replica_size

    def place(self, rank: int, world_size: int) -> Place:
        """Return the coordinates of a rank."""
        # TP varies fastest, then CP; the mapping decides between DP and PP.
        remainder, tp = divmod(rank, self.tp_size)
        remainder, cp = divmod(remainder, self.cp_size)
        if self.use_tp_pp_dp_mapping:
            dp, pp = divmod(remainder, self.pp_size)
        else:
            pp, dp = divmod(remainder, self.dp_size(world_size))
        return Place(tp, cp, dp, pp)

    def rank_at(self, coordinates: Place, world_size: int) -> int:
        """Return the rank with the given coordinates."""
        tp, cp, dp, pp = coordinates
        outer = dp + self.dp_size(world_size) * pp
        if self.use_tp_pp_dp_mapping:
            outer = pp + self.pp_size * dp
        return tp + self.tp_size * (cp + self.cp_size * outer)
