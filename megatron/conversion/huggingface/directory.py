"""A Hugging Face directory as a `Source`, and a `Source` written as one, a few rows at a time.

Beside an exported model may lie what transformers has no place for, so that the way back loses
nothing: the sidecar, `megatron_state/` in the model's directory (a subdirectory, so that no loader
takes its files for weights). It holds the optimizer state in model space as safetensors, and run
arguments and training state as JSON.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.conversion.huggingface.families import Family, choose_family, find_family
from megatron.conversion.huggingface.tokenizer import (
    export_tokenizer,
    tokenizer_arguments,
    write_generation_config,
)
from megatron.conversion.huggingface.weight_files import (
    Outgoing,
    Stored,
    StoredParameter,
    dequantized,
    open_safetensors,
    open_weights,
    scaled_blocks,
    stored_parameters,
    write_weight_files,
)
from megatron.conversion.model_space.model import (
    check_optimizer_complete,
    check_parameters,
    exported_config,
    model_config,
    model_tensors,
    resolved,
)
from megatron.conversion.model_space.pieces import (
    as_is,
    make_empty_directory,
    same_bits,
    unpack_rows,
)
from megatron.conversion.model_space.source import (
    ADAM,
    ARGUMENTS,
    TRAINING_STATE,
    WORD_EMBEDDINGS,
    Progress,
    Shape,
    Source,
    TensorInfo,
    TrainingState,
    full_precision_key,
    is_trained,
    no_progress,
    optimizer_key,
    optimizer_states,
    plain_args,
    read_whole,
    split_key,
)
from megatron.conversion.options import ReadOptions, WriteOptions
from megatron.core.dist_checkpointing.format import schema
from megatron.core.durable_files import fsync_tree, write_json
from megatron.core.transformer.transformer_config import TransformerConfig, compute_model_signature

DIRECTORY = "megatron_state"
_STATE = "state.json"  # written last: without it there is no sidecar
_QUANTIZATION = "quantization_config"
_TUPLES = ("window_size", "betas")  # JSON has lists only

_SCHEMA = schema.record(
    {"files": schema.sequence(schema.file_name), "training": TRAINING_STATE, "args": ARGUMENTS}
)


class Sidecar(NamedTuple):
    args: dict[str, Any]
    training: TrainingState
    tensors: dict[str, Stored]


def open_sidecar(directory: Path) -> Sidecar | None:
    """The sidecar in `directory`, if there is one; raises ValueError where it is incomplete."""
    if not (directory / _STATE).exists():
        return None
    where = str(directory / _STATE)
    state = _SCHEMA(schema.read_json(directory / _STATE), where)
    paths = [schema.named_file(directory, name, where) for name in state["files"]]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise ValueError(
            f"{directory} lacks {', '.join(missing)}: copy it again, or leave the optimizer out (--no-optim)"
        )
    training = TrainingState(**state["training"])
    training.param_groups = training.param_groups and [
        _with_tuples(group) for group in training.param_groups
    ]
    tensors = {name: stored for path in paths for name, stored in open_safetensors(path).items()}
    return Sidecar(_with_tuples(state["args"]), training, tensors)


def sidecar_tensors(source: Source, parameters: Mapping[str, Shape]) -> list[Outgoing]:
    """The optimizer state of the model's parameters, under their keys.

    Without main parameters the weights are the fp32 values that the optimizer works on; they are
    stored as such, since the exported weights may be rounded.
    """
    states = {"param": None} | dict.fromkeys(optimizer_states(source.tensors) or ADAM)
    tensors = []
    for parameter, shape in parameters.items():
        for state in states if is_trained(parameter) else ():
            key = optimizer_key(state, parameter)
            read = full_precision_key(parameter, source.tensors) if state == "param" else key
            if read not in source.tensors:
                raise ValueError(
                    f"{source.description} has no {key}: --save-optim-sidecar needs the optimizer state"
                )
            part = StoredParameter(key, (), shape, (key,), as_is(shape[0]))
            tensors.append(Outgoing(source, read, part, torch.float32))
    return tensors


def write_state(directory: Path, source: Source, files: list[str]) -> None:
    """The JSON part; RNG state is left out: it belongs to one layout."""
    training = dataclasses.asdict(dataclasses.replace(source.training or TrainingState(), rng={}))
    try:
        json.dumps(training)
    except TypeError as error:
        raise ValueError(
            f"{source.description}: its training state is not plain data ({error})"
        ) from error
    state = {"files": files, "training": training, "args": plain_args(source.args)}
    write_json(directory / _STATE, _SCHEMA(state, source.description))


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if k in _TUPLES and isinstance(v, list) else v for k, v in values.items()}


_NOT_THIS_MODELS = "is not this model's: leave it out (--no-optim) or remove it"


class HuggingFaceSource:
    """Weights of a model of transformers; with the sidecar of an earlier export, the optimizer and
    the run too.

    Raises ValueError for a model that is not supported, or files that do not fit together.
    """

    def __init__(self, directory: Path, read_options: ReadOptions | None = None) -> None:
        read_options = read_options or ReadOptions()
        self.description = f"Hugging Face directory {directory}"
        self._directory = directory
        given = read_options.args
        hf = schema.read_json(directory / "config.json")
        try:
            family = find_family(hf)
            self.args = family.read_config(hf, given, (*read_options.ignored_fields, _QUANTIZATION))
            quantization = (
                None if _QUANTIZATION in read_options.ignored_fields else hf.get(_QUANTIZATION)
            )
            block = None if quantization is None else scaled_blocks(quantization)
        except ValueError as error:
            raise schema.CheckpointError(f"{directory}: {error}") from error
        config = model_config(self.args, self.args["vocab_size"], self.description)
        self._files = open_weights(directory)
        if block is not None:
            self._files = dequantized(self._files, block, config.params_dtype)
        # A save of the base model alone (AutoModel, not AutoModelForCausalLM) names its tensors
        # without the prefix.
        self._prefix = (
            "" if any(name.startswith(family.prefix) for name in self._files) else family.prefix
        )
        # A model has the biases of attention and MLP or neither: those that are off are zero.
        self._zero_biases = [part for field, part in family.switched_biases() if not hf.get(field)]
        self._parts: dict[str, list[StoredParameter]] = defaultdict(
            list
        )  # of a tensor: one, or one per expert
        for part in _stored_parameters(
            family, config, lambda name: self._name(name) in self._files
        ):
            if self._holds(part):
                self._check_shapes(part)
                self._parts[part.key].append(part)
        default = self._stored_dtype(WORD_EMBEDDINGS)
        self.tensors: dict[str, TensorInfo] = {
            key: TensorInfo(shape, self._stored_dtype(key) if key in self._parts else default)
            for key, shape in model_tensors(config).items()
        }
        self._check_tied(config)
        used = {
            self._name(name)
            for parts in self._parts.values()
            for part in parts
            for name in part.names
        }
        self.unused = sorted(set(self._files) - used)
        if "bf16" not in self.args and "fp16" not in self.args:  # config.json is silent
            self.args |= {"bf16": default == torch.bfloat16, "fp16": default == torch.float16}
        # What the user gave is written last: it overrides everything that the files say.
        self.args |= resolved(config)
        self.args["hf_model_type"] = family.model_type
        self.args["hf_fields"] = family.repeated_fields(hf)
        self.args |= tokenizer_arguments(directory, hf) | dict(given)
        self._sidecar = open_sidecar(directory / DIRECTORY) if read_options.optimizer else None
        self.training: TrainingState | None = None
        if self._sidecar is not None:
            self._add_sidecar(self._sidecar, config, given)

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        info = self.tensors[key]
        if self._sidecar is not None:
            if key in self._sidecar.tensors:
                return self._read_optimizer(self._sidecar.tensors[key], key, offset, shape)
            # Weights exported in another dtype: those of the run are its main parameters, rounded
            # to its own dtype.
            if key in self._parts and self._stored_dtype(key) != info.dtype:
                return (
                    self._sidecar.tensors[optimizer_key("param", key)]
                    .read(offset, shape)
                    .to(info.dtype)
                )
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
        lead = part.lead if part.packed is not None else ()

        def read_box(source: int, start: Shape, extent: Shape) -> torch.Tensor:
            box = self._stored(part.names[source]).read(
                (*lead, *start), (*[1] * len(lead), *extent)
            )
            return box.view(extent)

        def read_rows(source: int, first: int, count: int) -> torch.Tensor:
            return read_box(source, (first, *offset[1:]), (count, *shape[1:]))

        if (
            part.transposed
        ):  # its rows are columns of the file: these are read once, not once for every run
            stored = read_box(
                0, (offset[1], 0), (shape[1], self._stored(part.names[0]).shape[-1])
            ).t()
            return unpack_rows(
                part.row_map,
                offset[0],
                offset[0] + shape[0],
                lambda _, first, count: stored[first : first + count],
            ).contiguous()
        return unpack_rows(part.row_map, offset[0], offset[0] + shape[0], read_rows).contiguous()

    def _read_optimizer(
        self, stored: Stored, key: str, offset: Shape, shape: Shape
    ) -> torch.Tensor:
        """Main parameters must still be those of the weights, to the bit: else the moments belong
        to another model.
        """
        value = stored.read(offset, shape)
        parameter, state = split_key(key)
        if state == "param" and parameter in self._parts:
            weight = self._read_parameter(parameter, offset, shape)
            if not same_bits(value.to(weight.dtype), weight):
                raise ValueError(
                    f"{self._directory}: {parameter} was changed after the export, so the optimizer state in "
                    f"{self._directory / DIRECTORY} {_NOT_THIS_MODELS}"
                )
        return value

    def _name(self, name: str) -> str:
        """A row's name as it is in the files: those of the base model alone have no prefix."""
        return name.removeprefix(self._prefix)

    def _stored(self, name: str) -> Stored:
        return self._files[self._name(name)]

    def _stored_dtype(self, key: str) -> torch.dtype:
        """Promoted, should q, k and v differ."""
        return reduce(
            torch.promote_types,
            {self._stored(name).dtype for part in self._parts[key] for name in part.names},
        )

    def _holds(self, part: StoredParameter) -> bool:
        """False for a bias that config.json says is absent: it is zero. Raises ValueError for a
        missing tensor.
        """
        missing = [name for name in map(self._name, part.names) if name not in self._files]
        is_off = part.key.endswith(".bias") and any(name in part.key for name in self._zero_biases)
        if missing and not (is_off and len(missing) == len(part.names)):
            raise ValueError(
                f"{self._directory}: the weights lack {', '.join(missing)}, which config.json calls for"
            )
        return not missing

    def _check_shapes(self, part: StoredParameter) -> None:
        for name, wanted in zip(part.names, part.stored_shapes(), strict=True):
            found = self._stored(name)
            if not found.dtype.is_floating_point or found.dtype.itemsize == 1:
                raise ValueError(
                    f"{self._directory}: {self._name(name)} has dtype {found.dtype}: weights must be floating point, "
                    "of 16 bits or more unless quantization_config says where their scales are"
                )
            if found.shape != wanted:
                raise ValueError(
                    f"{self._directory}: {self._name(name)} has shape {list(found.shape)}, but config.json makes it "
                    f"{list(wanted)}: config.json and weights are of different models"
                )

    def _check_tied(self, config: TransformerConfig) -> None:
        """A head beside a tied embedding is a copy; one that differs would be lost."""
        name = "lm_head.weight"
        if config.untie_embeddings_and_output_weights or name not in self._files:
            return
        head = self._files[name].read((0, 0), self._files[name].shape)
        if not torch.equal(
            head, self._read_parameter(WORD_EMBEDDINGS, (0, 0), self.tensors[WORD_EMBEDDINGS].shape)
        ):
            raise ValueError(
                f"{self._directory}: config.json ties the head to the embedding, but lm_head.weight differs from it: "
                "set tie_word_embeddings to false in config.json to keep the head"
            )

    def _add_sidecar(
        self, sidecar: Sidecar, config: TransformerConfig, given: Mapping[str, Any]
    ) -> None:
        where = self._directory / DIRECTORY
        run = model_config(sidecar.args, self.args["vocab_size"], str(where))
        wanted = compute_model_signature(run)
        found = compute_model_signature(config)
        differing = [
            f"{name} ({wanted[name]} -> {found[name]})"
            for name in wanted
            if wanted[name] != found[name]
        ]
        if differing:
            raise ValueError(
                f"{self._directory}: config.json was changed after the export ({', '.join(differing)}), so the "
                f"optimizer state in {where} {_NOT_THIS_MODELS}"
            )
        self.args |= {**sidecar.args, **given}
        self.training = sidecar.training
        for key, info in self.tensors.items():
            self.tensors[key] = TensorInfo(
                info.shape, run.params_dtype if is_trained(key) else info.dtype
            )
        strange = [
            key
            for key in sidecar.tensors
            if split_key(key)[1] is None or split_key(key)[0] not in self.tensors
        ]
        if strange:
            raise ValueError(f"{where}: {strange[0]} is no optimizer state of this model")
        self.tensors |= {
            key: TensorInfo(stored.shape, stored.dtype) for key, stored in sidecar.tensors.items()
        }
        check_optimizer_complete(self.tensors, str(where))


def write_huggingface(
    source: Source,
    directory: Path,
    options: WriteOptions | None = None,
    progress: Progress = no_progress,
) -> list[str]:
    """Write `source` into the empty `directory`; returns what it holds that could not be carried.

    config.json is written last, so an interrupted export is no model. Raises ValueError for a model
    that transformers cannot express, before anything is written.
    """
    options = options or WriteOptions()
    config = _config(source, options)
    family = choose_family(config, source.args.get("hf_model_type"))
    fields = family.write_config(config, _imported_fields(family, source.args))
    places = list(_stored_parameters(family, config, lambda name: False))
    _check_complete(source, config, places)
    places = _leave_out_biases(source, family, fields, places)
    optimizer = sidecar_tensors(source, model_tensors(config)) if options.optim_sidecar else []

    make_empty_directory(directory)
    limits = (options.max_shard_size, options.workers, progress)
    # Weights come from the fp32 main parameters where there are some, and are cast only once.
    weights = []
    for place in places:
        dtype = config.params_dtype if is_trained(place.key) else source.tensors[place.key].dtype
        weights.append(
            Outgoing(source, full_precision_key(place.key, source.tensors), place, dtype)
        )
    write_weight_files(directory, "model", weights, *limits)
    if optimizer:
        folder = directory / DIRECTORY
        folder.mkdir()
        write_state(folder, source, write_weight_files(folder, "optimizer", optimizer, *limits))
    tokenizer = export_tokenizer(source.args, options.tokenizer, directory, options.trusted)
    write_generation_config(directory, tokenizer.ids)
    for copied in tokenizer.copied:
        options.note(f"tokenizer: {copied}")
    # Readers recognise a model by config.json: it must not be durable before the weights are.
    fsync_tree(directory)
    write_json(
        directory / "config.json",
        {**fields, **tokenizer.ids, "use_cache": True},
    )
    fsync_tree(directory)
    return tokenizer.lost + _not_carried(source, bool(optimizer))


def _config(source: Source, options: WriteOptions) -> TransformerConfig:
    dtype = options.dtype or source.tensors[WORD_EMBEDDINGS].dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"weights of {dtype} cannot be written: give --dtype fp32, bf16 or fp16")
    config = exported_config(source, options.vocab_size)
    return dataclasses.replace(config, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)


def _check_complete(
    source: Source, config: TransformerConfig, places: list[StoredParameter]
) -> None:
    """Every parameter of the model is in the source, and has a place in the family or is a bias of
    zeros.
    """
    shapes = model_tensors(config)
    placed = {place.key for place in places}
    check_parameters(source.tensors, shapes, source.description, config.vocab_size)
    for key in shapes:
        if key not in placed and torch.count_nonzero(read_whole(source, key)):
            raise ValueError(
                f"{source.description}: {key} is not zero, and models of this family have no such bias"
            )
    extra = [k for k in source.tensors if k not in shapes and not k.startswith("optimizer.")]
    if extra:
        raise ValueError(
            f"{source.description}: {', '.join(extra)} are not part of the model its arguments describe"
        )


_REPEATED = schema.mapping(schema.anything, keys=schema.key)


def _imported_fields(family: Family, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the config.json that the model was imported from, checked again."""
    if args.get("hf_model_type") != family.model_type:
        return {}
    fields = args.get("hf_fields") or {}
    _REPEATED(fields, "the arguments: hf_fields")
    family.check_fields(fields)
    return family.repeated_fields(fields)


def _leave_out_biases(
    source: Source, family: Family, fields: dict[str, Any], places: list[StoredParameter]
) -> list[StoredParameter]:
    """Leave out the biases that `fields` switch off; switch them on if one of them is not zero."""
    for field, part in family.switched_biases():
        biases = [place for place in places if part in place.key and place.key.endswith(".bias")]
        if fields[field] or not biases:
            continue
        if any(torch.count_nonzero(read_whole(source, place.key)) for place in biases):
            fields[field] = True
        else:
            places = [place for place in places if place not in biases]
    return places


def _stored_parameters(
    family: Family, config: TransformerConfig, has: Callable[[str], bool]
) -> Iterator[StoredParameter]:
    """Yield the parameters of the model that have a row, in the order of the model.

    `has(name)` reports whether the files contain a tensor.
    """
    return stored_parameters(model_tensors(config), family.rows, family.layers, config, has)


def _not_carried(source: Source, sidecar: bool) -> list[str]:
    lost = []
    if any(key.startswith("optimizer.") for key in source.tensors) and not sidecar:
        lost.append(
            "optimizer state and training state: give --save-optim-sidecar to keep them beside the model"
        )
    if source.training is not None and source.training.rng:
        lost.append("random number state: it belongs to one layout")
    return lost
