"""A Hugging Face directory as a `Source`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.huggingface.adapters import refuse_adapted_modules, refuse_adapter
from megatron.conversion.huggingface.families import find_family
from megatron.conversion.huggingface.family import Family
from megatron.conversion.huggingface.model_tokenizer import (
    read_tokenizer_arguments,
    select_stated_ids,
)
from megatron.conversion.huggingface.other_layouts import read_params, use_transformers_layout
from megatron.conversion.huggingface.sidecar import (
    DIRECTORY,
    Sidecar,
    open_sidecar,
)
from megatron.conversion.huggingface.stored_weights import StoredWeights
from megatron.conversion.huggingface.weight_files import (
    open_weights,
)
from megatron.conversion.huggingface.wrapper import LanguageModel
from megatron.conversion.huggingface.wrappers import find_wrapper
from megatron.conversion.model_space.foreign import foreign_key, format_layers
from megatron.conversion.model_space.lazy_tensors import cast
from megatron.conversion.model_space.model import (
    check_optimizer_complete,
    compute_model_signature,
    model_config,
    resolve_arguments,
)
from megatron.conversion.model_space.optimizer_states import optimizer_key
from megatron.conversion.model_space.pieces import is_bitwise_equal
from megatron.conversion.options import ReadOptions, rename_tensors
from megatron.conversion.quantization.encodings import (
    check_settings,
    dequantize,
    read_other_settings,
)
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.run_checkpoint.keys import is_trained, split_key
from megatron.core.run_checkpoint.source import TrainingState
from megatron.core.safe_files.reading import read_json
from megatron.core.transformer.transformer_config import TransformerConfig

CONFIG = "config.json"
QUANTIZATION = "quantization_config"
# Arguments: fields of config.json that belong to foreign tensors (ignored fields, or all of a
# wrapper), and the prefix of the language model's names in the files of a wrapper.
FOREIGN_FIELDS = "hf_foreign_fields"
TEXT_PREFIX = "hf_text_prefix"
# The arguments of `dequantize`
Dequantize = Callable[
    [Mapping[str, LazyTensor], Mapping[str, Any], torch.dtype, Path], dict[str, LazyTensor]
]
_OTHER_MODEL = "belongs to another model: leave it out (--no-optim) or remove it"


def find_config(description: str, candidates: Sequence[Path], named: Path | None) -> Path:
    """Return the directory with the config.json of a model that another program trains.

    It is the `named` one, or the first candidate that has the file. Raises ValueError without it.
    """
    if named is not None:
        return named
    for candidate in candidates:
        if (candidate / CONFIG).is_file():
            return candidate
    raise ValueError(
        f"{description} has the weights of a model of transformers, but there is no {CONFIG} in "
        f"{' or '.join(map(str, candidates))}: copy it there, or give its directory with "
        "--hf-config"
    )


class HuggingFaceSource:
    """Weights of a model of transformers, with optimizer and run if an export left a sidecar.

    `weights` are the tensors of the model if they are not in files of transformers, `config_json`
    replaces the config.json in the directory, and `dequantize` decodes quantized matrices. Raises
    ValueError for a model that is not supported, or files that do not fit together.
    """

    def __init__(
        self,
        directory: Path,
        read_options: ReadOptions | None = None,
        weights: Mapping[str, LazyTensor] | None = None,
        config_json: Mapping[str, Any] | None = None,
        dequantize: Dequantize = dequantize,
    ) -> None:
        read_options = read_options or ReadOptions()
        self.description = f"Hugging Face directory {directory}"
        self._directory = directory
        self._files = weights
        self._config_json = config_json
        if weights is None:
            refuse_adapter(directory)

        # Read config.json; of a multimodal model, that of its language model.
        hf, quantization, multimodal = self._read_config_file(read_options)
        with _errors_about(directory):
            family = find_family(hf) if multimodal is None else multimodal.family
            self.args = family.read_config(hf, read_options.args, read_options.ignored_fields)
            if quantization is not None:
                check_settings(quantization)

        # Open the weights. Biases that config.json switches off are zero in a model with others.
        files = self._open_files(hf, multimodal, read_options)
        if quantization is not None:
            files = dequantize(files, quantization, _get_dtype(self.args), directory)
        if "mtp_num_layers" not in read_options.args and not _has_prediction_layers(
            files, self.args
        ):
            # transformers leaves these layers out when it saves a model, but not the field.
            self.args["mtp_num_layers"] = None
        with _errors_about(directory):
            self.args["foreign_mixers"] = family.find_foreign_mixers(files, self.args)
        config = model_config(self.args, self.args["vocab_size"], self.description)
        zero_biases = family.list_unbiased_parts(hf)
        self._weights = StoredWeights(directory, files, family, config, zero_biases)
        self.config = config
        self.tensors: dict[str, LazyTensor] = dict(self._weights.tensors)

        # Complete the arguments, and add optimizer and run, if an export left them.
        self._complete_arguments(config, family, hf, multimodal, read_options)
        self.training: TrainingState | None = None
        if not read_options.no_optim:
            sidecar = open_sidecar(directory / DIRECTORY)
            if sidecar is not None:
                self._add_sidecar(sidecar, config, read_options.args)
        self.unused = self._weights.find_unused()
        self._set_foreign_aside(family, files, multimodal, read_options)
        self.unused += family.list_unused_fields(hf, self.args)

    def map_names(self) -> dict[str, str]:
        """Return the name of each tensor in the files that is used -> its model-space key."""
        return self._weights.map_names()

    def _open_weights(self) -> Mapping[str, LazyTensor]:
        """Return the tensors of the model by name."""
        return open_weights(self._directory) if self._files is None else self._files

    def _read_config_file(
        self, read_options: ReadOptions
    ) -> tuple[dict[str, Any], Any, LanguageModel | None]:
        """Return the config.json of the language model, the `quantization_config`, and the
        multimodal model that contains it, if any.
        """
        directory = self._directory
        if self._config_json is not None:
            hf = dict(self._config_json)
        elif (directory / CONFIG).exists():
            hf = read_json(directory / CONFIG)
        else:
            hf = read_params(directory, self._open_weights())
        quantization = hf.pop(QUANTIZATION, None)
        multimodal: LanguageModel | None = None
        with _errors_about(directory):
            wrapper = find_wrapper(hf)
        if wrapper is not None:
            files = rename_tensors(self._open_weights(), read_options.renames, self.description)
            with _errors_about(directory):
                multimodal = wrapper.find_language_model(hf, files)
            hf = multimodal.text
            quantization = quantization or hf.pop(QUANTIZATION, None)
        if QUANTIZATION in read_options.ignored_fields:
            return hf, None, multimodal
        if quantization is None:
            quantization = read_other_settings(directory)
        return hf, quantization, multimodal

    def _open_files(
        self, hf: Mapping[str, Any], multimodal: LanguageModel | None, read_options: ReadOptions
    ) -> Mapping[str, LazyTensor]:
        """Return the tensors in the files under the names of the language model."""
        files: Mapping[str, LazyTensor]
        if multimodal is not None:
            files = multimodal.files
        else:
            weights = use_transformers_layout(self._open_weights(), hf)
            files = rename_tensors(weights, read_options.renames, self.description)
        refuse_adapted_modules(files, self._directory)
        return files

    def _complete_arguments(
        self,
        config: TransformerConfig,
        family: Family,
        hf: dict[str, Any],
        multimodal: LanguageModel | None,
        read_options: ReadOptions,
    ) -> None:
        """Add the arguments that config.json does not state. The user's override all files."""
        if "bf16" not in self.args and "fp16" not in self.args:  # config.json has no dtype
            dtype = self._weights.default_dtype
            self.args |= {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
        has_mixers = self.args["foreign_mixers"] is not None
        self.args |= resolve_arguments(config)
        self.args["hf_model_type"] = family.model_type
        self.args["hf_fields"] = hf if has_mixers else family.repeated_fields(hf)
        token_ids = hf
        if multimodal is not None:
            token_ids = hf | select_stated_ids(multimodal.hf)
        self.args |= read_tokenizer_arguments(self._directory, token_ids) | dict(read_options.args)
        if read_options.keep_foreign and multimodal is not None:
            self.args[FOREIGN_FIELDS] = multimodal.fields
            self.args[TEXT_PREFIX] = multimodal.prefix
        elif read_options.keep_foreign:
            ignored = set(read_options.ignored_fields) - {QUANTIZATION}
            self.args[FOREIGN_FIELDS] = {name: hf[name] for name in hf if name in ignored}

    def _set_foreign_aside(
        self,
        family: Family,
        files: Mapping[str, LazyTensor],
        multimodal: LanguageModel | None,
        read_options: ReadOptions,
    ) -> None:
        """Keep or summarize unused tensors. A head that is tied is equal to the embedding."""
        if family.indexer is not None and not read_options.keep_foreign:
            _refuse_indexer(family.indexer, self.unused, self._directory)
        if read_options.keep_foreign:
            for name in self.unused:
                if name not in family.head_names:
                    self.tensors[foreign_key(family.add_prefix(name))] = files[name]
            self.unused = [name for name in self.unused if name in family.head_names]
        elif multimodal is not None:
            self.unused = multimodal.summarize(self.unused)

    def _add_sidecar(
        self, sidecar: Sidecar, config: TransformerConfig, user_args: Mapping[str, Any]
    ) -> None:
        """Add the arguments, the training state and the tensors of the sidecar."""
        sidecar_dir = self._directory / DIRECTORY
        run = model_config(sidecar.args, self.args["vocab_size"], str(sidecar_dir))
        _check_same_model(
            compute_model_signature(run), compute_model_signature(config), sidecar_dir
        )
        self.args |= {**sidecar.args, **user_args}
        self.training = sidecar.training
        for key, tensor in sidecar.tensors.items():
            parameter, state = split_key(key)
            if state is None or parameter not in self.tensors:
                raise ValueError(f"{sidecar_dir}: {key} is not an optimizer state of this model")
            if state == "param" and parameter in self._weights:
                tensor = self._check_unchanged(tensor, parameter)
            self.tensors[key] = tensor
        check_optimizer_complete(self.tensors, self.args, str(sidecar_dir))

        # The weights have the dtype of the run. Those that were exported in another one are its
        # main parameters, rounded to its own dtype.
        for key, weight in self._weights.tensors.items():
            if not is_trained(key):
                continue
            if key in self._weights and weight.dtype != run.params_dtype:
                weight = sidecar.tensors[optimizer_key("param", key)]
            self.tensors[key] = cast(weight, run.params_dtype)

    def _check_unchanged(self, main: LazyTensor, parameter: str) -> LazyTensor:
        """Return main parameters that must equal the weights bitwise when they are read: else the
        moments belong to another model.
        """
        read = partial(self._read_unchanged, main, parameter)
        return dataclasses.replace(main, read=read)

    def _read_unchanged(
        self, main: LazyTensor, parameter: str, offset: Shape, shape: Shape
    ) -> torch.Tensor:
        value = main.read(offset, shape)
        weight = self._weights.tensors[parameter].read(offset, shape)
        if not is_bitwise_equal(value.to(weight.dtype), weight):
            raise ValueError(
                f"{self._directory}: {parameter} was changed after the export, so the "
                f"optimizer state in {self._directory / DIRECTORY} {_OTHER_MODEL}"
            )
        return value


def _get_dtype(args: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the weights that config.json states."""
    if args.get("bf16"):
        return torch.bfloat16
    return torch.float16 if args.get("fp16") else torch.float32


@contextmanager
def _errors_about(directory: Path) -> Iterator[None]:
    """Name the directory in errors about its content."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{directory}: {error}") from error


def _has_prediction_layers(files: Mapping[str, LazyTensor], args: Mapping[str, Any]) -> bool:
    """Return whether the files have layers for multi-token prediction, after those of the model."""
    projection = f"layers.{args['num_layers']}.eh_proj.weight"
    return any(name.endswith(projection) for name in files)


def _refuse_indexer(indexer: str, unused: Sequence[str], directory: Path) -> None:
    """Raise ValueError if tensors of a sparse indexer would be lost."""
    layers = set()
    for name in unused:
        before, separator, _ = name.partition(indexer)
        if separator:
            layers.add(int(before.rpartition(".")[2]))
    if layers:
        raise ValueError(
            f"{directory}: layers {format_layers(sorted(layers))} have a sparse indexer "
            f"({indexer}*), which the trainer does not have: it attends to all tokens, which is "
            "the same in sequences of at most index_topk tokens. Copy these tensors with "
            "--keep-foreign"
        )


def _check_same_model(
    exported: Mapping[str, Any], current: Mapping[str, Any], sidecar_dir: Path
) -> None:
    """Raise ValueError if config.json no longer describes the model of the sidecar."""
    differing = []
    for name, value in exported.items():
        if value != current[name]:
            differing.append(f"{name} ({value} -> {current[name]})")
    if differing:
        raise ValueError(
            f"{sidecar_dir.parent}: config.json was changed after the export "
            f"({', '.join(differing)}), so the optimizer state in {sidecar_dir} {_OTHER_MODEL}"
        )
