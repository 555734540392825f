"""Opening a checkpoint of any format, writing it in any other, and loading it into a run: all
through model space.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.conversion.deepspeed.universal import UniversalSource, write_universal
from megatron.conversion.formats import CheckpointRef, require_checkpoint
from megatron.conversion.huggingface.directory import HuggingFaceSource, write_huggingface
from megatron.conversion.megatron_lm.legacy_reader import LegacySource
from megatron.conversion.megatron_lm.legacy_writer import write_legacy
from megatron.conversion.megatron_lm.torch_dist import (
    RunCheckpoint,
    StackedLayers,
    open_torch_dist,
    write_torch_dist,
)
from megatron.conversion.model_space.model import Layout
from megatron.conversion.model_space.pieces import is_bitwise_equal, make_empty_directory
from megatron.conversion.model_space.source import (
    ADAM,
    Progress,
    Shape,
    Source,
    TensorInfo,
    TrainingState,
    full_precision_key,
    is_trained,
    no_progress,
    optimizer_states,
    split_key,
)
from megatron.conversion.options import ReadOptions, WriteOptions
from megatron.core.dist_checkpointing import (
    CheckpointDirectory,
    CheckpointError,
    LoadReport,
    ShardedStateDict,
    ShardedTensor,
    fill,
    write_tracker,
)
from megatron.core.dist_checkpointing.format.checksums import CHECKSUMS, find_checksums
from megatron.core.dist_checkpointing.format.schema import file_name
from megatron.core.dist_checkpointing.loading.load import RAISE, STRICTNESS, BoxReader
from megatron.core.dist_checkpointing.loading.reader import Request
from megatron.core.dist_checkpointing.mapping import cut_rows
from megatron.core.dist_checkpointing.verification import INTEGRITY, find_integrity_problems
from megatron.core.durable_files import fsync_tree, put_in_place, remove
from megatron.core.object_storage import ObjectPath
from megatron.core.progress import ProgressBar

_VERIFY_BYTES = 64 << 20

logger = logging.getLogger(__name__)


READERS: dict[str, Callable[[Path, ReadOptions], Source]] = {
    "torch_dist": open_torch_dist,
    "legacy": LegacySource,
    "hf": HuggingFaceSource,
    "universal": UniversalSource,
}


def open_checkpoint(
    root: Path,
    loader: str = "auto",
    step: int | None = None,
    read_options: ReadOptions | None = None,
) -> Source:
    """The checkpoint that `root` means as a `Source`."""
    return open_found(require_checkpoint(root, step, loader), read_options)


def open_found(found: CheckpointRef, read_options: ReadOptions | None = None) -> Source:
    """A checkpoint that was found, perhaps by another process."""
    read_options = read_options or ReadOptions()
    if read_options.verify:
        _require_checksums(found)
    source = READERS[found.format](found.directory, read_options)
    source.args.update(read_options.args)
    return source


def _require_checksums(found: CheckpointRef) -> None:
    """Raise CheckpointError unless what is read from the checkpoint can be verified.

    Blocks are compared with `checksums.bin` when they are read. Megatron-LM's `integrity.json` has
    a hash of each file, so all files are read here, on rank 0 only.
    """
    if find_checksums(found.directory) is not None:
        return
    if not (found.directory / INTEGRITY).is_file():
        raise CheckpointError(
            f"--ckpt-verify: {found.directory} ({found.format}) has neither {CHECKSUMS} nor {INTEGRITY} to compare it "
            "with: drop the flag, or convert the checkpoint first (tools/checkpoint/convert.py --saver torch_dist)"
        )
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    problems = find_integrity_problems(found.directory)
    if problems:
        raise CheckpointError("\n".join(problems))


def _write_torch_dist(
    source: Source, root: Path, options: WriteOptions, progress: Progress
) -> list[str]:
    stored = StackedLayers(source) if options.stacked_layers else source
    return _in_iteration(
        source, root, lambda to: write_torch_dist(stored, to, options.workers, progress)
    )


def _write_legacy(
    source: Source, root: Path, options: WriteOptions, progress: Progress
) -> list[str]:
    layout = _target_layout(source.args, options)
    return _in_iteration(
        source, root, lambda to: write_legacy(source, to, layout, options.workers, progress)
    )


# Each returns what could not be carried.
WRITERS: dict[str, Callable[[Source, Path, WriteOptions, Progress], list[str]]] = {
    "torch_dist": _write_torch_dist,
    "legacy": _write_legacy,
    "hf": write_huggingface,
    "universal": write_universal,
}


@dataclass(frozen=True)
class ConversionReport:
    """What was converted, and what not."""

    source: str
    target: Path
    num_tensors: int
    not_carried: list[str]
    verified: int | None  # tensors compared with the source


def convert(
    load_dir: Path,
    save_dir: Path,
    saver: str,
    loader: str = "auto",
    step: int | None = None,
    read_options: ReadOptions | None = None,
    options: WriteOptions | None = None,
    overwrite: bool = False,
    verify: bool = False,
    progress: Progress = no_progress,
    starting: Callable[[int], None] = lambda nbytes: None,
) -> ConversionReport:
    """Write the checkpoint at `load_dir` to `save_dir` in the format `saver`; it appears there
    complete or not at all.

    `starting` receives the number of bytes to write and then, with `verify`, to compare. Raises ValueError for an
    existing target without `overwrite`, an unreadable source, or a format that cannot hold the
    model; nothing is left behind then.
    """
    options = options or WriteOptions()
    source = open_checkpoint(load_dir, loader, step, read_options)
    _check_target(save_dir, load_dir, saver, overwrite)
    sidecar = options.optim_sidecar and source.training is not None
    options = dataclasses.replace(
        options, trusted=(*options.trusted, load_dir), optim_sidecar=sidecar
    )
    changed = CastSource(source, options)
    starting(bytes_to_write(changed, saver, options))

    def write(directory: Path) -> ConversionReport:
        lost = WRITERS[saver](changed, directory, options, progress)
        lost += [f"unused in the source: {name}" for name in source.unused]
        compared = None
        if verify:
            # Without optimizer state in the source, universal files have zeros in its place.
            has_optimizer = bool(optimizer_states(changed.tensors))
            read_back = ReadOptions(optimizer=has_optimizer)
            target = open_checkpoint(directory, read_options=read_back)
            starting(sum(info.nbytes for info in target.tensors.values()))
            compared = compare(changed, target, progress)
        return ConversionReport(source.description, save_dir, len(changed.tensors), lost, compared)

    if isinstance(save_dir, ObjectPath):  # a commit there is one request, at the end
        return write(save_dir)
    # Beside the target, so that the final rename stays within one file system.
    growing = save_dir.with_name(f".{save_dir.name}.converting")
    with exclusive_output_dir(growing):
        report = write(growing)
        fsync_tree(growing)
        put_in_place(growing, save_dir)
    return report


class CastSource:
    """A source with weights of another dtype, or without the optimizer, as the options say.

    Weights of a new dtype are cast from the fp32 main parameters, if there are any.
    """

    def __init__(self, source: Source, options: WriteOptions) -> None:
        self._source = source
        self._dtype = options.dtype
        self.description = source.description
        self.unused = source.unused
        self.args = dict(source.args)
        self.training: TrainingState | None = source.training
        self.tensors: dict[str, TensorInfo] = {}
        for key, info in source.tensors.items():
            if not key.startswith("optimizer.state."):
                wanted = (
                    options.dtype if is_trained(key) else None
                )  # what the load moves is fp32 in any model
                self.tensors[key] = TensorInfo(info.shape, wanted or info.dtype)
            elif options.optimizer:
                self.tensors[key] = info
        if options.dtype is not None:
            self.args |= {
                "bf16": options.dtype == torch.bfloat16,
                "fp16": options.dtype == torch.float16,
            }
            self.args["params_dtype"] = options.dtype
        if options.transformer_impl is not None:
            self.args["transformer_impl"] = options.transformer_impl
        if not options.optimizer and source.training is not None:
            self.training = dataclasses.replace(
                source.training, param_groups=None, scheduler=None, grad_scaler=None
            )

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        wanted = self.tensors[key].dtype
        if wanted != self._source.tensors[key].dtype:
            key = full_precision_key(key, self._source.tensors)
        return self._source.read(key, offset, shape).to(wanted)


def _check_target(save_dir: Path, load_dir: Path, saver: str, overwrite: bool) -> None:
    if (
        save_dir.exists()
        and not (save_dir.is_dir() and not any(save_dir.iterdir()))
        and not overwrite
    ):
        raise ValueError(
            f"{save_dir} exists: choose another --save-dir, or give --overwrite to replace it"
        )
    if save_dir.resolve() == load_dir.resolve() or load_dir.resolve().is_relative_to(
        save_dir.resolve()
    ):
        raise ValueError(
            f"--save-dir {save_dir} is or contains the source {load_dir}, which would be lost: choose another"
        )
    if isinstance(save_dir, ObjectPath) and (saver != "torch_dist" or overwrite):
        reason = (
            "nothing is replaced there: delete it first"
            if overwrite
            else "give --saver torch_dist or a directory"
        )
        raise ValueError(
            f"--save-dir {save_dir}: object storage holds torch_dist checkpoints alone; {reason}"
        )


def bytes_to_write(source: Source, saver: str, options: WriteOptions) -> int:
    """Approximately: without what a format adds."""
    weights = [info for key, info in source.tensors.items() if not key.startswith("optimizer.")]
    if saver == "hf" and not options.optim_sidecar:
        return sum(info.nbytes for info in weights)
    if saver == "universal":  # every state in fp32
        states = len(optimizer_states(source.tensors) or ADAM)
        return sum(states * 4 * math.prod(info.shape) for info in weights)
    return sum(info.nbytes for info in source.tensors.values())


def compare(source: Source, result: Source, progress: Progress = no_progress) -> int:
    """Number of tensors of `result` found bitwise equal to `source`; ValueError names the first
    that is not.
    """
    count = 0
    for key, info in result.tensors.items():
        if key not in source.tensors:
            raise ValueError(
                f"verification: {result.description} has {key}, which the source lacks"
            )
        for offset, shape in cut_rows(info.shape, info.dtype.itemsize, _VERIFY_BYTES):
            expected = source.read(key, offset, shape).to(info.dtype)
            if not is_bitwise_equal(result.read(key, offset, shape), expected):
                raise ValueError(
                    f"verification: {key} differs from the source (in the box at {offset} of {shape})"
                )
            progress(expected.nbytes)
        count += 1
    # A result without any optimizer state has no place for it, or it was not wanted.
    has_optimizer = bool(optimizer_states(result.tensors))
    wanted = [key for key in source.tensors if has_optimizer or not key.startswith("optimizer.")]
    lost = [key for key in wanted if key not in result.tensors]
    if lost:
        raise ValueError(
            f"verification: {result.description} lacks {len(lost)} tensors of the source, {lost[0]} first"
        )
    return count


def _target_layout(args: Mapping[str, Any], options: WriteOptions) -> Layout:
    """The source's layout unless the options change it; a new number of stages drops chunks and
    uneven stages.
    """

    def stored(axis: str) -> int:
        return args.get(f"{axis}_parallel_size") or 1

    tp = options.tensor_parallel or stored("tensor_model")
    pp = options.pipeline_parallel or stored("pipeline_model")
    same_pipeline = pp == stored("pipeline_model")
    vpp = options.virtual_pipeline_parallel or (
        stored("virtual_pipeline_model") if same_pipeline else 1
    )
    ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    splits = {name: args.get(name) for name in ends if same_pipeline}
    if (args.get("num_experts") or 0) <= 1:
        return Layout.of(args["num_layers"], tp, pp, vpp, splits)
    ep = options.expert_parallel or stored("expert_model")
    etp = options.expert_tensor_parallel
    if ep == 1 and etp not in (None, tp):
        raise ValueError(
            f"--target-expert-tensor-parallel-size {etp} needs --target-expert-model-parallel-size: legacy files split "
            f"experts as dense layers, over {tp} ranks, where there is no expert parallelism"
        )
    if etp is None and tp == stored("tensor_model"):
        etp = args.get("expert_tensor_parallel_size")
    return Layout.of(args["num_layers"], tp, pp, vpp, splits, (ep, etp if ep > 1 else None))


def _in_iteration(source: Source, root: Path, write: Callable[[Path], list[str]]) -> list[str]:
    """Write below `root` as a run does: a directory per iteration, and the tracker last."""
    training = source.training
    begun = training is not None and (training.iteration > 0 or training.param_groups is not None)
    iteration: int | str = training.iteration if training is not None and begun else "release"
    directory = CheckpointDirectory(root).path(iteration)
    file_name(directory.name, "the iteration")
    not_carried = write(directory)
    write_tracker(root, iteration)
    return not_carried


class _SourceReader:
    """What the engine reads a `Source` of another program by: tensors box by box, generators as
    objects.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.metadata = self
        self.tensors = source.tensors
        self.objects: Collection[str] = source.training.rng if source.training is not None else ()
        self.bytes_needed = self.bytes_read = 0

    def read_into(self, requests: Sequence[Request], workers: int = 1) -> None:
        """In one thread: sources make no promise about more."""
        for key, offset, target in requests:
            target.copy_(self._source.read(key, offset, tuple(target.shape)))
            self.bytes_needed += target.numel() * self.tensors[key].dtype.itemsize
            self.bytes_read = self.bytes_needed

    def read_object(self, key: str) -> Any:
        assert self._source.training is not None
        return self._source.training.rng[key]()


class _MainParametersFromWeights:
    """A reader that reads main parameters which the checkpoint lacks from its weights.

    Main parameters determine the weights of the run, so they must never keep their random initial
    values. An fp32 weight is its main parameter. The value of a bf16 or fp16 weight is rounded, so
    it is used only if `strictness` tolerates missing keys.
    """

    def __init__(self, reader: BoxReader, state: ShardedStateDict, strictness: str) -> None:
        self._reader = reader
        self.bytes_needed = 0
        self.bytes_read = 0
        self.metadata = self
        self.objects = reader.metadata.objects
        self.tensors: dict[str, Any] = dict(reader.metadata.tensors)
        self._weights: dict[str, str] = {}  # main parameter -> weight
        tolerates_missing = strictness not in STRICTNESS or STRICTNESS[strictness][0] != RAISE
        rounded = []
        for entry in state.values():
            weight, optimizer_state = split_key(entry.key)
            if optimizer_state != "param" or entry.key in self.tensors:
                continue
            if weight not in self.tensors:
                continue
            is_exact = self.tensors[weight].dtype == torch.float32
            if is_exact or tolerates_missing:
                self.tensors[entry.key] = self.tensors[weight]
                self._weights[entry.key] = weight
            if tolerates_missing and not is_exact:
                rounded.append(entry.key)
        if rounded:
            logger.warning(
                f"{len(rounded)} main parameters are not in the checkpoint, {rounded[0]} first: they are taken "
                "from its weights, which are rounded"
            )

    def is_substitute(self, key: str) -> bool:
        """Return whether the weight `key` is read as a main parameter."""
        return key in self._weights.values()

    def read_into(self, requests: Sequence[Request], workers: int = 1) -> None:
        stored = [
            request._replace(key=self._weights.get(request.key, request.key))
            for request in requests
        ]
        self._reader.read_into(stored, workers)
        self.bytes_needed = self._reader.bytes_needed
        self.bytes_read = self._reader.bytes_read

    def read_object(self, key: str) -> Any:
        return self._reader.read_object(key)


def load_from_source(
    state: ShardedStateDict,
    source: Source,
    *,
    strictness: str = "raise_all",
    skip: Callable[[str], bool] = lambda key: False,
    parallelization_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Fill the tensors of `state` in place from `source`. The options are those of `fill`. Collective.

    Raises CheckpointError on every rank if any rank fails; the tensors are undefined then.
    """
    stored: BoxReader = (
        source.reader if isinstance(source, RunCheckpoint) else _SourceReader(source)
    )
    reader = _MainParametersFromWeights(stored, state, strictness)
    total = 0
    for entry in state.values():
        if isinstance(entry, ShardedTensor):
            total += sum(box.tensor.nbytes for box in entry.boxes)
    # Rank 0 shows its own share: it represents those of the others.
    quiet = dist.is_initialized() and dist.get_rank() > 0
    with ProgressBar(
        f"loading {source.description}", total, count=lambda: stored.bytes_read, quiet=quiet
    ):
        return fill(
            state,
            reader,
            source.description,
            strictness=strictness,
            skip=lambda key: reader.is_substitute(key) or skip(key),
            parallelization_group=parallelization_group,
        )


@contextmanager
def exclusive_output_dir(directory: Path) -> Iterator[None]:
    """Create or empty `directory` for one process at a time, and remove it if the block fails.

    Raises ValueError while another conversion works there. Leftovers of a killed conversion are
    removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    handle = _open_own(directory)
    try:
        # The lock goes with the process: a killed conversion blocks nobody.
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            reason = "another conversion to the same --save-dir is writing: wait for it"
            raise ValueError(f"{directory}: {reason}") from error
        except OSError:  # some network file systems do not support locks
            pass
        try:
            for path in directory.iterdir():
                remove(path)
            make_empty_directory(directory)
            yield
        except BaseException:
            remove(directory)
            raise
    finally:
        os.close(handle)


def _open_own(directory: Path) -> int:
    """Refuse links: a planted one would have its target emptied."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise ValueError(
            f"{directory} is a link: remove it, since a conversion would write to its target"
        ) from error
    if os.fstat(handle).st_uid != os.geteuid():
        os.close(handle)
        raise ValueError(
            f"{directory} belongs to another user: remove it, or choose another --save-dir"
        )
    return handle
