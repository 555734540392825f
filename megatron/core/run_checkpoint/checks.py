"""Checks of the arguments and the training state of a run, in checkpoints of any format.

The limits in these tables are plausible values: they prevent a file of a few bytes from requesting
the time and memory of a model that is larger than any trained one. `MEGATRON_MAX_LAYERS`,
`MEGATRON_MAX_SIZE` and `MEGATRON_MAX_RANKS` raise them.
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Mapping
from typing import Any

import torch

from megatron.core.safe_files import FileTensor, load_file_tensors, schema
from megatron.core.safe_files.safe_globals import Placeholder
from megatron.core.safe_files.schema import COUNT, Check, anything, optional, record, sequence, text
from megatron.core.transformer.transformer_config import TransformerConfig

LAYERS = schema.plausible("LAYERS", 10_000)
MTP_LAYERS = schema.plausible("MTP_LAYERS", 100, low=0)  # for multi-token prediction
SIZE = schema.plausible("SIZE", 2**31 - 1, low=0)  # of one dimension of a model
RANKS = schema.plausible("RANKS", 100_000)  # of an axis or a layout


def check_scalar(value: Any, location: str) -> Any:
    """Check a number, or a tensor of one element."""
    if isinstance(value, torch.Tensor | FileTensor) and value.numel() == 1:
        return value
    return schema.number()(value, location)


def _check_plain(value: Any, location: str) -> Any:
    """Check None, a boolean, a number or a text."""
    if value is None or type(value) is bool:
        return value
    if type(value) is str:
        return text()(value, location)
    return schema.number()(value, location)


_CHECKS_BY_TYPE: dict[Any, Check] = {
    int: SIZE,
    float: schema.number(-1e15, 1e15),
    bool: schema.boolean,
    str: text(256),
}


def _make_check(hint: Any) -> Check:
    """Return the check for a field of a dataclass of type `hint`; None is accepted as well."""
    if hint in _CHECKS_BY_TYPE:
        return optional(_CHECKS_BY_TYPE[hint])
    if typing.get_origin(hint) is tuple:  # a pair, e.g., the attention window
        return optional(sequence(schema.integer(-1, 2**31 - 1), 2, least=2))
    alternatives = [arm for arm in typing.get_args(hint) if arm is not types.NoneType]
    check_one = _make_check(alternatives[0])
    if typing.get_origin(hint) is not list and len(alternatives) == 1:  # X | None
        return check_one

    # list[X] or X | list[X].
    check_many = sequence(check_one, 10_000)

    def check_list(value: Any, location: str) -> Any:
        # Megatron-LM stores one value instead of a list of one.
        if isinstance(value, list | tuple):
            return check_many(value, location)
        return check_one(value, location)

    return check_list


def _make_model_checks() -> dict[str, Check]:
    """Return a check for each field of TransformerConfig.

    The check limits what a file can request. Choices and bounds of the field itself are checked by
    TransformerConfig, as for a flag.
    """
    checks = {}
    for name, hint in typing.get_type_hints(TransformerConfig).items():
        checks[name] = _make_check(hint)
    # Narrower than their types.
    checks["num_layers"] = optional(LAYERS)
    checks["mtp_num_layers"] = optional(MTP_LAYERS)
    checks["rotary_base"] = optional(schema.number(1, 1e15))
    return checks


MODEL_ARGUMENTS = _make_model_checks()


def _fields(check: Check, names: str) -> dict[str, Check]:
    """Return optional fields that share a check."""
    return {f"{name}?": optional(check) for name in names.split()}


_RUN: dict[str, Check] = {
    "num_experts?": optional(_make_check(int | list[int])),  # Megatron-DeepSpeed has a list
    "special_tokens?": optional(sequence(text(256), 10_000)),
    **_fields(COUNT, "consumed_train_samples consumed_valid_samples end_of_document"),
    **_fields(SIZE, "model_vocab_size seq_length make_vocab_size_divisible_by"),
    **_fields(SIZE, "null_tokenizer_eod_id tiktoken_num_special_tokens"),
    **_fields(SIZE, "ddp_bucket_size ddp_num_buckets"),
    **_fields(RANKS, "tensor_model_parallel_size pipeline_model_parallel_size"),
    **_fields(RANKS, "virtual_pipeline_model_parallel_size data_parallel_size"),
    **_fields(RANKS, "context_parallel_size expert_model_parallel_size"),
    **_fields(RANKS, "expert_tensor_parallel_size"),
    **_fields(COUNT, "world_size"),
    **_fields(text(), "pipeline_model_parallel_layout"),
    **_fields(LAYERS, "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers"),
    **_fields(text(), "tokenizer_type tokenizer_model vocab_file merge_file"),
    **_fields(text(), "train_data_fingerprint train_token_digest"),
    **_fields(text(8), "tiktoken_pattern"),
    **_fields(schema.boolean, "legacy_tokenizer"),
    **_fields(sequence(text(256), 10_000), "foreign_mixers"),
}
ARGUMENTS = record({f"{name}?": check for name, check in MODEL_ARGUMENTS.items()} | _RUN)


_MAX_BETAS = 3  # of AdEMAMix; other optimizers have 2 or none
PARAM_GROUP = record(
    {
        **_fields(check_scalar, "step lr max_lr min_lr wd_mult lr_mult weight_decay eps momentum"),
        "betas?": optional(sequence(schema.number(), _MAX_BETAS, least=2)),
        "params?": sequence(anything),
    }
)
GRAD_SCALER = record(
    {
        "scale?": check_scalar,
        "growth_tracker?": check_scalar,
        "hysteresis_tracker?": check_scalar,
    }
)


def check_scheduler(value: Any, location: str) -> Any:
    """Check the state of a learning rate schedule: plain values by name."""
    schema.mapping(_check_plain)(value, location)
    return record({"num_steps?": COUNT})(value, location)


def _check_optimizer(value: Any, location: str) -> Any:
    """Check an optimizer, or several: dense layers and experts have one each with EP > 1."""
    if isinstance(value, dict) and 0 in value:
        schema.mapping(anything, keys=schema.integer(0, 63))(value, location)
        optimizers = list(value.values())
    elif isinstance(value, list):
        optimizers = value
    else:
        return _OPTIMIZER(value, location)
    sequence(_OPTIMIZER, 64, least=1)(optimizers, location)
    return value


# With half precision or sharding the groups are one level deeper, under "optimizer".
_OPTIMIZER: Check = record(
    {
        "param_groups?": sequence(PARAM_GROUP),
        "optimizer?": optional(lambda value, where: _OPTIMIZER(value, where)),
        "grad_scaler?": optional(GRAD_SCALER),
        "state?": schema.mapping(anything, keys=anything),
    }
)
TRAINING_STATE = record(
    {
        "iteration?": COUNT,
        "consumed_train_samples?": COUNT,
        "consumed_valid_samples?": COUNT,
        "num_floating_point_operations_so_far?": schema.number(0),
        "param_groups?": optional(sequence(PARAM_GROUP)),
        "scheduler?": optional(check_scheduler),
        "grad_scaler?": optional(GRAD_SCALER),
        "rng?": schema.mapping(anything),
    },
    closed=True,
)


def check_namespace(value: Any, location: str) -> Any:
    """Check the arguments of a run.

    Enums of other projects are left to the reader that knows them; `model_config` checks the values
    that it derives from them.
    """
    if not isinstance(value, argparse.Namespace):
        schema.refuse(location, value, "the arguments of a run (a Namespace)")
    checked_args = {}
    for name, item in vars(value).items():
        if not isinstance(item, Placeholder):
            checked_args[name] = item
    ARGUMENTS(checked_args, location)
    return value


# Content of `common.pt` and of every legacy file, except tensors.
COMMON = record(
    {
        "args?": check_namespace,
        "checkpoint_version?": schema.number(0),
        "iteration?": COUNT,
        "num_floating_point_operations_so_far?": schema.number(0),
        "content_metadata?": optional(schema.mapping(anything)),
        "optimizer?": optional(_check_optimizer),
        "opt_param_scheduler?": optional(check_scheduler),
    }
)


def plain_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with every tensor of one element replaced by its number."""
    result = load_file_tensors(dict(values))
    for name, value in result.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            result[name] = value.item()
    return result
