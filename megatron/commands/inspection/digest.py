"""`digest`: a hash of the values of each tensor, the same at every layout."""

from __future__ import annotations

import argparse

from megatron.commands.inspection.view import format_shape, open_view
from megatron.core.dist_checkpointing.verification import compute_digest
from megatron.core.progress import ProgressBar
from megatron.core.terminal import print_json, print_line


def run_digest(args: argparse.Namespace) -> int:
    """Print a digest of each tensor; return the exit status."""
    view = open_view(args.path, args.ckpt_step)
    keys = sorted(view.select_keys(args.keys))
    # All keys are read, so their bytes are the length of the progress bar.
    sizes = [view.tensors[key].nbytes for key in keys]
    total = sum(sizes)

    # Compute the digests from slices, which bound the memory for large tensors.
    digests: dict[str, str] = {}
    with ProgressBar("digest", total, quiet=args.quiet or args.json) as progress:
        for key in keys:
            slices = view.iterate_slices(key)
            rows = (tensor_slice for _, tensor_slice in slices)
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
