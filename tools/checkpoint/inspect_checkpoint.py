"""Inspect checkpoints: contents, completeness, and differences between two of them.

    T=tools/checkpoint/inspect_checkpoint.py
    python $T show run/checkpoints                  contents, origin, files
    python $T verify run/checkpoints                files, coverage of every tensor, checksums
    python $T diff run/checkpoints other/model      any two formats, any two layouts
    python $T digest run/checkpoints                one digest per tensor, independent of the layout
    python $T plan run/checkpoints --tensor-model-parallel-size 4      can this layout load it?

PATH is an iteration's directory or a run's --save directory (then its newest checkpoint, or
--ckpt-step). One process, no GPU, no model; tensors are read a slice at a time. Exit status 1:
damaged (verify), different (diff), or not loadable at that layout (plan).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.conversion.formats import (
    FORMATS,
    detect_format,
    find_named_checkpoint,
    is_extra_state,
    require_checkpoint,
)
from megatron.core.dist_checkpointing import (
    CheckpointError,
    CheckpointMetadata,
    StoredTensor,
    load_common,
    read_metadata,
)
from megatron.core.dist_checkpointing.format.checksums import find_checksums
from megatron.core.dist_checkpointing.format.links import allow_links
from megatron.core.dist_checkpointing.format.schema import format_error
from megatron.core.lazy_import import lazy_module
from megatron.core.object_storage import path_of
from megatron.core.progress import ProgressBar, format_size

if TYPE_CHECKING:
    import torch

    from megatron.conversion import convert
    from megatron.conversion.megatron_lm import torch_dist
    from megatron.conversion.model_space import model, pieces
    from megatron.conversion.model_space.source import Shape, TensorInfo
    from megatron.core.dist_checkpointing import mapping, verification
    from megatron.training.planning import summary
else:  # `show` needs torch for other formats than torch_dist alone
    torch, summary = map(lazy_module, ("torch", "megatron.training.planning.summary"))
    convert, torch_dist, pieces, model = (
        lazy_module(f"megatron.conversion.{name}")
        for name in ("convert", "megatron_lm.torch_dist", "model_space.pieces", "model_space.model")
    )
    mapping, verification = (
        lazy_module(f"megatron.core.dist_checkpointing.{n}") for n in ("mapping", "verification")
    )

SLICE = 64 << 20  # bytes of a tensor in memory at once
LAYOUT_ARGS = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "dp": "data_parallel_size",
    "world": "world_size",
}


class View(NamedTuple):
    """Named tensors of a checkpoint, whatever its format."""

    path: Path
    format: str
    tensors: Mapping[str, TensorInfo | StoredTensor]
    read: Callable[[str, Shape, Shape], torch.Tensor]

    def slices(self, key: str) -> Iterator[tuple[Shape, torch.Tensor]]:
        """(offset, rows) of a tensor in turn."""
        info = self.tensors[key]
        for offset, shape in mapping.cut_rows(info.shape, info.dtype.itemsize, SLICE):
            yield offset, self.read(key, offset, shape)


def open_view(root: Path, step: int | None) -> View:
    """In model space if the files say which model it is, so that formats can be compared; else keys
    as stored.
    """
    path, kind, _ = require_checkpoint(root, step)
    try:
        source = convert.open_checkpoint(path, kind)
    except ValueError:  # a checkpoint of something else than our models
        if kind != "torch_dist":
            raise
        return stored_view(path)
    if kind == "torch_dist" and source.unused:
        return stored_view(path)
    return View(path, kind, source.tensors, source.read)


def stored_view(path: Path) -> View:
    """A torch_dist directory under the keys in its files."""
    reader = torch_dist.Reader(path)
    return View(path, "torch_dist", reader.metadata.tensors, reader.read)


# show


def show(args: argparse.Namespace) -> int:
    path, kind, _ = require_checkpoint(args.path, args.ckpt_step)
    tensors: Mapping[str, TensorInfo | StoredTensor]
    if kind == "torch_dist":
        metadata = read_metadata(path)
        tensors = metadata.tensors
        facts = _torch_dist_facts(path, metadata)
    else:
        source = convert.open_checkpoint(path, kind)
        tensors = source.tensors
        facts = _run_facts(source.args, source.training.iteration if source.training else None)
    result: dict[str, Any] = {"path": str(path), "format": kind, **_totals(tensors), **facts}
    result["tensors"] = {
        key: {"shape": list(info.shape), "dtype": info.dtype_name, "bytes": info.nbytes}
        | ({"chunks": len(info.chunks)} if isinstance(info, StoredTensor) else {})
        for key, info in tensors.items()
        if fnmatch.fnmatch(key, args.keys)
    }
    if args.plot is not None:
        if kind != "torch_dist":
            raise ValueError(
                f"--plot: {path} is {kind}, and only torch_dist says which file holds what; use plan --plot"
            )
        title = f"{path.name}: who wrote what"
        summary.shares_picture(
            shares_of_files(path), args.plot, title, "file: __{rank}_{writer}.distcp"
        )
    if args.json:
        print(json.dumps(result, indent=1, default=str))
    else:
        print_show(result)
    return 0


def shares_of_files(path: Path) -> dict[str, dict[str, dict[str, int]]]:
    """Bytes by file, part of the model and kind; a file is `__{rank}_{writer}.distcp`, so also who
    wrote what.
    """
    metadata = read_metadata(path)
    shares: dict[str, dict[str, dict[str, int]]] = {
        name: {} for name in sorted(metadata.file_sizes(), key=_numbers)
    }
    for key, stored in metadata.tensors.items():
        kind = key.split(".")[2] if key.startswith("optimizer.state.") else "weights"
        chunks = stored.chunks
        for file, length in zip(chunks.file.tolist(), chunks.length.tolist(), strict=True):
            part = shares[chunks.files[file]].setdefault(model.part_of(key), {})
            part[kind] = part.get(kind, 0) + length
    for location in set(metadata.objects.values()):  # one may stand under several keys
        part = shares[location.file].setdefault("objects", {})
        part["objects"] = part.get("objects", 0) + location.length
    return shares


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", name))


def _totals(tensors: Mapping[str, TensorInfo | StoredTensor]) -> dict[str, Any]:
    sizes: Counter[str] = Counter()
    for key, info in tensors.items():
        sizes[
            ".".join(key.split(".")[:3]) if key.startswith("optimizer.state.") else "weights"
        ] += info.nbytes
    return {"num_tensors": len(tensors), "bytes": sum(sizes.values()), "bytes_by_kind": dict(sizes)}


def _torch_dist_facts(path: Path, metadata: CheckpointMetadata) -> dict[str, Any]:
    # Newer Megatron-LM keeps it in a shard, which needs torch.
    common = load_common(path, names=True) or torch_dist.stored_common(
        torch_dist.Reader(path), path
    )
    args = (
        vars(common["args"])
        if isinstance(common.get("args"), argparse.Namespace)
        else common.get("args", {})
    )
    needed = metadata.file_sizes()
    files = {
        name: (path / name).stat().st_size if (path / name).exists() else None
        for name in sorted(needed)
    }
    return {
        **_run_facts(args if isinstance(args, dict) else {}, common.get("iteration")),
        "objects": sorted(metadata.objects),
        "files": files,
        "checksums": find_checksums(path) is not None,
    }


def _run_facts(args: Mapping[str, Any], iteration: int | None) -> dict[str, Any]:
    layout = {name: args[full] for name, full in LAYOUT_ARGS.items() if args.get(full) is not None}
    if layout.get("cp") == 1:
        del layout["cp"]
    return {"iteration": iteration, "layout": layout, "args": dict(args)}


def print_show(result: dict[str, Any]) -> None:
    layout = (
        ", ".join(f"{name.upper()} {value}" for name, value in result["layout"].items())
        or "not stored"
    )
    print(f"{result['path']}\n  format     {result['format']}")
    print(f"  iteration  {'not stored' if result['iteration'] is None else result['iteration']}")
    print(f"  written at {layout}")
    kinds = ", ".join(
        f"{kind} {format_size(size)}" for kind, size in result["bytes_by_kind"].items()
    )
    print(f"  tensors    {result['num_tensors']}, {format_size(result['bytes'])} ({kinds})")
    if "files" in result:
        print(f"  objects    {_objects(result['objects'])}")
        print(f"  checksums  {'yes' if result['checksums'] else 'no (written by another program)'}")
        sizes = [size for size in result["files"].values() if size is not None]
        if sizes:
            balance = max(sizes) / (sum(sizes) / len(sizes))
            print(
                f"  files      {len(sizes)}, largest {format_size(max(sizes))} = {balance:.2f} x the mean"
            )
        for name, size in list(result["files"].items())[:32]:
            print(f"    {name:24} {'missing' if size is None else format_size(size):>12}")
    width = max(map(len, result["tensors"]), default=0)
    print(f"\n  {'key':{width}}  {'shape':>20}  {'dtype':>9}  {'size':>10}  chunks")
    for key, tensor in result["tensors"].items():
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        chunks = tensor.get("chunks", "")
        print(
            f"  {key:{width}}  {shape:>20}  {tensor['dtype']:>9}  {format_size(tensor['bytes']):>10}  {chunks:>6}"
        )


def _objects(keys: list[str]) -> str:
    named = [key for key in keys if not is_extra_state(key)]
    more = " ..." if len(named) > 3 else ""
    return (
        f"{len(keys)}, of which {len(keys) - len(named)} extra states: {', '.join(named[:3])}{more}"
    )


# verify


def verify_target(root: Path, step: int | None) -> Path:
    """The directory to verify, even if the file that identifies its format is missing."""
    if any(root.glob("*.distcp")):
        return root
    named, _ = find_named_checkpoint(root, step)
    path = (
        named
        if named is not None and any(named.glob("*.distcp"))
        else require_checkpoint(root, step).directory
    )
    if not (FORMATS["torch_dist"](path) or any(path.glob("*.distcp"))):
        raise ValueError(
            f"{path} is a {detect_format(path)} checkpoint; only torch_dist can be verified"
        )
    return path


def run_verify(args: argparse.Namespace) -> int:
    path = verify_target(args.path, args.ckpt_step)
    with ProgressBar(
        "verify", verification.total_bytes(path), quiet=args.quiet or args.json
    ) as progress:
        report = verification.verify(path, workers=args.workers, progress=progress.add)
        if args.write_integrity_json and report.ok:
            verification.write_integrity(path, progress.add)
    if args.json:
        print(json.dumps({"path": str(path), "ok": report.ok, **asdict(report)}, indent=1))
        return int(not report.ok)
    for problem in report.problems:
        print(f"DAMAGED  {problem}")
    for note in report.notes:
        print(f"note     {note}")
    what = f"{report.tensors} tensors, {report.objects} objects"
    if report.has_checksums:
        what += f", {format_size(report.bytes)} in {report.files} files against their checksums"
    print(f"{path}: {'intact' if report.ok else f'{len(report.problems)} problems'} ({what})")
    return int(not report.ok)


# diff


@dataclass
class Difference:
    """How one tensor differs. `max_abs` is None where values cannot be compared."""

    key: str
    what: str
    max_abs: float | None = None


def diff(args: argparse.Namespace) -> int:
    first, second = (open_view(path, args.ckpt_step) for path in (args.path, args.other))
    if (
        first.tensors.keys() != second.tensors.keys()
        and first.format == second.format == "torch_dist"
    ):
        raw = [stored_view(view.path) for view in (first, second)]
        if raw[0].tensors.keys() == raw[1].tensors.keys():
            first, second = raw
    differences = []
    for one, other in ((first, second), (second, first)):
        differences += [
            Difference(key, f"only in {one.path}")
            for key in one.tensors
            if key not in other.tensors
        ]
    common = [
        key for key in first.tensors if key in second.tensors and fnmatch.fnmatch(key, args.keys)
    ]
    with ProgressBar(
        "diff", sum(first.tensors[key].nbytes for key in common), quiet=args.quiet or args.json
    ) as progress:
        for key in common:
            found = compare_tensor(first, second, key, args.atol, progress.add)
            if found is not None:
                differences.append(found)
    if args.json:
        listed = [asdict(difference) for difference in differences]
        compared = {"a": str(first.path), "b": str(second.path), "compared": len(common)}
        print(json.dumps(compared | {"differences": listed}))
        return int(bool(differences))
    print(f"A {first.path} ({first.format})\nB {second.path} ({second.format})")
    for difference in differences:
        distance = "" if difference.max_abs is None else f", by at most {difference.max_abs:.3g}"
        print(f"  {difference.key}: {difference.what}{distance}")
    how = f"within {args.atol:g}" if args.atol else "bitwise"
    print(
        f"{len(common)} tensors compared: "
        + (f"{len(differences)} differences" if differences else f"equal {how}")
    )
    return int(bool(differences))


def compare_tensor(
    first: View, second: View, key: str, atol: float, progress: Callable[[int], None]
) -> Difference | None:
    """None if both hold the same: bitwise and of the same dtype, or within `atol` if that is not 0."""
    a = first.tensors[key]
    b = second.tensors[key]
    if a.shape != b.shape:
        progress(a.nbytes)
        return Difference(key, f"shape {a.shape} and {b.shape}")
    largest = 0.0
    count = 0
    for offset, part in first.slices(key):
        other = second.read(key, offset, tuple(part.shape))
        progress(part.nbytes)
        if part.dtype == other.dtype and pieces.same_bits(part, other):
            continue
        unequal, distance = _distance(part, other)
        largest = max(largest, distance)
        count = count + unequal
    dtypes = f"{a.dtype_name} and {b.dtype_name}, " if a.dtype != b.dtype else ""
    if (count == 0 and not dtypes) or (atol > 0 and largest <= atol):
        return None
    total = torch.Size(a.shape).numel()
    return Difference(key, f"{dtypes}{count} of {total} values differ", largest)


def _distance(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float]:
    """How many values differ (two NaNs do not), and by how much at most."""
    a, b = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
    same = (a == b) | (a.isnan() & b.isnan())
    distance = (a - b).abs()[~same]
    return int((~same).sum()), float(
        distance.nan_to_num(float("inf")).max()
    ) if distance.numel() else 0.0


# digest


def digest(args: argparse.Namespace) -> int:
    view = open_view(args.path, args.ckpt_step)
    chosen = [key for key in sorted(view.tensors) if fnmatch.fnmatch(key, args.keys)]
    digests: dict[str, str] = {}
    with ProgressBar(
        "digest", sum(view.tensors[key].nbytes for key in chosen), quiet=args.quiet or args.json
    ) as progress:
        for key in chosen:
            digests[key] = verification.digest_of(part for _, part in view.slices(key))
            progress.add(view.tensors[key].nbytes)
    if args.json:
        print(json.dumps({"path": str(view.path), "digests": digests}, indent=1))
        return 0
    for key, value in digests.items():
        info = view.tensors[key]
        print(
            f"{value}  {info.dtype_name:>8}  {'x'.join(map(str, info.shape)) or 'scalar':>16}  {key}"
        )
    return 0


# plan


def plan(args: argparse.Namespace) -> int:
    source = convert.open_checkpoint(args.path, step=args.ckpt_step)
    tp = args.tensor_model_parallel_size
    pp = args.pipeline_model_parallel_size
    vpp = args.virtual_pipeline_model_parallel_size
    layout = {"tp": tp, "pp": pp, "vpp": vpp, "dp": args.data_parallel_size}
    facts: dict[str, Any] = {"path": str(args.path), "layout": layout}
    try:
        ranks = model.plan_load(
            source, model.Layout.of(source.args.get("num_layers") or 0, tp, pp, vpp, vars(args))
        )
    except ValueError as error:
        result = facts | {"loadable": False, "reason": str(error)}
        print(
            json.dumps(result, indent=1)
            if args.json
            else f"{args.path} cannot be loaded at {layout}: {error}"
        )
        return 1
    rows = [
        {
            "tp": rank.tp,
            "pp": rank.pp,
            "layers": [[chunk.start, chunk.stop] for chunk in rank.layers],
            "parameters": rank.parameters,
            "weight_bytes": rank.nbytes("weights"),
            "optimizer_bytes": -(-rank.nbytes("optimizer") // args.data_parallel_size),
        }
        for rank in ranks
    ]
    if args.plot is not None:
        shares = {f"tp {rank.tp}, pp {rank.pp}": rank.parts for rank in ranks}
        named = " x ".join(f"{axis.upper()} {size}" for axis, size in layout.items())
        summary.shares_picture(
            shares, args.plot, f"{args.path.name}: who reads what at {named}", "rank"
        )
    if args.json:
        print(json.dumps(facts | {"loadable": True, "ranks": rows}, indent=1))
        return 0
    print(
        f"{source.description}\nloadable at {layout}; every rank reads (optimizer: sharded over data parallelism)"
    )
    print(f"{'tp':>4}{'pp':>4}  {'layers':24}{'parameters':>16}{'weights':>12}{'optimizer':>12}")
    for row in rows:
        layers = " ".join(f"{start}..{stop - 1}" for start, stop in row["layers"])
        sizes = f"{format_size(row['weight_bytes']):>12}{format_size(row['optimizer_bytes']):>12}"
        print(f"{row['tp']:>4}{row['pp']:>4}  {layers:24}{row['parameters']:>16,}{sizes}")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (run, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument(
            "path",
            type=path_of,
            metavar="PATH",
            help="an iteration's directory, or a --save directory",
        )
        if name == "diff":
            command.add_argument(
                "other", type=path_of, metavar="OTHER", help="what to compare it with"
            )
            command.add_argument(
                "--atol", type=float, default=0.0, help="largest difference that counts as equal"
            )
        if name == "plan":
            for axis in ("tensor-model", "pipeline-model", "virtual-pipeline-model", "data"):
                command.add_argument(f"--{axis}-parallel-size", type=int, default=1, metavar="N")
            for end in ("first", "last"):
                command.add_argument(f"--decoder-{end}-pipeline-num-layers", type=int, metavar="N")
        elif name != "verify":
            command.add_argument("--keys", default="*", help="only keys that match this pattern")
        else:
            command.add_argument("--workers", type=int, default=4, help="files read at once")
            command.add_argument(
                "--write-integrity-json",
                action="store_true",
                help="if intact, write integrity.json, which Megatron-LM's --verify-integrity asks for",
            )
        command.add_argument(
            "--ckpt-step", type=int, help="the iteration, if PATH is a --save directory"
        )
        if name in ("show", "plan"):
            command.add_argument(
                "--plot", type=Path, metavar="PNG", help="draw which file or rank has what"
            )
        command.add_argument(
            "--follow-links", action="store_true", help="follow links that leave the checkpoint"
        )
        command.add_argument("--json", action="store_true", help="print JSON")
        command.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args(argv)


COMMANDS = {
    "show": (show, "what a checkpoint holds: iteration, layout that wrote it, tensors, files"),
    "verify": (run_verify, "whether it is complete and undamaged"),
    "diff": (diff, "how two checkpoints differ, across formats and layouts"),
    "plan": (plan, "whether it can be loaded at a layout, and what each rank reads"),
    "digest": (digest, "a number per tensor that does not depend on layout or format"),
}


def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.follow_links:
        allow_links()
    try:
        return args.run(args)
    except MemoryError:
        print(
            "error: out of memory; a damaged or hostile checkpoint can claim any size",
            file=sys.stderr,
        )
        return 2
    except (ValueError, CheckpointError, OSError) as error:
        print(f"error: {format_error(error)}", file=sys.stderr)
        return 2


def cli() -> None:
    """Run this process's command line; also the console entry point."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    cli()
