"""Rules of the chunks of a pipeline stage, and of the groups of the interleaved schedule."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.pipeline_parallel import check_group_size, groups_fit
from megatron.core.pipeline_parallel.layer_ranges import PARSE_LAYOUT
from megatron.core.wings import resolve
from megatron.training.config.arguments import FlagValues
from megatron.training.config.batch_schedule import BatchSchedule
from megatron.training.config.run_config import Config

_LAYOUT = "pipeline_model_parallel_layout"


def compute_chunks_per_stage(flag_values: FlagValues) -> int | None:
    """Return the model chunks per stage that --num-layers-per-virtual-pipeline-stage or
    --pipeline-model-parallel-layout request; None without these flags.
    """
    layers_per_chunk = flag_values.get("num_layers_per_virtual_pipeline_stage")
    layout = flag_values.get(_LAYOUT)
    if layers_per_chunk is None and layout is None:
        return None
    flags = []
    for name in (
        "virtual_pipeline_model_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        _LAYOUT,
    ):
        if flag_values.get(name) is not None:
            flags.append(f"--{name.replace('_', '-')}")
    if len(flags) > 1:
        raise ValueError(f"{' and '.join(flags)} are mutually exclusive")
    pp_size = flag_values.get("pipeline_model_parallel_size", 1)

    # A layout lists every chunk; its stages follow from the pipeline size.
    if layout is not None:
        num_chunks = len(resolve(PARSE_LAYOUT)(layout))
        if num_chunks % pp_size:
            raise ValueError(
                f"{flags[0]} {layout} has {num_chunks} chunks for "
                f"--pipeline-model-parallel-size {pp_size}: change one of them"
            )
        return num_chunks // pp_size

    # The embedding and the loss can count as layers.
    num_layers = flag_values.get("num_layers", 0)
    num_layers += bool(flag_values.get("account_for_embedding_in_pipeline_split"))
    num_layers += bool(flag_values.get("account_for_loss_in_pipeline_split"))
    assert layers_per_chunk is not None
    if layers_per_chunk < 1 or num_layers % (pp_size * layers_per_chunk):
        raise ValueError(
            f"--num-layers {num_layers} is not a multiple of --pipeline-model-parallel-size "
            f"{pp_size} x --num-layers-per-virtual-pipeline-stage {layers_per_chunk}"
        )
    return int(num_layers // pp_size // layers_per_chunk)


def find_group_problems(config: Config, batches: BatchSchedule, dp_size: int) -> Iterator[str]:
    """Yield the batch sizes of a ramp-up that the interleaved schedule cannot run."""
    training = config.training
    pp_size = config.parallel.pp_size
    group_size = config.parallel.microbatch_group_size_per_vp_stage or pp_size
    check_group_size(pp_size, group_size)
    # A ramp-up can pass many sizes; report only those that do not fit.
    wrong: dict[int, int] = {}  # global batch size -> number of micro-batches
    for size in batches.sizes():
        num_microbatches = size // batches.samples_per_microbatch
        if not groups_fit(num_microbatches, pp_size, group_size):
            wrong[size] = num_microbatches
    if wrong:
        sizes = " or ".join(map(str, list(wrong)[:3]))
        counts = " or ".join(map(str, list(wrong.values())[:3]))
        yield (
            f"the interleaved schedule runs micro-batches in groups of {group_size}, the last one "
            f"of at least {pp_size}, the number of pipeline stages, but a global batch of {sizes} "
            f"/ ({training.micro_batch_size} per micro-batch x {dp_size} replicas) has {counts}"
        )
