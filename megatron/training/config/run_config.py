"""All options of a run together, and the rules between them.

Every rule is checked before a process group exists, so that a mistake costs one message and no
waiting.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from megatron.conversion.convert import open_found
from megatron.conversion.formats import Hints, find_checkpoint
from megatron.core.datasets.config import GPTDatasetConfig
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.flags import raise_problems
from megatron.core.models import ChunkPlace
from megatron.core.module import MegatronModule
from megatron.core.optimizer import OptimizerConfig, Schedule, SchedulerConfig, make_schedule
from megatron.core.parallel_state import ParallelConfig
from megatron.core.pipeline_parallel import pipeline_layer_ranges
from megatron.core.pipeline_parallel.schedules import parse_layout
from megatron.core.transformer.transformer_config import TransformerConfig, deciding_fields
from megatron.training.config import run_rules
from megatron.training.config.arguments import FlagParser, Given, build, flag_fields
from megatron.training.config.options import (
    BatchSchedule,
    CheckpointConfig,
    DataLoaderConfig,
    DistributedConfig,
    LoggingConfig,
    PipelineLayoutConfig,
    ProfilingConfig,
    TrainingConfig,
    rampup_steps,
    token_steps,
)
from megatron.training.data.tokenizer import TokenizerConfig
from megatron.training.launch import environment_world_size, join


def _titled(title: str) -> Any:
    """A part of `Config`, by its title in --help."""
    return field(metadata={"title": title})


@dataclass
class Config:
    """The options of a run; one dataclass per part of the code."""

    model: TransformerConfig = _titled("Model")
    parallel: ParallelConfig = _titled("Parallelism")
    pipeline_layout: PipelineLayoutConfig = _titled("Pipeline stages")
    training: TrainingConfig = _titled("Training")
    optimizer: OptimizerConfig = _titled("Optimizer")
    scheduler: SchedulerConfig = _titled("Schedules")
    data: GPTDatasetConfig = _titled("Data")
    loader: DataLoaderConfig = _titled("Reading data")
    tokenizer: TokenizerConfig = _titled("Tokenizer")
    checkpoint: CheckpointConfig = _titled("Checkpoints")
    logging: LoggingConfig = _titled("Logging")
    ddp: DistributedDataParallelConfig = _titled("Data parallelism")
    distributed: DistributedConfig = _titled("Processes")
    profiling: ProfilingConfig = _titled("Profiling")
    notes: list[str] = field(default_factory=list)  # what was changed or dropped, logged once

    def flags(self) -> dict[str, Any]:
        """Every option by its field name, as it holds after all rules."""
        parts = [getattr(self, attribute) for attribute, _ in SECTIONS.values()]
        return {f.name: getattr(part, f.name) for part in parts for f in flag_fields(type(part))}

    def set_vocab_size(self, tokenizer_vocab_size: int, stored: int | None = None) -> int:
        """Number of tokens of the model: the tokenizer's, or more if --vocab-size or the checkpoint
        to load says so.
        """
        given = self.tokenizer.vocab_size
        if given is None or self.tokenizer.kind == "NullTokenizer":
            given = tokenizer_vocab_size
        if given < tokenizer_vocab_size:
            raise ValueError(
                f"--vocab-size {given} is less than the {tokenizer_vocab_size} tokens of the tokenizer"
            )
        if stored is not None and stored > given:
            self.notes.append(
                f"the model of the checkpoint has {stored} tokens, {stored - given} more than the tokenizer"
            )
            given = stored
        self.model = dataclasses.replace(self.model, vocab_size=given)
        return given

    def batch_schedule(self, dp_size: int) -> BatchSchedule:
        """Global batch size and micro-batches at any point of the run."""
        training = self.training
        size = training.global_batch_size
        if size is None:
            size = training.micro_batch_size * dp_size
        if training.step_batch_size_schedule is not None:
            steps = token_steps(training.step_batch_size_schedule, self.data.seq_length)
        elif training.rampup_batch_size is not None:
            steps = rampup_steps(training.rampup_batch_size, size)
        else:
            steps = ((0, size),)
        return BatchSchedule(
            steps, training.micro_batch_size, dp_size, training.decrease_batch_size_if_needed
        )

    def schedule(self) -> Schedule:
        """Learning rate and weight decay over the run."""
        training = self.training
        assert training.global_batch_size is not None
        return make_schedule(
            self.optimizer,
            self.scheduler,
            global_batch_size=training.global_batch_size,
            train_iters=training.train_iters,
            train_samples=training.train_samples,
        )

    def layer_ranges(self) -> list[list[range]]:
        """Global layer numbers by [stage][chunk]."""
        return pipeline_layer_ranges(
            self.model.num_layers,
            self.parallel.pp_size,
            self.parallel.vpp_size,
            self.pipeline_layout.decoder_first_pipeline_num_layers,
            self.pipeline_layout.decoder_last_pipeline_num_layers,
            self.pipeline_layout.account_for_embedding_in_pipeline_split,
            self.pipeline_layout.account_for_loss_in_pipeline_split,
            self.pipeline_layout.pipeline_model_parallel_layout,
        )


ModelProvider = Callable[[Config, ChunkPlace], MegatronModule]
"""Builds one pipeline chunk, not yet initialised."""

_TYPES = get_type_hints(Config)
SECTIONS: dict[str, tuple[str, type]] = {  # title in --help -> attribute of Config and its type
    part.metadata["title"]: (part.name, _TYPES[part.name])
    for part in dataclasses.fields(Config)
    if "title" in part.metadata
}


def flag_parser() -> FlagParser:
    """The parser of `pretrain_gpt.py`."""
    return FlagParser({title: section for title, (_, section) in SECTIONS.items()})


def replica_size(argv: Sequence[str]) -> int:
    """The fewest processes that the model and its experts can be split over; 1 where the flags do
    not say.
    """
    given = flag_parser().parse(argv).given

    def size_of(axis: str) -> int:
        return max(1, given.get(f"{axis}_parallel_size", 1))

    stages = size_of("pipeline_model")
    dense = size_of("tensor_model") * size_of("context")
    experts = size_of("expert_model")
    if (given.get("num_experts") or 0) > 1:
        experts *= given.get("expert_tensor_parallel_size") or size_of("tensor_model")
    return stages * math.lcm(dense, experts)


def parse_args(argv: Sequence[str], world_size: int) -> Config:
    """The configuration of a run of `world_size` processes.

    Raises ValueError that says, one a line, everything that does not fit, and what to do; --help
    ends the program.
    """
    line = flag_parser().parse(argv)
    notes = (
        [f"accepted without effect: {', '.join(dict.fromkeys(line.ignored))}"]
        if line.ignored
        else []
    )
    given = line.given
    if given.get("use_checkpoint_args"):
        try:
            if environment_world_size() > 1:  # which checkpoint that is, rank 0 decides for all
                join(build(DistributedConfig, given))
            given, changes = with_stored_args(
                given, read_stored_args(given.get("load"), given.get("ckpt_step"))
            )
        except ValueError as error:  # without the model, nothing else can be judged
            raise_problems([*line.problems, str(error)])
        notes += changes
    config, problems = _make_config(given, world_size, line.malformed)
    raise_problems(line.problems + problems)
    config.notes = notes + config.notes
    return config


def make_config(given: Given, world_size: int) -> Config:
    """Build every part, derive what follows from others, and check the rules between them;
    ValueError with all.
    """
    config, problems = _make_config(given, world_size, set())
    raise_problems(problems)
    return config


def _make_config(given: Given, world_size: int, malformed: set[str]) -> tuple[Config, list[str]]:
    """The configuration, and everything that is wrong with it: then its wrong parts are None.

    Parts with a field in `malformed`, whose flag was given with a value that cannot be read, are
    not looked at.
    """
    problems: list[str] = []
    given, notes = _derived(given, problems)
    parts: dict[str, Any] = dict.fromkeys(attribute for attribute, _ in SECTIONS.values())
    for attribute, section in SECTIONS.values():
        if not malformed.intersection(field.name for field in flag_fields(section)):
            try:
                parts[attribute] = build(section, given)
            except ValueError as error:
                problems.append(str(error))
    config = Config(**parts, notes=notes)
    for check, needs in run_rules.CHECKS:
        if all(parts[part] is not None for part in needs.split()):
            try:
                problems += check(config, world_size)
            except ValueError as error:
                problems.append(str(error))
    if None not in parts.values():
        config.notes += run_rules.save_notes(config)
    return config, list(dict.fromkeys(problems))


# What --use-checkpoint-args takes over besides the fields that decide the model.
ALSO_TAKEN = (
    "group_query_attention",
    "make_vocab_size_divisible_by",
    "tokenizer_type",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "special_tokens",
    "legacy_tokenizer",
    "tiktoken_pattern",
    "tiktoken_num_special_tokens",
    "vocab_size",
    "null_tokenizer_eod_id",
)


def stored_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a checkpoint under our names."""
    known = dict(args)
    if not known.get("group_query_attention", True) and "num_attention_heads" in known:
        known["num_query_groups"] = known["num_attention_heads"]  # Megatron-LM stores an unused 1
    if known.get("add_bias_linear"):
        known["add_qkv_bias"] = False  # implied; Megatron-LM stores True
    if (
        known.get("tokenizer_type") == "NullTokenizer"
        and known.get("null_tokenizer_eod_id", 0) is None
    ):
        known["null_tokenizer_eod_id"] = (
            known.get("vocab_size") or 1
        ) - 1  # Megatron-LM since 0.19
    return known


def read_stored_args(root: str | None, step: int | None) -> dict[str, Any]:
    """The arguments of the checkpoint that `--load` and `--ckpt-step` name, for
    --use-checkpoint-args. Collective.
    """
    if root is None:
        raise ValueError("--use-checkpoint-args needs --load, the checkpoint to take them from")

    def read() -> dict[str, Any]:
        found = find_checkpoint(root, step)
        if found is None:
            raise ValueError(f"--use-checkpoint-args: --load {root} holds no checkpoint")
        return stored_args(open_found(found, Hints(optimizer=False, as_saved=True)).args)

    return Coordination.of(None).at_coordinator(read)


def with_stored_args(
    given: Mapping[str, Any], stored: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """`given` with the model and the tokenizer of a checkpoint, and a note for every flag that was overruled."""
    merged = dict(given)
    notes = []
    for name in (*(deciding.name for deciding in deciding_fields()), *ALSO_TAKEN):
        if name not in stored:
            continue
        if name in given and given[name] != stored[name]:
            notes.append(
                f"--use-checkpoint-args: {name} is {stored[name]} as in the checkpoint, not {given[name]}"
            )
        merged[name] = stored[name]
    if "seq_length" in stored:
        merged.setdefault("seq_length", stored["seq_length"])
    kind = merged.get("tokenizer_type")
    if kind == "NullTokenizer" and stored.get("tokenizer_type") != kind and "vocab_size" in stored:
        # A checkpoint of another tokenizer, or of none (config.json), counts every row of the
        # embedding, the end-of-document token included.
        last = stored["vocab_size"] - 1
        merged.setdefault("null_tokenizer_eod_id", min(given.get("vocab_size", last), last))
    return merged, notes


_LAYOUT = "pipeline_model_parallel_layout"


def _derived(given: Given, problems: list[str]) -> tuple[Given, list[str]]:
    """Values that follow from other flags, and notes about what was changed; adds to `problems`."""
    given = dict(given)
    notes = []
    if given.get("sequence_parallel") and given.get("tensor_model_parallel_size", 1) == 1:
        notes.append(
            "--sequence-parallel is off: it splits over tensor-parallel ranks, and there is only one"
        )
        given["sequence_parallel"] = False
    try:
        chunks = _chunks_per_stage(given)
        if chunks is not None:
            given["virtual_pipeline_model_parallel_size"] = chunks if chunks > 1 else None
    except ValueError as error:
        problems.append(str(error))
    needing = {"fp8": "--fp8-format", "fp4": "--fp4-format"}
    if given.get("cross_entropy_loss_fusion") and given.get("cross_entropy_fusion_impl") == "te":
        needing["cross_entropy_fusion_impl"] = "--cross-entropy-fusion-impl te"
    wanting = [name for field, name in needing.items() if given.get(field) is not None]
    if wanting and "transformer_impl" not in given:
        notes.append(f"--transformer-impl transformer_engine: {wanting[0]} needs it")
        given["transformer_impl"] = "transformer_engine"
    if "fim_rate" in given and not given.get("fim_data"):
        problems.append(
            f"--fim-rate {given['fim_rate']} without --fim-data: Megatron-LM ignores it, BigCode's fork fills in the "
            "middle: add --fim-data, or leave out --fim-rate"
        )
    if given.get("eval_iters", 0) < 0:
        notes.append(f"--eval-iters {given['eval_iters']}: evaluation is disabled, as with 0")
        given["eval_iters"] = 0
    given.setdefault("max_position_embeddings", given.get("seq_length"))
    if (given.get("num_experts") or 0) <= 1 and given.pop(
        "expert_tensor_parallel_size", None
    ) is not None:
        notes.append("--expert-tensor-parallel-size: the model has no experts")
    return given, notes


def _chunks_per_stage(given: Given) -> int | None:
    """Chunks per stage where another flag than --virtual-pipeline-model-parallel-size says it;
    None: none does.
    """
    per_chunk, layout = (
        given.get(name) for name in ("num_layers_per_virtual_pipeline_stage", _LAYOUT)
    )
    if per_chunk is None and layout is None:
        return None
    ways = (
        "virtual_pipeline_model_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        _LAYOUT,
    )
    said = [f"--{name.replace('_', '-')}" for name in ways if given.get(name) is not None]
    if len(said) > 1:
        raise ValueError(f"{' and '.join(said)} set the same thing: give one of them")
    pp_size = given.get("pipeline_model_parallel_size", 1)
    if layout is not None:
        count = len(parse_layout(layout))
        if count % pp_size:
            raise ValueError(
                f"{said[0]} {layout} has {count} chunks for --pipeline-model-parallel-size {pp_size}"
            )
        return count // pp_size
    counted = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    layers = given.get("num_layers", 0) + sum(bool(given.get(name)) for name in counted)
    assert per_chunk is not None
    if per_chunk < 1 or layers % (pp_size * per_chunk):
        raise ValueError(
            f"--num-layers {layers} is not a multiple of --pipeline-model-parallel-size {pp_size} x "
            f"--num-layers-per-virtual-pipeline-stage {per_chunk}"
        )
    return int(layers // pp_size // per_chunk)
