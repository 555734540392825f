"""Program without torch that inspects transformers' config classes.

Where torch is installed, importing a config class of transformers imports large parts of torch,
too, which takes longer than converting a small model. Config classes do not need torch, so this
module runs in a child process that cannot import torch, while the parent process imports it.
Requests and answers are lines of JSON.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import sys
from typing import Any


def config_class(model_type: str) -> Any:
    """Return transformers' config class. Raises ValueError where this release does not have it."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"transformers {transformers.__version__} does not know model_type {model_type!r}: "
            "install a newer release"
        )
    return CONFIG_MAPPING[model_type]


def list_defaults(model_type: str) -> dict[str, Any]:
    """Return the values that transformers takes for missing fields of `model_type`."""
    declared = config_class(model_type)
    defaults = {}
    for name, parameter in inspect.signature(declared).parameters.items():
        if parameter.default is not parameter.empty and _is_json(parameter.default):
            defaults[name] = parameter.default
    # Fields that some releases do not declare, but compute. All other computed fields depend on the
    # sizes of the model, so the instance does not have their defaults.
    instance = declared()
    for name in ("tie_word_embeddings", "rope_parameters"):
        defaults[name] = getattr(instance, name, None)
    # The base of a rope whose parameters do not state it; some families have one per kind of layer.
    base = getattr(declared, "default_theta", None)
    if isinstance(base, (int, float)):
        defaults.setdefault("rope_theta", base)
    # Some families compute this one as well.
    fraction = (defaults["rope_parameters"] or {}).get("partial_rotary_factor")
    if fraction is not None:
        defaults["partial_rotary_factor"] = fraction
    return defaults


def _is_json(value: Any) -> bool:
    """Return whether a default is a value of config.json; others mark a default as computed."""
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def find_refusal(model_type: str, fields: dict[str, Any]) -> str | None:
    """Return the reason for which transformers refuses `fields` of a config.json; None if none."""
    declared = config_class(model_type)
    # The defaults of special tokens may exceed the vocabulary, and some families refuse null.
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    try:
        declared(**(tokens | _decode_floats(fields)))
    except Exception as error:  # its validators raise errors of many types
        messages = str(error).strip().splitlines() or [type(error).__name__]
        return messages[-1].strip()
    return None


def _decode_floats(value: Any) -> Any:
    """Return a value of a config.json with numbers for the form of infinity in transformers 5."""
    if isinstance(value, list):
        return [_decode_floats(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _decode_floats(item) for name, item in value.items()}
    return value


def answer(request: list[Any]) -> dict[str, Any]:
    """Return the result of a request, or the error to raise in the parent process."""
    question, *arguments = request
    try:
        if question == "defaults":
            return {"result": list_defaults(*arguments)}
        return {"result": find_refusal(*arguments)}
    except ValueError as error:
        return {"error": "ValueError", "text": str(error)}
    except ImportError as error:
        return {"error": "ImportError", "text": f"transformers cannot be imported: {error}"}


def main() -> None:
    """Answer requests from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ends with the parent process
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of transformers must not mix with answers
    with contextlib.suppress(ImportError):  # reported with the first answer
        config_class("llama")  # imports everything before the first request
    for request in sys.stdin:
        answers.write(json.dumps(answer(json.loads(request))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
