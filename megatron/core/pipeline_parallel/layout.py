"""Which layers stand on which pipeline stage."""

from __future__ import annotations

import itertools
import re

FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"
LAYOUT = "--pipeline-model-parallel-layout"


def pipeline_layer_ranges(
    num_layers: int,
    pp_size: int,
    vpp_size: int = 1,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    layout: str | None = None,
) -> list[list[range]]:
    """Layers follow the chunks: all stages' chunk 0, then all stages' chunk 1, and so on.

    Returns global layer numbers indexed [stage][chunk]. Stages hold equally many layers, except the first and the last
    where a number is given; a stage's layers are split equally over its `vpp_size` chunks. The embedding and the loss
    may count as a layer. `layout` says it all in Megatron-LM's notation instead.
    Raises ValueError for numbers that do not divide, with values that would.
    """
    if layout is not None:
        counts = parse_layout(layout)
        if sum(counts) != num_layers or len(counts) != pp_size * vpp_size:
            raise ValueError(
                f"{LAYOUT} {layout} has {sum(counts)} layers on {len(counts)} chunks: the model has {num_layers} "
                f"layers, and there are {pp_size} pipeline stages x {vpp_size} chunks"
            )
    else:
        ends = (first_stage_layers, last_stage_layers)
        counts = _counts(num_layers, pp_size, vpp_size, ends, account_for_embedding, account_for_loss)
    starts = [0, *itertools.accumulate(counts)]
    ranges = [range(start, start + count) for start, count in zip(starts, counts, strict=False)]
    return [ranges[stage::pp_size] for stage in range(pp_size)]


def parse_layout(layout: str) -> list[int]:
    """Layers of every chunk in the order of the model, from Megatron-LM's notation; ValueError where it is another."""
    text = re.sub(r"\(([^()]+)\)\*(\d+)", _repeated, layout.replace(",", ""))
    text = re.sub(r"(.)\*(\d+)", _repeated, text)
    if "m" in text:
        raise ValueError(f"{LAYOUT} {layout}: Megatron-LM's multi-token prediction (m) is not implemented here")
    if not re.fullmatch(r"E[t|]*L", text):
        raise ValueError(f"{LAYOUT} {layout}: expected E, then t and |, then L, with *n behind a letter or (group)")
    chunks = text.split("|")
    if any(not chunk for chunk in chunks):
        raise ValueError(f"{LAYOUT} {layout}: chunk {chunks.index('')} has nothing on it")
    return [chunk.count("t") for chunk in chunks]


def _repeated(match: re.Match[str]) -> str:
    if len(match[2]) > 4:
        raise ValueError(f"{LAYOUT}: a repetition of {match[2]} is more than any model has")
    return match[1] * int(match[2])


def _counts(
    num_layers: int, pp_size: int, vpp_size: int, ends: tuple[int | None, int | None], embedding: bool, loss: bool
) -> list[int]:
    """Layers of every chunk in the order of the model; `ends`: the numbers given for the first and the last stage."""
    first, last = ends
    if (embedding or loss) and ends != (None, None):
        raise ValueError(f"{FIRST} and {LAST} exclude --account-for-...-in-pipeline-split")
    slots = num_layers + embedding + loss
    _check_sizes(num_layers, pp_size, vpp_size, first, last)
    stages = _stage_sizes(slots, pp_size, vpp_size, first, last)
    if stages is None:
        raise ValueError(_explain(slots, pp_size, vpp_size, first, last))
    counts = [layers // vpp_size for layers in stages] * vpp_size
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _check_sizes(num_layers: int, pp_size: int, vpp_size: int, first: int | None, last: int | None) -> None:
    if min(num_layers, pp_size, vpp_size) < 1:
        raise ValueError(
            f"the number of layers ({num_layers}), of pipeline stages ({pp_size}) and of chunks per stage ({vpp_size}) "
            "must be positive"
        )
    if vpp_size > 1 and pp_size == 1:
        raise ValueError(f"{vpp_size} chunks per stage need more than one pipeline stage")
    for name, layers in ((FIRST, first), (LAST, last)):
        if layers is not None and pp_size == 1:
            raise ValueError(f"{name} {layers} needs more than one pipeline stage")


def _stage_sizes(num_layers: int, pp_size: int, vpp_size: int, first: int | None, last: int | None) -> list[int] | None:
    """Layers of each stage; None if they cannot be split that way."""
    given = [layers for layers in (first, last) if layers is not None]
    other_stages = pp_size - len(given)
    rest = num_layers - sum(given)
    if rest % max(other_stages, 1) != 0 or (other_stages == 0 and rest != 0):
        return None
    stages = [rest // max(other_stages, 1)] * pp_size
    if first is not None:
        stages[0] = first
    if last is not None:
        stages[-1] = last
    return stages if all(layers > 0 and layers % vpp_size == 0 for layers in stages) else None


def _explain(num_layers: int, pp_size: int, vpp_size: int, first: int | None, last: int | None) -> str:
    """Every number, and which values of the first one that can be changed would do."""
    chunks = f" x {vpp_size} chunks" if vpp_size > 1 else ""
    given = [f"{name} {layers}" for name, layers in ((FIRST, first), (LAST, last)) if layers is not None]
    uneven = f" with {' and '.join(given)}" if given else ""
    problem = f"{num_layers} layers cannot be split over {pp_size} pipeline stages{chunks}{uneven}"

    candidates = range(1, num_layers)
    if first is not None:
        works = [n for n in candidates if _stage_sizes(num_layers, pp_size, vpp_size, n, last)]
        advice = f"with the other numbers as they are, {FIRST} could be {_list(works)}"
    elif last is not None:
        works = [n for n in candidates if _stage_sizes(num_layers, pp_size, vpp_size, first, n)]
        advice = f"with the other numbers as they are, {LAST} could be {_list(works)}"
    else:
        unit = pp_size * vpp_size
        lower = num_layers // unit * unit
        works = [n for n in candidates if _stage_sizes(num_layers, pp_size, vpp_size, n, None)]
        advice = f"--num-layers could be {_list([n for n in (lower, lower + unit) if n])}, {FIRST} {_list(works)}"
    return f"{problem}: every chunk needs the same whole number of layers within its stage, at least one; {advice}"


def _list(values: list[int]) -> str:
    return ", ".join(map(str, values)) if values else "no value"
