"""What a load asks for against what the checkpoint has, and what is done about the difference."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron.core.dist_checkpointing.format.schema import CheckpointError
from megatron.core.dist_checkpointing.planning.planner import LocalSpec

logger = logging.getLogger(__name__)


class Contents(Protocol):
    """What there is to load."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """By key: something with the global `shape`."""
        ...

    @property
    def objects(self) -> Collection[str]: ...


RAISE, LOG, RETURN, IGNORE = "raise", "log", "return", "ignore"


class _Reaction(NamedTuple):
    """To keys that are asked for but not stored ("unexpected"), and to keys stored that nobody asks for ("missing")."""

    unexpected: str
    missing: str


STRICTNESS = {
    "assume_ok_unexpected": _Reaction(RAISE, IGNORE),  # nothing is assumed here: it costs nothing to check
    "log_unexpected": _Reaction(LOG, IGNORE),
    "log_all": _Reaction(LOG, LOG),
    "raise_unexpected": _Reaction(RAISE, IGNORE),
    "raise_all": _Reaction(RAISE, RAISE),
    "return_unexpected": _Reaction(RETURN, IGNORE),
    "return_all": _Reaction(RETURN, RETURN),
    "ignore_all": _Reaction(IGNORE, IGNORE),
}
"""Megatron-LM's values of `--dist-ckpt-strictness`."""


class KeyReport(NamedTuple):
    """`unexpected`: asked for but not in the checkpoint; `missing`: in the checkpoint, asked for by no rank."""

    unexpected: list[str]
    missing: list[str]


def check_strictness(strictness: str) -> None:
    if strictness not in STRICTNESS:
        raise ValueError(f"strictness {strictness!r} is none of {', '.join(STRICTNESS)}")


class KeyComparison(NamedTuple):
    """What one rank asks for against the checkpoint. Small at any scale: rank 0 merges those of all ranks."""

    wrong: list[str]  # lines about keys whose shape or kind differs
    unexpected: list[str]
    requested: bytes  # a bit for each key of the checkpoint, in sorted order: this rank asks for it


def compare_keys(spec: LocalSpec, contents: Contents) -> KeyComparison:
    """What this rank asks for against the checkpoint."""
    shapes: dict[str, tuple[int, ...] | None] = {tensor.key: tensor.shape for tensor in spec.tensors}
    shapes.update(dict.fromkeys(spec.objects))
    wrong = []
    for key, shape in shapes.items():
        if shape is None and key in contents.tensors:
            wrong.append(f"{key}: a tensor in the checkpoint, an object here")
        elif shape is not None and key in contents.objects:
            wrong.append(f"{key}: an object in the checkpoint, a tensor here")
        elif shape is not None and key in contents.tensors and contents.tensors[key].shape != shape:
            wrong.append(f"{key}: {contents.tensors[key].shape} in the checkpoint, {shape} here")
    stored = _stored_keys(contents)
    requested = np.packbits(np.fromiter((key in shapes for key in stored), dtype=bool, count=len(stored)))
    return KeyComparison(wrong, sorted(shapes.keys() - set(stored)), requested.tobytes())


def merge_comparisons(
    comparisons: Sequence[KeyComparison], contents: Contents, skip: Callable[[str], bool], where: str
) -> KeyReport:
    """The comparisons of all ranks as one. Raises CheckpointError if any shape or kind differs."""
    wrong = sorted({line for comparison in comparisons for line in comparison.wrong})
    if wrong:
        raise CheckpointError(f"{where}: does not fit this model:\n  " + _lines(wrong))
    unexpected = sorted({key for comparison in comparisons for key in comparison.unexpected})
    by_rank = np.frombuffer(b"".join(c.requested for c in comparisons), np.uint8).reshape(len(comparisons), -1)
    stored = _stored_keys(contents)
    requested = np.unpackbits(np.bitwise_or.reduce(by_rank, axis=0), count=len(stored))
    missing = [key for key, asked in zip(stored, requested, strict=True) if not asked and not skip(key)]
    return KeyReport(unexpected, missing)


def _stored_keys(contents: Contents) -> list[str]:
    return sorted(contents.tensors.keys() | set(contents.objects))


def apply_strictness(report: KeyReport, strictness: str, contents: Contents, where: str) -> KeyReport:
    """Raise or log as `strictness` says; what is left is for the caller."""
    reaction = STRICTNESS[strictness]
    stored = _stored_keys(contents)
    unexpected = [_with_near(key, stored) for key in report.unexpected[:200]] + report.unexpected[200:]
    texts = {
        "unexpected": f"asked for but not in the checkpoint ({len(report.unexpected)}):\n  " + _lines(unexpected),
        "missing": f"in the checkpoint but asked for by no rank ({len(report.missing)}):\n  " + _lines(report.missing),
    }
    raised = [texts[kind] for kind in texts if getattr(report, kind) and getattr(reaction, kind) == RAISE]
    if raised:
        raise CheckpointError(f"{where}: keys " + "\nkeys ".join(raised))
    for kind in texts:
        if getattr(report, kind) and getattr(reaction, kind) == LOG:
            logger.warning("%s: keys %s", where, texts[kind])
    return KeyReport(
        report.unexpected if reaction.unexpected == RETURN else [], report.missing if reaction.missing == RETURN else []
    )


def _with_near(key: str, stored: list[str]) -> str:
    near = difflib.get_close_matches(key, stored, n=2, cutoff=0.75)
    return f"{key} (there is {' and '.join(near)})" if near else key


def _lines(lines: list[str], shown: int = 50) -> str:
    return "\n  ".join(lines[:shown]) + (f"\n  ... and {len(lines) - shown} more" if len(lines) > shown else "")
