"""The summary of a run, printed before its first iteration and recorded, and the record of how it ends."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron import __version__
from megatron.core.durable_files import write_json
from megatron.core.object_storage import ObjectPath, path_of
from megatron.core.utils import size_text
from megatron.training.config.run_config import Config, ModelProvider, parse_args, replica_size
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.launch import environment_world_size
from megatron.training.planning.run_plan import RunPlan, StagePlan, plan_run
from megatron.training.reporting import console
from megatron.training.reporting.logging import Writer, make_writers
from megatron.training.reporting.run_record import RECORDS, RUN_FILE, RunRecord, finite, goodput, read_record
from megatron.training.run import Run

logger = logging.getLogger(__name__)

JSON_TYPES = (str, int, float, bool, list, tuple, type(None))


def summarize(config: Config, world_size: int, plan: RunPlan, device: str = "", start: str = "") -> dict[str, str]:
    """What a run of `world_size` processes is, by topic. `start`: where it continues."""
    training = config.training
    active = "all of them" if plan.num_active == plan.num_parameters else amount(plan.num_active)
    several = config.parallel.pp_size > 1
    topics = {
        "model": _model(config),
        "parameters": f"{amount(plan.num_parameters)}, {active} active for every token",
        "layout": f"{layout_name(config, world_size)} on {world_size} rank{'s' * (world_size > 1)}",
        **{f"stage {s.ps.pp.rank}": _stage(config, world_size, s) for s in plan.stages if several},
        "bubble": f"{100 * plan.bubble:.1f} % of a step" if several else "",
        "device": device,
        "precision": _precision(config),
        "batch": f"{training.global_batch_size} samples of {config.data.seq_length} tokens, "
        f"{plan.num_microbatches} micro batches of {training.micro_batch_size} on each of "
        f"{config.parallel.dp_size(world_size)} replicas",
        "length": _length(config),
        "start": start,
        "memory": memory_of(plan),
        "checkpoint": size_text(plan.checkpoint_bytes)
        + (f" to {config.checkpoint.save}" if config.checkpoint.save else ", not saved: no --save"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }
    return {topic: text for topic, text in topics.items() if text}


def plan_page(config: Config, world_size: int, plan: RunPlan) -> str:
    """Notes, summary and what every stage needs, of a run that is not started."""
    notes = [f"note: {note}" for note in config.notes]
    return "\n".join([*notes, as_lines(summarize(config, world_size, plan)), "", plan.table()])


def set_planned_vocab_size(config: Config) -> None:
    """For a plan --vocab-size is enough: the tokenizer's files need not be there."""
    given = None if config.tokenizer.kind == "NullTokenizer" else config.tokenizer.vocab_size
    config.set_vocab_size(build_tokenizer(config.tokenizer).vocab_size if given is None else given)


def dry_run(argv: Sequence[str], model_provider: ModelProvider) -> str:
    """What a run with these flags would be and need on every stage; nothing is started.

    It has $WORLD_SIZE processes, else as many as one replica of the model takes. Raises ValueError as a run would.
    """
    world_size = environment_world_size() if "WORLD_SIZE" in os.environ else replica_size(argv)
    config = parse_args(argv, world_size)
    set_planned_vocab_size(config)
    return plan_page(config, world_size, plan_run(config, world_size, model_provider))


@contextmanager
def reporting(run: Run, model_provider: ModelProvider, writers: Sequence[Writer]) -> Iterator[None]:
    """Print the summary; inside the block rank 0 has `writers` and those of the flags; record how the run ended."""
    if run.ps.rank > 0:
        yield
        return
    config, flags = run.config, run.config.flags()
    start = f"iteration {run.state.iteration}" + (f" of {run.loaded}" if run.loaded else ", from random weights")
    world_size = run.ps.world_size
    plan = plan_run(config, world_size, model_provider, run.device.type)
    topics = summarize(config, world_size, plan, f"{_device(run.device)} on every rank", start)
    console.report(as_lines(topics), event="start", **topics)
    if config.logging.print_args:
        console.report(
            arguments(flags), event="arguments", arguments={name: str(value) for name, value in flags.items()}
        )
    # Records and logs are appended to line by line, which object storage cannot: they need a directory of their own.
    save = config.checkpoint.save
    directory = None if save is None or isinstance(path_of(save), ObjectPath) else save
    run.writers = [*writers, *make_writers(config.logging, directory, flags)]
    record = None if directory is None else RunRecord(directory)
    if record is not None:
        run.writers.append(record)
        _record_start(run, record, topics)
    ended: dict[str, Any] = {"reason": "stopped", "failed": True}
    try:
        yield
        ended = {"reason": run.exit_reason or "complete", "failed": False}
    except BaseException as error:
        ended["reason"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        if record is not None:
            record.write("end", iteration=run.state.iteration, **ended)
            if config.logging.goodput and directory is not None:
                _report_goodput(run, Path(directory))
        for writer in run.writers:
            writer.close()


def _report_goodput(run: Run, save: Path) -> None:
    """Where the time of all starts went (--goodput)."""
    try:
        spent = goodput(read_record(save))
    except (OSError, ValueError, LookupError) as error:  # the record is for people: a gap in it must not fail a run
        logger.warning(f"--goodput: the record in {save / RECORDS} cannot be read ({type(error).__name__}: {error})")
        return
    total = sum(spent.values()) or 1.0
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent.items())
    line = f"goodput {spent['training'] / total:.1%} of {total:.1f} s since the first start: {parts}"
    console.report(f" > {line}", event="goodput", seconds=spent)
    for writer in run.writers:
        points = {f"goodput/{name.replace(' ', '-')}": seconds for name, seconds in spent.items()}
        writer.scalars(points, run.state.iteration)


def _record_start(run: Run, record: RunRecord, topics: dict[str, str]) -> None:
    config, now = run.config, time.time()
    assert config.checkpoint.save is not None
    start = {
        "command": sys.argv,
        "began": round(now - (run.clock() - run.started), 3),  # of the program
        "iteration": run.state.iteration,
        "consumed_samples": run.state.consumed_train_samples,
        "loaded": run.loaded,
        "loading": round(run.loading_seconds, 3),
        "train_iters": run.train_iters,
        "world_size": run.ps.world_size,
        "layout": layout_name(config, run.ps.world_size),
        "summary": topics,
    }
    record.write("start", **start)
    arguments = {name: value if isinstance(value, JSON_TYPES) else str(value) for name, value in config.flags().items()}
    save = Path(config.checkpoint.save)
    try:
        write_json(save / RUN_FILE, finite({**start, "arguments": arguments}))
        for left in save.glob(f"{RUN_FILE}.tmp-*"):  # of a start that was killed while it wrote
            left.unlink(missing_ok=True)
    except OSError as error:
        logger.warning(f"{RUN_FILE} could not be written: {error}")


def as_lines(topics: dict[str, str]) -> str:
    """The summary as it is printed."""
    return "\n".join(f"   {topic:11} {text}" for topic, text in topics.items())


def arguments(flags: dict[str, Any]) -> str:
    """All arguments, as Megatron-LM prints them (--print-args)."""
    rows = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in flags.items()]
    title, end = " arguments ", " end of arguments "
    return "\n".join([f"{title:-^59}", *sorted(rows, key=str.lower), f"{end:-^59}"])


def layout_name(config: Config, world_size: int) -> str:
    """Such as TP 2 x CP 2 (p2p) x PP 4 (2 chunks) x DP 8."""
    parallel = config.parallel
    chunks = f" ({parallel.vpp_size} chunks)" if parallel.vpp_size > 1 else ""
    options = [", sequence parallel"] * parallel.sequence_parallel
    options += [", distributed optimizer"] * config.ddp.use_distributed_optimizer
    ways = "/".join(dict.fromkeys(parallel.cp_comm_type))
    context = f" x CP {parallel.cp_size} ({ways})" if parallel.cp_size > 1 else ""
    sizes = f"TP {parallel.tp_size}{context} x PP {parallel.pp_size}{chunks} x DP {parallel.dp_size(world_size)}"
    if parallel.splits_experts:
        sizes += f", experts ETP {parallel.etp_size} x EP {parallel.ep_size} x DP {parallel.edp_size(world_size)}"
    return sizes + "".join(options)


def versions() -> dict[str, str]:
    """Of what decides how a run behaves."""
    return {"megatron": __version__, "torch": torch.__version__, "python": platform.python_version()}


def amount(count: float) -> str:
    """Such as 9.87M or 70.6B."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:.0f}"


def memory_of(plan: RunPlan) -> str:
    """The fullest rank's share."""
    memory = max((stage.memory for stage in plan.stages), key=lambda memory: memory.total)
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations + memory.loss + memory.tables + memory.temporary,
    }
    shares = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())
    return f"{size_text(memory.total)} planned on the fullest rank ({shares})"


def _model(config: Config) -> str:
    model = config.model
    heads = f"{model.num_attention_heads} heads"
    if model.query_groups != model.num_attention_heads:
        heads += f" in {model.query_groups} groups"
    experts = ""
    if model.has_experts:
        experts = f"{model.moe_router_topk} of {model.experts} experts of {model.moe_ffn_size}, "
    return (
        f"{model.num_layers} layers, hidden size {model.hidden_size}, FFN {model.ffn_size} ({model.activation}), "
        f"{experts}{heads}, {model.normalization}, {model.position_embedding_type}, "
        f"{model.vocab_size} tokens in the vocabulary"
    )


def _stage(config: Config, world_size: int, stage: StagePlan) -> str:
    rank, size = stage.ps.pp.rank, world_size // config.parallel.pp_size
    first, last = stage.ps.dp_cp.ranks[0], stage.ps.dp_cp.ranks[-1]
    chunks = [f"{c.start}" if len(c) == 1 else f"{c.start}-{c.stop - 1}" for c in config.layer_ranges()[rank] if c]
    ends = [", embedding"] * stage.ps.pp.is_first + [", output layer"] * stage.ps.pp.is_last
    ranks = f"rank {first}" if size == 1 else f"ranks {first}-{last + config.parallel.tp_size - 1}"
    if config.parallel.use_tp_pp_dp_mapping and stage.ps.dp.size > 1:
        ranks = f"{size} of {ranks}"
    return (
        f"{ranks}: layers {', '.join(chunks) or 'none'}{''.join(ends)}; {amount(stage.num_parameters)} parameters, "
        f"{size_text(stage.memory.total)} on each"
    )


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return f"{torch.cuda.get_device_name(device)} with {size_text(memory)}"
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads > 1)}"


def _precision(config: Config) -> str:
    name = str(config.model.params_dtype).removeprefix("torch.")
    if config.model.low_precision is not None:
        narrow = f"fp8 ({config.model.fp8}" if config.model.fp8 is not None else f"fp4 ({config.model.fp4}"
        name += f", layers in {narrow}, {config.model.low_precision} scaling)"
    return name if name == "float32" else f"{name}, with fp32 main parameters and gradients"


def _length(config: Config) -> str:
    training, seq = config.training, config.data.seq_length
    if training.train_samples is not None:
        return f"{training.train_samples} samples = {amount(training.train_samples * seq)} tokens"
    assert training.train_iters is not None and training.global_batch_size is not None
    tokens = training.train_iters * training.global_batch_size * seq
    return f"{training.train_iters} iterations = {amount(tokens)} tokens"
