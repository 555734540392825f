"""`diff`: differences between the tensors of two checkpoints."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megatron.commands.inspection.view import View, open_stored_view, open_view
from megatron.conversion.model_space.pieces import is_bitwise_equal
from megatron.core.progress import ProgressBar
from megatron.core.terminal import print_json, print_line


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
    keys = []
    for key in first.select_keys(args.keys):
        if key in second.tensors:
            keys.append(key)
    total = sum(first.tensors[key].nbytes for key in keys)
    with ProgressBar("diff", total, quiet=args.quiet or args.json) as progress:
        for key in keys:
            difference = compare_tensor(first, second, key, args.atol, progress.add)
            if difference is not None:
                differences.append(difference)

    # Report.
    num_compared = len(keys)
    if args.json:
        result = {
            "a": str(first.path),
            "b": str(second.path),
            "compared": num_compared,
            "differences": [asdict(difference) for difference in differences],
        }
        print_json(result)
    else:
        print_line(f"A {first.path} ({first.format})")
        print_line(f"B {second.path} ({second.format})")
        print_differences(differences, num_compared, args.atol)
    has_differences = len(differences) > 0
    return int(has_differences)


def print_differences(differences: Sequence[Difference], num_compared: int, atol: float) -> None:
    """Print the differences, and the outcome of the comparison."""
    for difference in differences:
        print_line(f"  {difference}")
    outcome = "equal bitwise"
    if differences:
        outcome = f"{len(differences)} differences"
    elif atol:
        outcome = f"equal within {atol:g}"
    print_line(f"{num_compared} tensors compared: {outcome}")


def open_comparable_views(path: Path, second_path: Path, step: int | None) -> tuple[View, View]:
    """Open two checkpoints under the same keys, if there are such keys."""
    first = open_view(path, step)
    second = open_view(second_path, step)
    # Other formats are in model space only.
    if first.format != "torch_dist" or second.format != "torch_dist":
        return first, second
    if first.tensors.keys() == second.tensors.keys():
        return first, second

    # The keys in the files may agree even if only one of the two is in model space.
    first_stored = open_stored_view(first.path)
    second_stored = open_stored_view(second.path)
    if first_stored.tensors.keys() == second_stored.tensors.keys():
        return first_stored, second_stored
    return first, second


def list_missing(view: View, second: View) -> list[Difference]:
    """List the tensors of `view` that `second` does not contain."""
    differences = []
    for key in view.tensors:
        if key not in second.tensors:
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
    for offset, first_slice in first.iterate_slices(key):
        second_slice = second.view(key).read(offset, tuple(first_slice.shape))
        progress(first_slice.nbytes)
        if first_slice.dtype == second_slice.dtype and is_bitwise_equal(first_slice, second_slice):
            continue
        count, distance = measure_distance(first_slice, second_slice)
        num_different += count
        largest = max(largest, distance)

    # With a tolerance, equal values may have different dtypes.
    is_equal = num_different == 0 and a.dtype == b.dtype
    is_within_tolerance = atol > 0 and largest <= atol
    if is_equal or is_within_tolerance:
        return None
    num_values = math.prod(a.shape)
    text = f"{num_different} of {num_values} values differ"
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
