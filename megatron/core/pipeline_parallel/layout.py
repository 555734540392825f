"""Which layers stand on which pipeline stage."""

from __future__ import annotations

FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"


def pipeline_layer_ranges(
    num_layers: int,
    pp_size: int,
    vpp_size: int = 1,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
) -> list[list[range]]:
    """Layers follow the chunks: all stages' chunk 0, then all stages' chunk 1, and so on.

    Returns global layer numbers indexed [stage][chunk]. Stages hold equally many layers, except the first and the last
    where a number is given; a stage's layers are split equally over its `vpp_size` chunks.
    Raises ValueError for numbers that do not divide, with values that would.
    """
    _check_sizes(num_layers, pp_size, vpp_size, first_stage_layers, last_stage_layers)
    stages = _stage_sizes(num_layers, pp_size, vpp_size, first_stage_layers, last_stage_layers)
    if stages is None:
        raise ValueError(_explain(num_layers, pp_size, vpp_size, first_stage_layers, last_stage_layers))
    ranges: list[list[range]] = [[] for _ in stages]
    start = 0
    for _ in range(vpp_size):
        for stage, layers in enumerate(stages):
            ranges[stage].append(range(start, start + layers // vpp_size))
            start += layers // vpp_size
    return ranges


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
