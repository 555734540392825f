"""From a command line to a checked `Config`.

No process group is started and no checkpoint is opened, so that all mistakes in the flags are
reported together, before any rank waits for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from megatron.core.flags import (
    InvalidFlagsError,
    find_rule_problems,
    list_shared_rules,
    raise_problems,
)
from megatron.core.object_path import ObjectPath, path_of
from megatron.core.wings import resolve
from megatron.training.config import run_rules
from megatron.training.config.arguments import FlagParser, FlagValues, build, flag_fields
from megatron.training.config.run_config import SECTIONS, Config
from megatron.training.config.run_options import DistributedConfig, RestartConfig
from megatron.training.rendezvous import environment_rank

# Imported for --use-checkpoint-args
_READ_ARGS = "megatron.training.config.checkpoint_args:read_checkpoint_args"
_MERGE_ARGS = "megatron.training.config.checkpoint_args:merge_stored_args"


def make_flag_parser() -> FlagParser:
    """Return the parser for the flags of `pretrain_gpt.py`."""
    sections = {title: section for title, (_, section) in SECTIONS.items()}
    return FlagParser(sections)


def find_run_directory(argv: Sequence[str]) -> str | None:
    """Return --save of a command line that may have errors.

    None for object storage, which does not contain records, and on all ranks except the first.
    """
    if environment_rank() > 0:
        return None
    save = make_flag_parser().parse(argv).flag_values.get("save")
    if save is None or isinstance(path_of(save), ObjectPath):
        return None
    return str(save)


def read_restart_config(argv: Sequence[str]) -> tuple[RestartConfig, timedelta]:
    """Return the flags of in-process restart, and the time to wait for ranks.

    `parse_args` reports problems of other flags. Raises ValueError for those of these flags.
    """
    flag_values = make_flag_parser().parse(argv).flag_values
    distributed = build(DistributedConfig, flag_values)
    return build(RestartConfig, flag_values), timedelta(
        minutes=distributed.distributed_timeout_minutes
    )


def read_stored_args(argv: Sequence[str], world_size: int) -> dict[str, Any] | None:
    """Return the arguments that --use-checkpoint-args requests, None without that flag.

    See `checkpoint_args.read_checkpoint_args`.
    """
    if not make_flag_parser().parse(argv).flag_values.get("use_checkpoint_args"):
        return None
    stored_args: dict[str, Any] | None = resolve(_READ_ARGS)(argv, world_size)
    return stored_args


def parse_args(
    argv: Sequence[str], world_size: int, stored_args: Mapping[str, Any] | None = None
) -> Config:
    """Return the configuration of a run of `world_size` processes; --help exits the program.

    With --use-checkpoint-args, `stored_args` is the result of
    `checkpoint_args.read_checkpoint_args`. Raises ValueError that lists all problems, one per line,
    each with its fix.
    """
    command_line = make_flag_parser().parse(argv)
    notes = []
    if command_line.ignored:
        notes.append(f"accepted without effect: {', '.join(dict.fromkeys(command_line.ignored))}")
    if command_line.unsaved_memory:
        unsaved = ", ".join(command_line.unsaved_memory)
        notes.append(
            f"same results, but memory is not saved here: {unsaved}; "
            "tools/plan_run.py reports the memory of the run"
        )
    notes += command_line.notes
    if command_line.dropped:
        dropped = ", ".join(command_line.dropped)
        notes.append(f"WARNING: unknown flags have no effect (--ignore-unknown-flags): {dropped}")
    flag_values = command_line.flag_values
    if flag_values.get("use_checkpoint_args"):
        if stored_args is None:
            command_line.problems.append(
                "--use-checkpoint-args: parse_args does not open checkpoints; pass it "
                "stored_args=read_checkpoint_args(argv, world_size)"
            )
            raise_problems(command_line.problems)
        # Before anything is derived: derived values depend on the model.
        flag_values, overridden = use_stored_args(flag_values, stored_args or {})
        notes += overridden
    config, problems = _make_config(flag_values, world_size, command_line.malformed)
    raise_problems(command_line.problems + problems)
    config.notes = notes + config.notes
    return config


def use_stored_args(
    flag_values: FlagValues, stored_args: Mapping[str, Any]
) -> tuple[FlagValues, list[str]]:
    """Return `flag_values` with the arguments of a checkpoint, and notes for the log.

    `stored_args` is empty if there is no checkpoint yet.
    """
    if stored_args:
        merged: tuple[FlagValues, list[str]] = resolve(_MERGE_ARGS)(flag_values, stored_args)
        return merged
    note = (
        f"--use-checkpoint-args: --load {flag_values['load']} contains no checkpoint yet, "
        "so the flags on the command line are used"
    )
    return flag_values, [note]


def make_config(flag_values: FlagValues, world_size: int) -> Config:
    """Return the configuration for these values of fields.

    Builds every section, derives values from each other and checks the rules between them. Raises
    ValueError that lists all problems.
    """
    config, problems = _make_config(flag_values, world_size, malformed=set())
    raise_problems(problems)
    return config


def _make_config(
    flag_values: FlagValues, world_size: int, malformed: set[str]
) -> tuple[Config, list[str]]:
    """Return the configuration and all problems; sections with problems are None.

    Sections with a field in `malformed` (its flag has a value that cannot be parsed) are skipped.
    """
    problems: list[str] = []
    flag_values, notes = _derive_values(flag_values, problems)

    # Build the sections. Each checks its own fields.
    sections: dict[str, Any] = dict.fromkeys(attribute for attribute, _ in SECTIONS.values())
    for attribute, section in SECTIONS.values():
        names = {field.name for field in flag_fields(section)}
        # Building it with a default would report problems that are not there.
        if names & malformed:
            continue
        try:
            sections[attribute] = build(section, flag_values)
        except ValueError as error:
            problems.append(str(error))
            # Its values may also contradict those of other sections.
            if isinstance(error, InvalidFlagsError):
                sections[attribute] = error.section
    config = Config(**sections, notes=notes)

    # Check the rules between sections that could be built.
    rules = [*list_shared_rules(section for _, section in SECTIONS.values()), *run_rules.RULES]
    problems += find_rule_problems(rules, *filter(None, sections.values()))
    for check, needs in run_rules.CHECKS:
        # A rule needs valid values in every part that it reads; otherwise its message misleads.
        needed_parts = [sections[name] for name in needs.split()]
        if None in needed_parts:
            continue
        try:
            problems += check(config, world_size)
        except ValueError as error:
            problems.append(str(error))
    if None not in sections.values():
        config.notes += run_rules.make_save_notes(config)
    return config, list(dict.fromkeys(problems))


# Flags that specify the chunks of a stage, instead of their number
_CHUNK_FLAGS = ("num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout")
_COUNT_CHUNKS = "megatron.training.config.pipeline_rules:compute_chunks_per_stage"
_MAY_EXCHANGE_HEADS = "megatron.training.config.context_parallel_rules:may_exchange_heads"


def _derive_values(flag_values: FlagValues, problems: list[str]) -> tuple[FlagValues, list[str]]:
    """Return `flag_values` with the values that follow from other flags, and notes about changes.

    Appends to `problems`.
    """
    flag_values = dict(flag_values)
    notes = []

    # Parallelism.
    if (
        flag_values.get("sequence_parallel")
        and flag_values.get("tensor_model_parallel_size", 1) == 1
    ):
        notes.append(
            "--sequence-parallel is off: it splits over tensor-parallel ranks, "
            "and there is only one"
        )
        flag_values["sequence_parallel"] = False
    try:
        num_chunks = None
        if any(flag_values.get(name) is not None for name in _CHUNK_FLAGS):
            num_chunks = resolve(_COUNT_CHUNKS)(flag_values)
        # One chunk per stage is the plain 1F1B schedule.
        if num_chunks == 1:
            flag_values["virtual_pipeline_model_parallel_size"] = None
        elif num_chunks is not None:
            flag_values["virtual_pipeline_model_parallel_size"] = num_chunks
    except ValueError as error:
        problems.append(str(error))
    splits_sequences = flag_values.get("context_parallel_size", 1) > 1
    if splits_sequences and resolve(_MAY_EXCHANGE_HEADS)(flag_values):
        notes.append(
            "--cp-comm-type a2a: other exchanges compute attention in blocks, by kernels without "
            "dropout; the results are the same"
        )
        flag_values["cp_comm_type"] = ["a2a"]
    has_experts = (flag_values.get("num_experts") or 0) > 1
    if not has_experts and flag_values.pop("expert_tensor_parallel_size", None) is not None:
        notes.append("--expert-tensor-parallel-size: the model has no experts")

    # Features that only Transformer Engine implements select it.
    te_flags = []
    if flag_values.get("fp8") is not None:
        te_flags.append("--fp8-format")
    if flag_values.get("fp4") is not None:
        te_flags.append("--fp4-format")
    if (
        flag_values.get("cross_entropy_loss_fusion")
        and flag_values.get("cross_entropy_fusion_impl") == "te"
    ):
        te_flags.append("--cross-entropy-fusion-impl te")
    if te_flags and "transformer_impl" not in flag_values:
        notes.append(f"--transformer-impl transformer_engine: {te_flags[0]} needs it")
        flag_values["transformer_impl"] = "transformer_engine"

    # Data and evaluation.
    if "fim_rate" in flag_values and not flag_values.get("fim_data"):
        problems.append(
            f"--fim-rate {flag_values['fim_rate']} without --fim-data: Megatron-LM ignores it, "
            "BigCode's fork fills in the middle: add --fim-data, or leave out --fim-rate"
        )
    if flag_values.get("eval_iters", 0) < 0:
        notes.append(f"--eval-iters {flag_values['eval_iters']}: evaluation is disabled, as with 0")
        flag_values["eval_iters"] = 0
    # Megatron-LM requires both flags, and most scripts give the same value.
    flag_values.setdefault("max_position_embeddings", flag_values.get("seq_length"))
    return flag_values, notes
