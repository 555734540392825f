"""Megatron-LM's legacy format, written from training: `mp_rank_XX[_YYY]/model_optim_rng.pt` and `distrib_optim.pt`.

Its files hold whole shards of a layout, so they are made from a torch_dist checkpoint, tensor by tensor, by one rank.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron.conversion.detect import open_checkpoint
from megatron.conversion.files import sync_tree
from megatron.conversion.legacy_writer import write_legacy
from megatron.conversion.rank_layout import Layout
from megatron.core.dist_checkpointing.files import check_free_space, pending_directory, put_in_place
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


def intermediate_directory(directory: Path) -> Path:
    """Where the torch_dist checkpoint lies that becomes `directory`; what a crash leaves there is cleaned up."""
    return pending_directory(directory, "torch_dist")


def rewrite_as_legacy(stored: Path, directory: Path, layout: Layout) -> None:
    """Write the torch_dist checkpoint `stored` to `directory`, which appears when all of it is durable.

    Raises OSError or ValueError; nothing of it is left then.
    """
    pending = pending_directory(directory, "torch")
    shutil.rmtree(pending, ignore_errors=True)
    try:
        check_free_space(directory.parent, sum(path.stat().st_size for path in stored.glob("*.distcp")))
        write_legacy(open_checkpoint(stored), pending, layout)
        sync_tree(pending)
        put_in_place(pending, directory)
    except BaseException:
        shutil.rmtree(pending, ignore_errors=True)
        raise
