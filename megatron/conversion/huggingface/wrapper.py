"""One multimodal model of transformers around a language model: its names and its config.json."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron.conversion.huggingface.config_fields import Json, transformers_defaults
from megatron.conversion.huggingface.family import Family
from megatron.core.dist_checkpointing.mapping import LazyTensor, cut_rows
from megatron.core.safe_files import schema
from megatron.core.terminal import escape_control_chars, format_size
from megatron.core.transformer.transformer_config import TransformerConfig

TEXT_CONFIG = "text_config"
_BODY = "model."
_HEAD = "lm_head."
_HEAD_MATRIX = f"{_HEAD}weight"
_MODULES = ("embed_tokens.", "layers.", "norm.")  # of a language model, named after `_BODY`
_EMBEDDING = f"{_BODY}embed_tokens.weight"
_TIED = "tie_word_embeddings"
_PRECISION = ("dtype", "torch_dtype")
# Fields without which a config.json of a language model alone is not read.
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_experts_per_tok"),
)
_OUTSIDE = ("architectures", "model_type")  # not fields of the language model
_BLOCK = 32 << 20  # bytes that are compared at once
_FIELDS = schema.mapping(schema.anything, keys=schema.key)


def _is_text(name: str) -> bool:
    """Return whether a tensor belongs to a language model, under its own name."""
    if name.startswith(_HEAD):
        return True
    return name.startswith(_BODY) and name.removeprefix(_BODY).startswith(_MODULES)


class Prefixes(NamedTuple):
    """Prefixes of the language model's names in the files of a wrapper."""

    body: str  # instead of "model."
    head: str = ""  # before "lm_head."

    def remove(self, name: str) -> str:
        """Return the language model's own name of a tensor; other names are unchanged."""
        if name.startswith(self.head + _HEAD):
            return name.removeprefix(self.head)
        if name.startswith(self.body) and name.removeprefix(self.body).startswith(_MODULES):
            return _BODY + name.removeprefix(self.body)
        return name

    def add(self, name: str) -> str:
        """Return the name in a wrapper of a language model's tensor; other names are unchanged."""
        if name.startswith(_HEAD):
            return self.head + name
        if _is_text(name):
            return self.body + name.removeprefix(_BODY)
        return name


class LanguageModel(NamedTuple):
    """The language model in the files of a multimodal model."""

    wrapper: Wrapper
    family: Family
    hf: Json  # config.json of the multimodal model
    text: Json  # config.json of the language model
    files: dict[str, LazyTensor]  # under the names of the language model, where it has them
    prefix: str  # of its names, instead of "model."

    @property
    def fields(self) -> Json:
        """The config.json of the multimodal model with the fields of `text`."""
        return self.wrapper.write_config(self.hf, self.text)

    def summarize(self, names: Collection[str]) -> list[str]:
        """Return the names of tensors that are not read, with one line for all of those that do not
        belong to the language model.
        """
        inside = []
        outside = []
        for name in names:
            if _is_text(name):
                inside.append(name)
            else:
                outside.append(name)
        if outside:
            nbytes = 0
            for name in outside:
                tensor = self.files[name]
                nbytes += math.prod(tensor.shape) * tensor.dtype.itemsize
            inside.append(
                f"{len(outside)} tensors ({format_size(nbytes)}) of the {self.wrapper.model_type} "
                f"model outside of its language model, e.g. {min(outside)}"
            )
        return inside


@dataclass(frozen=True)
class Wrapper:
    """One multimodal `model_type` of transformers; for text, the function of its language model."""

    model_type: str
    families: tuple[Family, ...]  # supported language models; the first is the default
    prefixes: tuple[Prefixes, ...]  # in the order in which they are looked for
    # Fields that do not belong to the language model in a config.json without `text_config`.
    own_fields: tuple[str, ...] = ()

    def find_language_model(self, hf: Json, weights: Mapping[str, LazyTensor]) -> LanguageModel:
        """Return the language model of config.json and the weights of a multimodal model.

        Raises ValueError if there is none that is supported.
        """
        prefixes = self._find_prefixes(weights)
        files: dict[str, LazyTensor] = {}
        for name, tensor in weights.items():
            text_name = prefixes.remove(name)
            if text_name in files:
                raise ValueError(f"the weights have {text_name} twice, also as {name}: remove one")
            files[text_name] = tensor
        text = self._read_text_config(hf, files)
        return LanguageModel(self, self._find_family(text), hf, text, files, prefixes.body)

    def _find_prefixes(self, names: Collection[str]) -> Prefixes:
        """Return the prefixes in files with tensors of these names. Raises ValueError if none."""
        for prefixes in self.prefixes:
            if prefixes.add(_EMBEDDING) in names:
                return prefixes
        embedding_names = " or ".join(prefixes.add(_EMBEDDING) for prefixes in self.prefixes)
        raise ValueError(
            f"the weights lack the embedding of the language model, {embedding_names}; they have "
            f"e.g. {min(names, default='no tensors')}"
        )

    def get_prefixes(self, body: Any) -> Prefixes:
        """Return the prefixes with this `body`, which an import has recorded."""
        for prefixes in self.prefixes:
            if prefixes.body == body:
                return prefixes
        schema.refuse("the arguments: hf_text_prefix", body, f"a prefix of {self.model_type}")

    def _find_family(self, text: Json) -> Family:
        """Return the family of the language model with the config.json `text`."""
        for family in self.families:
            if text["model_type"] in (family.model_type, *family.aliases):
                return family
        supported = ", ".join(family.model_type for family in self.families)
        raise ValueError(
            f"config.json: model_type {escape_control_chars(str(text['model_type']))!r} of the "
            f"language model of {self.model_type} is not supported; supported are {supported}"
        )

    def _get_text_config(self, hf: Json) -> Json:
        """Return the config.json of the language model in that of the wrapper, completed.

        A wrapper may leave out sizes, for which transformers has defaults, and states the dtype of
        the whole model.
        """
        text = dict(self._get_stated_fields(hf))
        if len(self.families) == 1:  # transformers has one class, too, and ignores the name
            text["model_type"] = self.families[0].model_type
        text.setdefault("model_type", self.families[0].model_type)
        defaults = transformers_defaults(self._find_family(text).model_type)
        for name in _SIZES:
            if text.get(name) is None and defaults.get(name) is not None:
                text[name] = defaults[name]
        if not any(text.get(name) for name in _PRECISION):
            text |= {name: hf[name] for name in _PRECISION if hf.get(name)}
        return text

    def _get_stated_fields(self, hf: Json) -> Json:
        """Return the fields of the language model that config.json states."""
        if hf.get(TEXT_CONFIG) is not None:
            fields: Json = _FIELDS(hf[TEXT_CONFIG], f"config.json: {TEXT_CONFIG}")
            return fields
        if not self.own_fields:
            raise ValueError(f"config.json: a {self.model_type} model needs {TEXT_CONFIG}")
        return {name: hf[name] for name in hf if name not in (*self.own_fields, *_OUTSIDE)}

    def _read_text_config(self, hf: Json, files: Mapping[str, LazyTensor]) -> Json:
        """Return the config.json of the language model with the fields that the wrapper decides.

        `files` are the tensors under the language model's own names.
        """
        text = self._get_text_config(hf)
        text[_TIED] = self._is_tied(hf, text, files)
        return text

    def _is_tied(self, hf: Json, text: Json, files: Mapping[str, LazyTensor]) -> bool:
        """Return whether transformers ties the head to the embedding.

        transformers 4 reads the field of the language model, 5 that of the wrapper, unless the head
        in the files differs from the embedding.
        """
        stated = hf.get(_TIED)
        if stated is None:
            stated = transformers_defaults(self.model_type).get(_TIED)
        if _HEAD_MATRIX not in files:
            return bool(stated or text.get(_TIED))
        return bool(stated) and _are_equal(files[_HEAD_MATRIX], files[_EMBEDDING])

    def write_config(self, hf: Json, text: Json) -> Json:
        """Return the config.json `hf` with the language model `text`."""
        stated = self._get_stated_fields(hf)
        before = self._get_text_config(hf)
        # Fields that do not change stay as they are, also where they are missing.
        fields = {name: stated[name] for name in stated if name in text}
        for name, value in text.items():
            if name not in before or value != before[name]:
                fields[name] = value
        if hf.get(TEXT_CONFIG) is None:
            wrapper_fields = {name: hf[name] for name in hf if name not in stated}
            return wrapper_fields | fields
        result = hf | {TEXT_CONFIG: fields, _TIED: text[_TIED]}
        for name in _PRECISION:
            if hf.get(name):
                result[name] = text.get("torch_dtype") or text.get("dtype")
        return result

    def update_text_config(self, hf: Json, config: TransformerConfig) -> tuple[Family, Json]:
        """Return the family of the language model in `hf`, and its config.json for the model
        `config`.

        Raises ValueError if it cannot express that model.
        """
        text = self._get_text_config(hf)
        family = self._find_family(text)
        obstacles = family.find_obstacles(config, text)
        if obstacles:
            raise ValueError(
                f"the language model {family.model_type} of a {self.model_type} model has "
                f"{'; '.join(obstacles)}. Leave out --keep-foreign to write the language model "
                "alone, or change these properties"
            )
        return family, family.update_config(text, config)


def _are_equal(one: LazyTensor, another: LazyTensor) -> bool:
    """Return whether two matrices have the same values."""
    if one.shape != another.shape:
        return False
    for offset, shape in cut_rows(one.shape, one.dtype.itemsize, _BLOCK):
        if not torch.equal(one.read(offset, shape), another.read(offset, shape)):
            return False
    return True
