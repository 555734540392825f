"""The configuration of a run: all options, and the values derived from several of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from megatron.core.datasets.config import GPTDatasetConfig
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models import ChunkSpec
from megatron.core.module import MegatronModule
from megatron.core.optimizer import OptimizerConfig, Schedule, SchedulerConfig, make_schedule
from megatron.core.parallel_config import ParallelConfig
from megatron.core.pipeline_parallel import pipeline_layer_ranges
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.wings import resolve
from megatron.training.config.arguments import flag_fields
from megatron.training.config.batch_schedule import BatchSchedule
from megatron.training.config.lora_options import LoraConfig
from megatron.training.config.run_options import (
    CheckpointConfig,
    DataLoaderConfig,
    DistributedConfig,
    LoggingConfig,
    OperationsConfig,
    PipelineLayoutConfig,
    ProfilingConfig,
    RestartConfig,
    TrainingConfig,
)
from megatron.training.data.tokenizer import TokenizerConfig

_MAKE_RAMPUP_STEPS = "megatron.training.config.batch_steps:make_rampup_steps"
_MAKE_TOKEN_STEPS = "megatron.training.config.batch_steps:make_token_steps"


def _make_section(title: str) -> Any:
    """Return a field of `Config` with its title in --help."""
    return field(metadata={"title": title})


@dataclass
class Config:
    """The options of a run; one dataclass per part of the code."""

    model: TransformerConfig = _make_section("Model")
    parallel: ParallelConfig = _make_section("Parallelism")
    pipeline_layout: PipelineLayoutConfig = _make_section("Pipeline stages")
    training: TrainingConfig = _make_section("Training")
    lora: LoraConfig = _make_section("Adapters")
    optimizer: OptimizerConfig = _make_section("Optimizer")
    scheduler: SchedulerConfig = _make_section("Schedules")
    data: GPTDatasetConfig = _make_section("Data")
    loader: DataLoaderConfig = _make_section("Reading data")
    tokenizer: TokenizerConfig = _make_section("Tokenizer")
    checkpoint: CheckpointConfig = _make_section("Checkpoints")
    logging: LoggingConfig = _make_section("Logging")
    ddp: DistributedDataParallelConfig = _make_section("Data parallelism")
    distributed: DistributedConfig = _make_section("Processes")
    restart: RestartConfig = _make_section("In-process restart")
    operations: OperationsConfig = _make_section("Operations")
    profiling: ProfilingConfig = _make_section("Profiling")
    notes: list[str] = field(default_factory=list)  # changed or ignored flags, logged once

    def flags(self) -> dict[str, Any]:
        """Return every option by its field name, after all rules are applied."""
        flags = {}
        for attribute, section in SECTIONS.values():
            section_config = getattr(self, attribute)
            for flag_field in flag_fields(section):
                flags[flag_field.name] = getattr(section_config, flag_field.name)
        return flags

    def set_vocab_size(
        self, tokenizer_vocab_size: int, checkpoint_vocab_size: int | None = None
    ) -> int:
        """Set and return the number of tokens of the model: the tokenizer's, or more if
        --vocab-size or the checkpoint (`checkpoint_vocab_size`) requires it.
        """
        vocab_size = self.tokenizer.vocab_size
        # The --vocab-size of NullTokenizer defines the tokenizer, which may add one token.
        if vocab_size is None or self.tokenizer.kind == "NullTokenizer":
            vocab_size = tokenizer_vocab_size
        if vocab_size < tokenizer_vocab_size:
            raise ValueError(
                f"--vocab-size {vocab_size} is less than the {tokenizer_vocab_size} tokens of the "
                "tokenizer"
            )
        # Rows that pad the vocabulary in the checkpoint are part of its model.
        if checkpoint_vocab_size is not None and checkpoint_vocab_size > vocab_size:
            self.notes.append(
                f"the model of the checkpoint has {checkpoint_vocab_size} tokens, "
                f"{checkpoint_vocab_size - vocab_size} more than the tokenizer: rows of padding, "
                "or the checkpoint was trained with another tokenizer"
            )
            vocab_size = checkpoint_vocab_size
        self.model = dataclasses.replace(self.model, vocab_size=vocab_size)
        return vocab_size

    def batch_schedule(self, dp_size: int) -> BatchSchedule:
        """Return the global batch size and number of micro-batches over the run."""
        training = self.training
        size = training.global_batch_size
        if size is None:
            size = training.micro_batch_size * dp_size
        if training.step_batch_size_schedule is not None:
            steps = resolve(_MAKE_TOKEN_STEPS)(
                training.step_batch_size_schedule, self.data.seq_length
            )
        elif training.rampup_batch_size is not None:
            steps = resolve(_MAKE_RAMPUP_STEPS)(training.rampup_batch_size, size)
        else:
            steps = ((0, size),)
        return BatchSchedule(
            steps, training.micro_batch_size, dp_size, training.decrease_batch_size_if_needed
        )

    def schedule(self) -> Schedule:
        """Return learning rate and weight decay over the run."""
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
        """Return global layer numbers by [stage][chunk]."""
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

    def describe_layout(self, world_size: int) -> str:
        """Return the parallel layout, e.g. TP 2 x CP 2 (p2p) x PP 4 (2 chunks) x DP 8."""
        parallel = self.parallel

        # Axes of the dense layers
        sizes = [f"TP {parallel.tp_size}"]
        if parallel.cp_size > 1:
            comm_types = "/".join(dict.fromkeys(parallel.cp_comm_type))
            sizes.append(f"CP {parallel.cp_size} ({comm_types})")
        pipeline = f"PP {parallel.pp_size}"
        if parallel.vpp_size > 1:
            pipeline += f" ({parallel.vpp_size} chunks)"
        sizes.append(pipeline)
        dp_size = parallel.dp_size(world_size)
        sizes.append(f"DP {dp_size}")

        # Axes of the experts, and options that change the contents of a rank
        layout = [" x ".join(sizes)]
        if parallel.splits_experts:
            edp_size = parallel.edp_size(world_size)
            layout.append(
                f"experts ETP {parallel.etp_size} x EP {parallel.ep_size} x DP {edp_size}"
            )
        if parallel.sequence_parallel:
            layout.append("sequence parallel")
        if self.ddp.use_distributed_optimizer:
            layout.append("distributed optimizer")
        return ", ".join(layout)


ModelProvider = Callable[[Config, ChunkSpec], MegatronModule]
"""Function that builds one pipeline chunk, without initializing it."""

_TYPES = get_type_hints(Config)
SECTIONS: dict[str, tuple[str, type]] = {  # title in --help -> attribute of Config and its type
    config_field.metadata["title"]: (config_field.name, _TYPES[config_field.name])
    for config_field in dataclasses.fields(Config)
    if "title" in config_field.metadata
}
