"""Fields of a `config.json`, with the defaults of transformers for those that it does not state."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.terminal import escape_control_chars

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
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens tf_legacy_loss n_ctx
"""
# Fields that change only the training, and that the trainer does not have; 0 and null disable them.
LOST_TRAINING = "activation_dropout layerdrop aux_loss_alpha load_balance_coeff z_loss_coefficient"


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
        """Return the first value that is not null, stated fields before defaults; else None.

        Null disables a switch, as in transformers. Several names are spellings of one field. Raises
        ValueError if they have different values.
        """
        stated = {name: self.stated[name] for name in names if self.states(name)}
        refuse_conflicts(stated)
        for value in stated.values():
            return value
        for name in names:
            if isinstance(self.defaults.get(name), bool) and name in self.stated:
                return False
        for name in names:
            if self.defaults.get(name) is not None:
                return self.defaults[name]
        return None


def refuse_conflicts(values: Mapping[str, Any]) -> None:
    """Raise ValueError if fields that are names of one value have different values."""
    distinct: list[Any] = []
    for value in values.values():
        if value not in distinct:
            distinct.append(value)
    if len(distinct) > 1:
        texts = [f"{name} = {value!r}" for name, value in values.items()]
        listed = escape_control_chars(" and ".join(texts))
        raise ValueError(
            f"config.json has {listed}, which are names of one value: remove the wrong one"
        )


class _ConfigProcess:
    """Child process that inspects transformers' config classes (`config_process`)."""

    def __init__(self) -> None:
        # Modules are found as in this process, which may not search the working directory.
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONSAFEPATH": "1",
            "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",  # that torch is missing
        }
        command = [sys.executable, "-m", "megatron.conversion.huggingface.config_process"]
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, question: str, *arguments: Any) -> Any:
        """Return the answer. Raises its ValueError or ImportError, or RuntimeError without one."""
        requests = self._process.stdin
        answers = self._process.stdout
        assert requests is not None and answers is not None
        with self._lock:
            with contextlib.suppress(BrokenPipeError):  # without an answer, either
                requests.write(json.dumps([question, *arguments]) + "\n")
                requests.flush()
            reply = answers.readline()
        if not reply:
            status = self._process.wait()
            raise RuntimeError(
                f"the process that imports transformers ended with exit code {status} before it "
                "answered"
            )
        answer = json.loads(reply)
        if "error" in answer:
            error_type = ImportError if answer["error"] == "ImportError" else ValueError
            raise error_type(answer["text"])
        return answer["result"]


@functools.cache
def _config_process(pid: int) -> _ConfigProcess:
    """Return the child of process `pid`, which is this one: forked processes start their own."""
    return _ConfigProcess()


def start_transformers() -> None:
    """Begin to import transformers in the background, for the functions below."""
    _config_process(os.getpid())


@functools.cache
def transformers_defaults(model_type: str) -> Mapping[str, Any]:
    """Return the values that transformers takes for missing fields of `model_type`."""
    defaults: Json = _config_process(os.getpid()).ask("defaults", model_type)
    return defaults


def refusal_of_transformers(model_type: str, fields: Json) -> str | None:
    """Return the reason for which transformers refuses `fields` of a config.json; None if none."""
    refusal: str | None = _config_process(os.getpid()).ask("refusal", model_type, fields)
    return refusal
