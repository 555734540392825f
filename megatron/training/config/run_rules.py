"""Rules between flags of several sections. The rules of one flag are in its field."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from megatron.core.flags import CHANGED, FlagRule
from megatron.core.pipeline_parallel.layer_ranges import COUNT_MTP_LAYERS
from megatron.core.wings import resolve
from megatron.training.config.run_config import Config

# Imported for the flags that they are about
_FIND_GROUP_PROBLEMS = "megatron.training.config.pipeline_rules:find_group_problems"
_FIND_SPLIT_PROBLEMS = "megatron.training.config.context_parallel_rules:find_split_problems"
_FIND_LEGACY_PROBLEMS = "megatron.training.checkpoint.export:find_legacy_problems"
_FIND_EXPORT_PROBLEMS = "megatron.training.checkpoint.export:find_export_problems"
_FIND_ADAPTER_PROBLEMS = "megatron.training.config.lora_rules:find_adapter_problems"
_FIND_LOW_PRECISION_PROBLEMS = (
    "megatron.training.config.transformer_engine_rules:find_low_precision_problems"
)
_FIND_ATTENTION_PROBLEMS = (
    "megatron.training.config.transformer_engine_rules:find_attention_problems"
)
_TP = "tensor_model_parallel_size"
_LEGACY = "Megatron-LM's legacy files cannot store the average: use the format torch_dist"

RULES = (
    FlagRule(
        {"eval_ema": True},
        excludes={"fp8": True},
        reason="the average has no fp8 scales. Evaluate an export (convert.py --weights ema)",
    ),
    FlagRule(
        {"keep_best_n": True},
        excludes={"ckpt_format": "torch"},
        reason="legacy files do not contain validation losses",
    ),
    # A schedule of batch sizes replaces the flags that define them otherwise.
    FlagRule(
        {"step_batch_size_schedule": CHANGED},
        excludes={"global_batch_size": CHANGED, "rampup_batch_size": CHANGED},
    ),
    # Sizes that parallelism splits, if the model has them
    FlagRule({"group_query_attention": True}, divides={_TP: "num_query_groups"}),
    FlagRule({"has_dense_layers": True}, divides={_TP: "ffn_hidden_size"}),
    FlagRule({"sequence_parallel": True}, divides={_TP: "seq_length"}),
    FlagRule({"experts": True}, divides={"expert_model_parallel_size": "num_experts"}),
    FlagRule({"experts": True}, divides={"etp_size": "moe_ffn_hidden_size"}),
    FlagRule({"experts": True}, divides={_TP: "moe_shared_expert_intermediate_size"}),
    # With a replicated sequence, the ranks of a TP group would dispatch the same tokens.
    FlagRule(
        {"experts": True, _TP: CHANGED},
        requires={"sequence_parallel": True},
        reason="every rank routes its own tokens",
    ),
    FlagRule(
        {"tp_comm_overlap": True, "transformer_impl": "transformer_engine", _TP: CHANGED},
        requires={"sequence_parallel": True},
        reason="it overlaps the all-gathers and reduce-scatters of the sequence",
    ),
    FlagRule(
        {"save": CHANGED, "ckpt_format": "torch"}, excludes={"ema_decay": CHANGED}, reason=_LEGACY
    ),
    FlagRule({"ckpt_convert_format": "torch"}, excludes={"ema_decay": CHANGED}, reason=_LEGACY),
)


def _check_length(config: Config, world_size: int) -> Iterator[str]:
    training = config.training
    if not (training.train_iters or training.train_samples or training.sft_epochs):
        yield "--train-iters or --train-samples must be given: the length of the run"


def _check_positions(config: Config, world_size: int) -> Iterator[str]:
    if config.data.seq_length > (config.model.max_position_embeddings or 0):
        yield (
            f"--seq-length {config.data.seq_length} is longer than --max-position-embeddings "
            f"{config.model.max_position_embeddings}"
        )


def _check_low_precision(config: Config, world_size: int) -> Iterator[str]:
    if config.model.low_precision is not None:
        yield from resolve(_FIND_LOW_PRECISION_PROBLEMS)(config)


def _check_context_parallel(config: Config, world_size: int) -> Iterator[str]:
    comm_types = config.parallel.cp_comm_type
    num_layers = config.model.num_layers
    # Checked without context parallelism, too: the run may be continued with it.
    if len(comm_types) not in (1, num_layers):
        yield (
            f"--cp-comm-type {' '.join(comm_types)} has {len(comm_types)} values, --num-layers is "
            f"{num_layers}: give one for all layers, or one for each"
        )
    if config.parallel.cp_size > 1:
        yield from resolve(_FIND_SPLIT_PROBLEMS)(config)


def _check_backend(config: Config, world_size: int) -> Iterator[str]:
    if config.model.transformer_impl != "local":
        yield from resolve(_FIND_ATTENTION_PROBLEMS)(config)


def _check_experts(config: Config, world_size: int) -> Iterator[str]:
    if config.model.has_experts:
        config.parallel.edp_size(world_size)  # raises ValueError if it is not a multiple
    yield from ()


def _check_batches(config: Config, world_size: int) -> Iterator[str]:
    """Check every batch size of a ramp-up against the interleaved schedule."""
    dp_size = config.parallel.dp_size(world_size)
    batches = config.batch_schedule(dp_size)
    # Fill the default, so that it is logged and stored in checkpoints.
    config.training.global_batch_size = batches.global_batch_size
    if config.parallel.vpp_size > 1:
        yield from resolve(_FIND_GROUP_PROBLEMS)(config, batches, dp_size)


def _check_evaluation(config: Config, world_size: int) -> Iterator[str]:
    training = config.training
    dp_size = config.parallel.dp_size(world_size)
    size = training.eval_global_batch_size
    if size is not None and size % (training.micro_batch_size * dp_size):
        yield (
            f"--eval-global-batch-size {size} is not a multiple of micro-batch size "
            f"{training.micro_batch_size} x data-parallel size {dp_size}"
        )


def _check_schedules(config: Config, world_size: int) -> Iterator[str]:
    """Check the schedules of the optimizer by building them."""
    training = config.training
    # Other rules report these problems; a schedule can be built only without them.
    has_one_length = (training.train_iters is None) != (training.train_samples is None)
    if config.optimizer.lr is None:
        yield "--lr must be given"
    elif has_one_length and training.global_batch_size is not None:
        config.schedule()  # raises ValueError for a contradictory schedule


def _check_layers(config: Config, world_size: int) -> Iterator[str]:
    config.layer_ranges()  # raises ValueError if the layers cannot be split
    layout = config.pipeline_layout.pipeline_model_parallel_layout
    if layout is None:
        return
    num_mtp_layers: int = resolve(COUNT_MTP_LAYERS)(layout)
    if num_mtp_layers != config.model.num_mtp_layers:
        yield (
            f"--pipeline-model-parallel-layout {layout} has {num_mtp_layers} layers for "
            f"multi-token prediction (m), --mtp-num-layers is {config.model.mtp_num_layers}: "
            "change one of them"
        )


def make_save_notes(config: Config) -> list[str]:
    """Return notes about combinations of flags that do less than a user may expect."""
    checkpoint = config.checkpoint
    eval_interval = config.training.eval_interval
    notes = []
    save_flags = []
    for name in (
        "save_interval",
        "save_interval_secs",
        "keep_last_n",
        "save_retain_interval",
        "keep_best_n",
    ):
        if getattr(checkpoint, name) is not None:
            save_flags.append(f"--{name.replace('_', '-')}")
    if save_flags and checkpoint.save is None:
        notes.append(f"no checkpoints are saved: {', '.join(save_flags)} without --save")
    if checkpoint.keep_best_n is not None and checkpoint.save_interval and eval_interval:
        # A checkpoint has a loss only if the run was evaluated at its iteration.
        common = math.lcm(checkpoint.save_interval, eval_interval)
        if common > checkpoint.save_interval:
            notes.append(
                f"--keep-best-n: of checkpoints every {checkpoint.save_interval} iterations and "
                f"evaluations every {eval_interval}, only those every {common} have a validation "
                "loss"
            )
    return notes


def _check_adapters(config: Config, world_size: int) -> Iterator[str]:
    if config.lora.lora_rank is not None:
        yield from resolve(_FIND_ADAPTER_PROBLEMS)(config)


def _check_profile_ranks(config: Config, world_size: int) -> Iterator[str]:
    for rank in config.profiling.profile_ranks or []:
        if not 0 <= rank < world_size:
            yield f"--profile-ranks {rank}: the run has ranks 0 to {world_size - 1}"


def _check_hang_reports(config: Config, world_size: int) -> Iterator[str]:
    seconds = config.operations.hang_report_seconds
    minutes = config.distributed.distributed_timeout_minutes
    if seconds is not None and seconds >= 60 * minutes:
        yield (
            f"--hang-report-seconds {seconds:g} must be less than --distributed-timeout-minutes "
            f"{minutes:g}: it ends a run that hangs"
        )


def _check_legacy_files(config: Config, world_size: int) -> Iterator[str]:
    checkpoint = config.checkpoint
    if "torch" in (checkpoint.ckpt_format, checkpoint.ckpt_convert_format):
        yield from resolve(_FIND_LEGACY_PROBLEMS)(config)


def _check_hf_exports(config: Config, world_size: int) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.save_hf is not None or checkpoint.save_hf_dtype is not None:
        yield from resolve(_FIND_EXPORT_PROBLEMS)(config)


def _check_main_parameters(config: Config, world_size: int) -> Iterator[str]:
    """Check that there are main parameters apart from the model's if their dtype is given."""
    dtype = config.optimizer.main_params_dtype
    if dtype == "fp32":
        return
    if config.model.params_dtype == torch.float32:
        yield (
            f"--main-params-dtype {dtype} requires --bf16 or --fp16: an fp32 model has no separate "
            "main parameters"
        )


def _check_local_tier(config: Config, world_size: int) -> Iterator[str]:
    checkpoint = config.checkpoint
    tier = checkpoint.non_persistent_ckpt_type
    if tier in ("global", "in_memory"):
        yield (
            f"--non-persistent-ckpt-type {tier} is not supported: use local, or for global a "
            "shorter --save-interval with --keep-last-n"
        )
    if checkpoint.replication and checkpoint.replication_factor < 2:
        yield (
            f"--replication with --replication-factor {checkpoint.replication_factor} requires a "
            "factor of at least 2"
        )


# The other rules, each with the sections of `Config` that it needs. They yield problems or raise
# ValueError.
CHECKS: tuple[tuple[Callable[[Config, int], Iterator[str]], str], ...] = (
    (_check_length, "training"),
    (_check_positions, "model data"),
    (_check_low_precision, "model parallel data training"),
    (_check_context_parallel, "model parallel data"),
    (_check_backend, "model parallel data"),
    (_check_experts, "model parallel"),
    (_check_batches, "training parallel data"),
    (_check_evaluation, "training parallel"),
    (_check_schedules, "training parallel optimizer scheduler"),
    (_check_layers, "model parallel pipeline_layout"),
    (_check_legacy_files, "checkpoint optimizer"),
    (_check_hf_exports, "model checkpoint"),
    (_check_main_parameters, "model optimizer"),
    (_check_local_tier, "checkpoint"),
    (_check_adapters, "model checkpoint lora logging"),
    (_check_profile_ranks, "profiling"),
    (_check_hang_reports, "operations distributed"),
)
