"""`verify`: damage of a checkpoint."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from megatron.conversion.opening import require_checkpoint
from megatron.core.dist_checkpointing.verification import (
    VerifyReport,
    compute_verify_size,
    verify,
    write_integrity,
)
from megatron.core.progress import ProgressBar
from megatron.core.run_checkpoint.formats import FORMATS, detect_format, find_named_checkpoint
from megatron.core.terminal import format_size, print_json, print_line


def find_verify_target(root: Path, step: int | None) -> Path:
    """Return the directory to verify, even if the file that identifies its format is missing."""
    if has_tensor_files(root):
        return root
    # Damage may hide the file by which a format is recognized.
    path, _ = find_named_checkpoint(root, step)
    if path is None or not has_tensor_files(path):
        path = require_checkpoint(root, step).directory
    is_torch_dist = FORMATS["torch_dist"].is_format
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
        outcome = f"{count} problems"
        if count == 1:
            outcome = "1 problem"
    print_line(f"{path}: {outcome} ({extent})")
