"""Megatron-LM's legacy format, written from training: `mp_rank_XX[_YYY]/model_optim_rng.pt` and `distrib_optim.pt`.

Its files hold whole shards of a layout, so one rank makes them from a torch_dist checkpoint, tensor by tensor, before
that gets its name.
"""

from __future__ import annotations

from pathlib import Path

from megatron.conversion.detect import open_checkpoint
from megatron.conversion.files import Progress
from megatron.conversion.legacy_writer import write_legacy
from megatron.conversion.rank_layout import Layout
from megatron.training.rewriting import replace_files
from megatron.training.run_config import Config


def layout_of(config: Config) -> Layout:
    """The layout of the run: legacy files belong to one."""
    parallel, stages = config.parallel, config.pipeline_layout
    return Layout.of(
        config.model.num_layers,
        parallel.tp_size,
        parallel.pp_size,
        parallel.vpp_size,
        stages.decoder_first_pipeline_num_layers,
        stages.decoder_last_pipeline_num_layers,
    )


def rewrite_as_legacy(directory: Path, progress: Progress, *, layout: Layout) -> None:
    """Put legacy files in the place of the torch_dist checkpoint that lies in `directory`, durably.

    Raises OSError or ValueError; there is more in `directory` then than before.
    """
    replace_files(directory, lambda made: write_legacy(open_checkpoint(directory), made, layout, progress=progress))
