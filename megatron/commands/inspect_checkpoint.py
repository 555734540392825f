"""Inspection of checkpoints: the commands of tools/checkpoint/inspect_checkpoint.py."""

from __future__ import annotations

import argparse
import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.conversion.convert import open_checkpoint, write_checkpoint
from megatron.conversion.formats import (
    FORMATS,
    detect_format,
    find_named_checkpoint,
    is_extra_state,
    require_checkpoint,
)
from megatron.conversion.megatron_lm.shifted_optimizer import RepairedOptimizer
from megatron.conversion.megatron_lm.torch_dist import Reader, TorchDistSource, read_common
from megatron.conversion.model_space.foreign import describe_foreign_mixers
from megatron.conversion.model_space.model import Layout, RankLoad, name_model_part, plan_load
from megatron.conversion.model_space.pieces import is_bitwise_equal
from megatron.conversion.model_space.source import Shape, TensorInfo
from megatron.conversion.options import ReadOptions
from megatron.core.dist_checkpointing import (
    CheckpointMetadata,
    StoredTensor,
    load_common,
    read_metadata,
)
from megatron.core.dist_checkpointing.format.checksums import find_checksums
from megatron.core.dist_checkpointing.format.links import allow_links
from megatron.core.dist_checkpointing.format.schema import format_value
from megatron.core.dist_checkpointing.mapping import cut_rows
from megatron.core.dist_checkpointing.verification import (
    VerifyReport,
    compute_digest,
    compute_verify_size,
    verify,
    write_integrity,
)
from megatron.core.progress import ProgressBar, format_size
from megatron.core.terminal import print_json, print_line
from megatron.training.planning.pictures import Shares, draw_shares

SLICE = 64 << 20  # bytes of a tensor in memory at once
NUM_LARGEST = 10  # tensors and files that `show` prints without --all
OPTIMIZER_STATE = "optimizer.state."  # prefix of keys, followed by the name of the state
# Axis in the output -> argument of the run.
LAYOUT_ARGS = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "dp": "data_parallel_size",
    "world": "world_size",
}


class View(NamedTuple):
    """Named tensors of a checkpoint in any format, with its path and format for messages.

    `tensors` and `read` are those of a `Source`, or of a `Reader` for a torch_dist directory that
    is not a model of ours: that has neither arguments nor a training state, so it is not a source.
    """

    path: Path
    format: str
    tensors: Mapping[str, TensorInfo | StoredTensor]
    read: Callable[[str, Shape, Shape], torch.Tensor]  # (key, offset, shape)

    def iterate_slices(self, key: str) -> Iterator[tuple[Shape, torch.Tensor]]:
        """Yield (offset, rows) of a tensor in order."""
        info = self.tensors[key]
        for offset, shape in cut_rows(info.shape, info.dtype.itemsize, SLICE):
            yield offset, self.read(key, offset, shape)

    def select_keys(self, pattern: str) -> list[str]:
        """Return the keys that match a shell pattern, in stored order."""
        return fnmatch.filter(self.tensors, pattern)


_EVERYTHING = ReadOptions(keep_foreign=True)


def open_view(root: Path, step: int | None) -> View:
    """Open a checkpoint under the names of model space, which are the same for all formats.

    A torch_dist checkpoint that does not contain one of our models is opened under its own keys.
    """
    path, kind, _ = require_checkpoint(root, step)
    is_torch_dist = kind == "torch_dist"
    try:
        source = open_checkpoint(path, kind, read_options=_EVERYTHING)
    except ValueError:
        if not is_torch_dist:
            raise
        return open_stored_view(path)
    # Do not hide tensors that have no name in model space.
    if is_torch_dist and source.unused:
        return open_stored_view(path)
    return View(path, kind, source.tensors, source.read)


def open_stored_view(path: Path) -> View:
    """Open a torch_dist directory under the keys in its files."""
    reader = Reader(path)
    return View(path, "torch_dist", reader.metadata.tensors, reader.read)


def format_shape(shape: Shape | list[int]) -> str:
    """Return the shape as text, e.g., 4096x1024."""
    return "x".join(map(str, shape)) or "scalar"


# show


def run_show(args: argparse.Namespace) -> int:
    """Print the contents of a checkpoint; return the exit status.

    Only the metadata is read, not the tensors.
    """
    path, kind, _ = require_checkpoint(args.path, args.ckpt_step)
    if args.plot is not None and kind != "torch_dist":
        raise ValueError(
            f"--plot: {path} is {kind}, and only torch_dist records the contents of each file; "
            "use plan --plot"
        )

    # Collect the facts of each format.
    tensors: Mapping[str, TensorInfo | StoredTensor]
    if kind == "torch_dist":
        metadata = read_metadata(path)
        tensors = metadata.tensors
        facts = collect_torch_dist_facts(path, metadata)
    else:
        source = open_checkpoint(path, kind, read_options=_EVERYTHING)
        tensors = source.tensors
        iteration = None
        if source.training is not None:
            iteration = source.training.iteration
        facts = collect_run_facts(source.args, iteration)
    described = {}
    for key in fnmatch.filter(tensors, args.keys):
        described[key] = describe_tensor(tensors[key])

    # These are the fields of the JSON output.
    result = {
        "path": str(path),
        "format": kind,
        **sum_sizes(tensors),
        **facts,
        "tensors": described,
    }

    # Report them.
    if args.plot is not None:
        title = f"{path.name}: bytes in each file"
        shares = compute_file_shares(path)
        draw_shares(shares, args.plot, title, "file: __{rank}_{writer}.distcp")
    if args.json:
        print_json(result, indent=1)
    else:
        print_checkpoint(result, args.all)
    return 0


def describe_tensor(info: TensorInfo | StoredTensor) -> dict[str, Any]:
    """Return the entry of a tensor in the JSON output."""
    described = {"shape": list(info.shape), "dtype": info.dtype_name, "bytes": info.nbytes}
    if isinstance(info, StoredTensor):
        described["chunks"] = len(info.chunks)
    return described


def compute_file_shares(path: Path) -> Shares:
    """Return bytes by file, part of the model and kind (weights, optimizer state, objects).

    A file is called `__{rank}_{writer}.distcp`, so this also shows the work of each rank.
    """
    metadata = read_metadata(path)
    # file -> part of the model -> kind -> bytes
    shares: dict[str, dict[str, dict[str, int]]] = {}
    for name in sorted(metadata.file_sizes(), key=extract_numbers):
        shares[name] = {}

    def add(file: str, part: str, kind: str, nbytes: int) -> None:
        kinds = shares[file].setdefault(part, {})
        kinds[kind] = kinds.get(kind, 0) + nbytes

    # Tensors
    for key, stored in metadata.tensors.items():
        part = name_model_part(key)
        kind = name_kind(key).removeprefix(OPTIMIZER_STATE)
        chunks = stored.chunks
        numbers = chunks.file.tolist()
        lengths = chunks.length.tolist()
        for number, length in zip(numbers, lengths, strict=True):
            add(chunks.files[number], part, kind, length)

    # Objects, which several keys may share
    for location in set(metadata.objects.values()):
        add(location.file, "objects", "objects", location.length)
    return shares


def name_kind(key: str) -> str:
    """Return the kind of a tensor: weights, ema, or e.g. optimizer.state.exp_avg."""
    if key.startswith(OPTIMIZER_STATE):
        state, _, _ = key.removeprefix(OPTIMIZER_STATE).partition(".")
        return OPTIMIZER_STATE + state
    if key.startswith("ema."):
        return "ema"
    return "weights"


def extract_numbers(name: str) -> tuple[int, ...]:
    """Return the numbers in a file name, which sort __2_0.distcp before __10_0.distcp."""
    return tuple(map(int, re.findall(r"\d+", name)))


def sum_sizes(tensors: Mapping[str, TensorInfo | StoredTensor]) -> dict[str, Any]:
    """Return the number of tensors, and their bytes in total and by kind."""
    sizes: Counter[str] = Counter()
    for key, info in tensors.items():
        sizes[name_kind(key)] += info.nbytes
    return {
        "num_tensors": len(tensors),
        "bytes": sum(sizes.values()),
        "bytes_by_kind": dict(sizes),
    }


def collect_torch_dist_facts(path: Path, metadata: CheckpointMetadata) -> dict[str, Any]:
    """Return the origin of a torch_dist checkpoint, its objects and its files.

    The size of a missing file is None.
    """
    # Newer Megatron-LM stores the common state in a shard.
    common = load_common(path)
    if not common:
        common = read_common(Reader(path), path)

    # Other programs may store an instance of a class of theirs.
    args = common.get("args", {})
    if isinstance(args, argparse.Namespace):
        args = vars(args)
    if not isinstance(args, dict):
        args = {}

    # The metadata names the files, of which some may be missing.
    files: dict[str, int | None] = {}
    for name in sorted(metadata.file_sizes()):
        file = path / name
        files[name] = None
        if file.exists():
            files[name] = file.stat().st_size
    return {
        **collect_run_facts(args, common.get("iteration")),
        "objects": sorted(metadata.objects),
        "files": files,
        "checksums": find_checksums(path) is not None,
    }


def collect_run_facts(args: Mapping[str, Any], iteration: Any) -> dict[str, Any]:
    """Return the iteration, the layout that the checkpoint was written at, and the arguments."""
    layout = {}
    for axis, name in LAYOUT_ARGS.items():
        if args.get(name) is not None:
            layout[axis] = args[name]
    # Context parallelism is rare: leave its usual size out.
    if layout.get("cp") == 1:
        del layout["cp"]
    return {"iteration": iteration, "layout": layout, "args": dict(args)}


def print_checkpoint(result: dict[str, Any], print_all: bool) -> None:
    """Print a summary, and the largest files and tensors, or all of them."""
    # Print the summary.
    iteration = "not stored"
    if result["iteration"] is not None:
        iteration = format_value(result["iteration"])
    sizes = summarize_sizes(result["bytes"], result["bytes_by_kind"])
    print_line(result["path"])
    print_line(f"  format     {result['format']}")
    print_line(f"  iteration  {iteration}")
    print_line(f"  written at {summarize_layout(result['layout'])}")
    print_line(f"  tensors    {result['num_tensors']}, {sizes}")
    mixers = describe_foreign_mixers(result["args"])
    if mixers:
        print_line(f"  foreign    {mixers}: can be converted, not trained")

    # Print the files, which are only known for torch_dist, and the tensors.
    if "files" in result:
        checksums = "no (written by another program)"
        if result["checksums"]:
            checksums = "yes"
        print_line(f"  objects    {summarize_objects(result['objects'])}")
        print_line(f"  checksums  {checksums}")
        print_files(result["files"], print_all)
    print_line()
    print_tensors(result["tensors"], print_all)


def summarize_layout(layout: Mapping[str, Any]) -> str:
    """Return the sizes of a layout, e.g. TP 2, PP 4."""
    axes = []
    for name, size in layout.items():
        axes.append(f"{name.upper()} {format_value(size)}")
    return ", ".join(axes) or "not stored"


def summarize_sizes(total: int, by_kind: Mapping[str, int]) -> str:
    """Return the bytes of all tensors, in total and by kind."""
    kinds = []
    for kind, nbytes in by_kind.items():
        kinds.append(f"{kind} {format_size(nbytes)}")
    return f"{format_size(total)} ({', '.join(kinds)})"


def print_files(files: dict[str, int | None], print_all: bool) -> None:
    """Print the number and balance of the files, and the largest ones or all of them."""
    # Summarize the files that exist.
    sizes = [size for size in files.values() if size is not None]
    if sizes:
        largest = max(sizes)
        mean = sum(sizes) / len(sizes)
        balance = f"largest {format_size(largest)} = {largest / mean:.2f} x the mean"
        print_line(f"  files      {len(sizes)}, {balance}")

    def rank_missing_first(name: str) -> tuple[bool, int]:
        size = files[name]
        return size is not None, -(size or 0)

    # List missing files first, then the largest.
    names = list(files)
    if not print_all:
        names.sort(key=rank_missing_first)
        names = names[:NUM_LARGEST]
    for name in names:
        size = files[name]
        text = "missing" if size is None else format_size(size)
        print_line(f"    {name:24} {text:>12}")
    print_omitted(len(files) - len(names), "files")


def print_tensors(tensors: dict[str, dict[str, Any]], print_all: bool) -> None:
    """Print a table of the largest tensors, or of all of them in stored order."""
    keys = list(tensors)
    if not print_all:
        keys.sort(key=lambda key: tensors[key]["bytes"], reverse=True)
        keys = keys[:NUM_LARGEST]

    # The column of keys is as wide as the longest one.
    width = max(map(len, keys), default=0)
    print_line(f"  {'key':{width}}  {'shape':>20}  {'dtype':>9}  {'size':>10}  chunks")
    for key in keys:
        tensor = tensors[key]
        shape = format_shape(tensor["shape"])
        dtype = tensor["dtype"]
        size = format_size(tensor["bytes"])
        chunks = tensor.get("chunks", "")  # of torch_dist only
        print_line(f"  {key:{width}}  {shape:>20}  {dtype:>9}  {size:>10}  {chunks:>6}")
    print_omitted(len(tensors) - len(keys), "tensors")


def print_omitted(count: int, kind: str) -> None:
    """Print how many rows of a table were left out, if any."""
    if count:
        print_line(f"  ... and {count} smaller {kind} (--all prints them)")


def summarize_objects(keys: list[str]) -> str:
    """Return the number of objects, and the names of a few that are not extra states."""
    named = [key for key in keys if not is_extra_state(key)]
    num_extra = len(keys) - len(named)
    examples = ", ".join(named[:3])
    if len(named) > 3:
        examples += " ..."
    return f"{len(keys)}, of which {num_extra} extra states: {examples}"


# verify


def find_verify_target(root: Path, step: int | None) -> Path:
    """Return the directory to verify, even if the file that identifies its format is missing."""
    if has_tensor_files(root):
        return root
    # Damage may hide the file by which a format is recognized.
    path, _ = find_named_checkpoint(root, step)
    if path is None or not has_tensor_files(path):
        path = require_checkpoint(root, step).directory
    is_torch_dist = FORMATS["torch_dist"]
    if not is_torch_dist(path) and not has_tensor_files(path):
        raise ValueError(
            f"{path} is a {detect_format(path)} checkpoint; only torch_dist can be verified"
        )
    return path


def has_tensor_files(directory: Path) -> bool:
    """Return whether the directory contains tensor files of torch_dist."""
    return any(directory.glob("*.distcp"))


def run_verify(args: argparse.Namespace) -> int:
    """Check a checkpoint and print its damage; return the exit status."""
    # Verify.
    path = find_verify_target(args.path, args.ckpt_step)
    total = compute_verify_size(path)
    with ProgressBar("verify", total, quiet=args.quiet or args.json) as progress:
        report = verify(path, workers=args.workers, progress=progress.add)
        if args.write_integrity_json and report.ok:
            write_integrity(path, progress.add)

    # Report.
    if args.json:
        print_json({"path": str(path), "ok": report.ok, **asdict(report)}, indent=1)
    else:
        print_verification(path, report)
    return int(not report.ok)


def print_verification(path: Path, report: VerifyReport) -> None:
    """Print the damage, the outcome and the extent of a verification."""
    for problem in report.problems:
        print_line(f"DAMAGED  {problem}")
    for note in report.notes:
        print_line(f"note     {note}")

    extent = f"{report.tensors} tensors, {report.objects} objects"
    if report.has_checksums:
        size = format_size(report.bytes)
        extent += f", {size} in {report.files} files against their checksums"
    outcome = "intact"
    if not report.ok:
        count = len(report.problems)
        outcome = f"{count} problem" if count == 1 else f"{count} problems"
    print_line(f"{path}: {outcome} ({extent})")


# diff


@dataclass
class Difference:
    """Difference between the two versions of a tensor. The fields are those of the JSON output."""

    key: str
    what: str
    max_abs: float | None = None  # None where values cannot be compared

    def __str__(self) -> str:
        """Return the line that is printed."""
        text = f"{self.key}: {self.what}"
        if self.max_abs is not None:
            text += f", by at most {self.max_abs:.3g}"
        return text


def run_diff(args: argparse.Namespace) -> int:
    """Compare two checkpoints and print the differences; return the exit status."""
    first, second = open_comparable_views(args.path, args.other, args.ckpt_step)
    differences = list_missing(first, second)
    differences += list_missing(second, first)

    # Compare the tensors that both contain.
    keys = [key for key in first.select_keys(args.keys) if key in second.tensors]
    total = sum(first.tensors[key].nbytes for key in keys)
    with ProgressBar("diff", total, quiet=args.quiet or args.json) as progress:
        for key in keys:
            difference = compare_tensor(first, second, key, args.atol, progress.add)
            if difference is not None:
                differences.append(difference)

    # Report.
    if args.json:
        result = {
            "a": str(first.path),
            "b": str(second.path),
            "compared": len(keys),
            "differences": [asdict(difference) for difference in differences],
        }
        print_json(result)
    else:
        print_line(f"A {first.path} ({first.format})")
        print_line(f"B {second.path} ({second.format})")
        for difference in differences:
            print_line(f"  {difference}")
        outcome = "equal bitwise"
        if differences:
            outcome = f"{len(differences)} differences"
        elif args.atol:
            outcome = f"equal within {args.atol:g}"
        print_line(f"{len(keys)} tensors compared: {outcome}")
    has_differences = len(differences) > 0
    return int(has_differences)


def open_comparable_views(path: Path, other: Path, step: int | None) -> tuple[View, View]:
    """Open two checkpoints under the same keys, if there are such keys."""
    first = open_view(path, step)
    second = open_view(other, step)
    # Other formats are in model space only.
    are_torch_dist = first.format == "torch_dist" and second.format == "torch_dist"
    if not are_torch_dist or first.tensors.keys() == second.tensors.keys():
        return first, second

    # The keys in the files may agree even if only one of the two is in model space.
    first_stored = open_stored_view(first.path)
    second_stored = open_stored_view(second.path)
    if first_stored.tensors.keys() == second_stored.tensors.keys():
        return first_stored, second_stored
    return first, second


def list_missing(view: View, other: View) -> list[Difference]:
    """List the tensors of `view` that `other` does not contain."""
    differences = []
    for key in view.tensors:
        if key not in other.tensors:
            differences.append(Difference(key, f"only in {view.path}"))
    return differences


def compare_tensor(
    first: View, second: View, key: str, atol: float, progress: Callable[[int], None]
) -> Difference | None:
    """Compare a tensor: bitwise and by dtype, or up to `atol` if that is not 0.

    Returns None if it is equal. `progress` receives the bytes that have been compared.
    """
    a = first.tensors[key]
    b = second.tensors[key]
    if a.shape != b.shape:
        progress(a.nbytes)
        return Difference(key, f"shape {a.shape} and {b.shape}")

    # Compare the values slice by slice.
    num_different = 0
    largest = 0.0
    for offset, part in first.iterate_slices(key):
        other = second.read(key, offset, tuple(part.shape))
        progress(part.nbytes)
        if part.dtype == other.dtype and is_bitwise_equal(part, other):
            continue
        count, distance = measure_distance(part, other)
        num_different += count
        largest = max(largest, distance)

    # With a tolerance, equal values may have different dtypes.
    is_equal = num_different == 0 and a.dtype == b.dtype
    is_within_tolerance = atol > 0 and largest <= atol
    if is_equal or is_within_tolerance:
        return None
    total = torch.Size(a.shape).numel()
    text = f"{num_different} of {total} values differ"
    if a.dtype != b.dtype:
        text = f"{a.dtype_name} and {b.dtype_name}, {text}"
    return Difference(key, text, largest)


def measure_distance(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float]:
    """Return how many values differ (two NaNs are equal), and the largest absolute difference."""
    a = convert_to_double(a)
    b = convert_to_double(b)
    are_both_nan = a.isnan() & b.isnan()
    is_same = (a == b) | are_both_nan
    distances = (a - b).abs()
    distances = distances[~is_same]
    if not distances.numel():
        return 0, 0.0
    # A NaN on one side is infinitely far from any number.
    distances = distances.nan_to_num(float("inf"))
    return distances.numel(), float(distances.max())


def convert_to_double(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in double precision, real or complex."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64)


# digest


def run_digest(args: argparse.Namespace) -> int:
    """Print a digest of each tensor; return the exit status."""
    view = open_view(args.path, args.ckpt_step)
    keys = sorted(view.select_keys(args.keys))
    total = sum(view.tensors[key].nbytes for key in keys)

    # Compute the digests from slices, which bound the memory for large tensors.
    digests: dict[str, str] = {}
    with ProgressBar("digest", total, quiet=args.quiet or args.json) as progress:
        for key in keys:
            rows = (part for _, part in view.iterate_slices(key))
            digests[key] = compute_digest(rows)
            progress.add(view.tensors[key].nbytes)

    # Report.
    if args.json:
        print_json({"path": str(view.path), "digests": digests}, indent=1)
        return 0
    for key, digest in digests.items():
        info = view.tensors[key]
        shape = format_shape(info.shape)
        print_line(f"{digest}  {info.dtype_name:>8}  {shape:>16}  {key}")
    return 0


# plan


def run_plan(args: argparse.Namespace) -> int:
    """Print the share of each rank at a layout; return the exit status."""
    source = open_checkpoint(args.path, step=args.ckpt_step, read_options=_EVERYTHING)
    tp = args.tensor_model_parallel_size
    pp = args.pipeline_model_parallel_size
    vpp = args.virtual_pipeline_model_parallel_size
    dp = args.data_parallel_size
    layout = {"tp": tp, "pp": pp, "vpp": vpp, "dp": dp}
    facts: dict[str, Any] = {"path": str(args.path), "layout": layout}

    # Plan, which fails if the layout does not fit the model.
    try:
        num_layers = source.args.get("num_layers") or 0
        target = Layout.of(num_layers, tp, pp, vpp, vars(args))
        ranks = plan_load(source, target)
    except ValueError as error:
        if args.json:
            print_json(facts | {"loadable": False, "reason": str(error)}, indent=1)
        else:
            print_line(f"{args.path} cannot be loaded at {layout}: {error}")
        return 1

    # Report.
    if args.plot is not None:
        axes = " x ".join(f"{axis.upper()} {size}" for axis, size in layout.items())
        title = f"{args.path.name}: bytes that each rank reads at {axes}"
        draw_rank_shares(ranks, args.plot, title)
    rows = [describe_rank(rank, dp) for rank in ranks]
    if args.json:
        print_json(facts | {"loadable": True, "ranks": rows}, indent=1)
        return 0
    print_line(str(source.description))
    print_line(f"loadable at {layout}; every rank reads (optimizer: sharded over data parallelism)")
    print_plan(rows)
    return 0


def draw_rank_shares(ranks: Sequence[RankLoad], path: Path, title: str) -> None:
    """Draw which parts of the model each model-parallel rank reads."""
    shares = {}
    for rank in ranks:
        column = f"tp {rank.tp}, pp {rank.pp}"
        shares[column] = rank.parts
    draw_shares(shares, path, title, "rank")


def describe_rank(rank: RankLoad, dp_size: int) -> dict[str, Any]:
    """Return the entry of a rank in the JSON output.

    The optimizer state of a model-parallel rank is sharded over its data-parallel replicas.
    """
    layers = []
    for chunk in rank.layers:
        layers.append([chunk.start, chunk.stop])
    optimizer_bytes = -(-rank.nbytes("optimizer") // dp_size)  # rounded up
    return {
        "tp": rank.tp,
        "pp": rank.pp,
        "layers": layers,
        "parameters": rank.parameters,
        "weight_bytes": rank.nbytes("weights"),
        "optimizer_bytes": optimizer_bytes,
    }


def print_plan(rows: list[dict[str, Any]]) -> None:
    """Print a table with a line per model-parallel rank."""
    print_line(
        f"{'tp':>4}{'pp':>4}  {'layers':24}{'parameters':>16}{'weights':>12}{'optimizer':>12}"
    )
    for row in rows:
        rank = f"{row['tp']:>4}{row['pp']:>4}"
        chunks = [f"{start}..{stop - 1}" for start, stop in row["layers"]]
        layers = " ".join(chunks)
        parameters = row["parameters"]
        weights = format_size(row["weight_bytes"])
        optimizer = format_size(row["optimizer_bytes"])
        print_line(f"{rank}  {layers:24}{parameters:>16,}{weights:>12}{optimizer:>12}")


# repair


def run_repair(args: argparse.Namespace) -> int:
    """Write a copy of a checkpoint with its shifted optimizer state put back."""
    path, kind, _ = require_checkpoint(args.path, args.ckpt_step)
    if kind != "torch_dist":
        raise ValueError(f"{path} is a {kind} checkpoint; only torch_dist can be repaired")
    source = open_shifted_checkpoint(path)
    with ProgressBar("repair", 0, quiet=args.quiet or args.json) as progress:
        write_checkpoint(
            source,
            [path],
            args.output,
            "torch_dist",
            verify=True,
            progress=progress.add,
            starting=progress.restart,
        )

    # Report.
    if args.json:
        result = {"path": str(path), "output": str(args.output)}
        print_json(result | {"moved": source.moved, "lost": source.lost}, indent=1)
        return 0
    print_line(f"{path} -> {args.output}")
    print_line(f"  put back   {source.moved} elements of each optimizer state")
    print_line(
        f"  lost       {source.lost} elements of each state: main parameters are taken from the "
        "weights, moments are zero"
    )
    return 0


def open_shifted_checkpoint(path: Path) -> RepairedOptimizer:
    """Open a checkpoint with shifted optimizer state. Raises ValueError if it is not shifted."""
    try:
        open_checkpoint(path, "torch_dist", read_options=_EVERYTHING)
    except ValueError:
        shifted = TorchDistSource(path, compares_weights=False)
        return RepairedOptimizer(shifted, shifted.config)
    raise ValueError(f"{path}: there is nothing to repair: the main parameters equal the weights")


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "show": run_show,
    "verify": run_verify,
    "diff": run_diff,
    "plan": run_plan,
    "digest": run_digest,
    "repair": run_repair,
}


def run(args: argparse.Namespace) -> int:
    """Run the command that the command line specifies; return the exit status."""
    if args.follow_links:
        allow_links()
    return COMMANDS[args.command](args)
