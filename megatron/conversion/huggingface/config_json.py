"""How `config.json` is read and written: by rules, each of some fields, which a family lists.

Both generations are read: transformers 4.x (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5.x (`rope_parameters`,
`dtype`). The 4.x form is written, because both generations load it. A field that no rule knows is refused unless it is
in `HARMLESS`: an ignored field may be a different model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.format.schema import Check, optional, printable, record, shown
from megatron.core.transformer.transformer_config import TransformerConfig

Json = dict[str, Any]


class Rule(NamedTuple):
    """Some fields of config.json, and the arguments that say the same.

    `read(hf, args)` gives the arguments; those in `args`, from the user or from rules before, win over them.
    `write(config)` gives the fields.
    """

    fields: Mapping[str, Check]  # what they may be; null is as good as missing for all of them
    read: Callable[[Json, Json], Json]
    write: Callable[[TransformerConfig], Json] = lambda config: {}
    biases: tuple[str, ...] = ()  # fields that say which parts have biases: those of the others are zero


def unsupported(field: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"config.json: {field} = {shown(value)} is not supported, only {wanted}")


# Fields that describe files, tokens, generation or speed; none of them changes the logits.
_HARMLESS = """
    _name_or_path name_or_path _commit_hash architectures model_type transformers_version use_cache return_dict
    output_attentions output_hidden_states output_scores torchscript use_bfloat16 gradient_checkpointing is_decoder
    attn_implementation _attn_implementation _attn_implementation_internal _attn_implementation_autoset
    experts_implementation output_router_logits chunk_size_feed_forward tie_last_hidden_states return_dict_in_generate
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id tokenizer_class prefix
    id2label label2id num_labels problem_type finetuning_task task_specific_params classifier_dropout
    pretraining_tp summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p min_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens tf_legacy_loss"""
HARMLESS = frozenset(_HARMLESS.split())


def read_config(hf: Json, rules: Collection[Rule], harmless: Collection[str], args: Mapping[str, Any]) -> Json:
    """Arguments of the model in `hf`; `args` were given by the user and win.

    Raises ValueError for a field that is not known, missing or of an unsupported value.
    """
    # A field that nobody reads may still change the model, so all must be known before any is used.
    checks = {field: check for rule in rules for field, check in rule.fields.items()}
    known = HARMLESS.union(harmless, checks)
    unknown = sorted(name for name, value in hf.items() if value is not None and name not in known)
    if unknown:
        listed = ", ".join(f"{printable(name)} = {shown(hf[name])}" for name in unknown)
        raise ValueError(
            f"config.json has fields that are not supported and may change what the model computes: {listed}. "
            f"If they do not, convert it with --hf-ignore-fields {printable(' '.join(unknown))}"
        )
    record({f"{field}?": optional(check) for field, check in checks.items()})(hf, "config.json")
    result = dict(args)
    for rule in rules:
        result = {**rule.read(hf, result), **result}
    return result


def write_config(config: TransformerConfig, rules: Collection[Rule]) -> Json:
    return {field: value for rule in rules for field, value in rule.write(config).items()}
