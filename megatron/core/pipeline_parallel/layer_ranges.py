"""Assignment of layers to pipeline stages and model chunks."""

from __future__ import annotations

from megatron.core.wings import resolve

FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"
LAYOUT = "--pipeline-model-parallel-layout"

PARSE_LAYOUT = "megatron.core.pipeline_parallel.layout_notation:parse_layout"
COUNT_MTP_LAYERS = "megatron.core.pipeline_parallel.layout_notation:count_mtp_layers"
_EXPLAIN = "megatron.core.pipeline_parallel.uneven_stages:explain_split"


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
    # The number of layers of each chunk, in model order
    if layout is not None:
        counts: list[int] = resolve(PARSE_LAYOUT)(layout)
        num_found = sum(counts)
        if num_found != num_layers or len(counts) != pp_size * vpp_size:
            raise ValueError(
                f"{LAYOUT} {layout} has {num_found} layers on {len(counts)} chunks: the model "
                f"has {num_layers} layers, and there are {pp_size} pipeline stages x {vpp_size} "
                "chunks"
            )
    else:
        has_uneven_ends = first_stage_layers is not None or last_stage_layers is not None
        if has_uneven_ends and (account_for_embedding or account_for_loss):
            raise ValueError(f"{FIRST} and {LAST} exclude --account-for-...-in-pipeline-split")
        num_slots = num_layers + account_for_embedding + account_for_loss
        _check_sizes(num_layers, pp_size, vpp_size, first_stage_layers, last_stage_layers)
        stages = split_layers(num_slots, pp_size, vpp_size, first_stage_layers, last_stage_layers)
        if stages is None:
            raise ValueError(
                resolve(_EXPLAIN)(
                    num_slots, pp_size, vpp_size, first_stage_layers, last_stage_layers
                )
            )
        counts = [layers // vpp_size for layers in stages] * vpp_size
        # Slots that are not layers
        counts[0] -= account_for_embedding
        counts[-1] -= account_for_loss

    # Consecutive ranges, of which every `pp_size`-th belongs to the same stage
    ranges = []
    start = 0
    for count in counts:
        ranges.append(range(start, start + count))
        start += count
    return [ranges[stage::pp_size] for stage in range(pp_size)]


def _check_sizes(
    num_layers: int, pp_size: int, vpp_size: int, first: int | None, last: int | None
) -> None:
    """Raise ValueError for numbers that are not positive or need a pipeline."""
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


def split_layers(
    num_layers: int, pp_size: int, vpp_size: int, first: int | None, last: int | None
) -> list[int] | None:
    """Return the number of layers of each stage, or None if no such split exists."""
    # Layers and stages besides those whose numbers are given
    remaining = num_layers
    other_stages = pp_size
    for layers in (first, last):
        if layers is not None:
            remaining -= layers
            other_stages -= 1
    if other_stages == 0:
        per_stage = 0
        if remaining != 0:
            return None
    else:
        # The other stages have equal numbers of layers.
        per_stage, remainder = divmod(remaining, other_stages)
        if remainder != 0:
            return None
    # Insert the given numbers, then check that chunks have equally many layers.
    stages = [per_stage] * pp_size
    if first is not None:
        stages[0] = first
    if last is not None:
        stages[-1] = last
    for layers in stages:
        if layers <= 0 or layers % vpp_size != 0:
            return None
    return stages
