"""Edits of a model as views of a source: other layers, another vocabulary, experts.

Optimizer state follows its parameters, except into experts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from megatron.conversion.editing.lora import merge_adapters
from megatron.conversion.huggingface.model_tokenizer import count_tokens
from megatron.conversion.model_space.layouts import SPLITS
from megatron.conversion.model_space.lazy_tensors import cast, concatenate, repeat
from megatron.conversion.model_space.model import (
    model_config,
    model_parameters,
    read_vocabulary_rows,
    split_layer_key,
)
from megatron.conversion.model_space.optimizer_states import (
    average_key,
    full_precision_key,
    optimizer_states,
)
from megatron.conversion.model_space.views import SourceView, get_dtype
from megatron.conversion.options import EditOptions, WriteOptions
from megatron.core.dist_checkpointing.mapping import (
    Box,
    LazyTensor,
    Shape,
    cut_rows,
)
from megatron.core.distributed.param_and_grad_buffer import ParamSpec
from megatron.core.run_checkpoint.keys import (
    AVERAGE,
    WORD_EMBEDDINGS,
    is_foreign,
    is_trained,
    split_key,
)
from megatron.core.run_checkpoint.source import Source
from megatron.core.tensor_parallel import compute_padded_vocab_size
from megatron.core.transformer.transformer_config import TransformerConfig

_DEFAULT_TOPK = 2
_BLOCK = 32 << 20  # bytes that are read at once
_DEFAULT_SEED = 1234  # of training


def apply_edits(source: Source, options: WriteOptions) -> Source:
    """Return `source` with the edits in `options`.

    The order is vocabulary, adapters, layers, experts: an adapter belongs to a model with all
    layers, and with the tokens that were added before its training.
    """
    edits = options.edits
    if any(map(is_foreign, source.tensors)):
        _refuse_foreign(edits)
    if not source.args.get("mtp_num_layers"):
        source = leave_out_prediction_layers(source, options)
    if edits.target_vocab_size is not None:
        source = ResizedVocabulary(source, edits.target_vocab_size, edits.new_rows, options)
    if edits.adapters:
        source = merge_adapters(source, edits.adapters, options)
    if edits.layers is not None:
        source = SelectedLayers(source, edits.layers)
    if edits.experts is not None:
        source = UpcycledExperts(source, edits.experts, edits.topk, options)
    return source


def _refuse_foreign(edits: EditOptions) -> None:
    """Raise ValueError for edits of models that have foreign tensors."""
    if edits.layers is not None:
        raise ValueError(
            "--layers and --keep-foreign are mutually exclusive: which layer a foreign tensor "
            "belongs to is not known"
        )
    if edits.experts is not None:
        raise ValueError(
            "--upcycle-experts and --keep-foreign are mutually exclusive: the result is a model of "
            "another family, to which the foreign tensors do not belong"
        )


def describe_model(source: Source) -> TransformerConfig:
    """Return the configuration of the model in `source`."""
    rows = read_vocabulary_rows(source.tensors, source.description)
    return model_config(source.args, rows, source.description)


def _get_seed(source: Source) -> int:
    """Return the seed of initial values."""
    return int(source.args.get("seed") or _DEFAULT_SEED)


# ---- Layers ----


def leave_out_prediction_layers(source: Source, options: WriteOptions) -> Source:
    """Return `source` without layers for multi-token prediction, which its arguments do not have.

    The command line takes precedence over the stored arguments: --mtp-num-layers 0.
    """
    kept = {}
    for key, info in source.tensors.items():
        parameter, _ = split_key(key)
        if not parameter.startswith("mtp."):
            kept[key] = info
    if len(kept) == len(source.tensors):
        return source
    options.note("layers for multi-token prediction: left out, as --mtp-num-layers requests")
    view = SourceView(source)
    view.tensors = kept
    return view


class SelectedLayers(SourceView):
    """A model whose layer i is layer `layers[i]` of the source, with its optimizer state."""

    def __init__(self, source: Source, layers: tuple[int, ...]) -> None:
        super().__init__(source)
        config = describe_model(source)
        if max(layers) >= config.num_layers:
            raise ValueError(
                f"--layers: {source.description} has the layers 0 to {config.num_layers - 1}, not "
                f"{max(layers)}"
            )
        if config.num_mtp_layers and layers[-1] != config.num_layers - 1:
            raise ValueError(
                f"--layers ends with {layers[-1]}, but the layers for multi-token prediction are "
                f"like layer {config.num_layers - 1}: select it last"
            )
        # List the tensors in the order of the new layers.
        # Layer -> (prefix, name) of its tensors
        layer_tensors: dict[int, list[tuple[str, str]]] = {}
        self.tensors = {}
        for key, tensor in source.tensors.items():
            layer_key = split_layer_key(key)
            if layer_key is None:
                self.tensors[key] = tensor
            else:
                prefix, layer, name = layer_key
                layer_tensors.setdefault(layer, []).append((prefix, name))
        for new_layer, old_layer in enumerate(layers):
            for prefix, name in layer_tensors[old_layer]:
                tensor = source.tensors[f"{prefix}{old_layer}.{name}"]
                self.tensors[f"{prefix}{new_layer}.{name}"] = tensor

        # Adapt the arguments: a pattern with an entry per layer moves with the layers.
        self.args["num_layers"] = len(layers)
        if config.has_experts:
            self.args["moe_layer_freq"] = [config.moe_layer_pattern[old] for old in layers]
            if not any(self.args["moe_layer_freq"]):
                raise ValueError(
                    "--layers: none of the selected layers has experts, but the arguments describe "
                    "a model with experts: select at least one that has"
                )
        if config.window_size is not None:
            self.args["window_attn_skip_freq"] = [config.window_pattern[old] for old in layers]
        if config.no_rope_freq is not None:
            self.args["no_rope_freq"] = [config.no_rope_pattern[old] for old in layers]
        # Uneven stages were assigned to the old layers.
        for name in SPLITS:
            self.args.pop(name, None)


# ---- Vocabulary ----


class ResizedVocabulary(SourceView):
    """A model with another number of tokens.

    New rows of weights, main parameters and averages are the mean of the existing rows, the initial
    values of training, or zero. Their other optimizer states are zero, as at the start of training.
    """

    def __init__(
        self, source: Source, vocab_size: int, new_rows: str, options: WriteOptions
    ) -> None:
        super().__init__(source)
        old_config = describe_model(source)
        assert old_config.vocab_size is not None
        self._old_rows = old_config.vocab_size
        self._new_rows = new_rows
        # [h] by key; a mean reads the whole tensor, so it is computed once.
        self._means: dict[str, torch.Tensor] = {}
        config = model_config(source.args, vocab_size, source.description)
        # The layers define which of their parameters have a row per token.
        self._seed = _get_seed(source)
        self._resized: dict[str, ParamSpec] = {}
        for old, new in zip(model_parameters(old_config), model_parameters(config), strict=True):
            assert old.name == new.name
            if old.shape != new.shape:
                self._resized[new.name] = new
        if vocab_size < self._old_rows:
            self._require_unused(vocab_size, options)

        for key in source.tensors:
            parameter, state = split_key(key)
            if parameter in self._resized:
                self.tensors[key] = self._resize(key, parameter, state, vocab_size)
        self._set_vocabulary_arguments(vocab_size)

    def _set_vocabulary_arguments(self, vocab_size: int) -> None:
        """Set the arguments with sizes of the vocabulary that the source has."""
        divisible_by = int(self.args.get("make_vocab_size_divisible_by") or 1)
        tp = int(self.args.get("tensor_model_parallel_size") or 1)
        sizes = {
            "vocab_size": vocab_size,
            "model_vocab_size": vocab_size,
            "padded_vocab_size": compute_padded_vocab_size(vocab_size, divisible_by, tp),
        }
        for name, size in sizes.items():
            if self.args.get(name) is not None:
                self.args[name] = size

    def _require_unused(self, vocab_size: int, options: WriteOptions) -> None:
        """Raise ValueError if rows from `vocab_size` on belong to tokens."""
        tokens = count_tokens(self.args, options.tokenizer, options.trusted)
        if tokens is not None:
            if vocab_size < tokens:
                raise ValueError(
                    f"--target-vocab-size {vocab_size} removes rows in use: the tokenizer has "
                    f"{tokens} tokens"
                )
            return
        for key in self._resized:
            last = self._find_last_row_in_use(key)
            if last >= vocab_size:
                raise ValueError(
                    f"--target-vocab-size {vocab_size} removes rows in use: row {last} of {key} is "
                    "not zero. Its tokenizer is not known: give --tokenizer, of which every token "
                    "is kept"
                )

    def _find_last_row_in_use(self, key: str) -> int:
        """Return the number of the last row that is not zero, or -1."""
        last = -1
        tensor = self._source.tensors[key]
        for offset, shape in cut_rows(tensor.shape, tensor.dtype.itemsize, _BLOCK):
            rows = tensor.read(offset, shape)
            if rows.dim() > 1:
                # [rows]: whether a row has an element that is not zero
                rows = rows.any(dim=1)
            rows = rows.nonzero()
            if len(rows):
                last = offset[0] + int(rows[-1])
        return last

    def _resize(self, key: str, parameter: str, state: str | None, vocab_size: int) -> LazyTensor:
        """Return a tensor with another number of rows: the stored ones, then new ones."""
        old = self._source.tensors[key]
        row_shape = old.shape[1:]
        num_new = vocab_size - self._old_rows
        if num_new <= 0:
            return replace(old, shape=(vocab_size, *row_shape))
        read_new = partial(self._make_rows, key, parameter, state)
        stored_rows = replace(old, shape=(self._old_rows, *row_shape))
        new_rows = LazyTensor((num_new, *row_shape), old.dtype, read_new)
        return concatenate([stored_rows, new_rows], axis=0)

    def _make_rows(
        self, key: str, parameter: str, state: str | None, offset: Shape, shape: Shape
    ) -> torch.Tensor:
        """Return a box of the new rows."""
        dtype = self._source.tensors[key].dtype
        # Moments of new rows start at zero.
        is_value = state in (None, "param", AVERAGE)
        if not is_value or self._new_rows == "zero":
            return torch.zeros(shape, dtype=dtype)
        if self._new_rows == "init":
            spec = self._resized[parameter]
            whole_offset = (self._old_rows + offset[0], *offset[1:])
            return _initialize(spec, self._seed, dtype, whole_offset, shape)
        # The mean is computed from the most precise copy of the weights.
        if state != AVERAGE:
            key = full_precision_key(parameter, self._source.tensors)
        if key not in self._means:
            self._means[key] = self._compute_mean_row(key)
        columns = slice(offset[1], offset[1] + shape[1])
        return self._means[key][columns].to(dtype).expand(shape).contiguous()

    def _compute_mean_row(self, key: str) -> torch.Tensor:
        """Return the mean of the stored rows of `key`, summed in float64 and rounded to fp32."""
        tensor = self._source.tensors[key]
        total = torch.zeros(math.prod(tensor.shape[1:]), dtype=torch.float64)
        for offset, shape in cut_rows(tensor.shape, tensor.dtype.itemsize, _BLOCK):
            total += tensor.read(offset, shape).sum(dim=0, dtype=torch.float64)
        return (total / tensor.shape[0]).float()


# ---- Experts ----

# Part of a key in a model with experts -> the same part in the dense model.
_DENSE_PARTS = {
    ".mlp.experts.experts.": ".mlp.",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
    ".mlp.post_layernorm.": ".mlp.linear_fc2.post_layernorm.",
}


class UpcycledExperts(SourceView):
    """A model whose layers have copies of the dense MLP as experts, and an initialized router.

    While all experts of a layer are equal, the model computes the function of the dense one, if the
    weights of a token's experts sum to 1. With --moe-router-pre-softmax they do not, and the
    experts are scaled as Megatron-LM's --moe-use-upcycling does. The optimizer state is dropped.
    """

    def __init__(
        self, source: Source, experts: int, topk: int | None, options: WriteOptions
    ) -> None:
        super().__init__(source)
        dense = describe_model(source)
        if dense.has_experts:
            raise ValueError(
                f"--upcycle-experts {experts}: {source.description} already has {dense.experts} "
                "experts per layer"
            )
        if experts < 2:
            raise ValueError(f"--upcycle-experts {experts}: a model with experts has at least 2")
        self.args |= {
            "num_experts": experts,
            "moe_router_topk": topk or self.args.get("moe_router_topk") or _DEFAULT_TOPK,
            "moe_ffn_hidden_size": dense.ffn_size,
            "moe_layer_freq": 1,
        }

        # Tensors: copies of dense ones, and the routers.
        config = model_config(self.args, dense.vocab_size or 0, source.description)
        seed = _get_seed(source)
        scale = _compute_expert_scale(config)
        new_dtype = get_dtype(options.dtype)
        self.tensors = {}
        for spec in model_parameters(config):
            dense_key = self._find_dense_key(spec)
            dtype = source.tensors[dense_key or WORD_EMBEDDINGS].dtype
            if not is_trained(spec.name):
                dtype = torch.float32
            elif new_dtype is not None:
                dtype = new_dtype
            if dense_key is None:
                read = partial(_initialize, spec, seed, dtype)
                self.tensors[spec.name] = LazyTensor(spec.shape, dtype, read)
            else:
                self.tensors[spec.name] = self._copy(dense_key, spec, dtype, scale)

        if optimizer_states(source.tensors):
            options.note("optimizer state: dropped, since the dense MLP's does not fit its experts")
        if average_key(WORD_EMBEDDINGS) in source.tensors:
            options.note("average of the weights (ema.*): dropped, like the optimizer state")
        self.drop_optimizer()

    def _find_dense_key(self, spec: ParamSpec) -> str | None:
        """Return the key of the dense model that `spec` copies, or None for a router's."""
        if ".mlp.router." in spec.name:
            return None
        key = spec.name
        for expert_part, dense_part in _DENSE_PARTS.items():
            key = key.replace(expert_part, dense_part)
        # The first axis of experts' weights is the expert.
        shape = spec.shape[1:] if _is_of_experts(spec.name) else spec.shape
        if key not in self._source.tensors or self._source.tensors[key].shape != shape:
            raise ValueError(
                f"--upcycle-experts: {self.description} has no parameter that {spec.name} of shape "
                f"{list(spec.shape)} can be copied from: leave out the flags that add it"
            )
        return key

    def _copy(
        self, dense_key: str, spec: ParamSpec, dtype: torch.dtype, scale: float
    ) -> LazyTensor:
        """Return a dense tensor, or as many copies of it as there are experts."""
        tensors = self._source.tensors
        tensor = tensors[full_precision_key(dense_key, tensors)]
        if not _is_of_experts(spec.name):
            return cast(tensor, dtype)
        if scale != 1 and spec.name.endswith(".weight"):
            read = partial(_read_scaled, tensor, scale)
            tensor = replace(tensor, dtype=torch.float32, read=read)
        return repeat(cast(tensor, dtype), spec.shape[0])


def _initialize(
    spec: ParamSpec, seed: int, dtype: torch.dtype, offset: Shape, shape: Shape
) -> torch.Tensor:
    """Return a box of the initial values of a parameter."""
    values = torch.empty(shape)
    spec.info.init(Box(offset, values), spec.name, spec.shape, seed)
    return values.to(dtype)


def _read_scaled(tensor: LazyTensor, scale: float, offset: Shape, shape: Shape) -> torch.Tensor:
    return tensor.read(offset, shape).float() * scale


def _is_of_experts(key: str) -> bool:
    """Return whether a parameter has a leading axis of experts."""
    return ".mlp.experts.experts." in key


def _compute_expert_scale(config: TransformerConfig) -> float:
    """Return the factor of the experts' weights, which Megatron-LM applies to both projections.

    Without normalization a token's experts have weights that sum to about topk / experts. The
    output is a product of two weights, or of three with a gate or a squared activation.
    """
    if not config.moe_router_pre_softmax:
        return 1.0
    num_factors = 3 if config.gated or config.squared_relu else 2
    return float((config.experts / config.moe_router_topk) ** (1 / num_factors))
