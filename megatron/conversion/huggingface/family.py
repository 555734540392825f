"""One model family of transformers: its names of parameters and the rules of its config.json."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.conversion.huggingface.config_fields import (
    HARMLESS,
    ConfigFields,
    Json,
    refusal_of_transformers,
    transformers_defaults,
)
from megatron.conversion.huggingface.parameters import Row
from megatron.conversion.huggingface.rules import COMMON_RULES, Rule
from megatron.conversion.model_space.model import (
    StoredConfig,
    compute_model_signature,
    spell_out_mup,
)
from megatron.core.run_checkpoint.checks import MODEL_ARGUMENTS
from megatron.core.safe_files.schema import Check, format_value, optional, record
from megatron.core.terminal import escape_control_chars
from megatron.core.transformer.transformer_config import (
    LOCAL_BACKEND_FIELDS,
    TransformerConfig,
    find_conditions,
    is_used,
    select_architecture_fields,
)


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers.

    Rows for parameters that the family's models lack are harmless: `find_obstacles` compares whole
    models.
    """

    model_type: str
    architecture: str  # the class with the language model head
    rows: Mapping[str, Row]
    rules: tuple[Rule, ...]
    harmless: str = ""  # fields of this family that do not change the logits
    layers: str = "model.layers."  # names of layers start with it
    aliases: tuple[str, ...] = ()  # other values of `model_type` for the same models
    other_architectures: tuple[str, ...] = ()  # names of the class outside transformers
    sequential_rows: Mapping[str, Row] | None = None  # of models without a parallel residual
    indexer: str | None = None  # part of the names of a sparse indexer, which our model lacks
    # Token mixers that our model does not have: prefix of their names in a layer -> kind.
    foreign_mixers: Mapping[str, str] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """Prefix of the base model's names, which files of the base model alone do not have."""
        return self.layers.partition(".")[0] + "."

    def select_rows(self, config: TransformerConfig) -> Mapping[str, Row]:
        """Return the rows of a model."""
        if self.sequential_rows is not None and not config.parallel_residual:
            return self.sequential_rows
        return self.rows

    @property
    def head_names(self) -> tuple[str, ...]:
        """Names that the matrix of the output layer may have in the files."""
        head = self.rows["output_layer."]
        names = tuple(f"{name}weight" for name in head.names)
        return names if head.fused is None else (*names, head.fused)

    @property
    def embedding_name(self) -> str:
        """Name of the word embedding in the files."""
        (name,) = self.rows["embedding.word_embeddings."].names
        return f"{name}weight"

    @property
    def all_rules(self) -> tuple[Rule, ...]:
        return COMMON_RULES + self.rules

    @property
    def has_foreign_attention(self) -> bool:
        """Return whether attention is a foreign mixer, too, so that every layer has one."""
        return "self_attn." in self.foreign_mixers

    def add_prefix(self, name: str) -> str:
        """Return the name of a layer's tensor with the prefix, which files of the base model lack.

        Other names are unchanged.
        """
        if name.startswith(self.layers.removeprefix(self.prefix)):
            return self.prefix + name
        return name

    def find_foreign_mixers(
        self, names: Iterable[str], args: Mapping[str, Any]
    ) -> list[str] | None:
        """Return the kind of each layer's mixer if it is foreign, else ""; None if none is foreign.

        `names` are those of the tensors, and `args` the arguments in config.json. Raises ValueError
        if they contradict each other.
        """
        mixers = self._list_mixers(names, args["num_layers"])
        config_mixers = args.get("foreign_mixers") or [""] * len(mixers)
        if self.has_foreign_attention:  # config.json need not state the kinds
            mixer_names = " or ".join(self.foreign_mixers.values())
            config_mixers = [mixer or mixer_names for mixer in mixers]
        if len(config_mixers) != len(mixers):
            raise ValueError(
                f"config.json: layer_types lists {len(config_mixers)} layers, but "
                f"num_hidden_layers is {len(mixers)}: make them equal"
            )
        for layer, mixer in enumerate(mixers):
            if mixer != config_mixers[layer]:
                raise ValueError(
                    f"layer {layer} has {mixer or 'no foreign mixer'} in the weights, but "
                    f"{config_mixers[layer] or 'attention'} in config.json"
                )
        return mixers if any(mixers) else None

    def _list_mixers(self, names: Iterable[str], num_layers: int) -> list[str]:
        """Return the kind of each layer's foreign mixer among the tensors, "" if there is none."""
        layer_name = re.compile(rf"{re.escape(self.layers)}(\d+)\.(.+)")
        mixers = [""] * num_layers
        for name in names:
            match = layer_name.fullmatch(self.add_prefix(name))
            if match is None or int(match[1]) >= num_layers:
                continue
            for prefix, mixer in self.foreign_mixers.items():
                if match[2].startswith(prefix):
                    mixers[int(match[1])] = mixer
        return mixers

    def read_config(
        self, hf: Json, args: Mapping[str, Any], ignored: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return the model arguments in the config.json `hf`; `args` of the user take precedence.

        Raises ValueError for a field that is unknown, missing or has an unsupported value.
        """
        self.check_fields(hf, ignored)
        hf_config = ConfigFields(hf, transformers_defaults(self.model_type))
        result = dict(args)
        for rule in self.all_rules:
            result = {**rule.read(hf_config, result), **result}
        return result

    def check_fields(self, hf: Json, ignored: Collection[str] = ()) -> None:
        """Raise ValueError for a field that is unknown or has a value of the wrong type."""
        checks = self._collect_checks()
        # An unknown field may change the model: reject unknown fields before reading any. A model
        # that is copied, but not computed here, is described by all of its fields.
        accepted = {*HARMLESS.split(), *self.harmless.split(), *ignored, *checks}
        if self.has_foreign_attention:
            accepted |= hf.keys()
        unknown = []
        for name, value in hf.items():
            if value is not None and name not in accepted:
                unknown.append(name)
        if unknown:
            unknown.sort()
            listed = []
            for name in unknown:
                listed.append(f"{escape_control_chars(name)} = {format_value(hf[name])}")
            raise ValueError(
                "config.json has fields that are not supported and may change the results of the "
                f"model: {', '.join(listed)}. If they do not, convert it with "
                f"--hf-ignore-fields {escape_control_chars(' '.join(unknown))}"
            )
        check_all = record({f"{name}?": optional(check) for name, check in checks.items()})
        check_all(hf, "config.json")

    def _collect_checks(self) -> dict[str, Check]:
        """Return the check of each field that a rule reads."""
        checks: dict[str, Check] = {}
        for rule in self.all_rules:
            for name, check in rule.fields.items():
                if isinstance(check, str):  # the name of an argument
                    check = MODEL_ARGUMENTS[check]
                checks[name] = check
        return checks

    def write_config(
        self, config: TransformerConfig, imported: Mapping[str, Any] | None = None
    ) -> Json:
        """Return the config.json of a model.

        `imported` contains fields of the config.json that the model came from. Those that the
        arguments do not determine are repeated, as long as they still describe the model.
        """
        fields: Json = {"architectures": [self.architecture], "model_type": self.model_type}
        imported = imported or {}
        config = spell_out_mup(config)  # no family has muP, some have its factors
        if has_foreign_mixers(config):
            return self.update_config(imported, config)
        for rule in self.all_rules:
            fields |= rule.write(config)
            repeated = {name: imported[name] for name in rule.repeated if name in imported}
            if repeated and self._describes(rule, repeated, config):
                fields |= repeated
        return fields

    def update_config(self, imported: Mapping[str, Any], config: TransformerConfig) -> Json:
        """Return the config.json of a model that is stored with tensors which it does not have:
        all imported fields, and the fields of rules that would write something else now, e.g. after
        a change of the dtype.
        """
        config = spell_out_mup(config)
        before = _make_config(self.read_config(dict(imported), {}, ignored=imported))
        fields = dict(imported)
        for rule in self.all_rules:
            written = rule.write(config)
            if written != rule.write(before):
                if rule.update is not None:
                    written = rule.update(fields, config)
                for name in rule.fields:
                    fields.pop(name, None)
                fields |= written
        return fields

    def _describes(self, rule: Rule, fields: Json, config: TransformerConfig) -> bool:
        """Return whether the rule reads the arguments of this model from the fields."""
        hf_config = ConfigFields(fields, transformers_defaults(self.model_type))
        arguments = rule.read(hf_config, {})
        return all(getattr(config, name) == value for name, value in arguments.items())

    def repeated_fields(self, hf: Json) -> Json:
        """Return the fields that `write_config` repeats, with defaults for missing ones."""
        hf_config = ConfigFields(hf, transformers_defaults(self.model_type))
        fields: Json = {}
        for rule in self.rules:
            if hf_config.states(*rule.repeated):
                fields |= {name: hf_config.first(name) for name in rule.repeated}
        return fields

    def list_unused_fields(self, hf: Json, args: Json) -> list[str]:
        """Return a text for each field that changes the training in transformers, but not here."""
        hf_config = ConfigFields(hf, transformers_defaults(self.model_type))
        texts = []
        for rule in self.all_rules:
            for name, value in rule.list_unused(hf_config, args).items():
                texts.append(f"config.json: {name} = {format_value(value)}")
        return texts

    def switched_biases(self) -> list[tuple[str, str]]:
        """Return the switches of biases with the part of a layer that each is for, e.g. ".mlp."."""
        switches: list[tuple[str, str]] = []
        for rule in self.rules:
            switches += rule.biased_parts.items()
        return switches

    def list_unbiased_parts(self, hf: Json) -> list[str]:
        """Return the parts of a layer whose biases the config.json `hf` switches off."""
        hf_config = ConfigFields(hf, transformers_defaults(self.model_type))
        return [module for field, module in self.switched_biases() if not hf_config.first(field)]

    def find_obstacles(
        self, config: TransformerConfig, imported: Mapping[str, Any] | None = None
    ) -> list[str]:
        """Return a line for each property of a model that this family cannot express.

        config.json is written, read back as if from a file, and compared. `imported` are fields of
        the config.json that the model came from, which alone describe foreign mixers.
        """
        if config.window_size is not None and not any(config.window_pattern):
            # A window that no layer has. transformers has no such model.
            config = replace(
                config, window_size=None, window_attn_skip_freq=None, rotary_base_local=None
            )
        signature = compute_model_signature(config)

        # Write and read config.json. Names of tensors state which mixers are foreign.
        is_partial = has_foreign_mixers(config)
        try:
            fields = self.write_config(config, imported if is_partial else None)
            args = self.read_config(fields, {}, ignored=fields if is_partial else ())
        except ValueError as error:  # a value that the family does not have
            return [str(error), *_list_differences(signature, {})]
        if isinstance(config, StoredConfig):
            args["foreign_mixers"] = config.foreign_mixers

        # Compare the model that it describes.
        try:
            imported_config = _make_config(args)
        except ValueError as error:  # the model contradicts the family
            return [*str(error).splitlines(), *_list_differences(signature, signature | args)]
        obstacles = _list_differences(
            signature, compute_model_signature(imported_config), imported_config
        )
        if not obstacles:
            refusal = refusal_of_transformers(self.model_type, fields)
            if refusal is not None:
                obstacles.append(f"a config.json that transformers refuses ({refusal})")
        return obstacles


def has_foreign_mixers(config: TransformerConfig) -> bool:
    """Return whether a layer of the model has a token mixer that this program does not have."""
    return isinstance(config, StoredConfig) and config.foreign_mixers is not None


def _make_config(args: Mapping[str, Any]) -> StoredConfig:
    """Return the model that the arguments in a config.json describe.

    Raises ValueError if they contradict each other.
    """
    usual = {"kv_channels": args["hidden_size"] // args["num_attention_heads"]}
    return StoredConfig(**(usual | dict(args) | LOCAL_BACKEND_FIELDS))


_MISSING = object()


def _list_differences(
    signature: Mapping[str, Any],
    imported_signature: Mapping[str, Any],
    config: TransformerConfig | None = None,
) -> list[str]:
    """Return a line for each value that is missing or different in `imported_signature`.

    `imported_signature` is the signature of `config`. Differences that follow from another one are
    left out: a model without qk_layernorm has no place for the options of these norms.
    """
    unused = set()
    if config is not None:
        conditions = find_conditions(vars(config))
        for option in select_architecture_fields():
            if not is_used(option, conditions):
                unused.add(option.metadata["meaning"] or option.name)
    differences = []
    subordinate = []
    for name, value in signature.items():
        imported_value = imported_signature.get(name, _MISSING)
        if imported_value == value:
            continue
        if imported_value is _MISSING:
            differences.append(f"no {name}, which is {value}")
        elif imported_value is None and name in unused:
            subordinate.append(f"no {name}, which is {value}")
        else:
            differences.append(f"{name} = {imported_value} instead of {value}")
    return differences or subordinate
