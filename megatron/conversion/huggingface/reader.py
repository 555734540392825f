"""A Hugging Face directory as a `Source`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.huggingface.families import family_of
from megatron.conversion.huggingface.parameters import StoredParameter
from megatron.conversion.huggingface.sidecar import Sidecar
from megatron.conversion.huggingface.tokenizer import tokenizer_arguments
from megatron.conversion.huggingface.weight_files import open_weights
from megatron.conversion.model_space.model import (
    WORD_EMBEDDINGS,
    check_optimizer_complete,
    model_config,
    model_tensors,
    resolved,
)
from megatron.conversion.model_space.pieces import bits
from megatron.conversion.model_space.row_maps import unpack_rows
from megatron.conversion.model_space.source import Shape, TensorInfo, TrainingState, optimizer_key, split_key
from megatron.core.dist_checkpointing.format.schema import CheckpointError, read_json
from megatron.core.transformer.transformer_config import TransformerConfig, model_signature

_NOT_THIS_MODELS = "is not this model's: leave it out (--no-optim) or remove it"


class HuggingFaceSource:
    """Weights of a model of transformers; with the sidecar of an earlier export, the optimizer and the run too.

    `args` (Megatron-LM's names) were given by the user: they override config.json and supply what it lacks.
    `ignored_fields` are fields of config.json that the user knows to be harmless. Raises ValueError for a model that is
    not supported, or files that do not fit together.
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
        # A save of the base model alone (AutoModel, not AutoModelForCausalLM) names its tensors without the prefix.
        self._prefix = "" if any(name.startswith(family.prefix) for name in self._files) else family.prefix
        # Where biases of attention and MLP are an option, those that are off are zero in a model that has the others.
        biases = ("attention_bias", "mlp_bias") if family.has_field("attention_bias") else ()
        self._biases_off = [name for name in biases if not hf.get(name)]
        self._parts: dict[str, list[StoredParameter]] = defaultdict(list)  # of a tensor: one, or one per expert
        for part in family.places(config, lambda name: self._stored(name) in self._files):
            if self._holds(part):
                self._check_shapes(part)
                self._parts[part.key].append(part)
        default = self._stored_dtype(WORD_EMBEDDINGS)
        self.tensors: dict[str, TensorInfo] = {
            key: TensorInfo(shape, self._stored_dtype(key) if key in self._parts else default)
            for key, shape in model_tensors(config).items()
        }
        self._check_tied(config)
        used = {self._stored(name) for parts in self._parts.values() for part in parts for name in part.names}
        self.unused = sorted(set(self._files) - used)
        if "bf16" not in self.args and "fp16" not in self.args:  # config.json is silent
            self.args |= {"bf16": default == torch.bfloat16, "fp16": default == torch.float16}
        # What the user gave is written last: it overrides everything that the files say.
        self.args |= resolved(config) | {"hf_model_type": family.model_type}
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
            # Weights exported in another dtype: those of the run are its main parameters, rounded to its own dtype.
            if key in self._parts and self._stored_dtype(key) != info.dtype:
                return self._sidecar.read(optimizer_key("param", key), offset, shape).to(info.dtype)
        return self._read_parameter(key, offset, shape)

    def _read_parameter(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        if key not in self._parts:
            return torch.zeros(shape, dtype=self.tensors[key].dtype)
        parts = self._parts[key]
        if not parts[0].lead:
            return self._read_part(parts[0], offset, shape)
        experts = parts[offset[0] : offset[0] + shape[0]]
        return torch.stack([self._read_part(part, offset[1:], shape[1:]) for part in experts])

    def _read_part(self, part: StoredParameter, offset: Shape, shape: Shape) -> torch.Tensor:
        def read_rows(source: int, first: int, count: int) -> torch.Tensor:
            name = self._stored(part.names[source])
            return self._files[name].read(name, (first, *offset[1:]), (count, *shape[1:]))

        if part.transposed:  # its rows are columns of the file: these are read once, not once for every run
            name = self._stored(part.names[0])
            stored = self._files[name].read(name, (offset[1], 0), (shape[1], self._info(name).shape[1])).t()
            return unpack_rows(
                part.row_map, offset[0], offset[0] + shape[0], lambda _, first, count: stored[first : first + count]
            ).contiguous()
        return unpack_rows(part.row_map, offset[0], offset[0] + shape[0], read_rows).contiguous()

    def _read_optimizer(self, sidecar: Sidecar, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """Main parameters must still be those of the weights, to the bit: else the moments belong to another model."""
        value = sidecar.read(key, offset, shape)
        parameter, state = split_key(key)
        if state == "param" and parameter in self._parts:
            weight = self._read_parameter(parameter, offset, shape)
            if not torch.equal(bits(value.to(weight.dtype)), bits(weight)):
                raise ValueError(
                    f"{self._directory}: {parameter} was changed after the export, so the optimizer state in "
                    f"{sidecar.directory} {_NOT_THIS_MODELS}"
                )
        return value

    def _stored(self, name: str) -> str:
        """A row's name as it is in the files: those of the base model alone have no prefix."""
        return name.removeprefix(self._prefix)

    def _info(self, name: str) -> TensorInfo:
        stored = self._stored(name)
        return self._files[stored].tensors[stored]

    def _stored_dtype(self, key: str) -> torch.dtype:
        """Promoted, should q, k and v differ."""
        return reduce(torch.promote_types, {self._info(name).dtype for part in self._parts[key] for name in part.names})

    def _holds(self, part: StoredParameter) -> bool:
        """False for a bias that config.json says is absent: it is zero. Raises ValueError for a missing tensor."""
        missing = [name for name in map(self._stored, part.names) if name not in self._files]
        flag = "attention_bias" if ".self_attention." in part.key else "mlp_bias"
        is_off = part.key.endswith(".bias") and flag in self._biases_off
        if missing and not (is_off and len(missing) == len(part.names)):
            raise ValueError(f"{self._directory}: the weights lack {', '.join(missing)}, which config.json calls for")
        return not missing

    def _check_shapes(self, part: StoredParameter) -> None:
        for name, wanted in zip(part.names, part.stored_shapes(), strict=True):
            found = self._info(name)
            if not found.dtype.is_floating_point:
                raise ValueError(
                    f"{self._directory}: {self._stored(name)} has dtype {found.dtype}: weights must be floating point"
                )
            if found.shape != wanted:
                raise ValueError(
                    f"{self._directory}: {self._stored(name)} has shape {list(found.shape)}, but config.json makes it "
                    f"{list(wanted)}: config.json and weights are of different models"
                )

    def _check_tied(self, config: TransformerConfig) -> None:
        """A head beside a tied embedding is a copy; one that differs would be lost."""
        name = "lm_head.weight"
        if config.untie_embeddings_and_output_weights or name not in self._files:
            return
        head = self._files[name].read(name, (0, 0), self._files[name].tensors[name].shape)
        if not torch.equal(head, self._read_parameter(WORD_EMBEDDINGS, (0, 0), self.tensors[WORD_EMBEDDINGS].shape)):
            raise ValueError(
                f"{self._directory}: config.json ties the head to the embedding, but lm_head.weight differs from it: "
                "set tie_word_embeddings to false in config.json to keep the head"
            )

    def _add_sidecar(self, sidecar: Sidecar, config: TransformerConfig, given: Mapping[str, Any]) -> None:
        assert config.vocab_size is not None
        run = model_config(sidecar.args, config.vocab_size, str(sidecar.directory))
        wanted, found = model_signature(run), model_signature(config)
        differing = [f"{name} ({wanted[name]} -> {found[name]})" for name in wanted if wanted[name] != found[name]]
        if differing:
            raise ValueError(
                f"{self._directory}: config.json was changed after the export ({', '.join(differing)}), so the "
                f"optimizer state in {sidecar.directory} {_NOT_THIS_MODELS}"
            )
        self.args |= {**sidecar.args, **given}
        self.training = sidecar.training
        self.tensors = {key: TensorInfo(info.shape, run.params_dtype) for key, info in self.tensors.items()}
        for key in sidecar.tensors:
            parameter, state = split_key(key)
            if state is None or parameter not in self.tensors:
                raise ValueError(f"{sidecar.directory}: {key} is no optimizer state of this model")
        self.tensors |= sidecar.tensors
        check_optimizer_complete(self.tensors, str(sidecar.directory))
