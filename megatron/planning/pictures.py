"""Pictures of plans and checkpoints, drawn with matplotlib (the extra `plots`).

They show the pipeline schedule over time, the memory of stages, and the contents of ranks or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.core.pipeline_parallel.schedules import Action, consumer, schedule
from megatron.planning.run_plan import MEMORY_PARTS, RunPlan

COLORS = ["#2f6fdb", "#1a936f", "#d9730d", "#a23fbf", "#8a6d3b", "#0e8ba8", "#8e99a8"]
FORWARD_COLOR = "#7aa7f0"
BACKWARD_COLOR = "#17408b"
GRID_COLOR = "#dde2e9"
LIMIT_COLOR = "#c2334d"
BACKWARD_COST = 2.0  # of a forward pass: two matrix products instead of one
MAX_MICROBATCHES = 4  # per stage in the picture; more of them repeat the pattern in the middle
BREAK_WIDTH = 0.05  # of the picture, for the omitted middle of a long schedule
MAX_LABELED_PASSES = 24  # per stage; labels of more passes would overlap
SMALLEST_PART = 0.002  # fraction of the memory below which a part is not drawn
GB = 1e9


class Pass(NamedTuple):
    """A pass of a stage in time, in units of a forward pass through one chunk."""

    stage: int
    action: Action
    start: float
    end: float


def make_timeline(pp_size: int, vpp_size: int, num_microbatches: int) -> list[Pass]:
    """Return the start and end of all passes, assuming that messages take no time.

    A pass starts as soon as the previous pass of its stage has ended and its input is available.
    """
    # The passes of all stages, producers before consumers: inputs have an earlier clock.
    ticks = []
    for rank in range(pp_size):
        for tick in schedule(rank, pp_size, vpp_size, num_microbatches):
            if tick.action is not None:
                ticks.append((tick.clock, rank, tick.action))
    ticks.sort(key=lambda row: row[:2])  # by clock and rank

    # Start each of them when its stage and its input are ready. Passes without an entry in
    # `input_ready` read the batch, or follow a pass of their own stage.
    stage_ready = [0.0] * pp_size
    input_ready = dict[tuple[int, Action], float]()
    passes = []
    for _, rank, action in ticks:
        start = max(stage_ready[rank], input_ready.get((rank, action), 0.0))
        duration = 1.0
        if action.kind == "backward":
            duration = BACKWARD_COST
        end = start + duration
        stage_ready[rank] = end

        # The result of a pass is the input of a pass of a neighboring stage.
        message = consumer(rank, action, pp_size, vpp_size)
        if message is not None:
            input_ready[message.peer, message.input_of] = end
        passes.append(Pass(rank, action, start, end))
    return passes


class Excerpt(NamedTuple):
    """Head and tail of a timeline, and the omitted time in between."""

    passes: list[Pass]
    # The omitted time. Both are equal if the excerpt is the whole timeline.
    start: float = 0.0
    end: float = 0.0

    @property
    def omitted(self) -> float:
        """Return the length of the omitted time."""
        return self.end - self.start


def select_excerpt(passes: Sequence[Pass], pp_size: int, vpp_size: int) -> Excerpt:
    """Return the head and the tail of a long timeline, which contain its whole bubble."""
    total = max(item.end for item in passes)
    cost_of_chunk = 1 + BACKWARD_COST
    work = cost_of_chunk * vpp_size * MAX_MICROBATCHES * pp_size
    bubble = cost_of_chunk * (pp_size - 1)
    drawn = work + bubble
    if total <= drawn:
        return Excerpt(list(passes))

    # Omit the middle. A pass at the edge of the omitted time is cut.
    start = drawn / 2
    end = total - drawn / 2
    selected = []
    for item in passes:
        if item.start < start:
            selected.append(item._replace(end=min(item.end, start)))
        if item.end > end:
            selected.append(item._replace(start=max(item.start, end)))
    return Excerpt(selected, start, end)


def draw_plan(
    plan: RunPlan,
    path: Path,
    device_bytes: float | None = None,
    reserve: float = 0.0,
) -> None:
    """Draw the schedule as a Gantt chart above the memory of every stage.

    `device_bytes` is the memory of a device, drawn as a line, of which `reserve` is not available.
    """
    schedule_height = max(1.2, 0.4 * len(plan.stages))
    figure, (gantt, memory) = _make_figure(
        width=10,
        top=schedule_height,
        bottom=3.4,
        margin=1.8,
    )
    _draw_schedule(gantt, plan)
    _draw_memory(memory, plan, device_bytes, reserve)
    _save(figure, path)


class _Break(NamedTuple):
    """The omitted middle of a schedule in the picture: a band between head and tail."""

    start: float  # where the head ends
    width: float
    shift: float  # of the tail, to the left


def _draw_schedule(axes: Any, plan: RunPlan) -> None:
    """Draw the passes of all stages over time, without the middle of a long schedule."""
    pp_size = len(plan.stages)
    vpp_size = plan.stages[0].ps.vpp_size
    timeline = make_timeline(pp_size, vpp_size, plan.num_microbatches)
    end_of_step = max(item.end for item in timeline)
    excerpt = select_excerpt(timeline, pp_size, vpp_size)
    band = _Break(excerpt.start, 0.0, 0.0)
    if excerpt.omitted:
        width = BREAK_WIDTH * (end_of_step - excerpt.omitted)
        band = _Break(excerpt.start, width, excerpt.omitted - width)

    # Draw the passes, one row per stage.
    num_passes = plan.num_microbatches * vpp_size
    has_labels = num_passes <= MAX_LABELED_PASSES
    for item in excerpt.passes:
        is_in_tail = item.start >= excerpt.end > excerpt.start
        if is_in_tail:
            item = item._replace(start=item.start - band.shift, end=item.end - band.shift)
        _draw_pass(axes, item, vpp_size, has_labels)
    if excerpt.omitted:
        _draw_break(axes, band, pp_size)

    # Label the time before the tail is moved.
    ticks = _choose_ticks(excerpt, end_of_step, band.shift)
    labels = [str(time) for time in ticks.values()]
    axes.set_xticks(list(ticks), labels)

    # Add title, legend and axes.
    bubble = 100 * plan.bubble
    title = f"Pipeline: {bubble:.1f} % of a step is bubble (white)"
    if excerpt.omitted:
        share = 100 * excerpt.omitted / end_of_step
        title += f", {share:.0f} % of the step is omitted"
    axes.set_title(f"{title}\n", loc="left", fontsize=11)
    legend = [("forward", FORWARD_COLOR), ("backward", BACKWARD_COLOR)]
    if vpp_size > 1:
        legend.append(("later chunks are paler", GRID_COLOR))
    _add_legend(axes, legend, columns=3)
    stage_names = [f"stage {stage}" for stage in range(pp_size)]
    axes.set_yticks(range(pp_size), stage_names)
    axes.invert_yaxis()  # stage 0 at the top
    axes.set_xlabel("time (1 = forward pass of one chunk)", fontsize=9)
    _apply_style(axes)


def _choose_ticks(excerpt: Excerpt, end_of_step: float, shift: float) -> dict[float, int]:
    """Return the times to label, by their position in the picture: about 8 in all."""
    drawn = end_of_step - excerpt.omitted
    step = max(1, round(drawn / 8))
    if not excerpt.omitted:
        times = range(0, round(end_of_step) + 1, step)
        return {float(time): time for time in times}

    # Count forwards in the head and backwards in the tail, which is moved by `shift`.
    head = range(0, round(excerpt.start) - 1, step)
    tail = range(round(end_of_step), round(excerpt.end) + 1, -step)
    ticks = {float(time): time for time in head}
    for time in tail:
        ticks[time - shift] = time
    return ticks


def _draw_break(axes: Any, band: _Break, pp_size: int) -> None:
    """Draw the band that replaces the middle of the schedule."""
    axes.axvspan(band.start, band.start + band.width, color=GRID_COLOR, linewidth=0)
    x = band.start + band.width / 2
    y = (pp_size - 1) / 2
    axes.text(x, y, "no bubble", ha="center", va="center", rotation=90, fontsize=8)


def _draw_pass(axes: Any, item: Pass, vpp_size: int, has_label: bool) -> None:
    """Draw a bar, paler for later chunks, with the number of the micro-batch as its label."""
    color = FORWARD_COLOR
    label_color = "#1c2430"
    if item.action.kind == "backward":
        color = BACKWARD_COLOR
        label_color = "white"

    # A bar from begin to end in the row of the stage
    duration = item.end - item.start
    axes.barh(
        item.stage,
        duration,
        left=item.start,
        height=0.86,
        edgecolor="white",
        linewidth=0.8,
        color=color,
        alpha=1.0 - 0.45 * item.action.chunk / vpp_size,
    )
    if has_label:
        center = (item.start + item.end) / 2
        axes.text(
            center,
            item.stage,
            item.action.microbatch,
            ha="center",
            va="center",
            fontsize=7,
            color=label_color,
        )


def _draw_memory(axes: Any, plan: RunPlan, device_bytes: float | None, reserve: float) -> None:
    """Draw a bar for the memory of each stage, and the limit of the device."""
    largest = plan.largest / GB
    legend = _draw_memory_bars(axes, plan)

    # The memory of the device
    title = "Memory per rank"
    top_of_axis = largest
    if device_bytes is not None:
        device_size = device_bytes / GB
        reserve_size = reserve / GB
        available = device_size - reserve_size
        top_of_axis = max(top_of_axis, device_size)
        axes.axhline(device_size, color=LIMIT_COLOR, linewidth=1.6)
        axes.axhspan(available, device_size, color=LIMIT_COLOR, alpha=0.12, linewidth=0)
        verdict = "DOES NOT FIT"
        if plan.largest + reserve <= device_bytes:
            verdict = "fits"
        title += f": {verdict} {device_size:.0f} GB"
        if reserve:
            title += f" less {reserve_size:.0f} GB in reserve (red)"

    # Title, legend and axes, with room for the labels of the bars
    stages = range(len(plan.stages))
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylim(0, 1.12 * top_of_axis)
    right = len(stages) - 0.4
    axes.set_xlim(-0.6, right)
    stage_names = [f"stage {stage}" for stage in stages]
    axes.set_xticks(stages, stage_names)
    axes.set_ylabel("GB", fontsize=9)
    _add_legend(axes, legend[::-1], outside=True)
    _apply_style(axes)


def _draw_memory_bars(axes: Any, plan: RunPlan) -> list[tuple[str, str]]:
    """Draw a bar for each stage, stacked by part of the memory. Returns the legend."""
    stages = range(len(plan.stages))
    smallest_drawn = SMALLEST_PART * plan.largest / GB
    bottom = np.zeros(len(stages))
    legend = []
    for (component, name), color in zip(MEMORY_PARTS.items(), COLORS, strict=True):
        nbytes = [getattr(stage.memory, component) for stage in plan.stages]
        sizes = np.array(nbytes) / GB
        # Parts have the same color in every picture, whether they are large enough to be seen.
        if sizes.max() > smallest_drawn:
            axes.bar(stages, sizes, bottom=bottom, width=0.62, color=color)
            legend.append((name, color))
        bottom += sizes

    # The total above each bar
    for stage, top in enumerate(bottom):
        label = f" {top:.3g} GB\n"
        axes.text(stage, top, label, ha="center", va="bottom", fontsize=9, linespacing=0.4)
    return legend


Shares = Mapping[str, Mapping[str, Mapping[str, int]]]
"""Bytes by column (a rank or a file), part of the model and kind of tensor."""


def draw_shares(shares: Shares, path: Path, title: str, columns: str) -> None:
    """Draw which parts of a model each rank or file contains.

    Above: the bytes of each column by kind of tensor; below: by part of the model. `columns` is the
    label of the columns.
    """
    # Collect the parts, and the kinds in the order of their first tensor.
    all_parts: set[str] = set()
    all_kinds: dict[str, None] = {}
    for column in shares.values():
        all_parts |= column.keys()
        for sizes_by_kind in column.values():
            all_kinds |= dict.fromkeys(sizes_by_kind)
    model_parts = sorted(all_parts, key=_order_of_part)

    # Two pictures with the same columns. Each column and part has the space of its label.
    width = max(7.0, 2.2 + 0.32 * len(shares))
    grid_height = max(1.6, 0.26 * len(model_parts))
    figure, (bars, grid) = _make_figure(
        width=width,
        top=2.4,
        bottom=grid_height,
        margin=1.6,
        shares_x=True,
    )
    _draw_kinds(bars, shares, list(all_kinds))
    bars.set_title(title, loc="left", fontsize=11)
    image = _draw_parts(grid, shares, model_parts)

    # The scale of the colors
    color_axes = grid.inset_axes([1.02, 0.05, 0.02, 0.9])  # to the right of the grid
    figure.colorbar(image, cax=color_axes, label="MB")
    grid.set_xlabel(columns, fontsize=9)
    _save(figure, path)


def _draw_kinds(axes: Any, shares: Shares, tensor_kinds: Sequence[str]) -> None:
    """Draw a bar for each column, stacked by kind of tensor."""
    # The colors repeat if there are more kinds than colors.
    num_rounds = 1 + len(tensor_kinds) // len(COLORS)
    colors = COLORS * num_rounds

    # Each kind is drawn on top of the previous ones.
    positions = range(len(shares))
    bottom = np.zeros(len(shares))
    for tensor_kind, color in zip(tensor_kinds, colors, strict=False):
        sizes = []
        for column in shares.values():
            size = sum(sizes_by_kind.get(tensor_kind, 0) for sizes_by_kind in column.values())
            sizes.append(size)

        megabytes = np.array(sizes) / 1e6
        axes.bar(positions, megabytes, bottom=bottom, width=0.72, color=color)
        bottom += megabytes
    axes.set_ylabel("MB", fontsize=9)
    legend = list(zip(tensor_kinds, COLORS, strict=False))
    _add_legend(axes, legend, outside=True)
    _apply_style(axes)


def _draw_parts(axes: Any, shares: Shares, model_parts: Sequence[str]) -> Any:
    """Draw a heat map of the bytes by part of the model and column, and return the image."""
    # [parts, columns]. NaN is drawn white.
    grid_shape = (len(model_parts), len(shares))
    megabytes = np.full(grid_shape, np.nan)
    for x, column in enumerate(shares.values()):
        for y, model_part in enumerate(model_parts):
            size_by_kind = column.get(model_part, {})
            size = sum(size_by_kind.values())
            if size > 0:
                megabytes[y, x] = size / 1e6
    image = axes.imshow(megabytes, aspect="auto", cmap="Blues", vmin=0)

    # Label every part and column, or every n-th if there is not enough space for all.
    row_step = max(1, len(model_parts) // 60)
    rows = range(0, len(model_parts), row_step)
    axes.set_yticks(rows, model_parts[::row_step], fontsize=7)
    names = list(shares)
    column_step = max(1, len(names) // 64)
    columns = range(0, len(names), column_step)
    column_labels = names[::column_step]
    axes.set_xticks(columns, column_labels, rotation=90, fontsize=7)
    return image


def _order_of_part(model_part: str) -> tuple[int, int, str]:
    """Return a sort key: embedding, layers by number, final norm, output layer, objects."""
    position = {"embedding": 0, "layer": 1, "final norm": 2, "output layer": 3}
    last = len(position)  # objects
    word, _, layer = model_part.rpartition(" ")
    if word == "layer":
        return position["layer"], int(layer), ""
    return position.get(model_part, last), 0, model_part


def _import_pyplot() -> Any:
    """Return matplotlib.pyplot. Raises ValueError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'matplotlib>=3.8'") from None
    matplotlib.use("Agg")  # without a display
    from matplotlib import pyplot

    return pyplot


def _make_figure(
    width: float,
    top: float,
    bottom: float,
    margin: float,
    shares_x: bool = False,
) -> tuple[Any, Any]:
    """Return a figure with two axes, one above the other, and the axes; sizes are in inches."""
    return _import_pyplot().subplots(
        2,
        1,
        figsize=(width, top + bottom + margin),
        height_ratios=[top, bottom],
        sharex=shares_x,
        layout="constrained",
    )


def _apply_style(axes: Any) -> None:
    """Remove lines that are not data, and add a grid for the axis of values."""
    hidden_lines = axes.spines[["top", "right", "left"]]
    hidden_lines.set_visible(False)
    axes.tick_params(length=0, labelsize=9)
    axes.set_axisbelow(True)  # bars cover the grid
    value_axis = "y" if axes.get_ylabel() else "x"
    axes.grid(axis=value_axis, color=GRID_COLOR)


def _add_legend(
    axes: Any,
    rows: Sequence[tuple[str, str]],
    columns: int = 1,
    outside: bool = False,
) -> None:
    """Add a legend of (label, color) above the axes, or to the right with `outside`."""
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=label) for label, color in rows]
    location = "upper left" if outside else "lower right"
    axes.legend(
        handles=handles,
        frameon=False,
        fontsize=9,
        loc=location,
        bbox_to_anchor=(1.0, 1.0),
        ncols=columns,
    )


def _save(figure: Any, path: Path) -> None:
    """Write the picture in the format of the file name, and free its memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    _import_pyplot().close(figure)
