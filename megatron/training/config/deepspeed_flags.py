"""Command lines of Megatron-DeepSpeed, Microsoft's and BigScience's, as flags of this project.

Also the file of --deepspeed_config: each of its fields becomes a flag, has no effect on results, or
is refused by name. Where DeepSpeed reads a value from the file only, the file wins over the flag,
as it does there.

Options without effect are rows of `megatron_lm_options.tsv`. Sources: `megatron/arguments.py`,
`learning_rates.py` and `training.py` of both repositories, and DeepSpeed's page "DeepSpeed
Configuration JSON".
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from megatron.core.safe_files.reading import read_json
from megatron.training.config.arguments import CommandLine

Words = dict[str, list[str]]
"""Option of Megatron-DeepSpeed -> the words after it."""


def translate(options: Words, command_line: CommandLine) -> list[str]:
    """Return flags that replace `options`, for which they win over the flags of the command line.

    Appends notes and problems to `command_line`.
    """
    flags: list[str] = []
    for name, words in options.items():
        translation = _TRANSLATIONS.get(name)
        if translation is None:
            continue
        spelled = " ".join([name, *words])
        try:
            replacement = translation([word.strip("'\"") for word in words], command_line)
        except ValueError as error:
            command_line.problems.append(f"{spelled}: {error}")
            continue
        flags += replacement
        if replacement:
            command_line.notes.append(f"{spelled}: replaced by {shlex.join(replacement)}")
        else:
            command_line.ignored.append(name)
    if experts := [name for name in options if name in _EXPERTS]:
        _judge_experts(experts, command_line)
    if data := {name: words for name, words in options.items() if name in _DATA}:
        flags += _translate_data(data, command_line)
    return flags


def _parse_integer(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{word!r} is not an integer") from None


# Durations in tokens.


def _limit_training(words: list[str], command_line: CommandLine) -> list[str]:
    """Training ends at the given tokens, or earlier if --train-samples or --train-iters end it."""
    flag_values = command_line.flag_values
    tokens = _parse_integer(words[0])
    if flag_values.get("train_iters") is not None:
        iterations = math.ceil(tokens / _count_iteration_tokens(command_line))
        return ["--train-iters", str(min(iterations, flag_values["train_iters"]))]
    samples = math.ceil(tokens / _get_size("seq_length", command_line))
    return ["--train-samples", str(min(samples, flag_values.get("train_samples") or samples))]


def _convert_schedule(name: str) -> Callable[[list[str], CommandLine], list[str]]:
    """Return the translation of --lr-NAME-tokens, which win over iterations and samples."""

    def convert(words: list[str], command_line: CommandLine) -> list[str]:
        tokens = _parse_integer(words[0])
        if command_line.flag_values.get("train_iters") is not None:
            iterations = round(tokens / _count_iteration_tokens(command_line))
            return [f"--lr-{name}-iters", str(iterations)]
        samples = round(tokens / _get_size("seq_length", command_line))
        return [f"--lr-{name}-samples", str(samples)]

    return convert


def _get_size(field: str, command_line: CommandLine) -> int:
    size = command_line.flag_values.get(field)
    if not size or size < 1:
        raise ValueError(f"needs --{field.replace('_', '-')} to convert tokens")
    return int(size)


def _count_iteration_tokens(command_line: CommandLine) -> int:
    return _get_size("seq_length", command_line) * _get_size("global_batch_size", command_line)


# Model and parallelism.


def _rename(flag: str, *constants: str) -> Callable[[list[str], CommandLine], list[str]]:
    """Return the translation of an option that is `flag` here, together with `constants`."""
    return lambda words, command_line: [*constants, flag, *words]


def _exchange_heads(words: list[str], command_line: CommandLine) -> list[str]:
    """DeepSpeed-Ulysses exchanges heads for a part of the sequence, as `a2a` does."""
    if _parse_integer(words[0]) == 1:
        return []
    return ["--context-parallel-size", words[0], "--cp-comm-type", "a2a"]


def _count_embeddings_as_layers(words: list[str], command_line: CommandLine) -> list[str]:
    """`type:transformer|embedding` balances layers and embeddings; other methods are even here."""
    pp_size = command_line.flag_values.get("pipeline_model_parallel_size", 1)
    num_layers = command_line.flag_values.get("num_layers", 0)
    if "embedding" not in words[0].lower() or pp_size == 1 or num_layers % pp_size == 0:
        return []
    return ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]


def _use_gated_activation(words: list[str], command_line: CommandLine) -> list[str]:
    if words[0] not in ("swiglu", "geglu"):
        raise ValueError("this activation is not implemented here; swiglu and geglu are")
    flags = [f"--{words[0]}"]
    flag_values = command_line.flag_values
    if "ffn_hidden_size" not in flag_values and "hidden_size" in flag_values:
        # The width does not shrink for the gate, as it does with --swiglu.
        flags += ["--ffn-hidden-size", str(4 * flag_values["hidden_size"])]
    return flags


def _only_evaluate(words: list[str], command_line: CommandLine) -> list[str]:
    # Any word is true there: the option has the type `bool` of argparse.
    return ["--skip-train"]


_EXPERTS = (
    "--moe-expert-parallel-size",
    "--moe-loss-coeff",
    "--moe-train-capacity-factor",
    "--moe-eval-capacity-factor",
    "--moe-min-capacity",
    "--create-moe-param-group",
)


def _judge_experts(names: list[str], command_line: CommandLine) -> None:
    if (command_line.flag_values.get("num_experts") or 0) > 1:
        command_line.problems.append(
            f"{', '.join(names)}: layers of DeepSpeed's experts differ from Megatron-LM's in "
            "routing and capacity, and in their checkpoints: give Megatron-LM's flags "
            "(--expert-model-parallel-size, --moe-router-topk, --moe-aux-loss-coeff, ...)"
        )
    else:
        command_line.ignored += names


# Data.


class _WeightedRange(NamedTuple):
    """`WEIGHT START:END PATH`: a data set, and the range of its documents as fractions."""

    weight: str
    start: Decimal
    end: Decimal
    path: str


_SPLITS = ("train", "valid", "test")
_DATA = tuple(
    f"--{split}-weighted-split-paths{suffix}" for split in _SPLITS for suffix in ("", "-path")
)


def _translate_data(options: Words, command_line: CommandLine) -> list[str]:
    """Return the flags for data sets with ranges of documents."""
    splits: dict[str, list[_WeightedRange]] = {}
    for name, words in options.items():
        try:
            groups = _read_group_file(words[0]) if name.endswith("-path") else words
            if len(groups) != 1:
                raise ValueError(
                    f"{len(groups)} groups of data sets: groups are not evaluated one by one here; "
                    "give one group, which may have several data sets"
                )
            splits[name.removeprefix("--").partition("-")[0]] = _parse_group(groups[0])
        except (ValueError, OSError) as error:
            command_line.problems.append(f"{name} {shlex.join(words)}: {error}")
            return ["--mock-data"]  # so that missing data are not reported, too
    names = ", ".join(options)
    flags = _choose_data_flags(splits)
    if flags is None:
        command_line.problems.append(
            f"{names}: ranges of documents are supported if they are 0:1, or if all splits "
            "have the same data sets and weights with ranges that follow each other, e.g. "
            "0:0.95 and 0.95:1; divide the data sets with tools/preprocess_data.py"
        )
        return ["--mock-data"]
    command_line.notes.append(f"{names}: replaced by {shlex.join(flags)}")
    return flags


def _read_group_file(path: str) -> list[str]:
    """Return the groups of a file, each in double quotes."""
    with open(path, encoding="utf-8") as file:
        return shlex.split(file.read())


def _parse_group(text: str) -> list[_WeightedRange]:
    """Parse `NAME: WEIGHT START:END PATH, WEIGHT START:END PATH`."""
    sets = []
    for item in text.partition(":")[2].split(","):
        try:
            weight, documents, path = item.split()
            start, _, end = documents.partition(":")
            sets.append(_WeightedRange(weight, Decimal(start), Decimal(end), path))
        except (ValueError, InvalidOperation):
            raise ValueError(
                f"{item.strip()!r} is not WEIGHT START:END PATH, as in NAME: 0.3 0:0.95 corpus"
            ) from None
    return sets


def _choose_data_flags(splits: Mapping[str, list[_WeightedRange]]) -> list[str] | None:
    """Return the flags that select the same documents; None if there are none."""
    ranges = {name: {(item.start, item.end) for item in sets} for name, sets in splits.items()}
    blends = {
        name: [word for item in sets for word in (item.weight, item.path)]
        for name, sets in splits.items()
    }
    if all(documents == {(0, 1)} for documents in ranges.values()):
        flags = []
        for name, blend in blends.items():
            flags += [f"--{name}-data-path", *blend]
        return flags
    # The same data sets, cut at the same fractions.
    first = next(iter(blends.values()))
    if any(len(documents) != 1 for documents in ranges.values()):
        return None
    if any(blend != first for blend in blends.values()):
        return None
    boundary = Decimal(0)
    shares = []
    for name in _SPLITS:
        start, end = next(iter(ranges.get(name, {(boundary, boundary)})))
        if start != boundary:
            return None
        shares.append(end - start)
        boundary = end
    return [
        "--data-path",
        *first,
        "--split",
        ",".join(f"{(100 * share).normalize():f}" for share in shares),
    ]


# The file of --deepspeed_config.

_WITHOUT_EFFECT = (
    # Logs and checks
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "memory_breakdown",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "monitor_config",
    "flops_profiler",
    "comms_logger",
    "dataloader_drop_last",
    # Communication and memory, with the same results
    "prescale_gradients",
    "gradient_predivide_factor",
    "sparse_gradients",
    "disable_allgather",
    "activation_checkpointing",
    "aio",
    "pipeline",
    "use_node_local_storage",
    "checkpoint",
    "compile",
    "communication_data_type",
    "seq_parallel_communication_data_type",
    # Megatron-DeepSpeed passes its own optimizer, and other checks of it
    "optimizer",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)
_FEATURES = (
    "curriculum_learning",
    "data_efficiency",
    "progressive_layer_drop",
    "eigenvalue",
    "quantize_training",
    "compression_training",
    "sparse_attention",
    "elasticity",
    "autotuning",
    "hybrid_engine",
    "nebula",
    "amp",
    "tensor_parallel",
    "weight_quantization",
)
"""Objects of the file that turn a feature on, by their `enabled` if they have it."""


def _read_config(words: list[str], command_line: CommandLine) -> list[str]:
    """Return the flags for the fields of DeepSpeed's configuration file."""
    try:
        fields = read_json(words[0])
    except OSError as error:
        raise ValueError(f"cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("is not a JSON object")
    fields = {name: value for name, value in fields.items() if value not in (None, "auto")}
    problems: list[str] = []
    flags: list[str] = []
    for name, value in fields.items():
        if name in _WITHOUT_EFFECT or name == "gradient_accumulation_steps":
            continue
        if name in _FEATURES:
            is_on = value.get("enabled", bool(value)) if isinstance(value, dict) else bool(value)
            if is_on:
                problems.append(f"{name}: this feature of DeepSpeed is not implemented here")
        elif name in _FIELDS:
            flags += _FIELDS[name](value, command_line, problems)
        else:
            problems.append(f"{name}: this field is not supported; remove it from the file")
    # The number of micro-batches follows from the batch sizes.
    states_batch = "train_batch_size" in fields or "global_batch_size" in command_line.flag_values
    if "gradient_accumulation_steps" in fields and not states_batch:
        problems.append("gradient_accumulation_steps: give --global-batch-size instead")
    if "gradient_clipping" not in fields:
        command_line.notes.append(
            f"--deepspeed_config {words[0]}: has no gradient_clipping, without which DeepSpeed "
            "does not clip; --clip-grad is used here"
        )
    if problems:
        raise ValueError("; ".join(problems))
    return flags


_MAX_SCALE_POWER = 127  # of the largest fp32 number

FieldTranslation = Callable[[Any, CommandLine, list[str]], list[str]]
"""(value, command line, problems to append to) -> flags."""


def _check_equal(field: str) -> FieldTranslation:
    """Return the translation of a number that the command line usually states, too."""

    def check(value: Any, command_line: CommandLine, problems: list[str]) -> list[str]:
        flag = f"--{field.replace('_', '-')}"
        stated = command_line.flag_values.get(field, value)
        if stated != value:
            problems.append(f"{value} contradicts {flag} {stated}: make them equal")
        return [flag, str(value)]

    return check


def _clip(value: Any, command_line: CommandLine, problems: list[str]) -> list[str]:
    return ["--clip-grad", str(value)]


def _use_zero(value: Any, command_line: CommandLine, problems: list[str]) -> list[str]:
    """ZeRO 1 is the distributed optimizer; higher stages have the same results."""
    if not isinstance(value, dict):
        problems.append(f"zero_optimization: {value!r} is not an object")
        return []
    for name in ("offload_optimizer", "offload_param"):
        target = value.get(name) or {}
        if not isinstance(target, dict):
            problems.append(f"zero_optimization.{name}: {target!r} is not an object")
            continue
        device = target.get("device", "none")
        if device != "none":
            command_line.unsaved_memory.append(f"zero_optimization.{name} (to {device})")
    return _use_zero_stage([str(value.get("stage", 0))], command_line)


def _use_zero_stage(words: list[str], command_line: CommandLine) -> list[str]:
    stage = _parse_integer(words[0])
    if not 0 <= stage <= 3:
        raise ValueError(f"the stage of ZeRO is 0, 1, 2 or 3, got {stage}")
    if stage > 1:
        command_line.unsaved_memory.append(f"ZeRO stage {stage} (stage 1 is used)")
    return ["--use-distributed-optimizer"] if stage else []


def _use_precision(name: str) -> FieldTranslation:
    """Return the translation of the objects `fp16` and `bf16`."""

    def use(value: Any, command_line: CommandLine, problems: list[str]) -> list[str]:
        if not isinstance(value, dict):
            problems.append(f"{name}: {value!r} is not an object")
            return []
        if not value.get("enabled"):
            if command_line.flag_values.get(name):
                problems.append(f"{name}: is not enabled, which contradicts --{name}")
            return []
        flags = [f"--{name}"]
        if value.get("loss_scale"):
            flags += ["--loss-scale", str(value["loss_scale"])]
        elif "loss_scale" in command_line.flag_values:
            scale = command_line.flag_values.pop("loss_scale")
            command_line.notes.append(
                f"--loss-scale {scale}: not used; {name}.loss_scale of the file is dynamic"
            )
        power = value.get("initial_scale_power")
        if power is not None:
            if not isinstance(power, int) or not 0 <= power <= _MAX_SCALE_POWER:
                problems.append(
                    f"{name}.initial_scale_power: {power!r} is not an integer from 0 to "
                    f"{_MAX_SCALE_POWER}"
                )
                return []
            flags += ["--initial-loss-scale", str(2**power)]
        for field in ("loss_scale_window", "hysteresis", "min_loss_scale"):
            if field in value:
                flags += [f"--{field.replace('_', '-')}", str(value[field])]
        return flags

    return use


def _refuse_scheduler(value: Any, command_line: CommandLine, problems: list[str]) -> list[str]:
    problems.append(
        "scheduler: DeepSpeed's learning rate schedules are not implemented here: give "
        "--lr-decay-style, --lr-warmup-iters, ... and remove it from the file"
    )
    return []


_FIELDS: dict[str, FieldTranslation] = {
    "train_batch_size": _check_equal("global_batch_size"),
    "train_micro_batch_size_per_gpu": _check_equal("micro_batch_size"),
    "gradient_clipping": _clip,
    "zero_optimization": _use_zero,
    "fp16": _use_precision("fp16"),
    "bf16": _use_precision("bf16"),
    "bfloat16": _use_precision("bf16"),
    "scheduler": _refuse_scheduler,
}

_TRANSLATIONS: dict[str, Callable[[list[str], CommandLine], list[str]]] = {
    "--deepspeed_config": _read_config,
    "--zero-stage": _use_zero_stage,
    "--train-tokens": _limit_training,
    "--lr-decay-tokens": _convert_schedule("decay"),
    "--lr-warmup-tokens": _convert_schedule("warmup"),
    "--pipe-parallel-size": _rename("--pipeline-model-parallel-size"),
    "--ds-sequence-parallel-size": _exchange_heads,
    "--pp-partition-method": _count_embeddings_as_layers,
    "--num-key-value-heads": _rename("--num-query-groups", "--group-query-attention"),
    "--rotary-position-embeddings-theta": _rename("--rotary-base"),
    "--override-lr-scheduler": _rename("--override-opt_param-scheduler"),
    "--pad-vocab-size-to": _rename("--vocab-size"),
    "--glu-activation": _use_gated_activation,
    "--eval-only": _only_evaluate,
}
