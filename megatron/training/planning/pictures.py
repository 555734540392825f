"""Pictures of plans and checkpoints, drawn with matplotlib (the extra `plots`).

`plan_picture`: the pipeline schedule over time and the memory of every stage. `shares_picture`: which rank or file has
which part of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.core.pipeline_parallel.schedules import Action, consumer, schedule
from megatron.training.planning.run_plan import RunPlan

COLORS = ["#2f6fdb", "#1a936f", "#d9730d", "#a23fbf", "#8a6d3b", "#0e8ba8", "#8e99a8"]
FORWARD, BACKWARD, GRID = "#7aa7f0", "#17408b", "#dde2e9"
BACKWARD_COST = 2.0  # of a forward pass: two matrix products for each one of it
_SHOWN = 4  # micro batches per stage in the picture; the pattern repeats


class Pass(NamedTuple):
    """A pass of a stage in time, in units of a forward pass through one chunk."""

    stage: int
    action: Action
    start: float
    end: float


def timeline(pp_size: int, vpp_size: int, num_microbatches: int) -> list[Pass]:
    """When every pass runs, if messages take no time: after the one before it on its stage, and after its input."""
    passes = [
        (tick.clock, rank, tick.action)
        for rank in range(pp_size)
        for tick in schedule(rank, pp_size, vpp_size, num_microbatches)
        if tick.action is not None
    ]
    free, ready, placed = [0.0] * pp_size, dict[tuple[int, Action], float](), []
    for _, rank, action in sorted(passes, key=lambda row: row[:2]):  # inputs are produced at an earlier clock
        start = max(free[rank], ready.get((rank, action), 0.0))
        free[rank] = start + (1.0 if action.kind == "forward" else BACKWARD_COST)
        message = consumer(rank, action, pp_size, vpp_size)
        if message is not None:
            ready[message.peer, message.input_of] = free[rank]
        placed.append(Pass(rank, action, start, free[rank]))
    return placed


def plan_picture(plan: RunPlan, path: Path, device_bytes: float | None = None, reserve: float = 0.0) -> None:
    """The schedule as a Gantt chart above the memory of every stage; `device_bytes` is the card's line."""
    pyplot, stages = _pyplot(), len(plan.stages)
    heights = [max(1.2, 0.4 * stages), 3.4]
    figure, (gantt, memory) = pyplot.subplots(
        2, 1, figsize=(10, sum(heights) + 1.8), height_ratios=heights, layout="constrained"
    )
    _draw_schedule(gantt, plan)
    _draw_memory(memory, plan, device_bytes, reserve)
    _save(figure, path)


def _draw_schedule(axes: Any, plan: RunPlan) -> None:
    pp_size, vpp_size = len(plan.stages), plan.stages[0].ps.vpp_size
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
            axes.text(center, item.stage, item.action.microbatch, ha="center", va="center", fontsize=7, color=color)
    part = "" if shown == plan.num_microbatches else f", the first {shown} micro batches of {plan.num_microbatches}"
    axes.set_title(f"Pipeline: {100 * plan.bubble:.1f} % of a step is bubble (white){part}\n", loc="left", fontsize=11)
    legend = [("forward", FORWARD), ("backward", BACKWARD)]
    _legend(axes, legend + ([("later chunks are paler", GRID)] if vpp_size > 1 else []), (1.0, 1.0), columns=3)
    axes.set_yticks(range(pp_size), [f"stage {stage}" for stage in range(pp_size)])
    axes.invert_yaxis()
    axes.set_xlabel("time, in forward passes of one chunk", fontsize=9)
    _plain(axes)


def _draw_memory(axes: Any, plan: RunPlan, device_bytes: float | None, reserve: float) -> None:
    parts = ("weights", "gradients", "optimizer", "activations", "loss", "temporary", "tables")
    names = {"loss": "logits and loss", "tables": "rotary tables and masks"}
    bottom, legend = np.zeros(len(plan.stages)), []
    for part, color in zip(parts, COLORS, strict=True):
        sizes = np.array([getattr(stage.memory, part) for stage in plan.stages]) / 1e9
        if sizes.max() > 0.002 * plan.largest / 1e9:
            axes.bar(range(len(sizes)), sizes, bottom=bottom, width=0.62, color=color)
            legend.append((names.get(part, part), color))
        bottom += sizes
    for stage, top in enumerate(bottom):
        axes.text(stage, top, f" {top:.3g} GB\n", ha="center", va="bottom", fontsize=9, linespacing=0.4)
    title = "Memory per rank"
    if device_bytes is not None:
        axes.axhline(device_bytes / 1e9, color="#c2334d", linewidth=1.6)
        axes.axhspan((device_bytes - reserve) / 1e9, device_bytes / 1e9, color="#c2334d", alpha=0.12, linewidth=0)
        fits = plan.largest + reserve <= device_bytes
        title += f": {'fits' if fits else 'DOES NOT FIT'} {device_bytes / 1e9:.0f} GB"
        title += f" less {reserve / 1e9:.0f} GB in reserve (red)" if reserve else ""
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylim(0, 1.12 * max(plan.largest, device_bytes or 0) / 1e9)
    axes.set_xlim(-0.6, len(plan.stages) - 0.4)
    axes.set_xticks(range(len(plan.stages)), [f"stage {stage}" for stage in range(len(plan.stages))])
    axes.set_ylabel("GB", fontsize=9)
    _legend(axes, legend[::-1], (1.0, 1.0), outside=True)
    _plain(axes)


def shares_picture(shares: Mapping[str, Mapping[str, Mapping[str, int]]], path: Path, title: str, columns: str) -> None:
    """Bytes by column (a rank or file), part of the model and kind of tensor.

    Above how many bytes of each kind a column has, below which parts of the model they belong to.
    """
    pyplot, names = _pyplot(), list(shares)
    parts = _in_order({part for column in shares.values() for part in column})
    kinds = list(dict.fromkeys(kind for column in shares.values() for part in column.values() for kind in part))
    heights = [2.4, max(1.6, 0.26 * len(parts))]
    figure, (bars, grid) = pyplot.subplots(
        2, 1, figsize=(max(7.0, 2.2 + 0.32 * len(names)), sum(heights) + 1.6), height_ratios=heights, sharex=True,
        layout="constrained",
    )  # fmt: skip
    bottom = np.zeros(len(names))
    for kind, color in zip(kinds, COLORS * (1 + len(kinds) // len(COLORS)), strict=False):
        sizes = np.array([sum(part.get(kind, 0) for part in column.values()) for column in shares.values()])
        bars.bar(range(len(names)), sizes / 1e6, bottom=bottom / 1e6, width=0.72, color=color)
        bottom += sizes
    bars.set_title(title, loc="left", fontsize=11)
    bars.set_ylabel("MB", fontsize=9)
    _legend(bars, list(zip(kinds, COLORS, strict=False)), (1.0, 1.0), outside=True)
    _plain(bars)
    sizes = np.array([[sum(shares[name].get(part, {}).values()) for name in names] for part in parts], dtype=float)
    image = grid.imshow(np.where(sizes > 0, sizes / 1e6, np.nan), aspect="auto", cmap="Blues", vmin=0)
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
        return (first["layer"], int(number), "") if word == "layer" else (first.get(part, 4), 0, part)

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
    axes: Any, rows: Sequence[tuple[str, str]], anchor: tuple[float, float], columns: int = 1, outside: bool = False
) -> None:
    from matplotlib.patches import Patch

    place = {"loc": "upper left" if outside else "lower right", "bbox_to_anchor": anchor, "ncols": columns}
    axes.legend(handles=[Patch(color=color, label=name) for name, color in rows], frameon=False, fontsize=9, **place)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)
