"""Pretraining: initialize, build, load, train, save.

`pretrain` is the whole run, `train` its loop and `train_step` one optimizer step. The other
functions evaluate, save and report.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.datasets.index_cache import require_compiled_helpers
from megatron.core.dist_checkpointing.policy import ChosenCheckpoint, is_multiple
from megatron.core.dist_checkpointing.saving.run_saver import RunSaver, SaveFailedError
from megatron.core.distributed import finalize_model_grads
from megatron.core.object_path import path_of
from megatron.core.optimizer import StepResult
from megatron.core.parallel_state import ParallelState
from megatron.core.run_checkpoint.source import Source
from megatron.core.wings import resolve
from megatron.training.checkpoint.contents import (
    get_state_to_save,
    get_validation_loss,
    start_common_state,
)
from megatron.training.checkpoint.launch import (
    TrainingDirectory,
    adopt_end_of_document,
    is_restart_idiom,
    saves_to,
    stored_vocab_size,
)
from megatron.training.checkpoint.resume import load_checkpoint, may_leave_weights
from megatron.training.config.run_config import Config, ModelProvider
from megatron.training.data.loaders import Data, Split, build_data
from megatron.training.data.tokenizer import Tokenizer, build_tokenizer
from megatron.training.exit import (
    NanCheck,
    NotFiniteError,
    find_exit,
    make_save_policy,
    record_exit_signals,
)
from megatron.training.fatal_errors import TrainingInterrupted, lost_ranks_explained
from megatron.training.initialize import initialize
from megatron.training.rendezvous import environment_rank
from megatron.training.reporting.console import (
    configure_logging,
    report_line,
)
from megatron.training.reporting.intervals import Iteration, OnDevice, TrainingLog
from megatron.training.reporting.launch_report import reporting
from megatron.training.reporting.measurements import (
    compute_params_norm,
    format_memory_line,
    measure_memory,
)
from megatron.training.reporting.writers import Writer, format_log_line
from megatron.training.run import (
    Batch,
    DatasetsProvider,
    ForwardStep,
    Run,
    build_run,
    evaluate,
    measure_experts,
)

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.saving.pending_export import ExportTarget

logger = logging.getLogger(__name__)

STEP_PROFILER = "megatron.training.reporting.profiling:StepProfiler"
WATCHED = "megatron.training.operations.watch:watched"
_COUNT_EPOCHS = "megatron.training.sft.dataset:set_length_in_samples"
_CHECK_ADAPTERS = "megatron.training.adapters.base_model:check_adapters"
_EVALUATIONS = "megatron.training.evaluation.loop:make_evaluations"
_CHECK_EXPORT = "megatron.training.checkpoint.export:check_hf_target"
_PLAN_EXPORTS = "megatron.training.checkpoint.export:plan_hf_exports"
_CHECK_EARLIER_EXPORTS = "megatron.training.checkpoint.export:check_earlier_exports"
_EXPORT_AT_THE_END = "megatron.training.checkpoint.export:save_hf"
_MAKE_LEGACY_REWRITE = "megatron.training.checkpoint.export:make_legacy_rewrite"
_SAVE_CONVERTED = "megatron.training.checkpoint.export:save_converted"


def pretrain(
    config: Config,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider,
    forward_step: ForwardStep,
    writers: Sequence[Writer] = (),
    clock: Callable[[], float] = time.monotonic,
    on_iteration: Callable[[], None] = lambda: None,
) -> Run:
    """Run a training job from start to end, and return its final state.

    `writers` receive its metrics in addition to those that the flags request. `clock` returns the
    time in seconds for --save-interval-secs and --exit-duration-in-mins. `on_iteration` is called
    after every iteration.

    Raises ValueError for errors that the user can correct, the same on every rank that detects it.
    """
    # Initialize. Steps that can fail on one rank only come before the process group is created:
    # otherwise the other ranks would wait for it.
    started = clock()
    configure_logging(environment_rank(), config.logging.log_format)
    require_compiled_helpers()
    tokenizer = build_tokenizer(config.tokenizer)
    ps, device = initialize(config.distributed, config.parallel)
    # From here on, a collective can fail because another rank has died.
    timeout_minutes = config.distributed.distributed_timeout_minutes
    with lost_ranks_explained(ps, timeout_minutes), _watched(config, ps) as watch:
        # Choose the checkpoint before building the model: it may determine the vocabulary size.
        directory = TrainingDirectory(config.checkpoint, saves_to(config))
        directory.prepare()
        checkpoint = directory.choose()
        tokenizer = complete_config(config, tokenizer, checkpoint)

        # Build and load.
        random = checkpoint is None or may_leave_weights(config.checkpoint)
        run = build_run(config, ps, device, model_provider, forward_step, random_weights=random)
        run.started = started
        run.clock = clock
        run.on_iteration = on_iteration
        watch(run)
        run.end_of_document = tokenizer.eod
        call_exporter(run, _CHECK_EXPORT)
        checkpoint = directory.load(checkpoint, partial(load_checkpoint, run))
        if config.lora.lora_rank is not None:
            resolve(_CHECK_ADAPTERS)(run)
        if config.checkpoint.ckpt_convert_format is not None:
            resolve(_SAVE_CONVERTED)(run)
            return run
        if directory.root is not None:
            run.hf_exports = call_exporter(run, _PLAN_EXPORTS)
            run.saver.prepare(get_state_to_save(run))  # in the background of building the data
        data = build_data(run, tokenizer, datasets_provider)
        flags = config.training
        if flags.valid_domain or flags.eval_tasks or flags.sample_prompts:
            run.evaluate_further = resolve(_EVALUATIONS)(run, tokenizer, datasets_provider)

        # Train, evaluate, save.
        with (
            reporting(run, model_provider, writers) as record_start,
            interrupts_explained(run, directory),
        ):
            if directory.root is not None and take_directory(run, directory, checkpoint):
                data.close()
                data = build_data(run, tokenizer, datasets_provider)
            run.saver.finish_preparing()
            record_start()
            train_and_evaluate(run, data)
        data.close()
        run.saver.check_last_save()
    return run


def call_exporter(run: Run, entry: str) -> Any:
    """Call an entry of the exports to Hugging Face, which are imported only with --save-hf."""
    if run.config.checkpoint.save_hf is None:
        return None
    return resolve(entry)(run)


def complete_config(
    config: Config, tokenizer: Tokenizer, checkpoint: ChosenCheckpoint[Source] | None
) -> Tokenizer:
    """Complete what depends on files: the end of a document, the vocabulary size, the length.

    Returns the tokenizer for that end of a document.
    """
    if adopt_end_of_document(config, checkpoint):
        tokenizer = build_tokenizer(config.tokenizer)
    config.set_vocab_size(tokenizer.vocab_size, stored_vocab_size(checkpoint))
    for note in config.notes:
        logger.info(note)
    if config.training.sft_epochs is not None:
        resolve(_COUNT_EPOCHS)(config, tokenizer)
    return tokenizer


def train_and_evaluate(run: Run, data: Data) -> None:
    """Train; then evaluate and export a complete run."""
    if not run.config.training.skip_train:
        warn_if_complete(run)
        train(run, data)
    if run.is_complete:
        evaluate_at_the_end(run, data)
        call_exporter(run, _EXPORT_AT_THE_END)


def warn_if_complete(run: Run) -> None:
    """Explain why a run ends at once."""
    if run.loaded is not None and run.is_complete:
        logger.warning(
            f"{run.loaded} is complete: it has all {run.train_iters} iterations; to continue, "
            "increase --train-iters or --train-samples"
        )


@contextmanager
def interrupts_explained(run: Run, directory: TrainingDirectory) -> Iterator[None]:
    """Turn Ctrl-C into an error that names the newest checkpoint and how to resume."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        message = f"interrupted after iteration {run.state.iteration}"
        save = run.config.checkpoint.save
        # Only rank 0 looks at the disk.
        saved = None
        if directory.generation is not None and run.ps.rank == 0:
            saved = directory.find_saved()
        if save is None:
            message += "; without --save no checkpoint is saved"
        elif saved is None:
            message += f"; {save} contains no checkpoint yet"
        elif is_restart_idiom(run.config.checkpoint):
            message += f"; start the same command again to continue from {saved}"
        else:
            message += f"; continue from {saved} with --load {save} --save {save}"
        raise TrainingInterrupted(message) from interrupt


def take_directory(
    run: Run, directory: TrainingDirectory, loaded: ChosenCheckpoint[Source] | None
) -> bool:
    """Take ownership of the directory, and let checkpoints be saved to it.

    Returns whether the former owner has committed a newer checkpoint than `loaded`; it is loaded.
    """
    is_outdated = directory.take()
    if is_outdated:
        loaded = directory.load(directory.choose(), partial(load_checkpoint, run))
    if run.hf_exports is not None and run.ps.rank == 0:
        resolve(_CHECK_EARLIER_EXPORTS)(run, None if loaded is None else loaded.directory)
    directory.let_save(run.saver, loaded)
    return is_outdated


def train(run: Run, data: Data) -> None:
    """Train until the run is complete or must end early; log, evaluate and save on the way."""
    config = run.config
    training = run.config.training
    log = TrainingLog(
        run.ps,
        run.device,
        run.flops_per_token,
        config.data.seq_length,
        config.model,
        run.metric_names,
    )
    checks_values = training.check_for_nan_in_loss_and_grad
    nan_check = NanCheck(run.ps, checks_values, run.optimizer.grad_scaler.dynamic)
    batches: Iterator[Batch] | None = data.train.batches
    if batches is not None:
        batches = log.time_input(batches)
    first = run.state.iteration + 1
    leave = None
    with (
        record_exit_signals(training.exit_signal_handler) as signals,
        _saver_closed(run.saver),
        _garbage_collection(training.manual_gc),
        _profiling(run) as before_iteration,
    ):
        policy = make_save_policy(
            config.checkpoint, training, run.saver, signals, run.device, run.started, run.clock
        )
        while leave is None and not run.is_complete:
            # One optimizer step. The host does not wait for the device.
            began = run.clock()
            before_iteration(run.state.iteration + 1)
            with run.saver.iteration():
                iterate(run, batches, log, nan_check)
            run.on_iteration()
            iteration = run.state.iteration
            decision = policy.after(iteration, run.clock() - began)
            leave = find_exit(training, decision, iteration)
            is_last = leave is not None or run.is_complete

            # Report first, so that the line is not lost if evaluation or saving fails.
            if is_last or iteration == first or is_multiple(iteration, config.logging.log_interval):
                report_interval(run, log, nan_check)
            # Once on a GPU even without the flag: by then the allocator has reserved its memory.
            is_first_on_gpu = iteration == first and run.device.type == "cuda"
            if is_first_on_gpu or is_multiple(iteration, config.profiling.log_memory_interval):
                logger.info(format_memory_line(iteration, run.device))

            # Evaluate before saving, so that the checkpoint has its validation loss.
            if is_multiple(iteration, training.eval_interval) and not (leave and leave.urgent):
                with log.paused():
                    validate(run, data)
            if decision.save or is_last:
                save_if_finite(run, log, nan_check, last=is_last)
            elif decision.save_locally:
                save_if_finite(run, log, nan_check, locally=True)
            run.saver.after_iteration()
            report_saves(run)
            if training.manual_gc and is_multiple(iteration, training.manual_gc_interval):
                # At the same iterations on all ranks, so that they pause together.
                gc.collect()

        # Drain background work: the last NaN check, the last vote and the last save.
        nan_check.finish()
        policy.finish()
        run.saver.close()
        report_saves(run)
    if leave is not None:
        run.exit_reason = leave.reason
        logger.info(f"exiting after iteration {run.state.iteration}: {leave.reason}")


@contextmanager
def _saver_closed(saver: RunSaver) -> Iterator[None]:
    """Finish the save in progress if the run stops on all ranks together."""
    try:
        yield
    except (NotFiniteError, SaveFailedError):
        saver.close()
        raise


@contextmanager
def _profiling(run: Run) -> Iterator[Callable[[int], None]]:
    """Yield a function that starts and ends the trace of --profile; call it before iterations."""
    config = run.config
    if not config.profiling.profile:
        yield lambda iteration: None
        return
    profiler = resolve(STEP_PROFILER)(
        config.profiling, config.logging.tensorboard_dir, run.ps.rank, run.timers
    )
    with profiler:
        yield profiler.before


def _watched(config: Config, ps: ParallelState) -> AbstractContextManager[Callable[[Run], None]]:
    """Return a context with a function that lets flags of operations observe a run.

    Call the function once. With delayed scaling, it also lets the first step set scales of fp8.
    """
    if config.operations.is_enabled or config.model.low_precision == "delayed":
        return resolve(WATCHED)(config, ps)
    return nullcontext(lambda run: None)


@contextmanager
def _garbage_collection(manual: bool) -> Iterator[None]:
    """Disable automatic garbage collection inside the block if `manual` (--manual-gc)."""
    if manual:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()


def save_if_finite(
    run: Run, log: TrainingLog, nan_check: NanCheck, locally: bool = False, last: bool = False
) -> None:
    """Save, unless the last loss was not finite.

    The timers of the log are paused for a synchronous save, which also waits for the device.
    """
    config = run.config.checkpoint
    since = time.perf_counter()
    pause = nullcontext() if config.async_save else log.paused()
    with pause:
        if config.async_save and not last:
            # A background save is refused before it writes anything, so that the host need not wait
            # for the device here.
            check = nan_check.start_check()
        else:
            nan_check.finish()
            check = _accept
        if locally:
            common = start_common_state(run)
            run.saver.save_locally(
                get_state_to_save(run, common),
                run.state.iteration,
                common,
                since,
                loss=get_validation_loss(run),
                check=check,
            )
        elif config.save is not None:
            export = run.hf_exports if run.is_export_due else None
            save_checkpoint(run, config.save, config.ckpt_format, since, last, check, export)


def _accept() -> None:
    """Accept the state to save, which has been checked."""


def save_checkpoint(
    run: Run,
    root: str,
    ckpt_format: str,
    since: float | None = None,
    last: bool = True,
    check: Callable[[], None] = _accept,
    export: ExportTarget | None = None,
) -> None:
    """Save the run under `root`, and to `export`. Collective.

    Training has been waiting since `since` (perf_counter), and ends if this is the `last` save.
    """
    # For legacy files all ranks write torch_dist, which rank 0 rewrites before the directory gets
    # its name.
    rewrite = resolve(_MAKE_LEGACY_REWRITE)(run.config) if ckpt_format == "torch" else None
    # Copies from the device begin here and are awaited in the background.
    common = start_common_state(run)
    run.saver.save(
        get_state_to_save(run, common),
        path_of(root),
        run.state.iteration,
        common,
        rewrite,
        since,
        last,
        get_validation_loss(run),
        check,
        export,
    )


def iterate(
    run: Run, batches: Iterator[Batch] | None, log: TrainingLog, nan_check: NanCheck
) -> None:
    """Run one optimizer step, and update the counters and the log."""
    state = run.state
    batch_size = run.batches.global_batch_size_at(state.consumed_train_samples)
    loss_scale = run.optimizer.loss_scale
    num_microbatches = run.batches.num_microbatches_at(state.consumed_train_samples)
    losses, step, experts = train_step(run, batches, num_microbatches)
    params_norm = None
    if run.config.logging.log_params_norm:
        params_norm = compute_params_norm(run.chunks, run.ps)

    # Update the counters.
    state.iteration += 1
    state.consumed_train_samples += batch_size
    num_tokens = run.config.data.seq_length * batch_size
    state.num_floating_point_operations_so_far += run.flops_per_token * num_tokens

    # Record losses without reading them from the device.
    nan_check.submit(state.iteration, losses[0], step)
    log.record(
        Iteration(
            iteration=state.iteration,
            consumed_train_samples=state.consumed_train_samples,
            batch_size=batch_size,
            learning_rate=run.learning_rate,  # of the next iteration, as Megatron-LM logs it
            loss_scale=loss_scale,
        ),
        OnDevice(losses, step, params_norm, experts),
    )


def train_step(
    run: Run, batches: Iterator[Batch] | None, num_microbatches: int
) -> tuple[torch.Tensor, StepResult, torch.Tensor | None]:
    """Compute the gradients of one global batch, reduce them, and update weights and schedule.

    Returns this rank's [numerator, denominator] of each loss, the result of the optimizer, and the
    metrics of experts, if any. All of them stay on the device.
    """
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    with run.timers("forward-backward"):
        losses = run.compute_gradients(run, batches, num_microbatches)
    with run.timers("finalize-model-grads"):
        # Sums over DP, TP and the tied embedding; most of the DP reductions have overlapped with
        # the backward pass.
        num_tokens = None
        if run.config.training.calculate_per_token_loss:
            num_tokens = losses[0, 1]
        finalize_model_grads(run.chunks, run.ps, num_tokens)
        experts = measure_experts(run, num_microbatches)
    with run.timers("optimizer"):
        # The only place where a background save delays training: the optimizer changes the tensors
        # that are being copied.
        run.saver.before_update()
        step = run.optimizer.step(run.config.logging.log_num_zeros_in_grad)
    # After an overflow under a dynamic loss scale, the next batch uses the same learning rate.
    if not step.held_back:
        run.scheduler.step(num_microbatches * run.batches.samples_per_microbatch)
    return losses, step, experts


def report_interval(run: Run, log: TrainingLog, nan_check: NanCheck) -> None:
    """Log the iterations since the last call, and send their metrics to the writers. Collective."""
    interval = log.close_interval()
    config = run.config.logging
    fields = interval.as_fields() | {
        "train_iters": run.train_iters,
        "eta_seconds": interval.estimate_remaining_seconds(run.train_iters),
    }
    report_line(format_log_line(interval, run.train_iters), event="interval", **fields)
    times = run.timers.take()
    if times:
        report_line(
            run.timers.report(times, len(interval.iterations)), event="timers", seconds=times
        )
    # TensorBoard and other writers.
    for writer in run.writers:
        writer.interval(interval)
        if config.log_memory_to_tensorboard:
            writer.scalars(measure_memory(run.device), interval.last.iteration)
        if config.log_timers_to_tensorboard:
            # The slowest rank determines the time of a phase.
            slowest = {}
            for name, seconds in times.items():
                slowest[f"{name}-time"] = max(seconds) / len(interval.iterations)
            writer.scalars(slowest, interval.last.iteration)
    nan_check.check_interval(interval)


def report_saves(run: Run) -> None:
    """Send the metrics of the saves that were committed since the last call to the writers."""
    for iteration, points in run.saves.take_metrics():
        for writer in run.writers:
            writer.scalars(points, iteration)


def evaluate_split(run: Run, split: Split, name: str) -> None:
    """Evaluate one split and report its loss, if it has data and --eval-iters is positive."""
    config = run.config
    iteration = run.state.iteration
    if not (config.training.eval_iters and split.exists):
        return
    loss = evaluate(run, split.batches)
    perplexity = math.exp(min(20.0, loss))
    message = (
        f" {name} loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: "
        f"{perplexity:.6E} |"
    )
    report_line(
        message,
        event="evaluation",
        split=name,
        iteration=iteration,
        loss=loss,
        perplexity=perplexity,
    )
    values = {f"lm loss {name}": loss}
    if config.logging.log_validation_ppl_to_tensorboard:
        values[f"lm loss {name} ppl"] = perplexity
    for writer in run.writers:
        writer.scalars(values, iteration, run.state.consumed_train_samples)
    # Validation data continues at this position; test data starts from its first sample again.
    if name == "validation":
        run.validated = (iteration, loss)
        run.state.consumed_valid_samples += config.training.eval_iters * run.eval_batch_size


def validate(run: Run, data: Data) -> None:
    """Evaluate the validation split, and what the flags request in addition."""
    evaluate_split(run, data.valid, "validation")
    run.evaluate_further()


def evaluate_at_the_end(run: Run, data: Data) -> None:
    """Evaluate the test split, and the validation split unless training has just done that."""
    if run.validated is None or run.validated[0] != run.state.iteration:
        validate(run, data)
    evaluate_split(run, data.test, "test")
