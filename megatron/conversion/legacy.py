"""Reads Megatron-LM's legacy directories (`mp_rank_XX[_YYY]/model_optim_rng.pt`) as a `Source`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.flat_buffer import Placed, bucket_size_of, plan_buckets
from megatron.conversion.megatron_common import arguments, param_groups, stored_model, training_state
from megatron.conversion.model_space import OPTIMIZER_STATES, TensorInfo, TrainingState, optimizer_key
from megatron.conversion.pieces import Piece, PieceTable, region_of, region_of_flat
from megatron.conversion.rank_layout import Layout, LocalParameter, rank_parameters
from megatron.core.dist_checkpointing import CheckpointError, Shape, safe_load

MODEL_FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"

# With Transformer Engine's modules the norms belong to the projections.
_FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def rank_directory(tp: int, pp: int, pp_size: int) -> str:
    return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if pp_size > 1 else "")


def is_legacy(directory: Path) -> bool:
    return any(directory.glob(f"mp_rank_*/{MODEL_FILE}"))


class LegacySource:
    """One iteration directory; every file is mapped, so only what is read costs memory."""

    def __init__(self, directory: Path) -> None:
        self.description = f"legacy checkpoint {directory}"
        self._directory = directory
        first = self._load(sorted(directory.glob(f"mp_rank_*/{MODEL_FILE}"))[0])
        self.args = arguments(first, str(directory))
        layout = Layout.from_args(self.args)
        tp_size, pp_size = layout.parallel.tp_size, layout.parallel.pp_size
        rows_per_rank = _models(first)[0]["embedding.word_embeddings.weight"].shape[0]
        # Megatron-LM trains the rows that pad the vocabulary, so they are part of its model; ours says how many count.
        vocab_size = self.args.setdefault("model_vocab_size", rows_per_rank * tp_size)
        self.config = stored_model(self.args, vocab_size, self.description)
        self.unused: list[str] = []
        self._table = PieceTable()
        groups = param_groups(first.get("optimizer"))
        for tp, pp in layout.ranks:
            folder = directory / rank_directory(tp, pp, pp_size)
            content = first if (tp, pp) == (0, 0) else self._load(folder / MODEL_FILE)
            chunks = rank_parameters(self.config, layout, tp, pp, divisible_by=rows_per_rank)
            self._add_weights(content, chunks, folder)
            self._add_optimizer(content, chunks, folder, pp)
        self.training: TrainingState | None = training_state(first, self.args, groups)
        self.training.rng = {"rng_state": first.get("rng_state")}
        self.tensors: Mapping[str, TensorInfo] = self._table.tensors

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        return self._table.read(key, offset, shape)

    def _load(self, path: Path) -> dict[str, Any]:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: the stored arguments call for this rank")
        content = safe_load(path)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds a {type(content).__name__}, not a checkpoint")
        return content

    def _add_weights(self, content: dict[str, Any], chunks: list[list[LocalParameter]], folder: Path) -> None:
        models = _models(content)
        if len(models) != len(chunks):
            raise CheckpointError(f"{folder}: {len(models)} model chunks, but the arguments say {len(chunks)}")
        for model, parameters in zip(models, chunks, strict=True):
            names = {parameter.name: _stored_name(model, parameter, folder) for parameter in parameters}
            for parameter in parameters:
                tensor = model[names[parameter.name]]
                if tuple(tensor.shape) != parameter.shape:
                    raise CheckpointError(
                        f"{folder / MODEL_FILE}: {parameter.name} has shape {tuple(tensor.shape)}, but the stored "
                        f"arguments make it {parameter.shape}"
                    )
                self._add_tensor(parameter.key, parameter, tensor)
            extra = set(model) - set(names.values())
            self.unused += [f"{folder.name}: {name}" for name in sorted(extra) if not name.endswith("_extra_state")]

    def _add_tensor(self, key: str, parameter: LocalParameter, tensor: torch.Tensor) -> None:
        flat = tensor.reshape(-1)
        info = TensorInfo(parameter.global_shape, tensor.dtype)
        for box in parameter.boxes:
            numel = torch.Size(box.shape).numel()
            values = flat[box.start : box.start + numel].view(box.shape)
            self._table.add(key, info, Piece(box.offset, box.shape, region_of(values)))

    def _add_optimizer(
        self, content: dict[str, Any], chunks: list[list[LocalParameter]], folder: Path, pp: int
    ) -> None:
        if (folder / OPTIMIZER_FILE).is_file():
            buffers = self._load(folder / OPTIMIZER_FILE)
            for index, parameters in enumerate(chunks):
                self._add_buffer(buffers, index, parameters, folder, pp)
            return
        optimizer = content.get("optimizer") or {}
        inner = optimizer.get("optimizer", optimizer)
        if "state" in inner:
            self._add_states(inner, optimizer.get("fp32_from_fp16_params"), chunks)

    def _add_buffer(
        self, buffers: dict[Any, Any], chunk: int, parameters: list[LocalParameter], folder: Path, pp: int
    ) -> None:
        """`distrib_optim.pt`: flat tensors of the whole chunk, buckets end to end."""
        where = folder / OPTIMIZER_FILE
        if not buffers.get("buckets_coalesced") or len(buffers.get(chunk, {})) != 1:
            raise CheckpointError(f"{where}: model chunk {chunk} is not one buffer of coalesced buckets")
        (states,) = buffers[chunk].values()
        placed, sizes = plan_buckets(parameters, bucket_size_of(self.args, pp, chunk))
        if sum(sizes) != states["numel_unpadded"]:
            raise CheckpointError(
                f"{where}: {states['numel_unpadded']} elements, but the stored arguments make it {sum(sizes)}"
            )
        for state in OPTIMIZER_STATES:
            self._add_flat(state, states[state], placed, sizes)

    def _add_flat(self, state: str, flat: torch.Tensor, placed: Sequence[Placed], sizes: Sequence[int]) -> None:
        for parameter, bucket, start in placed:
            info = TensorInfo(parameter.global_shape, flat.dtype)
            first = sum(sizes[:bucket]) + start
            for box in parameter.boxes:
                region = region_of_flat(partial(flat.narrow, 0), first + box.start, box.shape)
                self._table.add(optimizer_key(state, parameter.key), info, Piece(box.offset, box.shape, region))

    def _add_states(
        self, inner: dict[str, Any], main: list[list[torch.Tensor]] | None, chunks: list[list[LocalParameter]]
    ) -> None:
        """torch's own form: numbered parameters, those with weight decay first; bf16 has its main parameters apart."""
        everything = [parameter for parameters in chunks for parameter in parameters]
        groups = [[p for p in everything if p.weight_decay], [p for p in everything if not p.weight_decay]]
        weights = {key: piece for key, piece in self._table.tensors.items()}
        number = 0
        for index, group in enumerate(groups):
            for position, parameter in enumerate(group):
                for state in ("exp_avg", "exp_avg_sq"):
                    self._add_tensor(optimizer_key(state, parameter.key), parameter, inner["state"][number][state])
                number += 1
                key = optimizer_key("param", parameter.key)
                if main is not None:
                    self._add_tensor(key, parameter, main[index][position])
                elif key not in self._table.tensors:
                    info = weights[parameter.key]
                    region = partial(self._table.read, parameter.key)
                    self._table.add(key, info, Piece((0,) * len(info.shape), info.shape, region))


def _models(content: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    if "model" in content:
        return [content["model"]]
    models: list[dict[str, torch.Tensor]] = []
    while f"model{len(models)}" in content:
        models.append(content[f"model{len(models)}"])
    return models


def _stored_name(model: Mapping[str, Any], parameter: LocalParameter, folder: Path) -> str:
    if parameter.name in model:
        return parameter.name
    for ours, fused in _FUSED_NORMS.items():
        name = parameter.name.replace(ours, fused)
        if name in model:
            return name
    raise CheckpointError(f"{folder / MODEL_FILE}: {parameter.name} is missing")
