"""Megatron-LM's legacy format, written from training: `mp_rank_XX[_YYY]/model_optim_rng.pt` and `distrib_optim.pt`.

Its files hold whole shards of a layout, so one rank makes them from a torch_dist checkpoint, tensor by tensor, before
that gets its name.
"""

from __future__ import annotations

from pathlib import Path

from megatron.conversion.files import Progress
from megatron.conversion.megatron_lm.legacy_writer import write_legacy
from megatron.conversion.model_space.rank_layout import RULES, Layout
from megatron.conversion.open_checkpoint import open_checkpoint
from megatron.core.dist_checkpointing.saving.commit import Rewrite
from megatron.training.checkpoint.convert_in_place import replace_files
from megatron.training.config.run_config import Config


def rewriting_as_legacy(config: Config) -> Rewrite:
    """What puts legacy files for the layout of the run in the place of a torch_dist checkpoint's."""
    layout = _layout_of(config)

    def rewrite(directory: Path, progress: Progress) -> None:
        replace_files(directory, lambda made: write_legacy(open_checkpoint(directory), made, layout, progress=progress))

    return rewrite


def _layout_of(config: Config) -> Layout:
    parallel, stages = config.parallel, config.pipeline_layout
    return Layout.of(
        config.model.num_layers,
        parallel.tp_size,
        parallel.pp_size,
        parallel.vpp_size,
        stages.decoder_first_pipeline_num_layers,
        stages.decoder_last_pipeline_num_layers,
        **{rule: getattr(stages, name) for name, rule in RULES.items() if getattr(stages, name)},
    )
