"""A plan in words and in pictures: what a run is, printed before its first iteration and by
--dry-run, its pipeline schedule over time and the memory of its stages; and which rank or file has
which part of a checkpoint.

Pictures are drawn with matplotlib (the extra `plots`).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron import __version__
from megatron.core.pipeline_parallel.schedules import Action, consumer, schedule
from megatron.core.progress import format_size
from megatron.training.config.checkpoint_args import read_checkpoint_args
from megatron.training.config.parsing import parse_args, replica_size
from megatron.training.config.run_config import Config, ModelProvider
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.planning.run_plan import MEMORY_PARTS, RunPlan, StagePlan, plan_run
from megatron.training.rendezvous import environment_world_size


def summarize(
    config: Config, world_size: int, plan: RunPlan, device: str = "", start: str = ""
) -> dict[str, str]:
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
        f"{plan.num_microbatches} micro-batches of {training.micro_batch_size} on each of "
        f"{config.parallel.dp_size(world_size)} replicas",
        "length": _length(config),
        "start": start,
        "memory": memory_of(plan),
        "checkpoint": format_size(plan.checkpoint_bytes)
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

    It has $WORLD_SIZE processes, else as many as one replica of the model takes. Raises ValueError
    as a run would.
    """
    world_size = environment_world_size() if "WORLD_SIZE" in os.environ else replica_size(argv)
    # This process reads the checkpoint alone: a dry run has no process group, whatever it plans.
    config = parse_args(argv, world_size, read_checkpoint_args(argv))
    set_planned_vocab_size(config)
    return plan_page(config, world_size, plan_run(config, world_size, model_provider))


def as_lines(topics: dict[str, str]) -> str:
    """The summary as it is printed."""
    return "\n".join(f"   {topic:11} {text}" for topic, text in topics.items())


def arguments(flags: dict[str, Any]) -> str:
    """All arguments, as Megatron-LM prints them (--print-args)."""
    rows = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in flags.items()]
    title = " arguments "
    end = " end of arguments "
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
    return {
        "megatron": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


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
    shares = ", ".join(f"{name} {format_size(size)}" for name, size in parts.items())
    return f"{format_size(memory.total)} planned on the fullest rank ({shares})"


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
    rank = stage.ps.pp.rank
    size = world_size // config.parallel.pp_size
    first = stage.ps.dp_cp.ranks[0]
    last = stage.ps.dp_cp.ranks[-1]
    chunks = [
        f"{c.start}" if len(c) == 1 else f"{c.start}-{c.stop - 1}"
        for c in config.layer_ranges()[rank]
        if c
    ]
    ends = [", embedding"] * stage.ps.pp.is_first + [", output layer"] * stage.ps.pp.is_last
    ranks = f"rank {first}" if size == 1 else f"ranks {first}-{last + config.parallel.tp_size - 1}"
    if config.parallel.use_tp_pp_dp_mapping and stage.ps.dp.size > 1:
        ranks = f"{size} of {ranks}"
    return (
        f"{ranks}: layers {', '.join(chunks) or 'none'}{''.join(ends)}; {amount(stage.num_parameters)} parameters, "
        f"{format_size(stage.memory.total)} on each"
    )


def device_name(device: torch.device) -> str:
    """Such as CPU, 4 threads."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return f"{torch.cuda.get_device_name(device)} with {format_size(memory)}"
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads > 1)}"


def _precision(config: Config) -> str:
    name = str(config.model.params_dtype).removeprefix("torch.")
    if config.model.low_precision is not None:
        narrow = (
            f"fp8 ({config.model.fp8}"
            if config.model.fp8 is not None
            else f"fp4 ({config.model.fp4}"
        )
        name += f", layers in {narrow}, {config.model.low_precision} scaling)"
    return name if name == "float32" else f"{name}, with fp32 main parameters and gradients"


def _length(config: Config) -> str:
    training = config.training
    seq = config.data.seq_length
    if training.train_samples is not None:
        return f"{training.train_samples} samples = {amount(training.train_samples * seq)} tokens"
    assert training.train_iters is not None and training.global_batch_size is not None
    tokens = training.train_iters * training.global_batch_size * seq
    return f"{training.train_iters} iterations = {amount(tokens)} tokens"


# Pictures

COLORS = ["#2f6fdb", "#1a936f", "#d9730d", "#a23fbf", "#8a6d3b", "#0e8ba8", "#8e99a8"]
FORWARD = "#7aa7f0"
BACKWARD = "#17408b"
GRID = "#dde2e9"
BACKWARD_COST = 2.0  # of a forward pass: two matrix products for each one of it
_SHOWN = 4  # micro-batches per stage in the picture; the pattern repeats


class Pass(NamedTuple):
    """A pass of a stage in time, in units of a forward pass through one chunk."""

    stage: int
    action: Action
    start: float
    end: float


def timeline(pp_size: int, vpp_size: int, num_microbatches: int) -> list[Pass]:
    """When every pass runs, if messages take no time: after the one before it on its stage, and
    after its input.
    """
    passes = [
        (tick.clock, rank, tick.action)
        for rank in range(pp_size)
        for tick in schedule(rank, pp_size, vpp_size, num_microbatches)
        if tick.action is not None
    ]
    free = [0.0] * pp_size
    ready = dict[tuple[int, Action], float]()
    placed = []
    for _, rank, action in sorted(
        passes, key=lambda row: row[:2]
    ):  # inputs are produced at an earlier clock
        start = max(free[rank], ready.get((rank, action), 0.0))
        free[rank] = start + (1.0 if action.kind == "forward" else BACKWARD_COST)
        message = consumer(rank, action, pp_size, vpp_size)
        if message is not None:
            ready[message.peer, message.input_of] = free[rank]
        placed.append(Pass(rank, action, start, free[rank]))
    return placed


def plan_picture(
    plan: RunPlan, path: Path, device_bytes: float | None = None, reserve: float = 0.0
) -> None:
    """The schedule as a Gantt chart above the memory of every stage; `device_bytes` is the card's
    line.
    """
    pyplot = _pyplot()
    stages = len(plan.stages)
    heights = [max(1.2, 0.4 * stages), 3.4]
    figure, (gantt, memory) = pyplot.subplots(
        2, 1, figsize=(10, sum(heights) + 1.8), height_ratios=heights, layout="constrained"
    )
    _draw_schedule(gantt, plan)
    _draw_memory(memory, plan, device_bytes, reserve)
    _save(figure, path)


def _draw_schedule(axes: Any, plan: RunPlan) -> None:
    pp_size = len(plan.stages)
    vpp_size = plan.stages[0].ps.vpp_size
    shown = min(plan.num_microbatches, max(_SHOWN, 2) * pp_size)
    for item in timeline(pp_size, vpp_size, shown):
        forward = item.action.kind == "forward"
        shade = 1.0 - 0.45 * item.action.chunk / vpp_size
        axes.barh(
            item.stage, item.end - item.start, left=item.start, height=0.86, edgecolor="white", linewidth=0.8,
            color=FORWARD if forward else BACKWARD, alpha=shade,
        )  # fmt: skip
        if shown * vpp_size <= 24:
            color = "#1c2430" if forward else "white"
            center = (item.start + item.end) / 2
            axes.text(
                center,
                item.stage,
                item.action.microbatch,
                ha="center",
                va="center",
                fontsize=7,
                color=color,
            )
    part = (
        ""
        if shown == plan.num_microbatches
        else f", the first {shown} micro-batches of {plan.num_microbatches}"
    )
    axes.set_title(
        f"Pipeline: {100 * plan.bubble:.1f} % of a step is bubble (white){part}\n",
        loc="left",
        fontsize=11,
    )
    legend = [("forward", FORWARD), ("backward", BACKWARD)]
    _legend(
        axes,
        legend + ([("later chunks are paler", GRID)] if vpp_size > 1 else []),
        (1.0, 1.0),
        columns=3,
    )
    axes.set_yticks(range(pp_size), [f"stage {stage}" for stage in range(pp_size)])
    axes.invert_yaxis()
    axes.set_xlabel("time, in forward passes of one chunk", fontsize=9)
    _plain(axes)


def _draw_memory(axes: Any, plan: RunPlan, device_bytes: float | None, reserve: float) -> None:
    bottom = np.zeros(len(plan.stages))
    legend = []
    for (part, name), color in zip(MEMORY_PARTS.items(), COLORS, strict=True):
        sizes = np.array([getattr(stage.memory, part) for stage in plan.stages]) / 1e9
        if sizes.max() > 0.002 * plan.largest / 1e9:
            axes.bar(range(len(sizes)), sizes, bottom=bottom, width=0.62, color=color)
            legend.append((name, color))
        bottom += sizes
    for stage, top in enumerate(bottom):
        axes.text(
            stage, top, f" {top:.3g} GB\n", ha="center", va="bottom", fontsize=9, linespacing=0.4
        )
    title = "Memory per rank"
    if device_bytes is not None:
        axes.axhline(device_bytes / 1e9, color="#c2334d", linewidth=1.6)
        axes.axhspan(
            (device_bytes - reserve) / 1e9,
            device_bytes / 1e9,
            color="#c2334d",
            alpha=0.12,
            linewidth=0,
        )
        fits = plan.largest + reserve <= device_bytes
        title += f": {'fits' if fits else 'DOES NOT FIT'} {device_bytes / 1e9:.0f} GB"
        title += f" less {reserve / 1e9:.0f} GB in reserve (red)" if reserve else ""
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylim(0, 1.12 * max(plan.largest, device_bytes or 0) / 1e9)
    axes.set_xlim(-0.6, len(plan.stages) - 0.4)
    axes.set_xticks(
        range(len(plan.stages)), [f"stage {stage}" for stage in range(len(plan.stages))]
    )
    axes.set_ylabel("GB", fontsize=9)
    _legend(axes, legend[::-1], (1.0, 1.0), outside=True)
    _plain(axes)


def shares_picture(
    shares: Mapping[str, Mapping[str, Mapping[str, int]]], path: Path, title: str, columns: str
) -> None:
    """Bytes by column (a rank or file), part of the model and kind of tensor.

    Above how many bytes of each kind a column has, below which parts of the model they belong to.
    """
    pyplot = _pyplot()
    names = list(shares)
    parts = _in_order({part for column in shares.values() for part in column})
    kinds = list(
        dict.fromkeys(
            kind for column in shares.values() for part in column.values() for kind in part
        )
    )
    heights = [2.4, max(1.6, 0.26 * len(parts))]
    figure, (bars, grid) = pyplot.subplots(
        2, 1, figsize=(max(7.0, 2.2 + 0.32 * len(names)), sum(heights) + 1.6), height_ratios=heights, sharex=True,
        layout="constrained",
    )  # fmt: skip
    bottom = np.zeros(len(names))
    for kind, color in zip(kinds, COLORS * (1 + len(kinds) // len(COLORS)), strict=False):
        sizes = np.array(
            [sum(part.get(kind, 0) for part in column.values()) for column in shares.values()]
        )
        bars.bar(range(len(names)), sizes / 1e6, bottom=bottom / 1e6, width=0.72, color=color)
        bottom += sizes
    bars.set_title(title, loc="left", fontsize=11)
    bars.set_ylabel("MB", fontsize=9)
    _legend(bars, list(zip(kinds, COLORS, strict=False)), (1.0, 1.0), outside=True)
    _plain(bars)
    sizes = np.array(
        [[sum(shares[name].get(part, {}).values()) for name in names] for part in parts],
        dtype=float,
    )
    image = grid.imshow(
        np.where(sizes > 0, sizes / 1e6, np.nan), aspect="auto", cmap="Blues", vmin=0
    )
    figure.colorbar(image, cax=grid.inset_axes([1.02, 0.05, 0.02, 0.9]), label="MB")
    step = max(1, len(parts) // 60)
    grid.set_yticks(range(0, len(parts), step), parts[::step], fontsize=7)
    step = max(1, len(names) // 64)
    grid.set_xticks(range(0, len(names), step), names[::step], rotation=90, fontsize=7)
    grid.set_xlabel(columns, fontsize=9)
    _save(figure, path)


def _in_order(parts: set[str]) -> list[str]:
    """Embedding, layers by number, what follows them, objects."""
    first = {"embedding": 0, "layer": 1, "final norm": 2, "output layer": 3}

    def place(part: str) -> tuple[int, int, str]:
        word, _, number = part.rpartition(" ")
        return (
            (first["layer"], int(number), "") if word == "layer" else (first.get(part, 4), 0, part)
        )

    return sorted(parts, key=place)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'matplotlib>=3.8'") from None
    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    return pyplot


def _plain(axes: Any) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, labelsize=9)
    axes.set_axisbelow(True)
    axes.grid(axis="y" if axes.get_ylabel() else "x", color=GRID)


def _legend(
    axes: Any,
    rows: Sequence[tuple[str, str]],
    anchor: tuple[float, float],
    columns: int = 1,
    outside: bool = False,
) -> None:
    from matplotlib.patches import Patch

    place = {
        "loc": "upper left" if outside else "lower right",
        "bbox_to_anchor": anchor,
        "ncols": columns,
    }
    axes.legend(
        handles=[Patch(color=color, label=name) for name, color in rows],
        frameon=False,
        fontsize=9,
        **place,
    )


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)
