"""What a run is, told before its first iteration: the summary, and all arguments in Megatron-LM's form."""

from __future__ import annotations

import platform
from functools import partial
from typing import Any

import torch

from megatron import __version__
from megatron.core.parallel_state import ParallelState
from megatron.planning.empty_model import RunShape
from megatron.planning.run_plan import RunPlan, StagePlan, plan_run
from megatron.training.config.run_config import Config
from megatron.training.run import ModelProvider


def run_shape(config: Config, world_size: int, model_provider: ModelProvider) -> RunShape:
    """What planning needs to know of a run; `config.model.vocab_size` must be known."""
    batches = config.batch_schedule(config.parallel.dp_size(world_size))
    return RunShape(
        model=config.model,
        parallel=config.parallel,
        ddp=config.ddp,
        optimizer=config.optimizer,
        layer_ranges=config.layer_ranges(),
        build_chunk=partial(model_provider, config),
        seq_length=config.data.seq_length,
        micro_batch_size=config.training.micro_batch_size,
        num_microbatches=batches.global_batch_size // batches.samples_per_microbatch,
        vocab_divisor=config.tokenizer.make_vocab_size_divisible_by,
        data_mask=config.data.reset_attention_mask,
        saves_optimizer=not config.checkpoint.no_save_optim,
    )


def summarize(
    config: Config, world_size: int, model_provider: ModelProvider, device: torch.device, start: str = ""
) -> dict[str, str]:
    """What a run of `world_size` processes is, by topic; needs no process group. `start`: where it goes on."""
    plan = plan_run(run_shape(config, world_size, model_provider), world_size)
    model, training, parallel = config.model, config.training, config.parallel
    topics = {
        "model": _model(config),
        "parameters": f"{amount(plan.num_parameters)}, all of them active for every token",
        "layout": f"{layout_name(config, world_size)} on {world_size} ranks",
        **{f"stage {stage.ps.pp.rank}": _stage(config, world_size, stage) for stage in plan.stages},
        "device": f"{_device(device)} on every rank",
        "precision": _precision(config),
        "batch": f"{training.global_batch_size} samples of {config.data.seq_length} tokens, "
        f"{plan.num_microbatches} micro batches of {training.micro_batch_size} on each of "
        f"{parallel.dp_size(world_size)} replicas",
        "length": _length(config),
        "start": start,
        "memory": memory_of(plan),
        "checkpoint": f"{plan.checkpoint_bytes / 1e9:.2f} GB"
        + (f" to {config.checkpoint.save}" if config.checkpoint.save else ", not saved: no --save"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }
    if model.num_layers == sum(len(chunk) for chunk in config.layer_ranges()[0]):
        topics.pop("stage 0")
    return {topic: text for topic, text in topics.items() if text}


def as_lines(topics: dict[str, str]) -> str:
    """The summary as it is printed."""
    return "\n".join(f"   {topic:11} {text}" for topic, text in topics.items())


def arguments(flags: dict[str, Any]) -> str:
    """All arguments, as Megatron-LM prints them (--print-args)."""
    rows = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in flags.items()]
    title, end = " arguments ", " end of arguments "
    return "\n".join([f"{title:-^59}", *sorted(rows, key=str.lower), f"{end:-^59}"])


def layout_name(config: Config, world_size: int) -> str:
    """Such as TP 2 x PP 4 (2 chunks) x DP 8."""
    parallel = config.parallel
    chunks = f" ({parallel.vpp_size} chunks)" if parallel.vpp_size > 1 else ""
    options = [", sequence parallel"] * parallel.sequence_parallel
    options += [", distributed optimizer"] * config.ddp.use_distributed_optimizer
    sizes = f"TP {parallel.tp_size} x PP {parallel.pp_size}{chunks} x DP {parallel.dp_size(world_size)}"
    return sizes + "".join(options)


def versions() -> dict[str, str]:
    """Of what decides how a run behaves."""
    return {"megatron": __version__, "torch": torch.__version__, "python": platform.python_version()}


def amount(count: float) -> str:
    """Such as 9.87M or 70.6B."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:.0f}"


def memory_of(plan: RunPlan) -> str:
    """The fullest rank's share, in GB of 10^9 bytes."""
    memory = max((stage.memory for stage in plan.stages), key=lambda memory: memory.total)
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations + memory.loss + memory.tables + memory.temporary,
    }
    shares = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
    return f"{memory.total / 1e9:.2f} GB planned on the fullest rank ({shares})"


def _model(config: Config) -> str:
    model = config.model
    heads = f"{model.num_attention_heads} heads"
    if model.query_groups != model.num_attention_heads:
        heads += f" in {model.query_groups} groups"
    return (
        f"{model.num_layers} layers, hidden size {model.hidden_size}, FFN {model.ffn_size}"
        f"{' (SwiGLU)' if model.swiglu else ''}, {heads}, {model.normalization}, {model.position_embedding_type}, "
        f"{model.vocab_size} tokens in the vocabulary"
    )


def _stage(config: Config, world_size: int, stage: StagePlan) -> str:
    rank, size = stage.ps.pp.rank, world_size // config.parallel.pp_size
    chunks = [f"{c.start}" if len(c) == 1 else f"{c.start}-{c.stop - 1}" for c in config.layer_ranges()[rank] if c]
    ends = [", embedding"] * stage.ps.pp.is_first + [", output layer"] * stage.ps.pp.is_last
    ranks = f"rank {rank}" if size == 1 else f"ranks {rank * size}-{(rank + 1) * size - 1}"
    return (
        f"{ranks}: layers {', '.join(chunks) or 'none'}{''.join(ends)}; {amount(stage.num_parameters)} parameters, "
        f"{stage.memory.total / 1e9:.2f} GB on each"
    )


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {torch.cuda.get_device_properties(device).total_memory / 1e9:.0f} GB,"
    return f"CPU with {torch.get_num_threads()} threads"


def _precision(config: Config) -> str:
    name = str(config.model.params_dtype).removeprefix("torch.")
    return name if name == "float32" else f"{name}, with fp32 main parameters and gradients"


def _length(config: Config) -> str:
    training, seq = config.training, config.data.seq_length
    if training.train_samples is not None:
        return f"{training.train_samples} samples = {amount(training.train_samples * seq)} tokens"
    assert training.train_iters is not None and training.global_batch_size is not None
    tokens = training.train_iters * training.global_batch_size * seq
    return f"{training.train_iters} iterations = {amount(tokens)} tokens"


