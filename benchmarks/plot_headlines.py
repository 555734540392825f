"""Plot the headline ratios of docs/benchmarks.md as docs/images/benchmarks.png.

    python benchmarks/plot_headlines.py

The ratios are read from the tables of the page, so that the picture and the text agree.
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/benchmarks.md"
PICTURE = ROOT / "docs/images/benchmarks.png"

# First cell of a row of the page -> (label, whether a smaller number is better).
ROWS = {
    "synchronous save": ("synchronous save vs DCP", False),
    "asynchronous save: until durable": ("asynchronous save, until durable vs DCP", False),
    "load, same layout, page cache": ("load vs DCP", False),
    "load, other layout, page cache": ("load at another layout vs DCP", False),
    "resume 2.26 GB at another layout, to the first step": ("resume vs FSDP + DCP", True),
    "dense, fp32": ("training step, fp32 vs best peer", False),
    "dense, bf16": ("training step, bf16 vs best peer", False),
    "experts, bf16": ("training step, experts, bf16 vs best peer", False),
}


def read_ratio(cell: str) -> float:
    """Return the first ratio of a cell: '1.32x' is 1.32, '1/4.8' is 4.8 times as fast."""
    if match := re.search(r"1/([\d.]+)", cell):
        return float(match[1])
    match = re.search(r"([\d.]+)x", cell)
    assert match is not None, cell
    return float(match[1])


def read_speedups(page: str) -> dict[str, float]:
    """Return label -> how many times as fast as the peer, for every row of `ROWS`."""
    speedups = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] not in ROWS or len(cells) < 4:
            continue
        label, smaller_is_better = ROWS[cells[0]]
        ratio = read_ratio(cells[3])
        speedups[label] = 1 / ratio if smaller_is_better else ratio
    return speedups


def main() -> None:
    speedups = read_speedups(PAGE.read_text(encoding="utf-8"))
    labels = list(speedups)
    values = list(speedups.values())
    figure, axes = plt.subplots(figsize=(8, 3.2))
    bars = axes.barh(labels, values, color="#3f6fb5")
    axes.bar_label(bars, [f"{value:.2f}x" for value in values], padding=3)
    axes.axvline(1, color="#444444", linewidth=1, linestyle="--")
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as the peer (dashed line: equal)")
    axes.set_xlim(0, max(values) * 1.15)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
