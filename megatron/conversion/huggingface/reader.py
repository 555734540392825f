"""A Hugging Face directory as a `Source`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.huggingface.families import family_of
from megatron.conversion.huggingface.parameters import StoredParameter
from megatron.conversion.huggingface.sidecar import Sidecar
from megatron.conversion.huggingface.tokenizer import tokenizer_arguments
from megatron.conversion.huggingface.weight_files import open_weights
from megatron.conversion.megatron_lm.optimizer_state import check_complete
from megatron.conversion.model_space.model import WORD_EMBEDDINGS, model_config, model_tensors, resolved
from megatron.conversion.model_space.pieces import bits
from megatron.conversion.model_space.row_maps import as_is, unpack_rows
from megatron.conversion.model_space.source import Shape, TensorInfo, TrainingState, optimizer_key
from megatron.core.dist_checkpointing.format.schema import CheckpointError, read_json
from megatron.core.transformer.transformer_config import TransformerConfig, model_signature


def is_huggingface(directory: Path) -> bool:
    """Whether `directory` holds a model of transformers."""
    path = directory / "config.json"
    if not path.is_file():
        return False
    hf = read_json(path)
    return isinstance(hf, dict) and ("model_type" in hf or "architectures" in hf)


class HuggingFaceSource:
    """Weights of a model of transformers; with the sidecar of an earlier export, the optimizer and the run too.

    `args` (Megatron-LM's names) were given by the user: they win over config.json and supply what it lacks.
    `ignored_fields` are fields of config.json that the user knows to be harmless. Raises ValueError for a model that
    cannot be expressed, or files that do not fit together.
    """

    def __init__(
        self,
        directory: Path,
        args: Mapping[str, Any] | None = None,
        ignored_fields: Collection[str] = (),
        use_sidecar: bool = True,
    ) -> None:
        self.description = f"Hugging Face directory {directory}"
        self._directory = directory
        given = dict(args or {})
        hf = read_json(directory / "config.json")
        try:
            family = family_of(hf)
            self.args = family.read_config(hf, given, ignored_fields)
        except ValueError as error:
            raise CheckpointError(f"{directory}: {error}") from error
        config = model_config(self.args, self.args["vocab_size"], self.description)
        self._files = open_weights(directory)
        self._prefix = "" if any(name.startswith(family.prefix) for name in self._files) else family.prefix
        self._biases_off = [
            name for name in ("attention_bias", "mlp_bias") if family.has_field(name) and not hf.get(name)
        ]
        places = map(self._as_stored, family.places(config))
        self._places = {place.key: place for place in places if self._holds(place)}
        self._check_shapes()
        self.tensors: dict[str, TensorInfo] = self._parameters(config)
        self._check_tied(config)
        self.unused = sorted(set(self._files) - {self._stored(n) for p in self._places.values() for n in p.names})
        self.args |= resolved(config) | self._precision() | {"hf_model_type": family.model_type}
        self.args |= tokenizer_arguments(directory, hf) | given
        self._sidecar = Sidecar.open(directory) if use_sidecar else None
        self.training: TrainingState | None = None
        if self._sidecar is not None:
            self._add_sidecar(self._sidecar, config, given)

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        info = self.tensors[key]
        if self._sidecar is not None:
            if key in self._sidecar.tensors:
                return self._read_optimizer(self._sidecar, key, offset, shape)
            if key in self._places and self._stored_dtype(key) != info.dtype:
                return self._sidecar.read(optimizer_key("param", key), offset, shape).to(info.dtype)
        if key not in self._places:
            return torch.zeros(shape, dtype=info.dtype)
        return self._read_parameter(self._places[key], offset, shape)

    def _as_stored(self, place: StoredParameter) -> StoredParameter:
        """With all experts in one tensor, where the files have them so."""
        if place.fused is None or self._stored(place.fused) not in self._files:
            return place
        return dataclasses.replace(place, names=(place.fused,), row_map=as_is(place.matrix[0]))

    def _read_parameter(self, place: StoredParameter, offset: Shape, shape: Shape) -> torch.Tensor:
        if len(shape) == 3 and place.names == (place.fused,):
            name = self._stored(place.names[0])
            return self._files[name].read(name, offset, shape).contiguous()
        if len(shape) == 3:  # one expert after the other
            rows = place.shape[1]
            matrix = dataclasses.replace(place, shape=place.matrix)
            first = [(expert * rows + offset[1], offset[2]) for expert in range(offset[0], offset[0] + shape[0])]
            return torch.stack([self._read_parameter(matrix, at, shape[1:]) for at in first])

        def read_rows(source: int, first: int, count: int) -> torch.Tensor:
            name = self._stored(place.names[source])
            if place.transposed:
                return self._files[name].read(name, (offset[1], first), (shape[1], count)).t()
            return self._files[name].read(name, (first, *offset[1:]), (count, *shape[1:]))

        return unpack_rows(place.row_map, offset[0], offset[0] + shape[0], read_rows).contiguous()

    def _read_optimizer(self, sidecar: Sidecar, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """Main parameters must still be those of the weights, to the bit: else the moments belong to another model."""
        value = sidecar.read(key, offset, shape)
        parameter = key.removeprefix(optimizer_key("param", ""))
        if parameter in self._places:
            weight = self._read_parameter(self._places[parameter], offset, shape)
            if not torch.equal(bits(value.to(weight.dtype)), bits(weight)):
                raise ValueError(
                    f"{self._directory}: {parameter} was changed after the export, so the optimizer state in "
                    f"{sidecar.directory} is not this model's: leave it out (--no-optim) or remove it"
                )
        return value

    def _stored(self, name: str) -> str:
        """A row's name as it is in the files: those of the base model alone have no prefix."""
        return name.removeprefix(self._prefix)

    def _stored_dtype(self, key: str) -> torch.dtype:
        """Promoted, should q, k and v differ."""
        dtypes = {self._info(name).dtype for name in self._places[key].names}
        result = dtypes.pop()
        for dtype in dtypes:
            result = torch.promote_types(result, dtype)
        return result

    def _info(self, name: str) -> TensorInfo:
        stored = self._stored(name)
        return self._files[stored].tensors[stored]

    def _holds(self, place: StoredParameter) -> bool:
        """False for a bias that config.json says is absent: it is zero. Raises ValueError for a missing tensor."""
        missing = [name for name in map(self._stored, place.names) if name not in self._files]
        if missing and not (self._bias_is_off(place.key) and len(missing) == len(place.names)):
            raise ValueError(f"{self._directory}: the weights lack {', '.join(missing)}, which config.json calls for")
        return not missing

    def _bias_is_off(self, key: str) -> bool:
        flag = "attention_bias" if ".self_attention." in key else "mlp_bias"
        return key.endswith(".bias") and flag in self._biases_off

    def _check_shapes(self) -> None:
        for place in self._places.values():
            for name, wanted in zip(place.names, place.stored_shapes(), strict=True):
                found, dtype = self._info(name).shape, self._info(name).dtype
                if not dtype.is_floating_point:
                    raise ValueError(f"{self._directory}: {self._stored(name)} is of {dtype}: integers are no weights")
                if found != wanted:
                    raise ValueError(
                        f"{self._directory}: {self._stored(name)} has shape {list(found)}, but config.json makes it "
                        f"{list(wanted)}: config.json and weights are of different models"
                    )

    def _parameters(self, config: TransformerConfig) -> dict[str, TensorInfo]:
        default = self._stored_dtype(WORD_EMBEDDINGS)
        return {
            key: TensorInfo(shape, self._stored_dtype(key) if key in self._places else default)
            for key, shape in model_tensors(config).items()
        }

    def _check_tied(self, config: TransformerConfig) -> None:
        """A head beside a tied embedding is a copy; one that differs would be lost."""
        name = "lm_head.weight"
        if config.untie_embeddings_and_output_weights or name not in self._files:
            return
        head = self._files[name].read(name, (0, 0), self._files[name].tensors[name].shape)
        embedding = self._read_parameter(self._places[WORD_EMBEDDINGS], (0, 0), self.tensors[WORD_EMBEDDINGS].shape)
        if not torch.equal(head, embedding):
            raise ValueError(
                f"{self._directory}: config.json ties the head to the embedding, but lm_head.weight differs from it: "
                "set tie_word_embeddings to false in config.json if the head counts"
            )

    def _precision(self) -> dict[str, bool]:
        """Where config.json is silent the word embedding tells."""
        dtype = self.tensors[WORD_EMBEDDINGS].dtype
        told = {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
        return {} if "bf16" in self.args or "fp16" in self.args else told

    def _add_sidecar(self, sidecar: Sidecar, config: TransformerConfig, given: Mapping[str, Any]) -> None:
        assert config.vocab_size is not None
        run = model_config(sidecar.args, config.vocab_size, str(sidecar.directory))
        wanted, found = model_signature(run), model_signature(config)
        if wanted != found:
            differing = [f"{name} ({wanted[name]} -> {found[name]})" for name in wanted if wanted[name] != found[name]]
            raise ValueError(
                f"{self._directory}: config.json was changed after the export ({', '.join(differing)}), so the "
                f"optimizer state in {sidecar.directory} is not this model's: leave it out (--no-optim) or remove it"
            )
        self.args |= {**sidecar.args, **given}
        self.training = sidecar.training
        self.tensors = {key: TensorInfo(info.shape, run.params_dtype) for key, info in self.tensors.items()}
        parameters = {key: key.partition("optimizer.state.")[2].partition(".")[2] for key in sidecar.tensors}
        strange = [key for key, parameter in parameters.items() if parameter not in self.tensors]
        if strange:
            raise ValueError(f"{sidecar.directory}: {strange[0]} is no optimizer state of this model")
        self.tensors |= sidecar.tensors
        check_complete(self.tensors, str(sidecar.directory))
