"""Assignment of layers to pipeline stages and model chunks."""

from __future__ import annotations

import itertools
import re

FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"
LAYOUT = "--pipeline-model-parallel-layout"
MAX_REPEAT = 9999  # in the notation of LAYOUT


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
    """Return global layer numbers indexed [stage][chunk].

    Layers follow the chunks: chunk 0 of all stages, then chunk 1 of all stages, and so on. Stages
    have equal numbers of layers, except the first and the last one if their numbers are given. The
    layers of a stage are split equally over its `vpp_size` chunks. The embedding and the loss may
    count as a layer each. `layout`, in Megatron-LM's notation, overrides all of this. Raises
    ValueError for numbers that do not divide, with values that would.
    """
    if layout is not None:
        counts = parse_layout(layout)
        if sum(counts) != num_layers or len(counts) != pp_size * vpp_size:
            raise ValueError(
                f"{LAYOUT} {layout} has {sum(counts)} layers on {len(counts)} chunks: the model "
                f"has {num_layers} layers, and there are {pp_size} pipeline stages x {vpp_size} "
                "chunks"
            )
    else:
        has_uneven_ends = first_stage_layers is not None or last_stage_layers is not None
        if has_uneven_ends and (account_for_embedding or account_for_loss):
            raise ValueError(f"{FIRST} and {LAST} exclude --account-for-...-in-pipeline-split")
        num_slots = num_layers + account_for_embedding + account_for_loss
        _check_sizes(num_layers, pp_size, vpp_size, first_stage_layers, last_stage_layers)
        stages = _split(num_slots, pp_size, vpp_size, first_stage_layers, last_stage_layers)
        if stages is None:
            raise ValueError(
                _explain(num_slots, pp_size, vpp_size, first_stage_layers, last_stage_layers)
            )
        counts = [layers // vpp_size for layers in stages] * vpp_size
        counts[0] -= account_for_embedding
        counts[-1] -= account_for_loss
    starts = [0, *itertools.accumulate(counts)]
    ranges = [range(start, start + count) for start, count in zip(starts, counts, strict=False)]
    return [ranges[stage::pp_size] for stage in range(pp_size)]


def parse_layout(layout: str) -> list[int]:
    """Return the number of layers of each chunk, in model order, from Megatron-LM's notation.

    E is the embedding, t a layer, L the loss, | separates chunks, and *n repeats a letter or a
    group in parentheses. Raises ValueError for any other notation.
    """
    text = re.sub(r"\(([^()]+)\)\*(\d+)", _repeat, layout.replace(",", ""))
    text = re.sub(r"(.)\*(\d+)", _repeat, text)
    if "m" in text:
        raise ValueError(
            f"{LAYOUT} {layout}: multi-token prediction (m) of Megatron-LM is not supported"
        )
    if not re.fullmatch(r"E[t|]*L", text):
        raise ValueError(
            f"{LAYOUT} {layout}: expected E, then t and |, then L, with *n after a letter "
            "or (group)"
        )
    chunks = text.split("|")
    if "" in chunks:
        raise ValueError(f"{LAYOUT} {layout}: chunk {chunks.index('')} is empty")
    return [chunk.count("t") for chunk in chunks]


def _repeat(match: re.Match[str]) -> str:
    count = match[2]
    if len(count) > len(str(MAX_REPEAT)):
        raise ValueError(f"{LAYOUT}: repeat count {count} is too large (limit {MAX_REPEAT})")
    return match[1] * int(count)


def _check_sizes(
    num_layers: int, pp_size: int, vpp_size: int, first: int | None, last: int | None
) -> None:
    if min(num_layers, pp_size, vpp_size) < 1:
        raise ValueError(
            f"the number of layers ({num_layers}), of pipeline stages ({pp_size}) and of chunks "
            f"per stage ({vpp_size}) must be positive"
        )
    if vpp_size > 1 and pp_size == 1:
        raise ValueError(f"{vpp_size} chunks per stage need more than one pipeline stage")
    for name, layers in ((FIRST, first), (LAST, last)):
        if layers is not None and pp_size == 1:
            raise ValueError(f"{name} {layers} needs more than one pipeline stage")


def _split(
    num_layers: int, pp_size: int, vpp_size: int, first: int | None, last: int | None
) -> list[int] | None:
    """Return the number of layers of each stage, or None if no such split exists."""
    given = [layers for layers in (first, last) if layers is not None]
    other_stages = pp_size - len(given)
    remaining = num_layers - sum(given)
    if other_stages == 0:
        per_stage = 0
        if remaining != 0:
            return None
    else:
        per_stage, rest = divmod(remaining, other_stages)
        if rest != 0:
            return None
    stages = [per_stage] * pp_size
    if first is not None:
        stages[0] = first
    if last is not None:
        stages[-1] = last
    if any(layers <= 0 or layers % vpp_size != 0 for layers in stages):
        return None
    return stages


def _explain(
    num_layers: int, pp_size: int, vpp_size: int, first: int | None, last: int | None
) -> str:
    """Return an error message with all numbers, and values of one flag that would work."""
    # The problem
    chunks = f" x {vpp_size} chunks" if vpp_size > 1 else ""
    given = []
    if first is not None:
        given.append(f"{FIRST} {first}")
    if last is not None:
        given.append(f"{LAST} {last}")
    uneven = f" with {' and '.join(given)}" if given else ""
    problem = f"{num_layers} layers cannot be split over {pp_size} pipeline stages{chunks}{uneven}"

    # Advice: vary the first of the flags that were given
    def is_possible(first: int | None, last: int | None) -> bool:
        return _split(num_layers, pp_size, vpp_size, first, last) is not None

    candidates = range(1, num_layers)
    if first is None and last is not None:
        works = [layers for layers in candidates if is_possible(None, layers)]
        advice = f"with the other numbers unchanged, {LAST} could be {_format_list(works)}"
    else:
        works = [layers for layers in candidates if is_possible(layers, last)]
        if first is not None:
            advice = f"with the other numbers unchanged, {FIRST} could be {_format_list(works)}"
        else:
            unit = pp_size * vpp_size
            lower = num_layers // unit * unit
            multiples = [layers for layers in (lower, lower + unit) if layers > 0]
            advice = (
                f"--num-layers could be {_format_list(multiples)}, {FIRST} {_format_list(works)}"
            )
    return (
        f"{problem}: each chunk needs the same whole number of layers within its stage, at least "
        f"one; {advice}"
    )


def _format_list(values: list[int]) -> str:
    return ", ".join(map(str, values)) if values else "no value"
