"""Checkpoint formats: recognize the format of a directory, and find the checkpoint that a path
means.

Training, convert.py and inspect_checkpoint.py share these rules. A run directory contains a tracker
file and `iter_0000010/`, `release/` or, from DeepSpeed, `global_step10_universal/`. The tracker is
written last, so the checkpoint it names was complete. If it was lost or damaged later, the newest
complete checkpoint is used instead.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megatron.core.dist_checkpointing import (
    CheckpointDirectory,
    CheckpointError,
    Lineage,
    is_complete,
    is_unfinished,
    read_lineage,
    read_metadata,
    read_tracker,
)
from megatron.core.dist_checkpointing.checkpoint_directory import find_missing_or_truncated
from megatron.core.dist_checkpointing.files import (
    COMMON,
    METADATA,
    METADATA_JSON,
    TRACKER,
)
from megatron.core.dist_checkpointing.format.checksums import find_checksums
from megatron.core.dist_checkpointing.ownership.fencing import find_interrupted_commit
from megatron.core.dist_checkpointing.ownership.lineage import on_branch
from megatron.core.dist_checkpointing.policy import CheckpointRef
from megatron.core.object_path import ObjectPath, listing_once, path_of
from megatron.core.run_checkpoint.keys import (
    CONSOLIDATED,
    ENGINE_LATEST,
    ENGINE_MODEL_FILES,
    GGUF_FILES,
    LATEST,
    MODEL_FILE,
    NEMO_ARCHIVES,
    NEMO_CONTEXT,
    NEMO_WEIGHTS,
    PARAMS,
    RELEASE,
    TRAINING_FOLDERS,
    ZERO,
)
from megatron.core.run_checkpoint.native_reader import open_run_checkpoint
from megatron.core.run_checkpoint.source import Source
from megatron.core.safe_files.reading import confine_links, read_json, read_regular
from megatron.core.safe_files.schema import file_name
from megatron.core.wings import resolve

logger = logging.getLogger(__name__)

_DEEPSPEED = re.compile(r"global_step(\d+)(_universal)?")
_MODEL_KEYS = ("embedding.", "decoder.")  # of torch_dist checkpoints
_CONFIG = "config.json"
_MAX_LISTED = 3  # damaged files in a message


class NoCheckpointError(ValueError):
    """A path does not name exactly one checkpoint in a known format."""


# ---- Formats ----


def _is_torch_dist(directory: Path) -> bool:
    if not (directory / METADATA).is_file() or is_unfinished(directory):
        return False
    # DCP files of a program that names its parameters differently, next to a model's config.json.
    return is_complete(directory) or not is_huggingface(directory)


def _is_legacy(directory: Path) -> bool:
    return any(directory.glob(f"mp_rank_*/{MODEL_FILE}"))


def _is_training_folder(program: str, directory: Path) -> bool:
    return any(any(directory.glob(pattern)) for pattern in TRAINING_FOLDERS[program])


def is_huggingface(directory: Path) -> bool:
    """Return whether `directory` contains a model of transformers, or a Llama model of Meta."""
    config_path = directory / _CONFIG
    if config_path.is_file():
        # A copy of a model's config.json may be next to the files of other programs.
        is_copy = any(_is_training_folder(program, directory) for program in TRAINING_FOLDERS)
        return _is_model_config(config_path) and not is_copy
    return (directory / PARAMS).is_file() and any(directory.glob(CONSOLIDATED))


def _is_model_config(path: Path) -> bool:
    """Return whether `path` is the config.json of a model of transformers."""
    config = read_json(path) if path.is_file() else None
    return isinstance(config, dict) and ("model_type" in config or "architectures" in config)


def _is_model(directory: Path) -> bool:
    # The config.json of a model may be copied next to the files of DeepSpeed.
    return is_huggingface(directory) and not _is_engine(directory)


def _is_gguf(path: Path) -> bool:
    # A repository of quantized models may have the config.json of the original.
    return path.match(GGUF_FILES) or (any(path.glob(GGUF_FILES)) and not is_huggingface(path))


def _is_nemo(path: Path) -> bool:
    if path.match(NEMO_ARCHIVES):
        return path.is_file()
    if (path / NEMO_CONTEXT).is_file():
        return True
    return (path / NEMO_WEIGHTS).is_dir() and (path / "model_config.yaml").is_file()


def _is_universal(directory: Path) -> bool:
    return (directory / ZERO).is_dir()


def _is_engine(directory: Path) -> bool:
    return any(directory.glob(ENGINE_MODEL_FILES)) and not _is_universal(directory)


class Format(NamedTuple):
    """Recognition, reader and damage check of a format.

    Modules of other programs' formats are imported on demand (see `megatron.core.wings`).
    """

    is_format: Callable[[Path], bool]  # of a directory
    reader: str  # (directory, ReadOptions) -> Source
    list_damage: str | None = None  # as `_list_damage`; None: files are checked when opened


_FOLDERS = "megatron.conversion.training_folders"
# Those of TRAINING_FOLDERS, "deepspeed" and "nemo" are only read; the others are also written.
FORMATS = {
    "torch_dist": Format(
        _is_torch_dist,
        "megatron.conversion.megatron_lm.torch_dist:open_torch_dist",
        "megatron.core.run_checkpoint.formats:list_torch_dist_damage",
    ),
    "legacy": Format(
        _is_legacy,
        "megatron.conversion.megatron_lm.legacy_reader:LegacySource",
        "megatron.conversion.megatron_lm.legacy_files:list_legacy_damage",
    ),
    "hf": Format(_is_model, "megatron.conversion.huggingface.directory:HuggingFaceSource"),
    "universal": Format(
        _is_universal,
        "megatron.conversion.deepspeed.universal:UniversalSource",
        "megatron.conversion.deepspeed.universal_files:list_universal_damage",
    ),
    **{
        program: Format(
            partial(_is_training_folder, program), f"{_FOLDERS}.{program}:open_{program}"
        )
        for program in TRAINING_FOLDERS
    },
    "deepspeed": Format(
        _is_engine,
        "megatron.conversion.deepspeed.engine:open_engine_checkpoint",
        "megatron.conversion.deepspeed.engine_files:list_engine_damage",
    ),
    "gguf": Format(_is_gguf, "megatron.conversion.gguf.gguf_reader:open_gguf"),
    "nemo": Format(_is_nemo, "megatron.conversion.megatron_lm.nemo:open_nemo"),
}

_REQUIRE_CHECKSUMS = "megatron.conversion.opening:require_checksums"
_OPEN_ANY = "megatron.conversion.opening:open_for_run"
_DESCRIBE_ALTERNATIVE = "megatron.core.run_checkpoint.directory_contents:describe_alternative"
_REFUSE_UNREAD = "megatron.core.run_checkpoint.directory_contents:refuse_unread"
_DESCRIBE_CONTENTS = "megatron.core.run_checkpoint.directory_contents:describe_contents"


def list_formats(directory: Path) -> list[str]:
    """Return the formats that `directory` looks like."""
    with listing_once():
        return [name for name, form in FORMATS.items() if form.is_format(directory)]


def detect_format(directory: Path, loader: str = "auto") -> str:
    """Return `loader`, or with "auto" the only format that the directory looks like.

    Raises NoCheckpointError if it looks like none, or like several.
    """
    if loader != "auto":
        return loader
    formats = list_formats(directory)
    if len(formats) == 1:
        return formats[0]
    # Guessing between several formats could read the wrong one.
    appearance = "is in no known format"
    if formats:
        appearance = "looks like " + " and ".join(formats)
    raise NoCheckpointError(
        f"{directory} {appearance}: name its format with --loader ({', '.join(FORMATS)})"
    )


# ---- Damage ----


def list_torch_dist_damage(directory: Path) -> list[str]:
    """Return a line for each file of a DCP directory that is missing or truncated."""
    if not is_complete(directory) and not _is_foreign_dcp(directory):
        return [f"{METADATA_JSON} is missing"]
    return find_missing_or_truncated(directory)


def _is_foreign_dcp(directory: Path) -> bool:
    """Return whether a program without `metadata.json` wrote a DCP directory.

    torch writes `.metadata` last, which completes a checkpoint of such a program.
    """
    if (directory / COMMON).exists() or find_checksums(directory) is not None:
        return False
    keys = read_metadata(directory).tensors
    return not any(key.startswith(_MODEL_KEYS) for key in keys)


def _list_damage(directory: Path, form: str) -> list[str]:
    """Return a line for each file that is missing or truncated, without reading tensors."""
    entry = FORMATS[form].list_damage
    if entry is None:
        return []
    damage: list[str] = resolve(entry)(directory)
    return damage


def find_problem(directory: Path) -> str | None:
    """Return the reason for which the checkpoint `directory` cannot be loaded, or None if it can.

    No tensors are read, but the files of all ranks are examined: only one rank should call this.
    """
    formats = list_formats(directory)
    if not formats:
        if directory.is_dir():
            return "it is not complete"
        return "it does not exist"
    # The directory of a run may contain one iteration in several formats.
    damage = []
    try:
        for form in formats:
            damage += _list_damage(directory, form)
    except CheckpointError as error:
        return f"it is damaged: {error}"
    if not damage:
        return None
    listed = "; ".join(damage[:_MAX_LISTED])
    if len(damage) > _MAX_LISTED:
        listed += f" and {len(damage) - _MAX_LISTED} more"
    return f"it is damaged: {listed}"


# ---- Directories of checkpoints ----


def checkpoint_directory(root: Path, named: int | str) -> Path:
    """Return the directory of the iteration or release `named`, which need not exist."""
    if isinstance(named, str):
        return root / named
    directory = CheckpointDirectory(root).path(named)
    deepspeed = root / f"global_step{named}"
    for path in (directory, root / f"global_step{named}_universal", deepspeed):
        if path.is_dir():
            return path
    return directory


def read_latest(root: Path) -> str | None:
    """Return the directory named in `latest_universal`, or None without that file.

    Raises CheckpointError for anything but the name of a directory.
    """
    return read_tag(root / LATEST)


def _read_deepspeed_tag(root: Path) -> tuple[str | None, str]:
    """Return the directory that DeepSpeed's trackers name, if any, and the name of that tracker.

    A checkpoint of the engine that was converted is read in its universal form.
    """
    tag = read_latest(root)
    if tag is not None:
        return tag, LATEST
    tag = read_tag(root / ENGINE_LATEST)
    # Other programs may have a file of this name, too.
    if tag is not None and not _is_engine(root / tag):
        tag = None
    return tag, ENGINE_LATEST


def read_tag(path: Path) -> str | None:
    """Return the name of a directory that one of DeepSpeed's trackers contains, None without it.

    Raises CheckpointError for anything but the name of a directory.
    """
    if not path.is_file():
        return None
    name = read_regular(path, limit=4096).decode(errors="replace").strip()
    return file_name(name, f"{path}: the name in it")


def is_checkpoint_itself(root: Path, loader: str = "auto") -> bool:
    """Return whether `root` is a checkpoint itself, and not a directory of checkpoints.

    A run may save to the directory of the model that it began with, or a model may be copied to the
    directory of a run: such a directory is that of a run, unless `loader` names the model's format.
    """
    formats = list_formats(root)
    if loader in formats:
        return True
    return bool(formats) and not _contains_run(root)


def _contains_run(root: Path) -> bool:
    """Return whether training has saved checkpoints to `root`."""
    if (root / TRACKER).is_file() or _contains_iterations(root):
        return True
    # The trainer of transformers stores its model next to the checkpoint of DeepSpeed.
    return (root / ENGINE_LATEST).is_file() and any(root.glob(f"*/{ENGINE_MODEL_FILES}"))


def _contains_iterations(root: Path) -> bool:
    checkpoints = CheckpointDirectory(root)
    paths = [checkpoints.path(iteration) for iteration in checkpoints.list_iterations()]
    return any(not is_unfinished(path) for path in paths)


def find_named_checkpoint(root: Path, step: int | None) -> tuple[Path | None, str | None]:
    """Return the checkpoint that `step`, if given, or the tracker names, and a description of that.

    The checkpoint need not be complete. It is None for a damaged tracker, and both are None without
    a tracker.
    """
    confine_links(root)
    if step is not None:
        return checkpoint_directory(root, step), f"--ckpt-step {step}"
    try:
        tag, tracker = _read_deepspeed_tag(root)
        named = find_interrupted_commit(root) or read_tracker(root)
    except CheckpointError as error:
        return None, str(error)
    if named is not None:
        directory = checkpoint_directory(root, named)
        # A run that began with DeepSpeed's checkpoint may save to the same directory, and moves the
        # tracker. The tracker of Megatron-DeepSpeed can name a checkpoint that is not universal.
        # Of its own checkpoints, it loads the one that DeepSpeed's tracker names.
        follows_deepspeed = tracker == ENGINE_LATEST and _is_engine(directory)
        is_followed = directory.is_dir() and not follows_deepspeed
        if tag is None or is_followed or _contains_iterations(root):
            return directory, f"the tracker names {named}"
    if tag is None:
        return None, None
    if _contains_iterations(root):
        return None, "there is no tracker file"
    return root / tag, f"{tracker} names {tag}"


def list_newest_first(root: Path, head: Path | None = None) -> list[Path]:
    """Return the checkpoints in `root`, complete or not, in the order of fallback.

    Iterations must be on the branch that ends with `head`, by default on the branch of the latest
    start (see `dist_checkpointing.lineage`).
    """
    checkpoints = CheckpointDirectory(root)
    lineages = checkpoints.read_lineages()
    branch = on_branch(lineages)
    if head is not None and head.is_dir() and head.parent == root:
        branch = _list_branch_of(checkpoints, lineages, read_lineage(head))

    # Iterations, those of DeepSpeed included.
    iterations: dict[Path, int] = {}
    for iteration in branch:
        iterations[checkpoints.path(iteration)] = iteration
    for path in sorted(root.glob("global_step*"), reverse=True):  # universal ones first
        match = _DEEPSPEED.fullmatch(path.name)
        if match is not None:
            iterations[path] = int(match[1])
    ordered = sorted(iterations, key=lambda path: -iterations[path])

    # Then a release. Copies under another name belong to no branch: they are the last resort.
    ordered.append(root / RELEASE)
    for iteration, lineage in lineages.items():
        path = checkpoints.path(iteration)
        if lineage.iteration != iteration and path not in ordered:
            ordered.append(path)
    # In object storage a directory exists only if it contains an object.
    if isinstance(root, ObjectPath):
        return [path for path in ordered if path in iterations or path.is_dir()]
    return [path for path in ordered if path.is_dir() and any(path.iterdir())]


def _list_branch_of(
    checkpoints: CheckpointDirectory, lineages: Mapping[int, Lineage], end: Lineage
) -> list[int]:
    """Return the iterations on the branch that ends with `end`, newest first."""
    branch = on_branch(lineages, end)
    if end.generation > 0:
        return branch
    # A checkpoint of generation 0 is of another program, or has lost its lineage, e.g., in a copy
    # of a run in progress. It ends the branch of the latest start, unless complete checkpoints of
    # generation 0 are not on that branch.
    latest = {iteration for iteration in on_branch(lineages) if iteration <= end.iteration}
    for iteration in branch:
        is_other = iteration != end.iteration and iteration not in latest
        if is_other and find_problem(checkpoints.path(iteration)) is None:
            return branch
    return sorted(latest.union(branch), reverse=True)


# ---- Finding a checkpoint ----


def find_checkpoint(
    root: str | Path, step: int | None = None, loader: str = "auto"
) -> CheckpointRef | None:
    """Return the checkpoint that `root` means, or None if it contains none.

    This is `root` itself if it is a checkpoint (see `is_checkpoint_itself`), otherwise iteration
    `step` if given, otherwise the checkpoint that the tracker names, otherwise (that one or the
    tracker is lost or damaged) the newest complete one. Raises NoCheckpointError if `step` is
    missing or damaged, or if no checkpoint is complete: training from scratch would overwrite them.
    `loader` names the format of a directory that looks like several.
    """
    root = path_of(root)
    confine_links(root)
    if step is None and is_checkpoint_itself(root, loader):
        return CheckpointRef(root, detect_format(root, loader))

    # 1. The named checkpoint. In object storage the tracker is only a hint.
    damaged: list[tuple[Path, str]] = []
    ignores_tracker = step is None and isinstance(root, ObjectPath)
    named, reason = (None, None) if ignores_tracker else find_named_checkpoint(root, step)
    if named is not None:
        problem = find_problem(named)
        if problem is None:
            note = None if step is not None else _find_alternative(root, named)
            return CheckpointRef(named, detect_format(named, loader), note)
        if step is not None:
            contents = resolve(_DESCRIBE_CONTENTS)(root)
            raise NoCheckpointError(f"{reason}: {named} cannot be loaded, {problem}; {contents}")
        reason = f"{reason}, but {problem}"
        damaged.append((named, problem))

    # 2. The newest complete one. Looking at all checkpoints is slow on a parallel file system.
    alternatives = [directory for directory in list_newest_first(root, named) if directory != named]
    if reason is None and not alternatives:
        _refuse_unread(root)
        return None
    reason = reason or "there is no tracker file"
    for directory in alternatives:
        problem = find_problem(directory)
        if problem is None:
            note = f"{reason}: taking {directory}, the newest complete checkpoint"
            if ignores_tracker:
                note = _find_alternative(root, directory)
            form = detect_format(directory, loader)
            return CheckpointRef(directory, form, note, tuple(damaged))
        damaged.append((directory, problem))
    raise NoCheckpointError(f"{root}: {reason}; {resolve(_DESCRIBE_CONTENTS)(root)}")


def _refuse_unread(root: Path) -> None:
    """Raise NoCheckpointError for a checkpoint of a program that is not read.

    A run would start from random weights otherwise. The files of a new run are hidden.
    """
    if root.is_file() or any(root.glob("[!.]*")):
        resolve(_REFUSE_UNREAD)(root)


def _find_alternative(root: Path, named: Path) -> str | None:
    """Return a note if `root` also contains a checkpoint of another program than this run, or if
    DeepSpeed's trackers disagree.
    """
    if read_latest(root) is None and not list_formats(root) and not _is_engine(named):
        return None
    note: str | None = resolve(_DESCRIBE_ALTERNATIVE)(root, named)
    return note


# ---- Opening a checkpoint ----


def open_found(
    checkpoint: CheckpointRef,
    *,
    optimizer: bool = True,
    verify: bool | None = None,
    waits_for_shards: bool = False,
) -> Source:
    """Open a checkpoint that was already found, possibly by another process, for a run.

    `verify` compares blocks that are read with checksums.bin. None: if the checkpoint contains it;
    True: it is required; False: never. `waits_for_shards` waits for shards of a torch_dist
    checkpoint that a network file system does not show yet: another rank has seen all of them.
    """
    if checkpoint.format == "torch_dist":
        run = open_run_checkpoint(checkpoint.directory, verify is not False, waits_for_shards)
        if run is not None:
            if verify:
                resolve(_REQUIRE_CHECKSUMS)(checkpoint)
            return run
    return open_in_any_form(
        checkpoint, optimizer=optimizer, verify=verify, waits_for_shards=waits_for_shards
    )


def open_in_any_form(
    checkpoint: CheckpointRef,
    *,
    optimizer: bool = True,
    verify: bool | None = None,
    waits_for_shards: bool = False,
) -> Source:
    """Open a checkpoint with the general reader of its format.

    That reader compares the arguments with the stored tensors. The options are those of
    `open_found`.
    """
    source: Source = resolve(_OPEN_ANY)(checkpoint, optimizer, verify, waits_for_shards)
    return source
