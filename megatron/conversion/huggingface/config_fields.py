"""Fields of a `config.json`, with the defaults of transformers for those that it does not state."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

# Fields that describe files, tokens, generation or speed. None of them changes the logits.
HARMLESS = """
    _name_or_path name_or_path _commit_hash architectures model_type transformers_version
    use_cache return_dict output_attentions output_hidden_states output_scores torchscript
    use_bfloat16 gradient_checkpointing is_decoder attn_implementation _attn_implementation
    _attn_implementation_internal _attn_implementation_autoset experts_implementation
    output_router_logits chunk_size_feed_forward tie_last_hidden_states return_dict_in_generate
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
    tokenizer_class prefix id2label label2id num_labels problem_type finetuning_task
    task_specific_params classifier_dropout pretraining_tp summary_type summary_use_proj
    summary_activation summary_proj_to_labels summary_first_dropout max_length min_length
    max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p min_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens tf_legacy_loss
"""


@dataclass(frozen=True)
class ConfigFields:
    """Stated fields of a model, and the defaults of transformers for all others."""

    stated: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def states(self, *names: str) -> bool:
        """Return whether one of the fields is stated and not null."""
        return any(self.stated.get(name) is not None for name in names)

    def get(self, name: str) -> Any:
        """Return the value of a field for which null is a value of its own."""
        if name in self.stated:
            return self.stated[name]
        return self.defaults.get(name)

    def first(self, *names: str) -> Any:
        """Return the first value that is not null, stated fields before defaults; else None."""
        for values in (self.stated, self.defaults):
            for name in names:
                if values.get(name) is not None:
                    return values[name]
        return None


@functools.cache
def config_class(model_type: str) -> Any:
    """Return transformers' config class. Raises ValueError where this release does not have it."""
    # Imported on first use: it takes more than a second, which other formats need not pay for.
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"transformers {transformers.__version__} does not know model_type {model_type!r}: "
            "install a newer release"
        )
    return CONFIG_MAPPING[model_type]


@functools.cache
def transformers_defaults(model_type: str) -> Mapping[str, Any]:
    """Return the values that transformers takes for missing fields of `model_type`."""
    declared = config_class(model_type)
    defaults = {}
    for name, parameter in inspect.signature(declared).parameters.items():
        if parameter.default is not parameter.empty:
            defaults[name] = parameter.default
    # Fields that some releases do not declare, but compute. All other computed fields depend on the
    # sizes of the model, so the instance does not have their defaults.
    instance = declared()
    for name in ("tie_word_embeddings", "rope_parameters"):
        defaults[name] = getattr(instance, name, None)
    # Some families compute this one as well.
    fraction = (defaults["rope_parameters"] or {}).get("partial_rotary_factor")
    if fraction is not None:
        defaults["partial_rotary_factor"] = fraction
    return defaults


def refusal_of_transformers(model_type: str, fields: Json) -> str | None:
    """Return the reason for which transformers refuses `fields` of a config.json; None if none."""
    # Special tokens are not part of the check: defaults may exceed the vocabulary.
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    try:
        config_class(model_type)(**fields, **tokens)
    except Exception as error:  # its validators raise errors of many types
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return lines[-1].strip()
    return None
