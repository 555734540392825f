"""Pretraining: initialize, build, load, train, save."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from megatron.conversion.find_checkpoint import iteration_of
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models import chunk_places
from megatron.core.optimizer import MegatronOptimizer, OptimizerParamScheduler, StepResult
from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.planning.costs import model_flops_per_token
from megatron.training.checkpoint.checkpointing import (
    check_hf_target,
    common_state,
    model_state,
    save_checkpoint,
    save_hf,
    take_save_directory,
)
from megatron.training.checkpoint.resume import adopt_end_of_document, find_start, load_checkpoint, stored_vocab_size
from megatron.training.checkpoint.saver import CheckpointSaver, SaveFailedError, scalars
from megatron.training.config.run_config import Config
from megatron.training.data.loaders import Data, Split, build_data
from megatron.training.data.samplers import Batch
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.exit import ExitSignals, NanCheck, NotFiniteError, SaveAndExitPolicy, is_multiple
from megatron.training.forward_backward import evaluate, forward_backward, measure_experts, report
from megatron.training.launch import (
    check_compiler,
    compile_layers,
    environment_rank,
    initialize,
    lost_ranks_explained,
    seed_everything,
)
from megatron.training.reporting import console
from megatron.training.reporting.logging import PendingIteration, TrainingLog, Writer, as_fields, log_line
from megatron.training.reporting.measurements import memory, memory_line, params_norm
from megatron.training.reporting.profiling import StepProfiler, Timers
from megatron.training.reporting.summary import reporting
from megatron.training.run import DatasetsProvider, ForwardStep, ModelProvider, Run

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

    `clock` is the time, in seconds, that --save-interval-secs and --exit-duration-in-mins go by.

    Raises ValueError for what the user can correct, the same on every rank that can see it.
    """
    started = clock()
    console.configure_logging(environment_rank(), config.logging.log_format)
    tokenizer = build_tokenizer(config.tokenizer)  # what can fail alone fails before the ranks meet
    ps, device = initialize(config.distributed, config.parallel)
    generation = take_save_directory(config)
    start = find_start(config.checkpoint)
    if adopt_end_of_document(config, start):
        tokenizer = build_tokenizer(config.tokenizer)
    config.set_vocab_size(tokenizer.vocab_size, stored_vocab_size(start))
    for note in config.notes:
        logger.info(note)
    run = build_run(config, ps, device, model_provider, forward_step)
    run.started, run.clock = started, clock
    run.saver.own(generation)
    check_hf_target(run)
    load_checkpoint(run, start)
    convert_format, convert_save = config.checkpoint.ckpt_convert_format, config.checkpoint.ckpt_convert_save
    if convert_format is not None and convert_save is not None:
        save_checkpoint(run, os.path.join(convert_save, convert_format), convert_format)  # as Megatron-LM places it
        run.saver.close()
        return run
    data = build_data(run, tokenizer, datasets_provider)
    with reporting(run, model_provider, writers) as writers:
        if not config.training.skip_train:
            train(run, data, writers)
        _evaluate_at_the_end(run, data, writers)
        if config.checkpoint.save_hf is not None and run.state.iteration >= run.train_iters:
            save_hf(run, model_state(run), common_state(run))
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
    rng = TensorParallelRng(0, ps.tp.rank, device)
    seed_everything(config.training.seed, ps, rng)
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
        chunks.append(DistributedDataParallel(chunk, config.ddp, ps.dp_cp, ps.edp))
        if config.distributed.compile:
            compile_layers(chunks[-1])
    return chunks


def train(run: Run, data: Data, writers: Sequence[Writer]) -> None:
    """Iterate until the run is complete or a reason to end it early comes up; log, evaluate and save on the way."""
    training = run.config.training
    log = TrainingLog(run.ps, run.device, run.flops_per_token, run.config.data.seq_length, run.config.model)
    check = NanCheck(run.ps, training.check_for_nan_in_loss_and_grad, run.optimizer.grad_scaler.dynamic)
    first, leave = run.state.iteration + 1, None
    if training.manual_gc:
        gc.disable()
    with (
        ExitSignals().installed(training.exit_signal_handler) as signals,
        lost_ranks_explained(run.ps, run.config.distributed.distributed_timeout_minutes),
        _saver_closed(run),
        StepProfiler(run.config.profiling, run.config.logging.tensorboard_dir, run.ps.rank, run.timers) as profiler,
    ):
        decisions = SaveAndExitPolicy(
            signals, training, run.config.checkpoint, run.saver, run.device, run.started, run.clock
        )
        while leave is None and run.state.iteration < run.train_iters:
            began = run.clock()
            profiler.before(run.state.iteration + 1)
            iterate(run, data.train.batches, log, check)
            iteration = run.state.iteration
            save, leave = decisions.after(iteration, run.clock() - began)
            if leave is not None and leave.failed:
                run.saver.stop()
            over = leave is not None or iteration >= run.train_iters
            if over or iteration == first or iteration % run.config.logging.log_interval == 0:
                _report_interval(run, log, check, writers)
            if is_multiple(iteration, run.config.profiling.log_memory_interval):
                logger.info(memory_line(iteration, run.device))
            if is_multiple(iteration, training.eval_interval) and not (leave and leave.urgent):
                with log.paused():
                    _evaluate(run, data.valid, "validation", writers)
            if over or save:
                _save(run, log, check)
            run.saver.after_iteration()
            _report_saves(run, writers)
            if training.manual_gc and is_multiple(iteration, training.manual_gc_interval):
                gc.collect()  # at the same iterations on all ranks, so that none waits for another's
        check.finish()
        decisions.finish()
        run.saver.close()
        _report_saves(run, writers)
    gc.enable()
    if leave is not None:
        run.exit_reason = leave.reason
        logger.info(f"exiting after iteration {run.state.iteration}: {leave.reason}")


@contextmanager
def _saver_closed(run: Run) -> Iterator[None]:
    """A run that stops on all ranks together still completes the save under way, and cleans up after a failed one."""
    try:
        yield
    except (NotFiniteError, SaveFailedError):
        run.saver.close()
        raise


def _save(run: Run, log: TrainingLog, check: NanCheck) -> None:
    """Save, if the last update was finite. Only a save that training waits for anyway waits for the device, too."""
    config, since = run.config.checkpoint, time.perf_counter()
    if config.save is None:
        return check.finish()
    with nullcontext() if config.async_save else log.paused():
        check.finish()
        save_checkpoint(run, config.save, config.ckpt_format, since)


def iterate(run: Run, batches: Iterator[Batch] | None, log: TrainingLog, check: NanCheck) -> None:
    """One optimizer step, and everything that counts it."""
    state = run.state
    batch_size = run.batches.global_batch_size_at(state.consumed_train_samples)
    loss_scale = run.optimizer.loss_scale
    loss, step, experts = train_step(run, batches, run.batches.num_microbatches_at(state.consumed_train_samples))
    state.iteration += 1
    state.consumed_train_samples += batch_size
    state.num_floating_point_operations_so_far += run.flops_per_token * run.config.data.seq_length * batch_size
    check.submit(state.iteration, loss, step)
    log.record(
        PendingIteration(
            iteration=state.iteration,
            consumed_train_samples=state.consumed_train_samples,
            batch_size=batch_size,
            learning_rate=run.learning_rate,  # of the next iteration, as Megatron-LM logs it
            loss_scale=loss_scale,
            loss=loss,
            step=step,
            experts=experts,
            params_norm=params_norm(run.chunks, run.ps) if run.config.logging.log_params_norm else None,
        )
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
        per_token = run.config.training.calculate_per_token_loss
        finalize_model_grads(run.chunks, run.ps, loss[1] if per_token else None)
        experts = measure_experts(run, num_microbatches)
    with run.timers("optimizer"):
        run.saver.before_update()
        step = run.optimizer.step(run.config.logging.log_num_zeros_in_grad)
    if not step.held_back:
        run.scheduler.step(num_microbatches * run.batches.samples_per_microbatch)
    return loss, step, experts


def _report_interval(run: Run, log: TrainingLog, check: NanCheck, writers: Sequence[Writer]) -> None:
    interval = log.close_interval()
    fields = as_fields(interval) | {
        "train_iters": run.train_iters,
        "eta_seconds": interval.seconds_to_go(run.train_iters),
    }
    console.report(log_line(interval, run.train_iters), event="interval", **fields)
    times = run.timers.take()
    if times:
        console.report(run.timers.report(times, len(interval.iterations)), event="timers", seconds=times)
    for writer in writers:
        writer.interval(interval)
        if run.config.logging.log_memory_to_tensorboard:
            writer.scalars(memory(run.device), interval.last.iteration)
        if run.config.logging.log_timers_to_tensorboard:
            slowest = {f"{name}-time": max(seconds) / len(interval.iterations) for name, seconds in times.items()}
            writer.scalars(slowest, interval.last.iteration)
    check.look_at(interval)


def _report_saves(run: Run, writers: Sequence[Writer]) -> None:
    for committed in run.saver.take_committed():
        for writer in writers:
            writer.scalars(scalars(committed), iteration_of(committed.directory))


def _evaluate(run: Run, split: Split, name: str, writers: Sequence[Writer]) -> None:
    if run.config.training.eval_iters and split.exists:
        loss = evaluate(run, split.batches)
        report(run, name, loss, writers)
        if name == "validation":
            run.validated = (run.state.iteration, loss)
        run.state.consumed_valid_samples += run.config.training.eval_iters * run.eval_batch_size


def _evaluate_at_the_end(run: Run, data: Data, writers: Sequence[Writer]) -> None:
    """When the run is complete: the validation loss of the last iteration, and the test loss."""
    training, iteration = run.config.training, run.state.iteration
    if iteration >= run.train_iters:
        if training.skip_train or not is_multiple(iteration, training.eval_interval):
            _evaluate(run, data.valid, "validation", writers)
        _evaluate(run, data.test, "test", writers)
