"""Parameters of one model in the weight files of transformers: checked when opened, read by box."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megatron.conversion.huggingface.family import Family
from megatron.conversion.huggingface.stored_parameters import (
    StoredParameter,
    copied_parameters,
    stored_parameters,
)
from megatron.conversion.model_space.lazy_tensors import make_zeros, stack
from megatron.conversion.model_space.model import model_tensors
from megatron.core.dist_checkpointing.mapping import LazyTensor, cut_rows
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS
from megatron.core.transformer.transformer_config import TransformerConfig

_BLOCK = 32 << 20  # bytes that are compared at once


class StoredWeights:
    """Weights of a model by model-space key.

    `zero_biases` are the parts of a layer, e.g. ".mlp.", whose biases are zero: config.json
    switches them off, so transformers ignores those in the files. Raises ValueError for files that
    do not fit the model.
    """

    def __init__(
        self,
        directory: Path,
        files: Mapping[str, LazyTensor],
        family: Family,
        config: TransformerConfig,
        zero_biases: Collection[str],
    ) -> None:
        self._directory = directory
        self._files = dict(files)
        self._embedding_name = family.embedding_name
        self._head_names = family.head_names
        self._zero_biases = zero_biases
        # A save of the base model alone (AutoModel instead of AutoModelForCausalLM) names its
        # tensors without the prefix.
        has_prefix = any(name.startswith(family.prefix) for name in files)
        self._removed_prefix = "" if has_prefix else family.prefix
        is_tied = not config.untie_embeddings_and_output_weights
        if is_tied:
            self._add_embedding()
        self.shapes = model_tensors(config)
        # Key -> its parameter, or those of its experts.
        self._parameters: dict[str, list[StoredParameter]] = defaultdict(list)
        parameters = stored_parameters(
            self.shapes, family.select_rows(config), family.layers, config, self._contains
        )
        for parameter in parameters:
            if self._is_stored(parameter):
                parameter = self._find_orientation(parameter)
                self._check_shapes(parameter)
                self._parameters[parameter.key].append(parameter)
        self.tensors: dict[str, LazyTensor] = {}
        for key, members in self._parameters.items():
            tensors = [self._join(parameter) for parameter in members]
            self.tensors[key] = stack(tensors) if members[0].lead else tensors[0]
        # Biases that are not stored are zero.
        self.default_dtype = self.tensors[WORD_EMBEDDINGS].dtype
        for key, shape in self.shapes.items():
            if key not in self.tensors:
                self.tensors[key] = make_zeros(shape, self.default_dtype)
        self._copies: list[StoredParameter] = []
        for parameter in copied_parameters(self.shapes, family.layers, config):
            if all(map(self._contains, parameter.names)):
                self._check_shapes(parameter)
                self._check_copy(parameter)
                self._copies.append(parameter)
        if is_tied:
            self._check_tied_head()

    def __contains__(self, key: object) -> bool:
        """Return whether the files have the parameter; those that they lack are zero."""
        return key in self._parameters

    def find_unused(self) -> list[str]:
        """Return the names of stored tensors that are not part of the model."""
        used: set[str] = set()
        for parameters in [*self._parameters.values(), self._copies]:
            for parameter in parameters:
                used.update(map(self._name, parameter.names))
        return sorted(set(self._files) - used)

    def map_names(self) -> dict[str, str]:
        """Return the name of each stored tensor that is used -> its model-space key."""
        keys = {}
        for key, parameters in self._parameters.items():
            for parameter in parameters:
                keys.update(dict.fromkeys(map(self._name, parameter.names), key))
        return keys

    def _join(self, parameter: StoredParameter) -> LazyTensor:
        """Return a parameter, or the matrix of one expert."""
        return parameter.join([self._stored(name) for name in parameter.names])

    def _name(self, name: str) -> str:
        """Return the name that a tensor of a row has in these files."""
        return name.removeprefix(self._removed_prefix)

    def _contains(self, name: str) -> bool:
        return self._name(name) in self._files

    def _stored(self, name: str) -> LazyTensor:
        return self._files[self._name(name)]

    def _is_stored(self, parameter: StoredParameter) -> bool:
        """Return False for a bias that is switched off. Raises ValueError for a missing tensor."""
        if parameter.is_bias and any(name in parameter.key for name in self._zero_biases):
            return False
        missing = [self._name(name) for name in parameter.names if not self._contains(name)]
        if missing:
            raise ValueError(
                f"{self._directory}: the weights lack {', '.join(missing)}, which config.json "
                f"calls for; {self._describe_names(missing[0])}"
            )
        return True

    def _describe_names(self, missing: str) -> str:
        """Return the flag that removes a wrapper's prefix (`module.`), or else a stored name."""
        with_prefix = self._removed_prefix + missing
        for name in self._files:
            if name.endswith(with_prefix):
                wrapper = name.removesuffix(with_prefix)
                return f"{name} is in them: add --rename '{wrapper}*=*'"
        return f"they have e.g. {min(self._files, default='no tensors')}"

    def _find_orientation(self, parameter: StoredParameter) -> StoredParameter:
        """Return the part as it is stored: some releases do not transpose packed experts."""
        if parameter.packed is None or not parameter.transposed:
            return parameter
        untransposed = replace(parameter, transposed=False)
        shapes = [self._stored(name).shape for name in parameter.names]
        return (
            untransposed
            if shapes == untransposed.stored_shapes() != parameter.stored_shapes()
            else parameter
        )

    def _check_shapes(self, parameter: StoredParameter) -> None:
        """Raise ValueError for a tensor of another dtype or shape than config.json implies."""
        for name, expected in zip(parameter.names, parameter.stored_shapes(), strict=True):
            tensor = self._stored(name)
            if not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
                raise ValueError(
                    f"{self._directory}: {self._name(name)} has dtype {tensor.dtype}: weights must "
                    "be floating point, of 16 bits or more unless quantization_config specifies "
                    "their scales"
                )
            # The shapes that config.json implies are those of the model that will be built.
            if tensor.shape != expected:
                raise ValueError(
                    f"{self._directory}: {self._name(name)} has shape {list(tensor.shape)}, but "
                    f"config.json makes it {list(expected)}: config.json and weights are of "
                    "different models"
                )

    def _check_copy(self, copy: StoredParameter) -> None:
        """Refuse a copy of the embedding or the output matrix that differs: it would be lost."""
        (name,) = copy.names
        tensor = self._stored(name)
        original = self.tensors[copy.key]
        for offset, shape in cut_rows(copy.shape, tensor.dtype.itemsize, _BLOCK):
            if not torch.equal(tensor.read(offset, shape), original.read(offset, shape)):
                (parameter,) = self._parameters[copy.key]
                raise ValueError(
                    f"{self._directory}: {self._name(name)} differs from "
                    f"{self._name(parameter.names[0])}, which layers for multi-token prediction "
                    "share with the model: give --mtp-num-layers 0 to leave these layers out"
                )

    def _add_embedding(self) -> None:
        """Add the word embedding of files that have only the head, which is tied to it."""
        embedding = self._name(self._embedding_name)
        for name in self._list_heads():
            self._files.setdefault(embedding, self._files[name])

    def _list_heads(self) -> list[str]:
        return [name for name in map(self._name, self._head_names) if name in self._files]

    def _check_tied_head(self) -> None:
        """Refuse a head that differs from the embedding it is tied to: it would be lost."""
        for name in self._list_heads():
            head = self._files[name]
            if head is self._stored(self._embedding_name):
                continue
            if not torch.equal(head.read_all(), self.tensors[WORD_EMBEDDINGS].read_all()):
                raise ValueError(
                    f"{self._directory}: config.json ties the head to the embedding, but {name} "
                    "differs from it: set tie_word_embeddings to false in config.json to keep the "
                    "head"
                )
