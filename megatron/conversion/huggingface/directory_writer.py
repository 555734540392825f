"""A `Source` written as a Hugging Face directory, a few rows at a time."""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.conversion.huggingface.config_fields import refusal_of_transformers
from megatron.conversion.huggingface.directory import (
    CONFIG,
    FOREIGN_FIELDS,
    QUANTIZATION,
    TEXT_PREFIX,
)
from megatron.conversion.huggingface.families import choose_family
from megatron.conversion.huggingface.family import Family, has_foreign_mixers
from megatron.conversion.huggingface.model_tokenizer import (
    copy_processor,
    export_tokenizer,
    select_stated_ids,
    write_generation_config,
)
from megatron.conversion.huggingface.sidecar import (
    DIRECTORY,
    collect_optimizer_tensors,
    write_state,
)
from megatron.conversion.huggingface.stored_parameters import (
    StoredParameter,
    copied_parameters,
    store_parameters,
    stored_parameters,
)
from megatron.conversion.huggingface.weight_files import (
    check_weight_files,
    open_weights,
    write_weight_files,
)
from megatron.conversion.huggingface.wrapper import TEXT_CONFIG
from megatron.conversion.huggingface.wrappers import find_wrapper
from megatron.conversion.model_space.foreign import foreign_name
from megatron.conversion.model_space.lazy_tensors import cast
from megatron.conversion.model_space.model import (
    check_parameters,
    make_export_config,
    model_tensors,
)
from megatron.conversion.model_space.optimizer_states import full_precision_key
from megatron.conversion.model_space.pieces import make_empty_directory
from megatron.conversion.model_space.views import get_dtype
from megatron.conversion.options import WriteOptions
from megatron.conversion.quantization.encodings import check_settings, read_other_settings
from megatron.conversion.quantization.export_encodings import TARGETS, group_fused
from megatron.conversion.quantization.fp8_writing import BLOCK_SIZE
from megatron.conversion.quantization.unchanged import keep_unchanged
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.files import CLAIM
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.dist_checkpointing.saving.commit import Progress, no_progress
from megatron.core.durable_files import discard, fsync_tree, write_json
from megatron.core.object_path import ObjectPath
from megatron.core.object_storage import ConflictError
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS, is_foreign, is_trained, is_weight
from megatron.core.run_checkpoint.source import Source
from megatron.core.safe_files import schema
from megatron.core.safe_files.reading import read_json
from megatron.core.transformer.transformer_config import TransformerConfig


def write_huggingface(
    source: Source,
    directory: Path,
    options: WriteOptions | None = None,
    progress: Progress = no_progress,
) -> list[str]:
    """Write `source` into the empty `directory`; return notes about data that was left out.

    config.json is written last, so an interrupted export is not taken for a model. In object
    storage, an export that fails is removed. Raises ValueError for a model that transformers cannot
    express, before anything is written.
    """
    options = options or WriteOptions()

    # Plan and check everything.
    config = _make_config(source, options)
    plan = _plan_model(source, config, options)
    weights = _collect_weights(source, config, plan, options)
    if options.quantized_original is not None:
        weights = _keep_quantized(weights, plan, options.quantized_original, options)
    optimizer: dict[str, LazyTensor] = {}
    if options.optim_sidecar:
        optimizer = collect_optimizer_tensors(source, model_tensors(config))

    # Write weights and sidecar.
    make_empty_directory(directory)
    with _folder_for_small_files(directory) as small_files:
        limits = (options.max_shard_size, options.workers, progress)
        write_weight_files(directory, "model", weights, *limits)
        check_weight_files(directory, weights)
        if optimizer:
            folder = directory / DIRECTORY
            folder.mkdir()
            files = write_weight_files(folder, "optimizer", optimizer, *limits)
            write_state(folder, source, files)
        lost = write_small_files(small_files, source.args, plan.fields, options, plan.is_multimodal)
    # A sidecar keeps the full precision.
    if options.dtype is None and not optimizer:
        lost = [*lost, *_list_rounded(source, plan.parameters, config.params_dtype)]
    if options.quantization == "fp8-block":
        _note_partial_blocks(weights, options)
    return lost + _list_left_out(source, bool(optimizer))


class _ModelPlan(NamedTuple):
    """A model of transformers to write: its config.json and its tensors."""

    fields: dict[str, Any]
    parameters: list[StoredParameter]
    foreign_names: dict[str, str]  # key -> name in the files
    is_multimodal: bool


def _plan_model(source: Source, config: TransformerConfig, options: WriteOptions) -> _ModelPlan:
    """Return the model to write. Raises ValueError if transformers cannot express it."""
    # Choose the family, or of a multimodal model the one of its language model.
    foreign = [key for key in source.tensors if is_foreign(key)]
    foreign_fields = get_foreign_fields(source.args)
    wrapper = find_wrapper(foreign_fields)
    if wrapper is not None and not foreign:  # the language model alone
        wrapper = None
        foreign_fields = {}
    if wrapper is not None:
        _check_multimodal_options(options)
        family, fields = wrapper.update_text_config(foreign_fields, config)
    else:
        model_type = source.args.get("hf_model_type")
        family = choose_family(config, model_type, foreign, get_stored_fields(source.args))
        fields = family.write_config(config, get_imported_fields(family, config, source.args))
    if has_foreign_mixers(config):
        _check_foreign_mixers(source, family, foreign)

    # List the tensors. Exports have one per expert, not the fused form.
    shapes = model_tensors(config)
    parameters = list(
        stored_parameters(shapes, family.select_rows(config), family.layers, config, has_none)
    )
    parameters += copied_parameters(shapes, family.layers, config)
    _check_complete(source, config, shapes, {parameter.key for parameter in parameters})
    parameters = _leave_out_biases(source, family, fields, parameters)
    foreign_names = {key: foreign_name(key) for key in foreign}
    if wrapper is None:
        if options.quantization is not None:
            unquantized = _list_unquantized(parameters, foreign, options.quantization)
            fields[QUANTIZATION] = TARGETS[options.quantization].make_settings(unquantized)
        return _ModelPlan(foreign_fields | fields, parameters, foreign_names, False)
    prefixes = wrapper.get_prefixes(source.args.get(TEXT_PREFIX))
    for index, parameter in enumerate(parameters):
        names = tuple(prefixes.add(name) for name in parameter.names)
        parameters[index] = dataclasses.replace(parameter, names=names)
    for key, name in foreign_names.items():
        foreign_names[key] = prefixes.add(name)
    fields = wrapper.write_config(foreign_fields, fields)
    return _ModelPlan(fields, parameters, foreign_names, True)


def _collect_weights(
    source: Source, config: TransformerConfig, plan: _ModelPlan, options: WriteOptions
) -> dict[str, LazyTensor]:
    """Return the tensors to write by name: from the fp32 main parameters if any, so that they are
    cast once.
    """
    quantized: set[str] = set()  # names
    if options.quantization is not None:
        for parameter in _select_quantizable(plan.parameters, options.quantization):
            quantized.update(parameter.names)

    def get_value(parameter: StoredParameter) -> LazyTensor:
        source_key = full_precision_key(parameter.key, source.tensors)
        value = parameter.select_in(source.tensors[source_key])
        if not is_trained(parameter.key):
            return cast(value, source.tensors[parameter.key].dtype)
        if quantized.issuperset(parameter.names):
            return value
        return cast(value, config.params_dtype)

    weights: dict[str, LazyTensor] = {}
    matrices: dict[str, LazyTensor] = {}
    for name, tensor in store_parameters(plan.parameters, get_value).items():
        if name in quantized:
            matrices[name] = tensor
        else:
            weights[name] = tensor
    if options.quantization is not None:
        for group in group_fused(matrices):
            weights |= TARGETS[options.quantization].encode(group)
    for key, name in plan.foreign_names.items():
        if name in weights:
            raise ValueError(
                f"{foreign_name(key)} is a foreign tensor with the name of a parameter of "
                "the model: rename it (--rename) or leave foreign tensors out (--keep-foreign)"
            )
        weights[name] = source.tensors[key]
    return weights


def collect_model(
    source: Source, options: WriteOptions
) -> tuple[dict[str, Any], dict[str, LazyTensor]]:
    """Return the config.json and the tensors that `write_huggingface` writes.

    Raises ValueError for a model that transformers cannot express.
    """
    config = _make_config(source, options)
    plan = _plan_model(source, config, options)
    return plan.fields, _collect_weights(source, config, plan, options)


def _keep_quantized(
    weights: dict[str, LazyTensor], plan: _ModelPlan, original: Path, options: WriteOptions
) -> dict[str, LazyTensor]:
    """Return the tensors to write with unchanged matrices as in the quantized model `original`.

    The configuration of the quantization is added to the plan.
    """
    if plan.is_multimodal:
        raise ValueError(
            f"--keep-quantization {original} is not supported for multimodal models: leave it "
            "out, or leave out --keep-foreign to write the language model alone"
        )
    settings = read_json(original / CONFIG).get(QUANTIZATION)
    if settings is not None:
        check_settings(settings)
    else:
        settings = read_other_settings(original)
    if settings is None:
        raise ValueError(f"--keep-quantization {original}: this model is not quantized")
    stored = open_weights(original)
    result, plan.fields[QUANTIZATION], changed = keep_unchanged(weights, stored, settings, original)
    if changed:
        options.note(
            f"--keep-quantization: {len(changed)} matrices, e.g. {changed[0]}, have changed and "
            "are not quantized"
        )
    return result


class _Claim:
    """The right of one program to write the objects of a model."""

    def __init__(self, directory: ObjectPath) -> None:
        self._directory = directory
        self._path = directory / CLAIM
        self._content = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}".encode()
        try:
            directory.store.create(self._path.key, self._content)
        except ConflictError as error:
            raise ValueError(
                f"{directory} is being written by {self._path.read_text()[:100]} (host, process): "
                f"if that program has ended, delete {directory}"
            ) from error

    def holds(self) -> bool:
        """Return whether no other program has taken the directory over."""
        try:
            return self._directory.store.read(self._path.key).content == self._content
        except FileNotFoundError:
            return False

    def complete(self, folder: Path) -> None:
        """Upload the files in `folder`, config.json last: it makes the objects a model."""
        if not self.holds():
            raise CheckpointError(f"{self._directory}: another program has taken it over")
        paths = [path for path in sorted(folder.iterdir()) if path.name != CONFIG]
        for path in [*paths, folder / CONFIG]:
            target = self._directory / path.name
            target.store.put(target.key, path.read_bytes())
        self._path.unlink()


@contextmanager
def _folder_for_small_files(directory: Path) -> Iterator[Path]:
    """Yield the folder for all files but the weights, and complete the model at the end.

    In object storage it is a temporary one whose files are uploaded. The objects of an export that
    fails are removed; directories are removed by the caller.
    """
    if not isinstance(directory, ObjectPath):
        yield directory
        return
    claim = _Claim(directory)
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
            claim.complete(Path(folder))
    except BaseException:
        with suppress(OSError):
            if claim.holds():
                remove_model(directory)
        raise


def remove_model(directory: Path) -> None:
    """Remove a model from a file system or object storage; it stops being a model at once."""
    if not isinstance(directory, ObjectPath):
        discard(directory)
        return
    store = directory.store
    store.delete([(directory / CONFIG).key])
    store.delete(list(store.sizes(directory.key)))


def write_small_files(
    directory: Path,
    args: Mapping[str, Any],
    fields: Mapping[str, Any],
    options: WriteOptions,
    is_multimodal: bool = False,
) -> list[str]:
    """Write tokenizer and configuration next to the weights; return notes about lost parts.

    `fields` are those of config.json without the tokens of the tokenizer, which a multimodal model
    has only if they are among its fields.
    """
    tokenizer = export_tokenizer(args, options.tokenizer, directory, options.trusted)
    if is_multimodal:
        copy_processor(tokenizer, options.foreign, directory)
    write_generation_config(directory, {} if options.tokenizer else args, tokenizer.ids)
    for copied in tokenizer.copied:
        options.note(f"tokenizer: {copied}")
    # Readers recognize a model by config.json: it must not be durable before the weights are.
    fsync_tree(directory)
    if is_multimodal:
        changed = select_stated_ids(tokenizer.ids)
        fields = {**fields, **{name: changed[name] for name in changed if name in fields}}
    else:
        fields = {"use_cache": True, **fields, **tokenizer.ids}
        # Some families refuse null for special tokens that are not known.
        unknown = [name for name, token in tokenizer.ids.items() if token is None]
        if unknown and refusal_of_transformers(fields["model_type"], fields) is not None:
            fields = {name: value for name, value in fields.items() if name not in unknown}
    write_json(directory / CONFIG, fields)
    fsync_tree(directory)
    return tokenizer.lost


def has_none(name: str) -> bool:
    """Return False: an export has no fused tensors of experts."""
    return False


def _make_config(source: Source, options: WriteOptions) -> TransformerConfig:
    """Return the model of `source` in the dtype of the export."""
    dtype = get_dtype(options.dtype) or source.tensors[WORD_EMBEDDINGS].dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"weights of {dtype} cannot be written: give --dtype fp32, bf16 or fp16")
    config = make_export_config(source, options.true_vocab_size)
    return dataclasses.replace(config, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)


def _check_complete(
    source: Source, config: TransformerConfig, shapes: Mapping[str, Shape], placed: set[str]
) -> None:
    """Check that the source has every parameter, and that those not in `placed` are zero biases.

    Raises ValueError otherwise, or if the source has parameters that the model does not have.
    """
    check_parameters(source.tensors, shapes, source.description, config.vocab_size)
    for key in shapes:
        if key not in placed and torch.count_nonzero(source.tensors[key].read_all()):
            raise ValueError(
                f"{source.description}: {key} is not zero, and models of this family have no such "
                "bias"
            )
    extra = []
    for key in source.tensors:
        if key not in shapes and is_weight(key):
            extra.append(key)
    if extra:
        raise ValueError(
            f"{source.description}: {', '.join(extra)} are not part of the model that its "
            "arguments describe"
        )


def _check_foreign_mixers(source: Source, family: Family, foreign: Sequence[str]) -> None:
    """Raise ValueError if a layer's foreign mixer is not among the foreign tensors."""
    try:
        family.find_foreign_mixers(map(foreign_name, foreign), source.args)
    except ValueError as error:
        raise ValueError(f"{source.description}: {error}") from error


_FIELDS = schema.mapping(schema.anything, keys=schema.key)


def get_stored_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json among the arguments of a checkpoint."""
    fields: dict[str, Any] = args.get("hf_fields") or {}
    _FIELDS(fields, "the arguments: hf_fields")
    return fields


def get_imported_fields(
    family: Family, config: TransformerConfig, args: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of the config.json that the model was imported from, checked again.

    Those of a model with foreign mixers are all fields.
    """
    if args.get("hf_model_type") != family.model_type:
        return {}
    fields = get_stored_fields(args)
    if has_foreign_mixers(config):
        family.check_fields(fields, ignored=fields)
        return fields
    family.check_fields(fields)
    return family.repeated_fields(fields)


def get_foreign_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the config.json that belong to foreign tensors, checked again."""
    fields: dict[str, Any] = args.get(FOREIGN_FIELDS) or {}
    _FIELDS(fields, f"the arguments: {FOREIGN_FIELDS}")
    return dict(fields)


def list_foreign_fields(args: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields of config.json that belong to foreign tensors, and of those of
    the language model of a wrapper, which repeats all of them.
    """
    fields = get_foreign_fields(args)
    return [*fields, *(fields.get(TEXT_CONFIG) or ())]


def _check_multimodal_options(options: WriteOptions) -> None:
    """Raise ValueError for options that are not supported for multimodal models."""
    if options.quantization is not None:
        raise ValueError(
            f"--quantize {options.quantization} is not supported for multimodal models: leave it "
            "out, or leave out --keep-foreign to write the language model alone"
        )


def _leave_out_biases(
    source: Source, family: Family, fields: dict[str, Any], parameters: list[StoredParameter]
) -> list[StoredParameter]:
    """Leave out the biases that `fields` switch off; switch them on if one of them is not zero."""
    unbiased = family.list_unbiased_parts(fields)
    for field, name in family.switched_biases():
        biases = [
            parameter for parameter in parameters if parameter.is_bias and name in parameter.key
        ]
        if not biases or name not in unbiased:
            continue
        is_used = any(torch.count_nonzero(source.tensors[bias.key].read_all()) for bias in biases)
        if is_used:
            fields[field] = True
        else:
            parameters = [parameter for parameter in parameters if parameter not in biases]
    return parameters


def _list_rounded(
    source: Source, parameters: Sequence[StoredParameter], dtype: torch.dtype
) -> list[str]:
    """Return a note about weights with more precision than the model's dtype, such as fp32 norms.

    Weights of an export have one dtype, in which transformers loads all of them by default.
    """
    rounded: dict[str, None] = {}  # several rows may be parts of one key
    for parameter in parameters:
        info = source.tensors.get(parameter.key)
        if info is not None and is_trained(parameter.key) and info.dtype.itemsize > dtype.itemsize:
            rounded[parameter.key] = None
    if not rounded:
        return []
    return [
        f"fp32 precision of {len(rounded)} weights, which are rounded to the dtype of the others, "
        f"e.g. {next(iter(rounded))}: --dtype fp32 keeps it"
    ]


def check_quantizable(family: Family, config: TransformerConfig, quantization: str) -> None:
    """Raise ValueError if matrices of a model cannot be quantized in the files of `family`."""
    shapes = model_tensors(config)
    parameters = stored_parameters(shapes, family.rows, family.layers, config, has_none)
    _select_quantizable(list(parameters), quantization)


def _select_quantizable(
    parameters: Sequence[StoredParameter], quantization: str
) -> list[StoredParameter]:
    """Return the matrices of linear layers in attention, MLP and experts that are quantized.

    Raises ValueError for a family whose matrices are stored in a form that has no scales.
    """
    of_packed_experts = TARGETS[quantization].of_packed_experts
    selected = []
    for parameter in parameters:
        is_packed = parameter.transposed or parameter.packed is not None
        is_experts = parameter.transposed and parameter.packed is not None
        if not _is_linear(parameter) or (of_packed_experts and not is_experts):
            continue
        if is_packed and not of_packed_experts:
            raise ValueError(
                f"--quantize: {parameter.names[0]} is stored transposed or packed "
                "with other experts, and scales of such tensors are not defined: leave the flag "
                "out, or for gpt_oss give --quantize mxfp4"
            )
        selected.append(parameter)
    if not selected:
        raise ValueError(
            f"--quantize {quantization} is the encoding of gpt_oss's experts, which this model "
            "does not have: give --quantize nvfp4 or fp8-channel"
        )
    return selected


def _is_linear(parameter: StoredParameter) -> bool:
    return (
        ".linear_" in parameter.key
        and parameter.key.endswith("weight")
        and len(parameter.shape) == 2
    )


def _list_unquantized(
    parameters: Sequence[StoredParameter], foreign: Sequence[str], quantization: str
) -> list[str]:
    """Return the modules with a matrix that is not quantized: embeddings, head, routers, and those
    of foreign tensors.
    """
    modules = ["lm_head"]  # a tied head has no tensor, but is a linear layer
    quantized = set(map(id, _select_quantizable(parameters, quantization)))
    for parameter in parameters:
        if len(parameter.shape) == 2 and id(parameter) not in quantized:
            modules += [name.removesuffix(".weight") for name in parameter.names]
    for key in foreign:
        module, _, suffix = foreign_name(key).rpartition(".")
        if suffix == "weight":
            modules.append(module)
    return sorted(set(modules))


def _note_partial_blocks(weights: Mapping[str, LazyTensor], options: WriteOptions) -> None:
    """Note matrices with partial blocks, which not every program reads."""
    partial_names = []
    for name, tensor in weights.items():
        is_quantized = f"{name}_scale_inv" in weights
        if is_quantized and any(extent % BLOCK_SIZE for extent in tensor.shape):
            partial_names.append(name)
    if partial_names:
        options.note(
            f"--quantize: {len(partial_names)} matrices, e.g. {partial_names[0]}, have partial "
            f"blocks, because a side is not a multiple of {BLOCK_SIZE}: vLLM refuses these in "
            "fused layers, and transformers dequantizes them only if the side is smaller than a "
            "block"
        )


def _list_left_out(source: Source, has_sidecar: bool) -> list[str]:
    """Return a note for each kind of state that the export does not contain."""
    notes = []
    has_optimizer = any(key.startswith("optimizer.") for key in source.tensors)
    if has_optimizer and not has_sidecar:
        notes.append(
            "optimizer state and training state: give --save-optim-sidecar to keep them next to "
            "the model"
        )
    if source.training is not None and source.training.rng:
        notes.append("random number state: it belongs to one layout")
    return notes
