"""What a checkpoint of a run holds, where it goes, and what a load takes from it.

Weights, optimizer and generators are boxes and objects in model space; everything else is in
`common`: arguments, iteration, schedules. The tracker moves when all of it is durable.

Legacy files (--ckpt-format torch) and Hugging Face's (--save-hf) do not lie where the ranks hold
their parts. So all ranks write torch_dist, and rank 0 puts the other form in its place, tensor by
tensor, before the directory gets its name.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.conversion.convert import convert, open_checkpoint
from megatron.conversion.formats import is_huggingface
from megatron.conversion.huggingface.families import choose_family
from megatron.conversion.megatron_lm.args import add_loader_defaults, split_by_expert_optimizer
from megatron.conversion.megatron_lm.args import build_common_state as megatron_common_state
from megatron.conversion.megatron_lm.extra_states import build_extra_states
from megatron.conversion.megatron_lm.generators import rng_key as megatron_rng_key
from megatron.conversion.megatron_lm.legacy_writer import write_legacy
from megatron.conversion.model_space.model import Layout
from megatron.conversion.model_space.source import COMMON, Progress
from megatron.conversion.options import WriteOptions
from megatron.core.dist_checkpointing import (
    CheckpointError,
    save,
)
from megatron.core.dist_checkpointing.files import remove_unfinished, run_name
from megatron.core.dist_checkpointing.local_tier import LocalTier
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.saving.commit import Rewrite
from megatron.core.durable_files import check_free_space, fsync_directory
from megatron.core.object_storage import ObjectPath, path_of
from megatron.core.tensor_parallel import compute_padded_vocab_size
from megatron.core.transformer.layer_spec import FP8StateMixin
from megatron.training.checkpoint.rng_state import get_rng_state, megatron_rng_state, rng_key
from megatron.training.checkpoint.saver import VALIDATION_LOSS
from megatron.training.config.options import CheckpointConfig
from megatron.training.config.run_config import Config
from megatron.training.run import Run

logger = logging.getLogger(__name__)


def save_checkpoint(
    run: Run, root: str, ckpt_format: str, since: float | None = None, last: bool = True
) -> None:
    """Save the run under `root` and move the tracker. Training has waited since `since`
    (perf_counter), and ends if this is the `last` save. Collective.
    """
    rewrite = convert_in_place(run.config) if ckpt_format == "torch" else None
    run.saver.save(
        state_to_save(run),
        path_of(root),
        run.state.iteration,
        common_state(run),
        rewrite,
        since,
        last,
    )


def state_to_save(run: Run) -> ShardedStateDict:
    """All that the ranks hold of the run."""
    config = run.config.checkpoint
    model = model_state(run)
    empty = build_extra_states(model, run.config.model.experts)
    state: ShardedStateDict = {**run.optimizer.weights(model), **empty, **fp8_state(run, model)}
    if not config.no_save_optim:
        state |= run.optimizer.sharded_state_dict(model)
    if not config.no_save_rng:
        state |= _generators(run)
    return state


def _generators(run: Run) -> ShardedStateDict:
    """Random generators: of this rank for us, of the model-parallel rank for Megatron-LM."""
    ps = run.ps
    ours = get_rng_state(run.rng)
    generators: ShardedStateDict = {rng_key(ps): ShardedObject(rng_key(ps), ours)}
    if ps.dp_cp.rank == 0:
        key = megatron_rng_key((ps.tp.rank, ps.pp.rank), run.config.parallel)
        generators[key] = ShardedObject(key, megatron_rng_state(ours, ps, run.config.training.seed))
    return generators


def model_state(run: Run) -> ShardedStateDict:
    """The weights of all chunks."""
    state: ShardedStateDict = {}
    for chunk in run.chunks:
        state |= chunk.sharded_state_dict()
    return state


def common_state(run: Run) -> dict[str, Any]:
    """What is the same on every rank, in Megatron-LM's form."""
    config = run.config
    state = run.state
    derived = {
        **vars(state),
        "padded_vocab_size": compute_padded_vocab_size(
            run.vocab_size, config.tokenizer.make_vocab_size_divisible_by, run.ps.tp.size
        ),
        "model_vocab_size": run.vocab_size,
        "world_size": run.ps.world_size,
        "data_parallel_size": run.ps.dp.size,
        "transformer_pipeline_model_parallel_size": run.ps.pp.size,
        "params_dtype": config.model.params_dtype,
        "skipped_train_samples": 0,
        "train_data_fingerprint": run.train_data_fingerprint,
    }
    common = megatron_common_state(make_namespace(config.flags(), derived), state)
    if not config.checkpoint.no_save_optim:
        common["optimizer"] = split_by_expert_optimizer(run.optimizer.state_dict(), config.flags())
        common["opt_param_scheduler"] = run.scheduler.state_dict()
    if run.validated is not None and run.validated[0] == state.iteration:
        common[VALIDATION_LOSS] = run.validated[1]
    # Loads apply this schema, so a save must fail rather than write what cannot be loaded.
    return COMMON(common, "the state of the run")


def make_namespace(flags: Mapping[str, Any], derived: Mapping[str, Any]) -> argparse.Namespace:
    """All options and what follows from them, with Megatron-LM's attribute names, so that its tools
    and other readers find what they know.
    """
    args = {**add_loader_defaults(flags), "layernorm_epsilon": flags["norm_epsilon"], **derived}
    if flags["null_tokenizer_eod_id"] is None:
        if flags["tokenizer_type"] == "NullTokenizer":
            # Store a size that counts the end-of-document token, as Megatron-LM since 0.19 does:
            # converters of other projects cut the embedding at `vocab_size` rows.
            end_of_document = flags["vocab_size"]
            args["null_tokenizer_eod_id"] = end_of_document
            args["vocab_size"] = derived.get("model_vocab_size", end_of_document + 1)
        else:
            # None would mean the last token of --vocab-size: see `stored_args`.
            del args["null_tokenizer_eod_id"]
    return argparse.Namespace(**args)


def convert_in_place(config: Config) -> Rewrite:
    """Replaces the files of a torch_dist checkpoint by Megatron-LM's legacy ones, for the layout of
    the run: `mp_rank_XX[_YYY]/model_optim_rng.pt` and `distrib_optim.pt`.
    """
    parallel = config.parallel
    stages = config.pipeline_layout
    sizes = parallel.tp_size, parallel.pp_size, parallel.vpp_size
    experts = (parallel.ep_size, parallel.etp_size) if parallel.ep_size > 1 else (1, None)
    layout = Layout.of(config.model.num_layers, *sizes, vars(stages), experts)

    def rewrite(directory: Path, progress: Progress) -> None:
        source = open_checkpoint(directory)
        _replace_files(
            directory, lambda made: write_legacy(source, made, layout, progress=progress)
        )

    return rewrite


def check_hf_target(run: Run) -> None:
    """Raise ValueError before training if --save-hf could not be written after it."""
    target = run.config.checkpoint.save_hf
    if target is None:
        return
    choose_family(run.config.model, None)
    directory = path_of(target)
    if isinstance(directory, ObjectPath):
        raise ValueError(
            f"--save-hf {target}: object storage holds torch_dist checkpoints alone; give a directory"
        )
    if directory.exists() and not (
        directory.is_dir() and (is_huggingface(directory) or not any(directory.iterdir()))
    ):
        raise ValueError(
            f"--save-hf {directory} exists and is not a Hugging Face model: give another directory"
        )


def save_hf(run: Run) -> None:
    """Write the model to --save-hf, if it is given. Collective.

    The directory appears, or is replaced, as a whole. Raises ValueError on every rank if it could
    not be written.
    """
    if run.config.checkpoint.save_hf is None:
        return
    directory = Path(run.config.checkpoint.save_hf)
    flags = run.config.tokenizer
    own = tuple(
        Path(name)
        for name in (flags.tokenizer_model, flags.vocab_file, flags.merge_file)
        if name is not None
    )
    common = common_state(run)
    for key in ("optimizer", "opt_param_scheduler"):
        common.pop(key, None)
    _begin_anew(run, directory)
    try:
        weights = run.optimizer.weights(model_state(run))
        save(
            weights,
            directory,
            common=common,
            rewrite=partial(_rewrite_as_hf, WriteOptions(trusted=own)),
        )
    except CheckpointError as error:  # on every rank
        _begin_anew(run, directory)
        raise ValueError(f"--save-hf: {error}") from error
    logger.info(f"saved {directory} in Hugging Face format")


def _begin_anew(run: Run, directory: Path) -> None:
    """Remove what an attempt that was killed, or that failed on some ranks, has left. Collective."""
    dist.barrier()
    if run.ps.rank == 0:
        remove_unfinished(directory)
    dist.barrier()


def _rewrite_as_hf(options: WriteOptions, directory: Path, progress: Progress) -> None:
    _replace_files(
        directory, lambda made: convert(directory, made, "hf", options=options, progress=progress)
    )


def _replace_files(directory: Path, write: Callable[[Path], object]) -> None:
    """Replace the files in `directory` by those that `write` makes from them, durably.

    What it writes must be durable. Raises what it raises, or OSError; what it has made then stays
    in `directory`.
    """
    stored = list(directory.iterdir())
    check_free_space(directory, sum(path.stat().st_size for path in stored))
    made = directory / "rewritten"
    write(made)
    # Still inside the directory of an unfinished save, which nobody takes for a checkpoint if this
    # is interrupted.
    for path in stored:
        path.unlink()
    for path in list(made.iterdir()):
        os.rename(path, directory / path.name)
    made.rmdir()
    fsync_directory(directory)


def open_local_tier(config: CheckpointConfig, save: Path | None) -> LocalTier | None:
    """Return where the nodes keep checkpoints of `save` on their own disks. Collective.

    None without --non-persistent-ckpt-type, and for a run that saves nothing.
    """
    directory = config.non_persistent_local_ckpt_dir
    if save is None or config.non_persistent_ckpt_type is None or directory is None:
        return None
    run = Coordination.of(None).run_on_rank0(lambda: run_name(save))
    return LocalTier.create(
        Path(os.path.expandvars(directory)) / run,
        config.replication_factor if config.replication else 1,
        config.replication_jump,
        timedelta(minutes=config.ckpt_save_timeout_minutes),
    )


# Scales of fp8 are stored under Megatron-core's keys of extra states, as tensors that can be read
# without running code. Where the recipe or the layout differs they start again, which costs a few
# steps of precision.


def fp8_state(run: Run, model: ShardedStateDict) -> dict[str, ShardedObject]:
    """What of the run's modules is to be stored; every rank of a stage has the same, but for the
    experts of others.
    """
    scales = {key: module.get_fp8_state() for key, module in _quantized(run, model).items()}
    return {key: ShardedObject(key, state) for key, state in scales.items() if state is not None}


def fp8_state_to_load(
    run: Run, model: ShardedStateDict, stored: Collection[str]
) -> dict[str, ShardedObject]:
    """What to ask a checkpoint with these objects for."""
    if run.config.model.fp8 is None:
        return {}
    return {key: ShardedObject(key, None) for key in _quantized(run, model) if key in stored}


def restore_fp8_state(
    run: Run, model: ShardedStateDict, objects: Mapping[str, Any], source_args: Mapping[str, Any]
) -> None:
    """Take what fits, and say in one line what does not."""
    config = run.config.model
    modules = _quantized(run, model)
    restored = [
        isinstance(objects.get(key), dict) and module.restore_fp8_state(objects[key], config)
        for key, module in modules.items()
    ]
    if any(restored):
        run.optimizer.requantize()
    if source_args.get("fp8") and not any(restored):
        now = f"of --fp8-recipe {config.fp8_recipe}" if config.fp8 is not None else "without fp8"
        logger.info(
            f"the scales of fp8 in the checkpoint are not used: this run is {now}, or of another layout"
        )


def _quantized(run: Run, model: ShardedStateDict) -> dict[str, FP8StateMixin]:
    """The modules by the keys of their state, which follow from those of their weights."""
    keys = {
        id(entry.local): key for key, entry in model.items() if isinstance(entry, ShardedTensor)
    }
    found: dict[str, FP8StateMixin] = {}
    for chunk in run.chunks:
        for module in chunk.modules():
            if isinstance(module, FP8StateMixin):
                key = keys[id(module.weight)]
                ep = run.ps.ep if ".experts." in key else None
                place = f"{ep.rank}_{ep.size}" if ep is not None else "0_1"
                found[f"{key.removesuffix('weight')}_extra_state/shard_{place}"] = module
    return found
