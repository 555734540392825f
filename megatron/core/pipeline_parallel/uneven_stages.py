"""The error message for layers that cannot be split over pipeline stages, with numbers that can."""

from __future__ import annotations

from megatron.core.pipeline_parallel.layer_ranges import FIRST, LAST, split_layers


def explain_split(
    num_layers: int, pp_size: int, vpp_size: int, first: int | None, last: int | None
) -> str:
    """Return an error message with all numbers, and values of one flag that would work."""
    # The problem
    problem = f"{num_layers} layers cannot be split over {pp_size} pipeline stages"
    if vpp_size > 1:
        problem += f" x {vpp_size} chunks"
    specified_flags = []
    if first is not None:
        specified_flags.append(f"{FIRST} {first}")
    if last is not None:
        specified_flags.append(f"{LAST} {last}")
    if specified_flags:
        problem += f" with {' and '.join(specified_flags)}"

    # Advice: vary the first of the flags that were given
    varies_last = first is None and last is not None
    possible = []
    for layers in range(1, num_layers):
        if varies_last:
            stages = split_layers(num_layers, pp_size, vpp_size, None, layers)
        else:
            stages = split_layers(num_layers, pp_size, vpp_size, layers, last)
        if stages is not None:
            possible.append(layers)
    if specified_flags:
        flag = LAST if varies_last else FIRST
        advice = f"with the other numbers unchanged, {flag} could be {_format_list(possible)}"
    else:
        num_chunks = pp_size * vpp_size
        multiple = num_layers // num_chunks * num_chunks
        multiples = [multiple + num_chunks]
        if multiple > 0:
            multiples.insert(0, multiple)
        advice = (
            f"--num-layers could be {_format_list(multiples)}, {FIRST} {_format_list(possible)}"
        )
    return (
        f"{problem}: each chunk needs the same whole number of layers within its stage, at least "
        f"one; {advice}"
    )


def _format_list(values: list[int]) -> str:
    if not values:
        return "no value"
    return ", ".join(map(str, values))
