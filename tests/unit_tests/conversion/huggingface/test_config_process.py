"""The process that answers questions about transformers' config classes."""

import json
import os
import signal
import subprocess
import sys

import pytest

from megatron.conversion.huggingface import config_fields
from megatron.conversion.huggingface.config_fields import (
    refusal_of_transformers,
    transformers_defaults,
)
from megatron.conversion.huggingface.config_process import find_refusal, list_defaults
from megatron.conversion.huggingface.families import FAMILIES


def test_answers_are_those_of_a_process_with_torch():
    for family in FAMILIES:
        defaults = list_defaults(family.model_type)
        in_json = json.loads(json.dumps(defaults))  # as in config.json, which has no tuples
        assert transformers_defaults(family.model_type) == in_json
    impossible = {"hidden_size": 64, "num_attention_heads": 3}
    refusal = refusal_of_transformers("llama", impossible)
    assert refusal is not None
    assert refusal == find_refusal("llama", impossible)
    assert refusal_of_transformers("llama", {"hidden_size": 64, "num_attention_heads": 4}) is None


def test_questions_import_neither_transformers_nor_torch():
    program = (
        "import sys\n"
        "from megatron.conversion.huggingface.config_fields import transformers_defaults\n"
        "assert transformers_defaults('llama')['rms_norm_eps'] == 1e-6\n"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"
    assert result.stderr == ""


def test_unknown_model_type():
    with pytest.raises(ValueError, match="does not know model_type 'abacus': install a newer"):
        transformers_defaults("abacus")


def test_process_that_ended_is_an_error():
    process = config_fields._ConfigProcess()
    process._process.send_signal(signal.SIGKILL)
    with pytest.raises(RuntimeError, match="ended with exit code -9 before it answered"):
        process.ask("defaults", "llama")


def test_forked_process_has_its_own():
    parent = config_fields._config_process(os.getpid())
    child = os.fork()
    if child == 0:
        own = config_fields._config_process(os.getpid())
        is_answered = own.ask("refusal", "llama", {}) is None
        os._exit(0 if own is not parent and is_answered else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
