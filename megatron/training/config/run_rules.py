"""Rules between flags. Each rule yields its problems: values, reason and fix."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping

import torch

from megatron.core.optimizer import get_update_rule
from megatron.core.pipeline_parallel import check_group_size, count_mtp_layers, groups_fit
from megatron.training.config.options import HF_DTYPES, HF_QUANTIZATIONS
from megatron.training.config.run_config import Config


def _check_divisible(sizes: Mapping[str, int], by: str, divisor: int) -> Iterator[str]:
    """Yield a problem for each of `sizes` (by flag) that is not a multiple of `divisor`."""
    for name, value in sizes.items():
        if value % max(divisor, 1):
            yield f"{name} {value} is not divisible by {by} {divisor}: change one of them"


def _check_length(config: Config, world_size: int) -> Iterator[str]:
    training = config.training
    if training.train_iters is not None and training.train_samples is not None:
        yield (
            f"--train-iters {training.train_iters} and --train-samples {training.train_samples} "
            "are mutually exclusive"
        )
    if training.train_iters is None and training.train_samples is None:
        yield "--train-iters or --train-samples must be given: the length of the run"
    # Three flags define the global batch size over the run; a schedule excludes the others.
    if training.step_batch_size_schedule is not None:
        for name in ("global_batch_size", "rampup_batch_size"):
            if getattr(training, name) is not None:
                yield (
                    f"--step-batch-size-schedule and --{name.replace('_', '-')} are "
                    "mutually exclusive"
                )
    if training.train_iters is not None and training.rampup_batch_size is not None:
        yield "--rampup-batch-size requires --train-samples: the samples per iteration change"


def _check_positions(config: Config, world_size: int) -> Iterator[str]:
    if config.data.seq_length > (config.model.max_position_embeddings or 0):
        yield (
            f"--seq-length {config.data.seq_length} is longer than --max-position-embeddings "
            f"{config.model.max_position_embeddings}"
        )


def _check_tensor_parallel(config: Config, world_size: int) -> Iterator[str]:
    tp_size = config.parallel.tp_size
    split = {
        "--num-attention-heads": config.model.num_attention_heads,
        "--num-query-groups": config.model.query_groups,
        "--ffn-hidden-size": config.model.ffn_size,
    }
    if not config.model.group_query_attention:
        del split["--num-query-groups"]  # one for each head
    if config.parallel.sequence_parallel:
        split["--seq-length (with --sequence-parallel)"] = config.data.seq_length
    if 0 not in config.model.moe_layer_pattern:
        del split["--ffn-hidden-size"]  # every layer has experts
    yield from _check_divisible(split, "--tensor-model-parallel-size", tp_size)


def _check_low_precision(config: Config, world_size: int) -> Iterator[str]:
    """Check the matrices and tokens of a rank against the kernels of fp8 and fp4.

    Source: Transformer Engine 2.20, `assert_dim_for_fp8_exec` and `is_quantizable`.
    """
    model = config.model
    if model.low_precision is None or model.multi_latent_attention:
        return
    parallel = config.parallel
    tp_size = parallel.tp_size
    ranks = f"--tensor-model-parallel-size {tp_size}"
    recipe = f"--fp4-format {model.fp4}"
    if model.fp8 is not None:
        recipe = f"--fp8-recipe {model.fp8_recipe}"
    features = 16
    tokens = 8
    if model.low_precision == "mxfp8":
        features = tokens = 32
    elif model.low_precision == "nvfp4":
        tokens = 16

    # Features per rank: the rows or columns of a matrix that tensor parallelism splits.
    heads = f"{model.num_attention_heads} heads x --kv-channels {model.head_dim}"
    split = {heads: model.num_attention_heads * model.head_dim}
    if 0 in model.moe_layer_pattern:
        split[f"--ffn-hidden-size {model.ffn_size}"] = model.ffn_size
    for name, size in split.items():
        if size % (tp_size * features):
            yield (
                f"{name} / {ranks} = {size / tp_size:g} per rank is not a multiple of {features}, "
                f"as {recipe} requires: change one of them"
            )

    # Tokens of a micro-batch on a rank
    splits = parallel.cp_size * (tp_size if parallel.sequence_parallel else 1)
    size = config.data.seq_length * config.training.micro_batch_size
    if size % (splits * tokens):
        yield (
            f"--seq-length {config.data.seq_length} x --micro-batch-size "
            f"{config.training.micro_batch_size} / {splits} ranks of tensor and context "
            f"parallelism = {size / splits:g} tokens per rank is not a multiple of {tokens}, as "
            f"{recipe} requires: change one of them"
        )


def _check_context_parallel(config: Config, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    model = config.model
    length = config.data.seq_length
    cp_size = parallel.cp_size
    tp_size = parallel.tp_size
    comm_types = parallel.cp_comm_type
    # Checked without context parallelism, too: the run may be continued with it.
    if len(comm_types) not in (1, model.num_layers):
        yield (
            f"--cp-comm-type {' '.join(comm_types)} has {len(comm_types)} values, --num-layers is "
            f"{model.num_layers}: give one for all layers, or one for each"
        )
    if cp_size <= 1:
        return
    context = f"--context-parallel-size {cp_size}"
    # Ranks hold chunk i from the start and chunk i from the end of a sequence, because with a
    # causal mask the work of a chunk grows with its position.
    if length % (2 * cp_size):
        yield (
            f"--seq-length {length} is not divisible by 2 x {context} = {2 * cp_size}: a rank "
            "has two chunks of a sequence. Change one of them"
        )
    elif parallel.sequence_parallel and length % (cp_size * tp_size):
        yield (
            f"--seq-length {length} is not divisible by {context} x --tensor-model-parallel-size "
            f"{tp_size} = {cp_size * tp_size}, as --sequence-parallel needs it: change the "
            "length, or leave out --sequence-parallel"
        )
    # Ulysses: every rank computes some of the heads over the whole sequence.
    if "a2a" in comm_types and model.query_groups % (tp_size * cp_size):
        kind = "--num-query-groups" if model.group_query_attention else "--num-attention-heads"
        yield (
            f"--cp-comm-type a2a splits heads: {kind} {model.query_groups} is not divisible by "
            f"--tensor-model-parallel-size {tp_size} x {context} = {tp_size * cp_size}. Use "
            "--cp-comm-type p2p or all_gather, or smaller sizes"
        )
    in_blocks = [comm_type for comm_type in comm_types if comm_type != "a2a"]
    if in_blocks and model.attention_dropout:
        yield (
            f"--attention-dropout {model.attention_dropout} with {context} and --cp-comm-type "
            f"{in_blocks[0]}: attention is computed in blocks, by kernels without dropout. Use "
            "--attention-dropout 0, or --cp-comm-type a2a"
        )


def _check_backend(config: Config, world_size: int) -> Iterator[str]:
    """Check the restrictions of Transformer Engine, e.g. on attention over p2p and all_gather."""
    model = config.model
    parallel = config.parallel
    if model.transformer_impl == "local":
        return
    if model.tp_comm_overlap and parallel.tp_size > 1 and not parallel.sequence_parallel:
        yield (
            "--tp-comm-overlap requires --sequence-parallel, whose all-gathers and "
            "reduce-scatters it overlaps"
        )
    # Without sharding, parameters are not gathered.
    if model.fp8_param_gather and not config.ddp.use_distributed_optimizer:
        yield "--fp8-param-gather requires --use-distributed-optimizer, whose all-gather it changes"
    if parallel.cp_size == 1 or len(parallel.cp_comm_type) not in (1, model.num_layers):
        return

    # Find a communication type of a layer that does not support each feature.
    unsupported: dict[str, str] = {}  # flag -> communication type
    for number in range(model.num_layers):
        comm_type = parallel.cp_comm_type_of(number)
        if comm_type == "a2a":
            continue
        if config.data.reset_attention_mask:
            unsupported.setdefault("--reset-attention-mask", comm_type)
        if model.position_embedding_type == "alibi":
            unsupported.setdefault("--position-embedding-type alibi", comm_type)
        if comm_type == "p2p" and model.get_window(number) is not None:
            unsupported.setdefault("--window-size", comm_type)
    for flag_name, comm_type in unsupported.items():
        yield (
            f"{flag_name} with --cp-comm-type {comm_type} requires --transformer-impl local; "
            "with transformer_engine use --cp-comm-type a2a"
        )


def _check_experts(config: Config, world_size: int) -> Iterator[str]:
    model = config.model
    parallel = config.parallel
    if not model.has_experts:
        if parallel.ep_size > 1:
            yield (
                f"--expert-model-parallel-size {parallel.ep_size} requires "
                "--num-experts: the model has no experts"
            )
        return
    experts = {"--num-experts": model.experts}
    width = {"--moe-ffn-hidden-size": model.moe_ffn_size}
    shared_width = {
        "--moe-shared-expert-intermediate-size": model.moe_shared_expert_intermediate_size or 0
    }
    yield from _check_divisible(experts, "--expert-model-parallel-size", parallel.ep_size)
    yield from _check_divisible(width, "--expert-tensor-parallel-size", parallel.etp_size)
    yield from _check_divisible(shared_width, "--tensor-model-parallel-size", parallel.tp_size)
    # With a replicated sequence, the ranks of a TP group would dispatch the same tokens.
    if parallel.tp_size > 1 and not parallel.sequence_parallel:
        yield (
            f"--num-experts with --tensor-model-parallel-size {parallel.tp_size} requires "
            "--sequence-parallel: every rank routes its own tokens"
        )
    parallel.edp_size(world_size)  # raises ValueError if the world size is not a multiple


def _check_batches(config: Config, world_size: int) -> Iterator[str]:
    """Check every batch size of a ramp-up against the interleaved schedule."""
    training = config.training
    pp_size = config.parallel.pp_size
    dp_size = config.parallel.dp_size(world_size)
    batches = config.batch_schedule(dp_size)
    # Fill the default, so that it is logged and stored in checkpoints.
    training.global_batch_size = batches.global_batch_size
    if config.parallel.vpp_size == 1:
        return
    group_size = config.parallel.microbatch_group_size_per_vp_stage or pp_size
    check_group_size(pp_size, group_size)
    # A ramp-up can pass many sizes; report only those that do not fit.
    wrong: dict[int, int] = {}  # global batch size -> number of micro-batches
    for size in batches.sizes():
        num_microbatches = size // batches.samples_per_microbatch
        if not groups_fit(num_microbatches, pp_size, group_size):
            wrong[size] = num_microbatches
    if wrong:
        sizes = " or ".join(map(str, list(wrong)[:3]))
        counts = " or ".join(map(str, list(wrong.values())[:3]))
        yield (
            f"the interleaved schedule runs micro-batches in groups of {group_size}, the last one "
            f"of at least {pp_size}, the number of pipeline stages, but a global batch of {sizes} "
            f"/ ({training.micro_batch_size} per micro-batch x {dp_size} replicas) has {counts}"
        )


def _check_evaluation(config: Config, world_size: int) -> Iterator[str]:
    training = config.training
    dp_size = config.parallel.dp_size(world_size)
    size = training.eval_global_batch_size
    if size is not None and size % (training.micro_batch_size * dp_size):
        yield (
            f"--eval-global-batch-size {size} is not a multiple of micro-batch size "
            f"{training.micro_batch_size} x data-parallel size {dp_size}"
        )


def _check_gradients(config: Config, world_size: int) -> Iterator[str]:
    if config.ddp.reduces_in_bf16 and config.model.params_dtype != torch.bfloat16:
        flag = "--main-grads-dtype bf16"
        if config.ddp.grad_reduce_in_bf16:
            flag = "--grad-reduce-in-bf16"
        yield (f"{flag} requires --bf16: gradients of an fp32 or fp16 model are reduced in fp32")


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
    num_mtp_layers = count_mtp_layers(layout)
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
    given = []
    for name in (
        "save_interval",
        "save_interval_secs",
        "keep_last_n",
        "save_retain_interval",
        "keep_best_n",
    ):
        if getattr(checkpoint, name) is not None:
            given.append(f"--{name.replace('_', '-')}")
    if given and checkpoint.save is None:
        notes.append(f"no checkpoints are saved: {', '.join(given)} without --save")
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


def _check_profile_ranks(config: Config, world_size: int) -> Iterator[str]:
    for rank in config.profiling.profile_ranks or []:
        if not 0 <= rank < world_size:
            yield f"--profile-ranks {rank}: the run has ranks 0 to {world_size - 1}"


def _check_checkpoint(config: Config, world_size: int) -> Iterator[str]:
    checkpoint = config.checkpoint
    is_evaluated = config.training.eval_iters and config.training.eval_interval
    if checkpoint.keep_best_n is not None and not is_evaluated:
        yield (
            f"--keep-best-n {checkpoint.keep_best_n} compares validation losses: give "
            "--eval-interval (one that meets the saved iterations) and --eval-iters"
        )
    if checkpoint.ckpt_format == "torch" and checkpoint.keep_best_n is not None:
        yield f"--keep-best-n {checkpoint.keep_best_n}: --ckpt-format torch does not store the loss"
    # Rank 0 writes legacy files from the complete torch_dist files of all ranks, on a file system.
    targets = []
    if checkpoint.ckpt_format == "torch":
        targets.append(("--ckpt-format", "--save", checkpoint.save))
    if checkpoint.ckpt_convert_format == "torch":
        targets.append(
            ("--ckpt-convert-format", "--ckpt-convert-save", checkpoint.ckpt_convert_save)
        )
    for format_flag, target_flag, target in targets:
        if "://" in (target or ""):
            yield (
                f"{format_flag} torch: object storage ({target_flag} {target}) supports only "
                "torch_dist checkpoints"
            )
    if (checkpoint.ckpt_convert_format is None) != (checkpoint.ckpt_convert_save is None):
        yield "--ckpt-convert-format and --ckpt-convert-save go together"
    if checkpoint.ckpt_convert_format is not None and checkpoint.load is None:
        yield "--ckpt-convert-format needs --load, the checkpoint to convert"
    if checkpoint.ckpt_step is not None and checkpoint.load is None:
        yield f"--ckpt-step {checkpoint.ckpt_step} needs --load"


def _check_hf_exports(config: Config, world_size: int) -> Iterator[str]:
    """Check the options of models in Hugging Face format."""
    checkpoint = config.checkpoint
    interval = checkpoint.save_hf_interval
    if "://" in (checkpoint.save_hf or "") and interval is None:
        yield (
            f"--save-hf {checkpoint.save_hf}: models in object storage are converted from "
            "checkpoints: give --save-hf-interval, or a directory"
        )
    yield from _check_hf_dtype(config)
    if interval is None:
        if checkpoint.save_hf_keep_last is not None:
            yield f"--save-hf-keep-last {checkpoint.save_hf_keep_last} needs --save-hf-interval"
        return
    # The model is written from the staging buffers of a save, so each export needs one.
    missing = []
    for name in ("save", "save_hf", "save_interval"):
        if getattr(checkpoint, name) is None:
            missing.append(f"--{name.replace('_', '-')}")
    if missing:
        yield (
            f"--save-hf-interval {interval} saves models next to checkpoints: give "
            f"{' and '.join(missing)}"
        )
    elif checkpoint.save_interval and interval % checkpoint.save_interval:
        yield (
            f"--save-hf-interval {interval} must be a multiple of --save-interval "
            f"{checkpoint.save_interval}: models are saved together with checkpoints"
        )
    elif os.path.abspath(checkpoint.save_hf or "") == os.path.abspath(checkpoint.save or ""):
        yield (
            f"--save-hf {checkpoint.save_hf} is the directory of --save: with --save-hf-interval "
            "give another one"
        )


def _check_hf_dtype(config: Config) -> Iterator[str]:
    """Check the data type of models in Hugging Face format."""
    dtype = config.checkpoint.save_hf_dtype
    if dtype is None:
        return
    if config.checkpoint.save_hf is None:
        yield f"--save-hf-dtype {dtype} needs --save-hf"
    weights = config.model.params_dtype
    if dtype in HF_QUANTIZATIONS:
        return
    if weights not in (torch.float32, HF_DTYPES[dtype]):
        yield (
            f"--save-hf-dtype {dtype} with weights in {weights}: models are cast from the weights, "
            f"which would be rounded twice; convert checkpoints with convert.py --dtype {dtype}"
        )


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
    if config.model.fp8_param_gather:
        yield (
            f"--main-params-dtype {dtype} and --fp8-param-gather are mutually exclusive: weights "
            "in fp8 are cast from fp32 main parameters"
        )


def _check_average(config: Config, world_size: int) -> Iterator[str]:
    """Check the uses of the average of the weights."""
    decay = config.optimizer.ema_decay
    if config.training.eval_ema and decay is None:
        yield "--eval-ema evaluates the average of the weights: give --ema-decay, e.g. 0.999"
    if config.training.eval_ema and config.model.fp8 is not None:
        yield (
            f"--eval-ema with --fp8 {config.model.fp8} is not supported: the average has no fp8 "
            "scales; evaluate an export of it (convert.py --weights ema)"
        )
    checkpoint = config.checkpoint
    saves_legacy = checkpoint.save is not None and checkpoint.ckpt_format == "torch"
    if decay is not None and (saves_legacy or checkpoint.ckpt_convert_format == "torch"):
        yield (
            f"--ema-decay {decay}: Megatron-LM's legacy files cannot store the average: use the "
            "format torch_dist, or leave --ema-decay out"
        )


def _check_legacy_optimizer(config: Config, world_size: int) -> Iterator[str]:
    """Reject an optimizer whose state legacy files cannot contain, before the first save fails."""
    checkpoint = config.checkpoint
    optimizer = config.optimizer.optimizer
    if get_update_rule(optimizer).HAS_UNIFORM_STATE or checkpoint.no_save_optim:
        return
    if checkpoint.save is not None and checkpoint.ckpt_format == "torch":
        yield (
            f"--ckpt-format torch cannot store the state of --optimizer {optimizer}: use "
            "--ckpt-format torch_dist or --no-save-optim"
        )
    if checkpoint.ckpt_convert_format == "torch":
        yield (
            f"--ckpt-convert-format torch cannot store the state of --optimizer {optimizer}: give "
            "--no-save-optim"
        )


def _check_local_tier(config: Config, world_size: int) -> Iterator[str]:
    checkpoint = config.checkpoint
    kind = checkpoint.non_persistent_ckpt_type
    interval = checkpoint.non_persistent_save_interval
    if kind in ("global", "in_memory"):
        yield (
            f"--non-persistent-ckpt-type {kind} is not supported: use local, or for global a "
            "shorter --save-interval with --keep-last-n"
        )
    if checkpoint.replication and (kind is None or checkpoint.replication_factor < 2):
        yield (
            f"--replication with --replication-factor {checkpoint.replication_factor} needs a "
            "factor of at least 2 and --non-persistent-ckpt-type local"
        )
    if checkpoint.replication_interval > 1 and not checkpoint.replication:
        yield (
            f"--replication-interval {checkpoint.replication_interval} needs --replication: "
            "without it, no local checkpoint is stored on other nodes"
        )
    # All of these flags belong together.
    needed = {
        "--non-persistent-ckpt-type": kind,
        "--non-persistent-save-interval": interval,
        "--non-persistent-local-ckpt-dir": checkpoint.non_persistent_local_ckpt_dir,
        "--save (for when more nodes are lost than there are copies)": checkpoint.save,
    }
    missing = [name for name, value in needed.items() if value is None]
    if missing and (kind is not None or interval is not None):
        yield f"checkpoints on the nodes' disks need {' and '.join(missing)}"
    if kind is not None and checkpoint.ckpt_format == "torch":
        yield f"--non-persistent-ckpt-type {kind} needs --ckpt-format torch_dist"


# The rules, each with the parts of `Config` that it needs. A rule yields problems or raises
# ValueError.
CHECKS: tuple[tuple[Callable[[Config, int], Iterator[str]], str], ...] = (
    (_check_length, "training"),
    (_check_positions, "model data"),
    (_check_tensor_parallel, "model parallel data"),
    (_check_low_precision, "model parallel data training"),
    (_check_context_parallel, "model parallel data"),
    (_check_backend, "model parallel data ddp"),
    (_check_experts, "model parallel optimizer"),
    (_check_batches, "training parallel data"),
    (_check_evaluation, "training parallel"),
    (_check_gradients, "model ddp"),
    (_check_schedules, "training parallel optimizer scheduler"),
    (_check_layers, "model parallel pipeline_layout"),
    (_check_checkpoint, "training checkpoint"),
    (_check_hf_exports, "checkpoint"),
    (_check_main_parameters, "model optimizer"),
    (_check_average, "training model optimizer checkpoint"),
    (_check_legacy_optimizer, "checkpoint optimizer"),
    (_check_local_tier, "checkpoint"),
    (_check_profile_ranks, "profiling"),
)
