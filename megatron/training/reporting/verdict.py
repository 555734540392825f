"""The verdict about a run: sentences of the report, each about one property."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron.training.reporting.recorded_launches import (
    Point,
    RecordedLaunch,
    Row,
    find_kept_iterations,
    make_curve,
)

_PRODUCTIVE_SHARE = 0.9  # below, the verdict is a warning
_TREND_SHARE = 0.1  # of the losses, compared with as many before
_SPIKE_WINDOW = 20  # points of the curve with which a loss is compared
_SPIKE_DEVIATIONS = 8.0  # median absolute deviations above the median of the window
_SPIKE_SHARE = 0.1  # least increase
_SLOW_RATIO = 1.2  # of the slowest rank to the median of the others
_INPUT_SHARE = 0.05  # of the training time, above which waiting for data is a warning
_SILENCE_SECONDS = 600.0  # without an end or a new line for longer, a launch is not running
# Activities of `compute_goodput`, as the page calls them.
_LOSSES = {
    "done again later": "iterations repeated later",
    "held up by saves": "saves that blocked training",
    "between starts": "time between launches",
}


class Sentence(NamedTuple):
    """A sentence of the verdict on a run."""

    mood: Literal["good", "warn", "bad"]
    text: str


def make_verdict(
    launches: Sequence[RecordedLaunch],
    train_iters: int,
    checkpoints: Sequence[Row],
    goodput: Mapping[str, float],
    now: float,
) -> list[Row]:
    """Return the state of the run in sentences, as plain values."""
    sentences = [
        _judge_progress(launches[-1], train_iters, now),
        _judge_numbers(launches),
        _judge_loss(launches),
        _judge_spikes(launches),
        _judge_ranks(launches[-1]),
        _judge_input(launches[-1]),
        _judge_checkpoints(checkpoints),
        _judge_time(goodput),
    ]
    return [sentence._asdict() for sentence in sentences if sentence is not None]


def _judge_progress(newest: RecordedLaunch, train_iters: int, now: float) -> Sentence:
    """Report whether the newest launch is running, or how it ended."""
    progress = f"iteration {newest.last} of {train_iters}"
    if newest.end is None:
        silence = max(0.0, now - newest.ended)
        if silence < _SILENCE_SECONDS:
            return Sentence("good", f"Running: {progress}.")
        age = _format_duration(silence)
        return Sentence(
            "bad",
            f"Killed or hanging: no end is recorded, and the last line, at {progress}, is {age} "
            "old.",
        )
    reason = newest.end["reason"]
    if newest.end["failed"]:
        return Sentence("bad", f"Failed at {progress}: {reason}")
    if newest.last >= train_iters:
        return Sentence("good", f"Finished: all {train_iters} iterations.")
    return Sentence("warn", f"Ended early at {progress}: {reason}")


def _judge_numbers(launches: Sequence[RecordedLaunch]) -> Sentence:
    """Report losses that are not finite, and skipped iterations."""
    num_nan = 0
    num_skipped = 0
    for launch in launches:
        for row in launch.intervals:
            num_nan += row.get("nan", 0)
            num_skipped += row.get("skipped", 0)
    skipped = f"skipped iterations: {num_skipped}."
    if num_nan:
        return Sentence("bad", f"Losses that are not finite: {num_nan}; {skipped}")
    if num_skipped:
        return Sentence("warn", f"All losses are finite; {skipped}")
    return Sentence("good", "All losses are finite; no iteration was skipped.")


def _judge_loss(launches: Sequence[RecordedLaunch]) -> Sentence | None:
    """Compare the mean of the last losses with the mean of as many before them."""
    # Losses of iterations that were not repeated
    losses = []
    for launch, kept in zip(launches, find_kept_iterations(launches), strict=True):
        for row in launch.intervals:
            loss = row.get("lm_loss")
            if loss is not None and row["iteration"] <= kept:
                losses.append(loss)
    if not losses:
        return None
    newest = losses[-1]

    # Means over a share of the run are less noisy than single losses.
    size = max(1, int(_TREND_SHARE * len(losses)))
    if len(losses) < 2 * size:
        return Sentence("good", f"Training loss {newest:.3f}.")
    recent = statistics.fmean(losses[-size:])
    before = statistics.fmean(losses[-2 * size : -size])
    change = 0.0
    if before != 0:
        change = (recent - before) / abs(before)

    trend = f"{change:+.2%}"
    if trend in ("+0.00%", "-0.00%"):
        trend = "unchanged"
    text = f"Training loss {newest:.3f}, {trend} over the last {_TREND_SHARE:.0%} of it."
    if change < 0.01:
        return Sentence("good", text)
    return Sentence("warn", text)


def _judge_spikes(launches: Sequence[RecordedLaunch]) -> Sentence | None:
    """Report losses far above those before them."""
    curve: list[Point] = []
    for launch, kept in zip(launches, find_kept_iterations(launches), strict=True):
        for iteration, loss in make_curve(launch, "lm_loss"):
            if iteration <= kept:
                curve.append((iteration, loss))
    spikes = _find_spikes(curve)
    if not spikes:
        return None

    largest = max(spikes, key=_Spike.compute_height)
    text = (
        f"Loss spikes: {len(spikes)}; the largest from {largest.before:.3f} to "
        f"{largest.highest:.3f}, at "
    )
    if largest.first == largest.last:
        text += f"iteration {largest.first}"
    else:
        text += f"iterations {largest.first} to {largest.last}"
    newest = spikes[-1]
    last_iteration, _ = curve[-1]
    if newest.last == last_iteration:
        return Sentence(
            "bad", f"{text}. The loss has not come down since iteration {newest.first}."
        )
    return Sentence("warn", f"{text}.")


@dataclass
class _Spike:
    """Consecutive losses that are too high."""

    first: float
    """Iteration."""
    last: float
    before: float
    """Median loss before the spike."""
    highest: float

    def compute_height(self) -> float:
        return self.highest - self.before


def _find_spikes(curve: Sequence[Point]) -> list[_Spike]:
    """Return the spikes; each ends at the next loss that is not too high."""
    spikes: list[_Spike] = []
    window: list[float] = []
    is_high = False
    for iteration, loss in curve:
        if len(window) < _SPIKE_WINDOW // 2:
            window.append(loss)
            continue
        before = statistics.median(window)
        deviation = statistics.median(abs(value - before) for value in window)
        limit = before + max(_SPIKE_DEVIATIONS * deviation, _SPIKE_SHARE * abs(before))
        if loss <= limit:
            window = [*window, loss][-_SPIKE_WINDOW:]
            is_high = False
            continue
        if not is_high:
            spikes.append(_Spike(iteration, iteration, before, loss))
        is_high = True
        spike = spikes[-1]
        spike.last = iteration
        spike.highest = max(spike.highest, loss)
    return spikes


def _judge_ranks(newest: RecordedLaunch) -> Sentence | None:
    """Report a rank that is slower than the others, if --log-straggler measured it."""
    ratios: dict[float, list[float]] = {}
    num_points = 0
    for row in newest.points:
        values = row["values"]
        rank = values.get("slowest-rank")
        ratio = values.get("slowest-rank-ratio")
        if rank is not None and ratio is not None:
            num_points += 1
            ratios.setdefault(rank, []).append(ratio)
    if num_points == 0:
        return None
    # Noise makes another rank the slowest each time.
    rank, of_rank = max(ratios.items(), key=lambda item: len(item[1]))
    ratio = statistics.median(of_rank)
    if ratio < _SLOW_RATIO or len(of_rank) <= num_points / 2:
        return Sentence("good", "No rank is permanently slower than the others.")
    return Sentence(
        "warn",
        f"Rank {rank:.0f} is slow: it works {ratio:.2f} times as long as the median of the others.",
    )


def _judge_input(newest: RecordedLaunch) -> Sentence | None:
    """Report time that ranks have waited for data."""
    # The first interval includes the start of the workers.
    rows = [row for row in newest.intervals[1:] if row.get("input_seconds") is not None]
    seconds = sum(row["seconds"] for row in rows)
    waited = sum(row["input_seconds"] for row in rows)
    if waited <= _INPUT_SHARE * seconds:
        return None
    slowest = max(rows, key=lambda row: row["input_seconds"])
    return Sentence(
        "warn",
        f"{waited / seconds:.0%} of the training time was spent waiting for data, longest on rank "
        f"{slowest.get('input_rank')}: raise --num-workers, or use faster storage.",
    )


def _judge_checkpoints(checkpoints: Sequence[Row]) -> Sentence:
    """Report the newest usable checkpoint, and the number of damaged ones."""
    total = len(checkpoints)
    if total == 0:
        return Sentence("warn", "There is no checkpoint.")
    usable = [row["iteration"] for row in checkpoints if row["usable"]]
    if not usable:
        return Sentence("bad", f"None of {total} checkpoints is usable.")
    text = f"Newest usable checkpoint: iteration {max(usable)}"
    num_damaged = total - len(usable)
    if num_damaged:
        return Sentence("warn", f"{text}; {num_damaged} of {total} are not usable.")
    return Sentence("good", f"{text}; all {total} are usable.")


def _judge_time(goodput: Mapping[str, float]) -> Sentence | None:
    """Report the share of productive time, and the two activities that lost the most."""
    total = sum(goodput.values())
    if total <= 0:
        return None
    lost = dict(goodput)
    share = lost.pop("training") / total
    text = f"{share:.0%} of the time was productive training"

    # Name the two largest losses, if they matter.
    losses = []
    for name in sorted(lost, key=lost.__getitem__, reverse=True)[:2]:
        if lost[name] > 0.01 * total:
            label = _LOSSES.get(name, name)
            losses.append(f"{label} {_format_duration(lost[name])}")
    if losses:
        text += f"; most was lost by: {', '.join(losses)}"
    if share >= _PRODUCTIVE_SHARE:
        return Sentence("good", f"{text}.")
    return Sentence("warn", f"{text}.")


def _format_duration(seconds: float) -> str:
    """Return a time in the unit that suits its size."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    if seconds < 172_800:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86_400:.1f} days"
