"""From a command line to a checked `Config`.

No process group is started and no checkpoint is opened, so that all mistakes in the flags are
reported together, before any rank waits for another.
"""

from __future__ import annotations

import math
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
from megatron.core.pipeline_parallel import parse_layout
from megatron.training.config import run_rules
from megatron.training.config.arguments import FlagParser, Given, build, flag_fields
from megatron.training.config.options import DistributedConfig, RestartConfig
from megatron.training.config.run_config import SECTIONS, Config
from megatron.training.config.stored_args import merge_stored_args
from megatron.training.rendezvous import environment_rank


def make_flag_parser() -> FlagParser:
    """Return the parser for the flags of `pretrain_gpt.py`."""
    sections = {title: section for title, (_, section) in SECTIONS.items()}
    return FlagParser(sections)


def compute_replica_size(argv: Sequence[str]) -> int:
    """Return the minimum number of processes for the model and its experts; 1 if no flag
    sets it.
    """
    given = make_flag_parser().parse(argv).given

    def get_size(axis: str) -> int:
        return max(1, given.get(f"{axis}_parallel_size", 1))

    # The dense layers and the experts of a stage divide the same ranks in two ways.
    dense = get_size("tensor_model") * get_size("context")
    experts = get_size("expert_model")
    if (given.get("num_experts") or 0) > 1:
        experts *= given.get("expert_tensor_parallel_size") or get_size("tensor_model")
    return get_size("pipeline_model") * math.lcm(dense, experts)


def find_run_directory(argv: Sequence[str]) -> str | None:
    """Return --save of a command line that may have errors.

    None for object storage, which does not contain records, and on all ranks except the first.
    """
    if environment_rank() > 0:
        return None
    save = make_flag_parser().parse(argv).given.get("save")
    if save is None or isinstance(path_of(save), ObjectPath):
        return None
    return str(save)


def read_restart_config(argv: Sequence[str]) -> tuple[RestartConfig, timedelta]:
    """Return the flags of in-process restart, and the time to wait for ranks.

    `parse_args` reports problems of other flags. Raises ValueError for those of these flags.
    """
    given = make_flag_parser().parse(argv).given
    distributed = build(DistributedConfig, given)
    return build(RestartConfig, given), timedelta(minutes=distributed.distributed_timeout_minutes)


def parse_args(
    argv: Sequence[str], world_size: int, stored_args: Mapping[str, Any] | None = None
) -> Config:
    """Return the configuration of a run of `world_size` processes; --help exits the program.

    With --use-checkpoint-args, `stored_args` is the result of
    `checkpoint_args.read_checkpoint_args`. Raises ValueError that lists all problems, one per line,
    each with its fix.
    """
    line = make_flag_parser().parse(argv)
    notes = []
    if line.ignored:
        notes.append(f"accepted without effect: {', '.join(dict.fromkeys(line.ignored))}")
    if line.unsaved_memory:
        notes.append(
            f"same results, but memory is not saved here: {', '.join(line.unsaved_memory)}; "
            "tools/plan_run.py reports the memory of the run"
        )
    notes += line.notes
    if line.dropped:
        dropped = ", ".join(line.dropped)
        notes.append(f"WARNING: unknown flags have no effect (--ignore-unknown-flags): {dropped}")
    given = line.given
    if given.get("use_checkpoint_args"):
        if stored_args is None:
            line.problems.append(
                "--use-checkpoint-args: parse_args does not open checkpoints; pass it "
                "stored_args=read_checkpoint_args(argv, world_size)"
            )
            raise_problems(line.problems)
        # Before anything is derived: derived values depend on the model.
        given, overridden = use_stored_args(given, stored_args or {})
        notes += overridden
    config, problems = _make_config(given, world_size, line.malformed)
    raise_problems(line.problems + problems)
    config.notes = notes + config.notes
    return config


def use_stored_args(given: Given, stored_args: Mapping[str, Any]) -> tuple[Given, list[str]]:
    """Return `given` with the arguments of a checkpoint, and notes.

    `stored_args` are empty if there is no checkpoint yet.
    """
    if stored_args:
        return merge_stored_args(given, stored_args)
    note = (
        f"--use-checkpoint-args: --load {given['load']} contains no checkpoint yet, "
        "so the flags on the command line are used"
    )
    return given, [note]


def make_config(given: Given, world_size: int) -> Config:
    """Return the configuration for these values of fields.

    Builds every part, derives values from each other and checks the rules between them. Raises
    ValueError that lists all problems.
    """
    config, problems = _make_config(given, world_size, malformed=set())
    raise_problems(problems)
    return config


def _make_config(given: Given, world_size: int, malformed: set[str]) -> tuple[Config, list[str]]:
    """Return the configuration and all problems; parts with problems are None.

    Parts with a field in `malformed` (its flag has a value that cannot be parsed) are skipped.
    """
    problems: list[str] = []
    given, notes = _derive_values(given, problems)

    # Build the parts. Each checks its own fields.
    parts: dict[str, Any] = dict.fromkeys(attribute for attribute, _ in SECTIONS.values())
    for attribute, section in SECTIONS.values():
        names = {field.name for field in flag_fields(section)}
        # Building it with a default would report problems that are not there.
        if names & malformed:
            continue
        try:
            parts[attribute] = build(section, given)
        except ValueError as error:
            problems.append(str(error))
            # Its values may also contradict those of other parts.
            if isinstance(error, InvalidFlagsError):
                parts[attribute] = error.section
    config = Config(**parts, notes=notes)

    # Check the rules between parts that could be built.
    rules = [*list_shared_rules(section for _, section in SECTIONS.values()), *run_rules.RULES]
    problems += find_rule_problems(rules, *filter(None, parts.values()))
    for check, needs in run_rules.CHECKS:
        # A rule needs valid values in every part that it reads; otherwise its message misleads.
        needed_parts = [parts[name] for name in needs.split()]
        if None in needed_parts:
            continue
        try:
            problems += check(config, world_size)
        except ValueError as error:
            problems.append(str(error))
    if None not in parts.values():
        config.notes += run_rules.make_save_notes(config)
    return config, list(dict.fromkeys(problems))


_LAYOUT = "pipeline_model_parallel_layout"


def _derive_values(given: Given, problems: list[str]) -> tuple[Given, list[str]]:
    """Return `given` with the values that follow from other flags, and notes about the changes.

    Appends to `problems`.
    """
    given = dict(given)
    notes = []

    # Parallelism.
    if given.get("sequence_parallel") and given.get("tensor_model_parallel_size", 1) == 1:
        notes.append(
            "--sequence-parallel is off: it splits over tensor-parallel ranks, "
            "and there is only one"
        )
        given["sequence_parallel"] = False
    try:
        num_chunks = _compute_chunks_per_stage(given)
        # One chunk per stage is the plain 1F1B schedule.
        if num_chunks == 1:
            given["virtual_pipeline_model_parallel_size"] = None
        elif num_chunks is not None:
            given["virtual_pipeline_model_parallel_size"] = num_chunks
    except ValueError as error:
        problems.append(str(error))
    if _exchanges_heads_for_dropout(given):
        notes.append(
            "--cp-comm-type a2a: other exchanges compute attention in blocks, by kernels without "
            "dropout; the results are the same"
        )
        given["cp_comm_type"] = ["a2a"]
    has_experts = (given.get("num_experts") or 0) > 1
    if not has_experts and given.pop("expert_tensor_parallel_size", None) is not None:
        notes.append("--expert-tensor-parallel-size: the model has no experts")

    # Features that only Transformer Engine implements select it.
    te_flags = []
    if given.get("fp8") is not None:
        te_flags.append("--fp8-format")
    if given.get("fp4") is not None:
        te_flags.append("--fp4-format")
    if given.get("cross_entropy_loss_fusion") and given.get("cross_entropy_fusion_impl") == "te":
        te_flags.append("--cross-entropy-fusion-impl te")
    if te_flags and "transformer_impl" not in given:
        notes.append(f"--transformer-impl transformer_engine: {te_flags[0]} needs it")
        given["transformer_impl"] = "transformer_engine"

    # Data and evaluation.
    if "fim_rate" in given and not given.get("fim_data"):
        problems.append(
            f"--fim-rate {given['fim_rate']} without --fim-data: Megatron-LM ignores it, "
            "BigCode's fork fills in the middle: add --fim-data, or leave out --fim-rate"
        )
    if given.get("eval_iters", 0) < 0:
        notes.append(f"--eval-iters {given['eval_iters']}: evaluation is disabled, as with 0")
        given["eval_iters"] = 0
    # Megatron-LM requires both flags, and most scripts give the same value.
    given.setdefault("max_position_embeddings", given.get("seq_length"))
    return given, notes


def _exchanges_heads_for_dropout(given: Given) -> bool:
    """Return whether an exchange of heads replaces other kinds of context parallelism.

    Only if attention has dropout, and if the heads are divisible by the ranks that split them.
    """
    cp_size = given.get("context_parallel_size", 1)
    types = given.get("cp_comm_type", ["p2p"])
    if cp_size <= 1 or set(types) <= {"a2a"} or not given.get("attention_dropout", 0.1):
        return False
    # A wrong number of values is reported later.
    if len(types) not in (1, given.get("num_layers")):
        return False
    num_groups = given.get("num_attention_heads", 0)
    if given.get("group_query_attention"):
        num_groups = given.get("num_query_groups", 1)
    return num_groups % (given.get("tensor_model_parallel_size", 1) * cp_size) == 0


def _compute_chunks_per_stage(given: Given) -> int | None:
    """Return the model chunks per stage that --num-layers-per-virtual-pipeline-stage or
    --pipeline-model-parallel-layout request; None without these flags.
    """
    layers_per_chunk = given.get("num_layers_per_virtual_pipeline_stage")
    layout = given.get(_LAYOUT)
    if layers_per_chunk is None and layout is None:
        return None
    flags = []
    for name in (
        "virtual_pipeline_model_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        _LAYOUT,
    ):
        if given.get(name) is not None:
            flags.append(f"--{name.replace('_', '-')}")
    if len(flags) > 1:
        raise ValueError(f"{' and '.join(flags)} are mutually exclusive")
    pp_size = given.get("pipeline_model_parallel_size", 1)

    # A layout lists every chunk; its stages follow from the pipeline size.
    if layout is not None:
        num_chunks = len(parse_layout(layout))
        if num_chunks % pp_size:
            raise ValueError(
                f"{flags[0]} {layout} has {num_chunks} chunks for "
                f"--pipeline-model-parallel-size {pp_size}: change one of them"
            )
        return num_chunks // pp_size

    # The embedding and the loss can count as layers.
    num_layers = given.get("num_layers", 0)
    num_layers += bool(given.get("account_for_embedding_in_pipeline_split"))
    num_layers += bool(given.get("account_for_loss_in_pipeline_split"))
    assert layers_per_chunk is not None
    if layers_per_chunk < 1 or num_layers % (pp_size * layers_per_chunk):
        raise ValueError(
            f"--num-layers {num_layers} is not a multiple of --pipeline-model-parallel-size "
            f"{pp_size} x --num-layers-per-virtual-pipeline-stage {layers_per_chunk}"
        )
    return int(num_layers // pp_size // layers_per_chunk)
