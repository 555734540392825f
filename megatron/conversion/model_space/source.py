"""A checkpoint of any format, seen in model space.

Every format has one reader, which presents it as a `Source`, and one writer, which reads from a
`Source`; so N formats need N adapters, and every pair works. Keys, shapes and conventions are those
of `docs/architecture.md`: one key per layer with its global number, TP-independent shapes,
optimizer state under `optimizer.state.*`.

Arguments and training states of all formats are checked by the tables in this module. Their limits
are plausible values: they prevent a file of a few bytes from requesting the time and memory of a
model that is larger than any trained one. `MEGATRON_MAX_LAYERS`, `MEGATRON_MAX_SIZE` and
`MEGATRON_MAX_RANKS` raise them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron.core.optimizer import AVERAGE_PREFIX, UPDATE_RULES
from megatron.core.safe_files import FileTensor, load_file_tensors, schema
from megatron.core.safe_files.safe_globals import Placeholder
from megatron.core.safe_files.schema import COUNT, Check, anything, optional, record, sequence, text
from megatron.core.transformer.transformer_config import TransformerConfig

LAYERS = schema.plausible("LAYERS", 10_000)
MTP_LAYERS = schema.plausible("MTP_LAYERS", 100, low=0)  # for multi-token prediction
SIZE = schema.plausible("SIZE", 2**31 - 1, low=0)  # of one dimension of a model
RANKS = schema.plausible("RANKS", 100_000)  # of an axis or a layout


def check_scalar(value: Any, where: str) -> Any:
    """Check a number, or a tensor of one element."""
    if isinstance(value, torch.Tensor | FileTensor) and value.numel() == 1:
        return value
    return schema.number()(value, where)


def _check_plain(value: Any, where: str) -> Any:
    """Check None, a boolean, a number or a text."""
    if value is None or type(value) is bool:
        return value
    if type(value) is str:
        return text()(value, where)
    return schema.number()(value, where)


_CHECKS_BY_TYPE: dict[Any, Check] = {
    int: SIZE,
    float: schema.number(-1e15, 1e15),
    bool: schema.boolean,
    str: text(256),
}


def _make_check(kind: Any) -> Check:
    """Return the check for a field of a dataclass of type `kind`; None is accepted as well."""
    if kind in _CHECKS_BY_TYPE:
        return optional(_CHECKS_BY_TYPE[kind])
    if typing.get_origin(kind) is tuple:  # a pair, e.g., the attention window
        return optional(sequence(schema.integer(-1, 2**31 - 1), 2, least=2))
    alternatives = [arm for arm in typing.get_args(kind) if arm is not types.NoneType]
    check_one = _make_check(alternatives[0])
    if typing.get_origin(kind) is not list and len(alternatives) == 1:  # X | None
        return check_one

    # list[X] or X | list[X].
    check_many = sequence(check_one, 10_000)

    def check_list(value: Any, where: str) -> Any:
        # Megatron-LM stores one value instead of a list of one.
        if isinstance(value, list | tuple):
            return check_many(value, where)
        return check_one(value, where)

    return check_list


def _make_model_checks() -> dict[str, Check]:
    """Return a check for each field of TransformerConfig.

    The check limits what a file can request. Choices and bounds of the field itself are checked by
    TransformerConfig, as for a flag.
    """
    checks = {}
    for name, kind in typing.get_type_hints(TransformerConfig).items():
        checks[name] = _make_check(kind)
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
    **_fields(text(), "train_data_fingerprint"),
    **_fields(text(8), "tiktoken_pattern"),
    **_fields(schema.boolean, "legacy_tokenizer"),
    **_fields(sequence(text(256), 10_000), "foreign_mixers"),
}
ARGUMENTS = record({f"{name}?": check for name, check in MODEL_ARGUMENTS.items()} | _RUN)


_MAX_BETAS = max(rule.NUM_BETAS for rule in UPDATE_RULES.values())
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


def check_scheduler(value: Any, where: str) -> Any:
    """Check the state of a learning rate schedule: plain values by name."""
    schema.mapping(_check_plain)(value, where)
    return record({"num_steps?": COUNT})(value, where)


def _check_optimizer(value: Any, where: str) -> Any:
    """Check an optimizer, or several: dense layers and experts have one each with EP > 1."""
    if isinstance(value, dict) and 0 in value:
        schema.mapping(anything, keys=schema.integer(0, 63))(value, where)
        parts = list(value.values())
    elif isinstance(value, list):
        parts = value
    else:
        return _OPTIMIZER(value, where)
    sequence(_OPTIMIZER, 64, least=1)(parts, where)
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


def check_namespace(value: Any, where: str) -> Any:
    """Check the arguments of a run.

    Enums of other projects are left to the reader that knows them; `model_config` checks the values
    that it derives from them.
    """
    if not isinstance(value, argparse.Namespace):
        schema.refuse(where, value, "the arguments of a run (a Namespace)")
    known = {}
    for name, item in vars(value).items():
        if not isinstance(item, Placeholder):
            known[name] = item
    ARGUMENTS(known, where)
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

Shape = tuple[int, ...]


def plain_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are plain data, which files of other programs can contain."""
    return {name: value for name, value in args.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """Return whether the value consists of None, booleans, numbers, texts and containers."""
    if isinstance(value, dict):
        return all(type(name) is str for name in value) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def plain_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with every tensor of one element replaced by its number."""
    result = load_file_tensors(dict(values))
    for name, value in result.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            result[name] = value.item()
    return result


def refuse_other_models(
    args: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]], where: str
) -> None:
    """Raise ValueError with the arguments of a run that trained another kind of model than ours.

    `known` contains the values of our models. A missing argument is accepted. Values are compared
    with ==, so 0, 0.0 and False are equal.
    """
    wrong = []
    for name, accepted in known.items():
        if name in args and args[name] not in accepted:
            wrong.append(f"{name} = {schema.format_value(args[name])}")
    if wrong:
        raise ValueError(f"{where} was trained with {', '.join(wrong)}, which is not supported")


# ---- Keys in model space ----


WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


def _list_state_sets(only_uniform: bool = False) -> list[tuple[str, ...]]:
    """Return the sets of states that the registered optimizers may have of a parameter.

    `only_uniform` leaves out optimizers with other states of matrices.
    """
    state_sets: list[tuple[str, ...]] = []
    for rule in UPDATE_RULES.values():
        if rule.HAS_UNIFORM_STATE or not only_uniform:
            state_sets.extend(rule.STATE_SETS)
    return state_sets


_UNIFORM_STATE_SETS = _list_state_sets(only_uniform=True)
# Names of the optimizer's tensors; param is the fp32 main parameter. The rest are the states of the
# registered optimizers, each once.
OPTIMIZER_STATES = ("param", *dict.fromkeys(itertools.chain.from_iterable(_list_state_sets())))
# The state of a parameter that is its average, which does not belong to the optimizer.
AVERAGE = "ema"
ADAM = ("param", *UPDATE_RULES["adam"].STATE_SETS[0])
SGD = ("param", *UPDATE_RULES["sgd"].STATE_SETS[0])


def optimizer_key(state: str, parameter: str) -> str:
    """Return the key of a parameter's optimizer state."""
    assert state in OPTIMIZER_STATES, state
    return f"optimizer.state.{state}.{parameter}"


def average_key(parameter: str) -> str:
    """Return the key of a parameter's average (--ema-decay)."""
    return f"{AVERAGE_PREFIX}{parameter}"


def split_key(key: str) -> tuple[str, str | None]:
    """Return the parameter of a key, and its state: one of the optimizer's, AVERAGE, or None for
    the parameter itself.
    """
    if key.startswith(AVERAGE_PREFIX):
        return key.removeprefix(AVERAGE_PREFIX), AVERAGE
    if not key.startswith("optimizer.state."):
        return key, None
    state, _, parameter = key.removeprefix("optimizer.state.").partition(".")
    return parameter, state


# Prefix of the keys of foreign tensors, which are copied byte for byte (--keep-foreign).
_FOREIGN_PREFIX = "foreign."


def foreign_key(name: str) -> str:
    """Return the key of a tensor that the model does not have, called `name` in the files."""
    return f"{_FOREIGN_PREFIX}{name}"


def is_foreign(key: str) -> bool:
    """Return whether a key is that of a tensor that the model does not have."""
    return key.startswith(_FOREIGN_PREFIX)


def foreign_name(key: str) -> str:
    """Return the name in the files of a foreign tensor. Other keys are returned unchanged."""
    return key.removeprefix(_FOREIGN_PREFIX)


def is_weight(key: str) -> bool:
    """Return whether a key is that of a parameter of the model, not of its state."""
    _, state = split_key(key)
    return state is None and not is_foreign(key)


def optimizer_states(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the optimizer states of a parameter that `keys` contain, in order."""
    found = set()
    for key in keys:
        _, state = split_key(key)
        if state is not None:
            found.add(state)
    return tuple(state for state in OPTIMIZER_STATES if state in found)


def complete_states(found: Iterable[str]) -> tuple[str, ...] | None:
    """Return the smallest set of states of an optimizer that includes `found`, with `param`.

    None if they belong to several optimizers. All parameters have the same states.
    """
    return _find_smallest_set(found, _UNIFORM_STATE_SETS)


def has_mixed_states(args: Mapping[str, Any]) -> bool:
    """Return whether the optimizer of a run has other states of matrices than of the rest."""
    rule = UPDATE_RULES.get(args.get("optimizer") or "")
    return rule is not None and not rule.HAS_UNIFORM_STATE


def complete_mixed_states(args: Mapping[str, Any], found: Iterable[str]) -> tuple[str, ...] | None:
    """Return the smallest set of states of one parameter that includes `found`, with `param`.

    The optimizer of the run has other states of matrices (see `has_mixed_states`).
    """
    return _find_smallest_set(found, UPDATE_RULES[args["optimizer"]].STATE_SETS)


def _find_smallest_set(
    found: Iterable[str], state_sets: Iterable[tuple[str, ...]]
) -> tuple[str, ...] | None:
    moments = set(found) - {"param"}
    fitting = [states for states in state_sets if moments.issubset(states)]
    if not fitting:
        return None
    smallest = min(fitting, key=len)
    return ("param", *smallest)


def list_parameter_states(parameter: str, keys: Container[str]) -> tuple[str, ...]:
    """Return the optimizer states of a parameter that are in `keys`."""
    return tuple(state for state in OPTIMIZER_STATES if optimizer_key(state, parameter) in keys)


def full_precision_key(parameter: str, keys: Container[str]) -> str:
    """Return the key of the fp32 main parameter if it is in `keys`, else `parameter`."""
    # Weights are rounded copies of the main parameters.
    main = optimizer_key("param", parameter)
    if main in keys:
        return main
    return parameter


_UNTRAINED = (".router.expert_bias", ".activation.beta", ".activation.eps")


def is_trained(key: str) -> bool:
    """Return whether the optimizer trains the parameter.

    A router's bias follows the load. Constants and foreign tensors do not change.
    """
    return not key.endswith(_UNTRAINED) and not is_foreign(key)


# ---- Checkpoints ----


@dataclass(frozen=True)
class TensorInfo:
    """Global shape and dtype of one tensor."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass
class TrainingState:
    """State of a run besides tensors. Raises CheckpointError for values that no run has.

    Counters are in iterations and samples.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    num_floating_point_operations_so_far: float = 0.0
    # Megatron-LM's: group 0 with weight decay, group 1 without.
    param_groups: list[dict[str, Any]] | None = None
    scheduler: dict[str, Any] | None = None  # Megatron-LM's opt_param_scheduler
    grad_scaler: dict[str, Any] | None = None
    # Key of the object in torch_dist -> function that reads it. Only the same layout can use it.
    rng: dict[str, Callable[[], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        TRAINING_STATE(vars(self), "the training state")


class Source(Protocol):
    """A checkpoint that can be read piece by piece. Only `read` reads more than metadata."""

    description: str  # format and path, for messages
    args: dict[str, Any]  # known model and run arguments under Megatron-LM's names
    training: TrainingState | None  # None: the format (an HF directory) contains only weights
    unused: list[str]  # names in the files that have no key in model space

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Global shape and dtype of every tensor by its model-space key."""
        ...

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return the box of `key` at `offset` with extent `shape`, on CPU in the stored dtype.

        Raises KeyError for an unknown key, ValueError where the file is damaged.
        """
        ...


class SourceView:
    """Base of sources that change `source`: they override tensors, arguments or `read`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.description = source.description
        self.unused = source.unused
        self.args: dict[str, Any] = dict(source.args)
        self.training: TrainingState | None = source.training
        self.tensors: dict[str, TensorInfo] = dict(source.tensors)

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        return self._source.read(key, offset, shape)

    def cast_weights(self, dtype: torch.dtype) -> None:
        """Change the dtype of the weights. A router's bias is fp32 in every model.

        Foreign tensors are copied as they are, except for weights of layers with foreign mixers:
        those that have the dtype of the other weights are cast with them.
        """
        old = None
        if self.args.get("foreign_mixers"):
            old = self.tensors[WORD_EMBEDDINGS].dtype
        for key, info in self.tensors.items():
            is_cast = is_weight(key) and is_trained(key)
            if is_foreign(key):
                is_cast = info.dtype == old
            if is_cast:
                self.tensors[key] = TensorInfo(info.shape, dtype)

    def drop_average(self) -> None:
        """Leave out the average of the weights."""
        for key in list(self.tensors):
            if key.startswith(AVERAGE_PREFIX):
                del self.tensors[key]

    def drop_optimizer(self) -> None:
        """Leave out the optimizer state, and the parts of the training state that belong to it."""
        for key in list(self.tensors):
            if key.startswith("optimizer."):
                del self.tensors[key]
        if self.training is not None:
            self.training = dataclasses.replace(
                self.training, param_groups=None, scheduler=None, grad_scaler=None
            )


class AveragedWeights(SourceView):
    """A model with the average of its weights (--ema-decay) as the weights, without optimizer.

    The average is fp32 and is cast once to `dtype`, by default the dtype of the weights.
    """

    def __init__(self, source: Source, dtype: torch.dtype | None = None) -> None:
        super().__init__(source)
        missing = []
        for key in source.tensors:
            is_averaged = is_weight(key) and is_trained(key)
            if is_averaged and average_key(key) not in source.tensors:
                missing.append(key)
        if missing:
            raise ValueError(
                f"--weights ema: {source.description} has no average of {missing[0]}: a run saves "
                "one with --ema-decay"
            )
        self.drop_optimizer()
        self.drop_average()
        if dtype is not None:
            self.cast_weights(dtype)

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        stored = average_key(key) if is_trained(key) else key
        return self._source.read(stored, offset, shape).to(self.tensors[key].dtype)


def read_whole(source: Source, key: str) -> torch.Tensor:
    """Return the whole global tensor `key`."""
    info = source.tensors[key]
    return source.read(key, (0,) * len(info.shape), info.shape)


Progress = Callable[[int], None]  # called with the number of bytes just written


def no_progress(nbytes: int) -> None:
    """Ignore the progress: the default `Progress`."""
