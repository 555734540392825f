"""Pretraining: initialize, build, load, train, save.

`pretrain` is the life of a run, `train` its loop, `train_step` one iteration; the rest reports, evaluates and saves.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models import chunk_places
from megatron.core.optimizer import MegatronOptimizer, OptimizerParamScheduler, StepResult
from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.layer_spec import layer_spec
from megatron.training.checkpoint.checkpointing import (
    check_hf_target,
    common_state,
    open_local_tier,
    save_checkpoint,
    save_hf,
    state_to_save,
    take_save_directory,
)
from megatron.training.checkpoint.resume import adopt_end_of_document, find_start, load_checkpoint, stored_vocab_size
from megatron.training.checkpoint.saver import CheckpointSaver, SaveFailedError
from megatron.training.config.run_config import Config, ModelProvider
from megatron.training.data.loaders import Data, Split, build_data
from megatron.training.data.samplers import Batch
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.exit import ExitSignals, NanCheck, NotFiniteError, SaveAndExitPolicy, is_multiple
from megatron.training.forward_backward import evaluate, forward_backward, measure_experts, report_evaluation
from megatron.training.launch import (
    check_compiler,
    compile_layers,
    environment_rank,
    initialize,
    lost_ranks_explained,
    seed_everything,
)
from megatron.training.planning.costs import model_flops_per_token
from megatron.training.reporting import console
from megatron.training.reporting.logging import Iteration, OnDevice, TrainingLog, Writer, log_line
from megatron.training.reporting.measurements import StepProfiler, Timers, memory, memory_line, params_norm
from megatron.training.reporting.summary import reporting
from megatron.training.run import DatasetsProvider, ForwardStep, Run

logger = logging.getLogger(__name__)


def pretrain(
    config: Config,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider,
    forward_step: ForwardStep,
    writers: Sequence[Writer] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Run:
    """The whole life of a run; `writers` get its measurements besides those that the flags ask for.

    `clock` gives the time, in seconds, for --save-interval-secs and --exit-duration-in-mins.

    Raises ValueError for what the user can correct, the same on every rank that can see it.
    """
    # Initialize. What can fail on one rank alone fails before the ranks meet: otherwise the others would wait for it.
    started = clock()
    console.configure_logging(environment_rank(), config.logging.log_format)
    tokenizer = build_tokenizer(config.tokenizer)
    ps, device = initialize(config.distributed, config.parallel)
    generation = take_save_directory(config)
    tier = open_local_tier(config.checkpoint, generation)

    # Find the checkpoint before the model is built: it may have a say in the vocabulary.
    start = find_start(config.checkpoint, tier)
    if adopt_end_of_document(config, start):
        tokenizer = build_tokenizer(config.tokenizer)
    config.set_vocab_size(tokenizer.vocab_size, stored_vocab_size(start))
    for note in config.notes:
        logger.info(note)

    # Build and load.
    run = build_run(config, ps, device, model_provider, forward_step)
    run.started, run.clock = started, clock
    run.saver.own(generation, tier)
    check_hf_target(run)
    load_checkpoint(run, start, tier)
    if config.checkpoint.ckpt_convert_format is not None:
        save_converted(run)
        return run
    data = build_data(run, tokenizer, datasets_provider)

    # Train, evaluate, save.
    with reporting(run, model_provider, writers):
        if not config.training.skip_train:
            train(run, data)
        if run.is_complete:
            evaluate_at_the_end(run, data)
            save_hf(run)
    data.close()
    run.saver.check_last_save()
    return run


def build_run(
    config: Config,
    ps: ParallelState,
    device: torch.device,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
) -> Run:
    """Model (of `config.model.vocab_size` tokens), optimizer, schedules, initialised from the seed; no data."""
    vocab_size = config.model.vocab_size
    assert vocab_size is not None
    # Weights depend on the seed and their names alone; these generators are for what follows, such as dropout.
    rng = TensorParallelRng(0, ps.tp.rank, device)
    seed_everything(config.training.seed, ps, rng)
    tokens = config.data.seq_length // config.parallel.cp_size * config.training.micro_batch_size
    layer_spec(config.model).set_up(config.model, tokens, ps.tp.size)
    chunks = build_chunks(config, ps, rng, model_provider)
    optimizer = MegatronOptimizer(chunks, config.optimizer, ps)
    return Run(
        config=config,
        ps=ps,
        device=device,
        chunks=chunks,
        optimizer=optimizer,
        scheduler=OptimizerParamScheduler(
            optimizer.param_groups,
            config.schedule(),
            override=config.scheduler.override_opt_param_scheduler,
            use_checkpoint=config.scheduler.use_checkpoint_opt_param_scheduler,
        ),
        batches=config.batch_schedule(ps.dp.size),
        forward_step=forward_step,
        rng=rng,
        saver=CheckpointSaver(config.checkpoint),
        timers=Timers(config.logging.timing_log_level, config.logging.timing_log_option, device),
        vocab_size=vocab_size,
        flops_per_token=model_flops_per_token(config.model, config.data.seq_length, vocab_size),
    )


def build_chunks(
    config: Config, ps: ParallelState, rng: TensorParallelRng, model_provider: ModelProvider
) -> list[DistributedDataParallel]:
    """This rank's pipeline chunks, initialised, on the device, with their gradients reduced over data parallelism."""
    if config.distributed.compile:
        check_compiler(rng.device)
    chunks = []
    for place in chunk_places(config.layer_ranges(), ps, rng, rng.device):
        chunk = model_provider(config, place)
        chunk.initialize(config.training.seed)
        # Moves the parameters into one buffer, so it must come after they are initialised and before they are compiled.
        chunks.append(DistributedDataParallel(chunk, config.ddp, ps.dp_cp, ps.edp))
        if config.distributed.compile:
            compile_layers(chunks[-1])
    return chunks


def train(run: Run, data: Data) -> None:
    """Iterate until the run is complete or there is a reason to end it early; log, evaluate and save on the way."""
    config, training = run.config, run.config.training
    log = TrainingLog(run.ps, run.device, run.flops_per_token, config.data.seq_length, config.model)
    nan_check = NanCheck(run.ps, training.check_for_nan_in_loss_and_grad, run.optimizer.grad_scaler.dynamic)
    first, leave = run.state.iteration + 1, None
    with (
        ExitSignals().installed(training.exit_signal_handler) as signals,
        lost_ranks_explained(run.ps, config.distributed.distributed_timeout_minutes),
        _saver_closed(run.saver),
        _garbage_collection(training.manual_gc),
        StepProfiler(config.profiling, config.logging.tensorboard_dir, run.ps.rank, run.timers) as profiler,
    ):
        policy = SaveAndExitPolicy(signals, training, config.checkpoint, run.saver, run.device, run.started, run.clock)
        while leave is None and not run.is_complete:
            # One optimizer step. The host does not wait for the device: it reads no number of this iteration.
            began = run.clock()
            profiler.before(run.state.iteration + 1)
            iterate(run, data.train.batches, log, nan_check)
            iteration = run.state.iteration
            save, save_locally, leave = policy.after(iteration, run.clock() - began)
            is_last = leave is not None or run.is_complete

            # Report first: the line must not be lost with an evaluation or a save that fails.
            if is_last or iteration == first or is_multiple(iteration, config.logging.log_interval):
                report_interval(run, log, nan_check)
            if is_multiple(iteration, config.profiling.log_memory_interval):
                logger.info(memory_line(iteration, run.device))

            # Evaluate before saving, so that the checkpoint has its validation loss.
            if is_multiple(iteration, training.eval_interval) and not (leave and leave.urgent):
                with log.paused():
                    evaluate_split(run, data.valid, "validation")
            if save or is_last:
                save_if_finite(run, log, nan_check, last=is_last)
            elif save_locally:
                save_if_finite(run, log, nan_check, locally=True)
            run.saver.after_iteration()
            report_saves(run)
            if training.manual_gc and is_multiple(iteration, training.manual_gc_interval):
                gc.collect()  # at the same iterations on all ranks, so that none waits for another's

        # What still runs behind training: the last check, the last exchange between ranks, the last save.
        nan_check.finish()
        policy.finish()
        run.saver.close()
        report_saves(run)
    if leave is not None:
        run.exit_reason = leave.reason
        logger.info(f"exiting after iteration {run.state.iteration}: {leave.reason}")


@contextmanager
def _saver_closed(saver: CheckpointSaver) -> Iterator[None]:
    """A run that stops on all ranks together completes the save under way, and cleans up after a failed one."""
    try:
        yield
    except (NotFiniteError, SaveFailedError):
        saver.close()
        raise


@contextmanager
def _garbage_collection(manual: bool) -> Iterator[None]:
    """With `manual`, Python collects only where the loop says (--manual-gc)."""
    if manual:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()


def save_if_finite(run: Run, log: TrainingLog, nan_check: NanCheck, locally: bool = False, last: bool = False) -> None:
    """Save, unless the last loss was not finite. Only a save that training waits for anyway waits for the device."""
    config, since = run.config.checkpoint, time.perf_counter()
    with nullcontext() if config.async_save else log.paused():
        nan_check.finish()
        if locally:
            run.saver.save_locally(state_to_save(run), run.state.iteration, common_state(run), since)
        elif config.save is not None:
            save_checkpoint(run, config.save, config.ckpt_format, since, last)


def save_converted(run: Run) -> None:
    """--ckpt-convert-format: what was loaded, in another format, where Megatron-LM places it."""
    config = run.config.checkpoint
    assert config.ckpt_convert_format is not None and config.ckpt_convert_save is not None
    save_checkpoint(run, os.path.join(config.ckpt_convert_save, config.ckpt_convert_format), config.ckpt_convert_format)
    run.saver.close()


def iterate(run: Run, batches: Iterator[Batch] | None, log: TrainingLog, nan_check: NanCheck) -> None:
    """One optimizer step, and everything that counts it."""
    state = run.state
    batch_size = run.batches.global_batch_size_at(state.consumed_train_samples)
    loss_scale = run.optimizer.loss_scale
    loss, step, experts = train_step(run, batches, run.batches.num_microbatches_at(state.consumed_train_samples))
    state.iteration += 1
    state.consumed_train_samples += batch_size
    state.num_floating_point_operations_so_far += run.flops_per_token * run.config.data.seq_length * batch_size
    nan_check.submit(state.iteration, loss, step)
    log.record(
        Iteration(
            iteration=state.iteration,
            consumed_train_samples=state.consumed_train_samples,
            batch_size=batch_size,
            learning_rate=run.learning_rate,  # of the next iteration, as Megatron-LM logs it
            loss_scale=loss_scale,
        ),
        OnDevice(loss, step, params_norm(run.chunks, run.ps) if run.config.logging.log_params_norm else None, experts),
    )


def train_step(
    run: Run, batches: Iterator[Batch] | None, num_microbatches: int
) -> tuple[torch.Tensor, StepResult, torch.Tensor | None]:
    """Gradients of one global batch, their reductions, the update, the schedule.

    Returns this rank's [numerator, denominator] of the loss, what the optimizer says, and in a model with experts what
    is measured of them; all stay on the device.
    """
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    with run.timers("forward-backward"):
        loss = forward_backward(run, batches, num_microbatches)
    with run.timers("finalize-model-grads"):
        # Sums over DP, TP and the tied embedding; most of the DP reductions have overlapped with the backward pass.
        per_token = run.config.training.calculate_per_token_loss
        finalize_model_grads(run.chunks, run.ps, loss[1] if per_token else None)
        experts = measure_experts(run, num_microbatches)
    with run.timers("optimizer"):
        # The only place where a save behind training holds it up: nothing else changes the tensors that are copied.
        run.saver.before_update()
        step = run.optimizer.step(run.config.logging.log_num_zeros_in_grad)
    # An overflow under a dynamic loss scale is retried with other data, not with another learning rate.
    if not step.held_back:
        run.scheduler.step(num_microbatches * run.batches.samples_per_microbatch)
    return loss, step, experts


def report_interval(run: Run, log: TrainingLog, nan_check: NanCheck) -> None:
    """The line of the log and the points of all iterations since the last one. Collective."""
    interval, config = log.close_interval(), run.config.logging
    fields = interval.as_fields() | {
        "train_iters": run.train_iters,
        "eta_seconds": interval.seconds_to_go(run.train_iters),
    }
    console.report(log_line(interval, run.train_iters), event="interval", **fields)
    times = run.timers.take()
    if times:
        console.report(run.timers.report(times, len(interval.iterations)), event="timers", seconds=times)
    for writer in run.writers:
        writer.interval(interval)
        if config.log_memory_to_tensorboard:
            writer.scalars(memory(run.device), interval.last.iteration)
        if config.log_timers_to_tensorboard:
            slowest = {f"{name}-time": max(seconds) / len(interval.iterations) for name, seconds in times.items()}
            writer.scalars(slowest, interval.last.iteration)
    nan_check.check_interval(interval)


def report_saves(run: Run) -> None:
    """Points of the saves that were committed since the last call."""
    for iteration, points in run.saver.take_committed():
        for writer in run.writers:
            writer.scalars(points, iteration)


def evaluate_split(run: Run, split: Split, name: str) -> None:
    """The loss of one split, where there is data for it and --eval-iters asks for it."""
    if run.config.training.eval_iters and split.exists:
        loss = evaluate(run, split.batches)
        report_evaluation(run, name, loss)
        if name == "validation":
            run.validated = (run.state.iteration, loss)
            run.state.consumed_valid_samples += run.config.training.eval_iters * run.eval_batch_size


def evaluate_at_the_end(run: Run, data: Data) -> None:
    """The validation loss of the last iteration, unless training has just measured it, and the test loss."""
    if run.validated is None or run.validated[0] != run.state.iteration:
        evaluate_split(run, data.valid, "validation")
    evaluate_split(run, data.test, "test")
