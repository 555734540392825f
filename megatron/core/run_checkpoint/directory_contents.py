"""Descriptions of the checkpoints in a directory, for errors and warnings."""

from __future__ import annotations

from pathlib import Path

from megatron.core.dist_checkpointing import (
    CheckpointDirectory,
    iteration_in_name,
    read_tracker,
)
from megatron.core.dist_checkpointing.files import METADATA_JSON, TRACKER
from megatron.core.run_checkpoint.formats import (
    NoCheckpointError,
    find_problem,
    list_formats,
    list_newest_first,
    read_latest,
    read_tag,
)
from megatron.core.run_checkpoint.keys import (
    ENGINE_LATEST,
    ENGINE_MODEL_FILES,
    LATEST,
    NEMO_CONTEXT,
    NEMO_WEIGHTS,
    TRAINING_FOLDERS,
)
from megatron.core.wings import resolve

# Checkpoints that are not read: the function that describes how to convert one in a directory, and
# patterns of their files there.
_UNREAD = {
    "megatron.conversion.huggingface.adapters:describe_adapter": ("adapter_config.json",),
    "megatron.conversion.deepspeed.engine:describe_engine_checkpoint": (f"*/{ENGINE_MODEL_FILES}",),
    "megatron.conversion.megatron_lm.zarr:describe_zarr_checkpoint": (
        METADATA_JSON,
        f"*/{METADATA_JSON}",
    ),
}
_NEMO_CONFIG = "model_config.yaml"


def describe_contents(root: Path) -> str:
    """Return a list of the complete or damaged checkpoints in `root`, for messages."""
    if not root.is_dir():
        return f"{root} is not a directory"
    complete = []
    descriptions = []
    for directory in list_newest_first(root):
        problem = find_problem(directory)
        if problem is None:
            complete.append(directory.name)
        else:
            descriptions.append(f"\n  {directory.name}: {problem}")
    if complete:
        return f"complete are: {', '.join(complete)}"
    text = f"{root} holds no complete checkpoint{''.join(descriptions[:5])}"
    abandoned = _find_abandoned(root)
    if abandoned is not None:
        text += (
            f"\n  {abandoned.name} is complete, but of a branch that this run has left: to return "
            f"to it, add --ckpt-step {iteration_in_name(abandoned)}"
        )
    unread = describe_unread(root)
    if unread is not None:
        text += f"\n  {unread}"
    return text


def _find_abandoned(root: Path) -> Path | None:
    """Return the last complete checkpoint in `root`, of any branch; None if there is none."""
    checkpoints = CheckpointDirectory(root)
    for iteration in reversed(checkpoints.list_iterations()):
        path = checkpoints.path(iteration)
        if find_problem(path) is None:
            return path
    return None


def describe_alternative(root: Path, named: Path) -> str | None:
    """Return a note if `root` contains a checkpoint of another program next to the run, or one of
    DeepSpeed's engine that was not converted, or that another tracker does not name.
    """
    alternative = None
    tag = read_latest(root)
    if list_formats(root):
        alternative = f"{root} is also a checkpoint itself ({' and '.join(list_formats(root))})"
    elif tag not in (None, named.name):
        alternative = f"{LATEST} names {tag}"
    if alternative is not None:
        return (
            f"{alternative}: taking {named}, which training has saved. To use the other one, move "
            "it to a directory of its own"
        )
    saved = read_tag(root / ENGINE_LATEST)
    if tag is None:
        iteration = read_tracker(root) if saved == named.name else None
        if iteration is None or saved == f"global_step{iteration}":
            return None
        return (
            f"DeepSpeed's {ENGINE_LATEST} names {saved}, but {TRACKER} names {iteration}: taking "
            f"{saved}, as Megatron-DeepSpeed does. To use the other one, give its directory"
        )
    if saved is None or f"{saved}_universal" == tag:
        return None
    return (
        f"DeepSpeed's {ENGINE_LATEST} names {saved}, but {LATEST} names {tag}: taking {tag}. To "
        f"use {saved}, give its directory"
    )


def describe_unread(root: Path) -> str | None:
    """Return how to name or to convert a checkpoint that is not read here, None without one."""
    for program, patterns in TRAINING_FOLDERS.items():
        for pattern in patterns:
            # In folders of `root`, or in their folders
            for depth in ("*", "*/*"):
                for path in sorted(root.glob(f"{depth}/{pattern}"), reverse=True):
                    levels = pattern.count("/") + 1
                    return (
                        f"{root} has checkpoints of {program}: give one of them, e.g. "
                        f"{path.parents[levels - 1]}"
                    )
    if (root / _NEMO_CONFIG).is_file():
        return (
            f"{root} is an unpacked archive of NeMo without {NEMO_WEIGHTS}/, which is not read: "
            "convert it to a model of transformers with NeMo (scripts/checkpoint_converters), and "
            "give that"
        )
    if (root / "context/io.json").is_file():
        return (
            f"{root} is a checkpoint of NeMo 2 without {NEMO_CONTEXT}, which early versions do not "
            "write: export it to a model of transformers with NeMo "
            "(nemo.collections.llm.export_ckpt, target 'hf'), and give that"
        )
    for path in sorted(root.glob(f"*/{NEMO_CONTEXT}"), reverse=True):
        return f"{root} has checkpoints of NeMo: give one of them, e.g. {path.parents[1]}"
    for entry, patterns in _UNREAD.items():
        if any(any(root.glob(pattern)) for pattern in patterns):
            description: str | None = resolve(entry)(root)
            if description is not None:
                return description
    return None


def refuse_unread(root: Path) -> None:
    """Raise NoCheckpointError for a checkpoint of a program that is not read."""
    unread = describe_unread(root)
    if unread is not None:
        raise NoCheckpointError(unread)
