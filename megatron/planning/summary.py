"""Summary of a run in words: printed before the first iteration and by --dry-run."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch

from megatron import __version__
from megatron.core.terminal import format_size
from megatron.planning.run_plan import RunPlan, StagePlan, plan_run
from megatron.training.config.run_config import Config, ModelProvider
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.reporting.console import format_summary


def set_planned_vocab_size(config: Config) -> None:
    """Set the vocabulary size from --vocab-size or, if it is not given, from the tokenizer.

    The files of the tokenizer are not needed with --vocab-size.
    """
    vocab_size = config.tokenizer.vocab_size
    if vocab_size is None or config.tokenizer.kind == "NullTokenizer":
        vocab_size = build_tokenizer(config.tokenizer).vocab_size
    config.set_vocab_size(vocab_size)


def format_plan(config: Config, world_size: int, plan: RunPlan) -> str:
    """Return the notes, the summary and the requirements of every stage as text."""
    rows = [f"note: {note}" for note in config.notes]
    topics = summarize(config, world_size, plan)
    rows.append(format_summary(topics))
    rows.append("")
    rows.append(plan.format_table())
    return "\n".join(rows)


def summarize_start(
    config: Config,
    world_size: int,
    model_provider: ModelProvider,
    device: torch.device,
    start: str,
) -> dict[str, str]:
    """Return the description by topic of a run that starts on `device`."""
    plan = plan_run(config, world_size, model_provider, device.type, measure_passes=False)
    return summarize(config, world_size, plan, f"{_describe_device(device)} on every rank", start)


def summarize(
    config: Config,
    world_size: int,
    plan: RunPlan,
    device: str = "",
    start: str = "",
) -> dict[str, str]:
    """Return a description of a run of `world_size` processes by topic.

    `start` describes where the run continues. Topics without text are omitted.
    """
    layout = config.describe_layout(world_size)
    num_ranks = _format_number(world_size, "rank")
    topics = {
        "model": _describe_model(config),
        "parameters": _describe_parameters(plan),
        "layout": f"{layout} on {num_ranks}",
    }
    # With one stage, the other topics describe it.
    if config.parallel.pp_size > 1:
        for stage in plan.stages:
            topic = f"stage {stage.ps.pp.rank}"
            topics[topic] = _describe_stage(config, world_size, plan, stage)
        topics["bubble"] = f"{100 * plan.bubble:.1f} % of a step"
    versions = [f"{name} {version}" for name, version in get_versions().items()]
    topics |= {
        "device": device,
        "precision": _describe_precision(config),
        "batch": _describe_batch(config, world_size, plan),
        "length": _describe_length(config),
        "start": start,
        "memory": _describe_memory(plan),
        "checkpoint": _describe_checkpoint(config, plan),
        "versions": ", ".join(versions),
    }
    return {topic: text for topic, text in topics.items() if text}


def get_versions() -> dict[str, str]:
    """Return the versions of the software that affects the behavior of a run."""
    return {
        "megatron": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _describe_device(device: torch.device) -> str:
    """Return a description of a device, e.g. `CPU, 4 threads`."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = format_size(properties.total_memory)
        return f"{properties.name} with {memory}"
    threads = _format_number(torch.get_num_threads(), "thread")
    return f"CPU, {threads}"


def _format_number(count: int, unit: str) -> str:
    """Return a number of units: 1 rank, 2 ranks."""
    return f"{count} {unit}" if count == 1 else f"{count} {unit}s"


def format_count(count: float) -> str:
    """Return a number with a unit, e.g. 9.87M or 70.6B."""
    units = {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3}
    for unit, limit in units.items():
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:.0f}"


# Topics


def _describe_model(config: Config) -> str:
    """Describe the sizes and the architecture of the model."""
    model = config.model
    layers = f"{model.num_layers} layers"
    if model.num_mtp_layers:
        layers += f" + {model.num_mtp_layers} for multi-token prediction"
    descriptions = [
        layers,
        f"hidden size {model.hidden_size}",
        f"FFN {model.ffn_size} ({model.activation})",
    ]
    if model.has_experts:
        descriptions.append(
            f"{model.moe_router_topk} of {model.experts} experts of {model.moe_ffn_size}"
        )
    heads = f"{model.num_attention_heads} heads"
    if model.query_groups != model.num_attention_heads:
        heads += f" in {model.query_groups} groups"
    descriptions.append(heads)
    descriptions.append(model.normalization)
    descriptions.append(model.position_embedding_type)
    descriptions.append(f"{model.vocab_size} tokens in the vocabulary")
    return ", ".join(descriptions)


def _describe_parameters(plan: RunPlan) -> str:
    """Describe the number of parameters, in total and for each token."""
    total = format_count(plan.num_parameters)
    active = format_count(plan.num_active)
    if plan.num_active == plan.num_parameters:
        active = "all of them"
    description = f"{total}, {active} active for every token"
    if plan.num_trained < plan.num_parameters:
        description += f", {format_count(plan.num_trained)} trained"
    return description


def _describe_stage(config: Config, world_size: int, plan: RunPlan, stage: StagePlan) -> str:
    """Describe the ranks, layers and memory of a pipeline stage."""
    ranks = _describe_ranks(config, world_size, stage)
    chunks = config.layer_ranges()[stage.ps.pp.rank]
    content = _describe_layers(chunks)
    if stage.ps.pp.is_first:
        content += ", embedding"
    if stage.ps.pp.is_last:
        content += ", output layer"
    num_parameters = format_count(stage.num_parameters)
    memory = format_size(stage.memory.total)
    if not plan.has_activations:
        memory += " without activations"
    return f"{ranks}: {content}; {num_parameters} parameters, {memory} on each"


def _describe_ranks(config: Config, world_size: int, stage: StagePlan) -> str:
    """Describe the ranks of a stage, e.g. ranks 8-15."""
    parallel = config.parallel
    num_ranks = world_size // parallel.pp_size
    # `stage.ps` is of the first TP rank, which the others of its group follow.
    replicas = stage.ps.dp_cp.ranks
    first = replicas[0]
    last = replicas[-1] + parallel.tp_size - 1
    ranks = f"rank {first}"
    if num_ranks > 1:
        ranks = f"ranks {first}-{last}"
    if parallel.use_tp_pp_dp_mapping and stage.ps.dp.size > 1:
        # With this order of ranks, those of a stage are not adjacent.
        ranks = f"{num_ranks} of {ranks}"
    return ranks


def _describe_layers(chunks: Sequence[range]) -> str:
    """Describe the layers of each chunk of a stage."""
    intervals = []
    for layers in chunks:
        if len(layers) == 1:
            intervals.append(f"{layers.start}")
        elif layers:
            intervals.append(f"{layers.start}-{layers.stop - 1}")
    if not intervals:
        return "layers none"
    return f"layers {', '.join(intervals)}"


def _describe_precision(config: Config) -> str:
    """Describe the dtypes of parameters and layers."""
    model = config.model
    name = str(model.params_dtype).removeprefix("torch.")
    if model.low_precision is not None:
        dtype = f"fp8 ({model.fp8}"
        if model.fp8 is None:
            dtype = f"fp4 ({model.fp4}"
        name += f", layers in {dtype}, {model.low_precision} scaling)"
    # The parameters are their own main parameters.
    if name == "float32":
        return name
    return f"{name}, with fp32 main parameters and gradients"


def _describe_batch(config: Config, world_size: int, plan: RunPlan) -> str:
    """Describe the global batch and how it is divided."""
    training = config.training
    num_replicas = config.parallel.dp_size(world_size)
    return (
        f"{training.global_batch_size} samples of {config.data.seq_length} tokens, "
        f"{plan.num_microbatches} micro-batches of {training.micro_batch_size} on each of "
        f"{num_replicas} replicas"
    )


def _describe_length(config: Config) -> str:
    """Describe the length of the run, which is given in samples or in iterations."""
    training = config.training
    seq_length = config.data.seq_length
    # A launch replaces the epochs by samples, a dry run does not read the data.
    if training.train_samples is None and training.sft_epochs is not None:
        return f"{training.sft_epochs} epochs of the training data"
    if training.train_samples is not None:
        tokens = training.train_samples * seq_length
        return f"{training.train_samples} samples = {format_count(tokens)} tokens"
    assert training.train_iters is not None
    assert training.global_batch_size is not None
    samples = training.train_iters * training.global_batch_size
    tokens = samples * seq_length
    return f"{training.train_iters} iterations = {format_count(tokens)} tokens"


def _describe_memory(plan: RunPlan) -> str:
    """Describe the memory of the rank that uses the most."""
    fullest = max(plan.stages, key=lambda stage: stage.memory.total)
    memory = fullest.memory
    if not plan.has_activations:
        # Measuring the passes would delay the start of every run.
        return (
            f"{format_size(memory.total)} on the fullest rank without activations (weights "
            f"{format_size(memory.weights)}, gradients {format_size(memory.gradients)}, optimizer "
            f"{format_size(memory.optimizer)})"
        )
    # The table of stages lists these separately.
    activations = memory.activations + memory.loss + memory.tables + memory.temporary
    sizes = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": activations,
    }
    shares = [f"{name} {format_size(size)}" for name, size in sizes.items()]
    total = format_size(memory.total)
    return f"{total} planned on the fullest rank ({', '.join(shares)})"


def _describe_checkpoint(config: Config, plan: RunPlan) -> str:
    """Describe the size of checkpoints and exports, and where they are saved."""
    size = format_size(plan.checkpoint_bytes)
    checkpoint = config.checkpoint
    if checkpoint.save and checkpoint.async_save:
        largest = max(stage.checkpoint_bytes for stage in plan.stages)
        staged = format_size(largest)
        size += f", saved through {staged} of host memory on each rank,"
    if checkpoint.save_hf_interval is not None:
        export = format_size(plan.export_bytes)
        return (
            f"{size} to {checkpoint.save}; every {checkpoint.save_hf_interval} iterations {export} "
            f"as a Hugging Face model to {checkpoint.save_hf}"
        )
    if checkpoint.save:
        return f"{size} to {checkpoint.save}"
    return f"{size}, not saved: no --save"
