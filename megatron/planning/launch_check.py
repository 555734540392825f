"""Check what a launch needs besides valid flags: files, packages, memory and space on disks.

`--dry-run` reports these problems together with those of the flags, so that a launch without
problems starts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core.apex import import_apex, import_apex_norms
from megatron.core.datasets.config import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.dist_checkpointing.choice import Choice, choose
from megatron.core.dist_checkpointing.files import read_run_name
from megatron.core.dist_checkpointing.local_checkpoints import (
    LocalInventory,
    find_local_checkpoints,
)
from megatron.core.dist_checkpointing.ownership.takeover import identify_job
from megatron.core.dist_checkpointing.tiers.local_tier import LocalTier, Replication
from megatron.core.flags import InvalidFlagsError
from megatron.core.object_path import ObjectPath, path_of
from megatron.core.optimizer import OptimizerConfig
from megatron.core.terminal import format_size
from megatron.core.transformer.layer_spec import select_layer_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.planning.run_plan import RunPlan
from megatron.training.checkpoint.launch import check_random_weights, describe_launch
from megatron.training.config.arguments import build
from megatron.training.config.parsing import make_flag_parser
from megatron.training.config.run_config import Config
from megatron.training.config.run_options import CheckpointConfig, DistributedConfig, LoggingConfig
from megatron.training.data.data_files import find_data_files
from megatron.training.data.text_corpus import is_text
from megatron.training.data.tokenizer import TokenizerConfig, build_tokenizer
from megatron.training.reporting.dashboards import check_dashboards


@dataclass(frozen=True)
class LaunchFlags:
    """The sections of flags that name files and packages; None for one with problems."""

    data: GPTDatasetConfig | None
    tokenizer: TokenizerConfig | None
    checkpoint: CheckpointConfig | None
    model: TransformerConfig | None
    optimizer: OptimizerConfig | None
    logging: LoggingConfig | None
    skip_train: bool

    @classmethod
    def parse(cls, argv: Sequence[str]) -> LaunchFlags:
        """Read the sections that can be built from a command line with problems."""
        flag_values = make_flag_parser().parse(argv).flag_values

        def try_to_build(section: type) -> Any:
            try:
                return build(section, flag_values)
            except InvalidFlagsError as error:  # which `parse_args` reports
                return error.section
            except ValueError:
                return None

        return cls(
            data=try_to_build(GPTDatasetConfig),
            tokenizer=try_to_build(TokenizerConfig),
            checkpoint=try_to_build(CheckpointConfig),
            model=try_to_build(TransformerConfig),
            optimizer=try_to_build(OptimizerConfig),
            logging=try_to_build(LoggingConfig),
            skip_train=bool(flag_values.get("skip_train")),
        )

    @classmethod
    def of_config(cls, config: Config) -> LaunchFlags:
        return cls(
            config.data,
            config.tokenizer,
            config.checkpoint,
            config.model,
            config.optimizer,
            config.logging,
            config.training.skip_train,
        )


def find_launch_problems(flags: LaunchFlags) -> list[str]:
    """Return why a launch would fail: missing files and packages. Does not write files."""
    problems: list[str] = []
    checks: Sequence[Callable[[LaunchFlags], None]] = (
        _check_tokenizer,
        _check_checkpoint,
        _check_backends,
        _check_dashboards,
    )
    for check in checks:
        try:
            check(flags)
        except ValueError as error:
            problems += str(error).splitlines()
    return problems + _find_data_problems(flags)


def _check_tokenizer(flags: LaunchFlags) -> None:
    if flags.tokenizer is not None:
        build_tokenizer(flags.tokenizer)


def _check_checkpoint(flags: LaunchFlags) -> None:
    if flags.checkpoint is not None:
        save = None
        if flags.checkpoint.save is not None and not flags.skip_train:
            save = path_of(flags.checkpoint.save)
        preview_choice(flags.checkpoint, save)


def _check_backends(flags: LaunchFlags) -> None:
    if flags.model is not None:
        select_layer_spec(flags.model)
        if flags.model.norm_impl == "apex":
            import_apex_norms()
    if flags.optimizer is not None and flags.optimizer.optimizer_impl == "apex":
        import_apex("apex.optimizers", "--optimizer-impl")
        import_apex("amp_C", "--optimizer-impl")


def _check_dashboards(flags: LaunchFlags) -> None:
    if flags.logging is not None:
        check_dashboards(flags.logging)


def _find_data_problems(flags: LaunchFlags) -> list[str]:
    if flags.data is None:
        return []
    problems = []
    for path in flags.data.data_paths():
        open_data: Callable[[str], object] = IndexedDataset
        if flags.data.sft or is_text(path):
            open_data = find_data_files
        try:
            open_data(path)
        except ValueError as error:
            problems.append(str(error))
    return problems


def preview_choice(config: CheckpointConfig, save: Path | None) -> Choice:
    """Return the checkpoint that a launch on this machine would choose, without launching it.

    `save` is the directory of checkpoints that the run will own. Of the checkpoints on the disks of
    the nodes, only those of this node are read. The environment variables of torchrun and Slurm
    determine whether the launch is an automatic restart. Raises ValueError if the launch would.
    """
    local = _find_on_this_node(config, save)
    description = describe_launch(config, save, identify_job(), local)
    choice = choose(description.launch, description.inventory)
    if choice.candidate is None and config.load is not None:
        check_random_weights(config, path_of(config.load))
    return choice


def _find_on_this_node(config: CheckpointConfig, save: Path | None) -> LocalInventory:
    """Return the checkpoints on the disk of this node, without creating its directory."""
    directory = config.non_persistent_local_ckpt_dir
    if save is None or config.non_persistent_ckpt_type is None or directory is None:
        return LocalInventory()
    parent = Path(os.path.expandvars(directory))
    # Without a name the run has none, but there may be some of the same run under another name.
    root = parent / (read_run_name(save) or "unnamed")
    return find_local_checkpoints(LocalTier(root, 0, [0], Replication()))


def find_shortages(config: Config, plan: RunPlan, processes: int) -> list[str]:
    """Return for what a run of `processes` on this machine lacks memory, or space for a checkpoint.

    A plan on a machine without GPUs is one for another machine, unless the flags select the CPU.
    """
    problems = []
    memory = _measure_memory(config.distributed, processes)
    if memory is not None and plan.largest > memory:
        problems.append(
            f"a rank needs {format_size(plan.largest)} of memory and has {format_size(memory)}: "
            "more tensor, pipeline or context parallelism, --use-distributed-optimizer, "
            "recomputation or a smaller --micro-batch-size reduce it (tools/plan_run.py --search)"
        )
    save = config.checkpoint.save
    if save is not None and not isinstance(path_of(save), ObjectPath):
        needed = plan.checkpoint_bytes + plan.export_bytes
        parent = Path(save) if Path(save).exists() else Path(save).parent
        if parent.is_dir() and needed > (free := shutil.disk_usage(parent).free):
            problems.append(
                f"--save {save}: a checkpoint has {format_size(needed)}, and the disk has "
                f"{format_size(free)} free"
            )
    return problems


def _measure_memory(config: DistributedConfig, processes: int) -> int | None:
    """Return the bytes of memory for a rank on this machine, None if the run is for another one."""
    if config.device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    if config.device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes
    return None
