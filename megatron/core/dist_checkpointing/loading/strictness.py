"""What a load asks for against what the checkpoint has, and what is done about the difference."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from megatron.core.dist_checkpointing.errors import CheckpointError
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


def compare_keys(
    specs: Iterable[LocalSpec], metadata: Contents, skip: Callable[[str], bool], directory: object
) -> KeyReport:
    """`specs` of all ranks against the checkpoint. Raises CheckpointError if shapes differ or a kind does."""
    requested: dict[str, tuple[int, ...] | None] = {}
    for spec in specs:
        requested.update({tensor.key: tensor.shape for tensor in spec.tensors})
        requested.update(dict.fromkeys(spec.objects))
    wrong = []
    for key, shape in sorted(requested.items()):
        if shape is None and key in metadata.tensors:
            wrong.append(f"{key}: a tensor in the checkpoint, an object here")
        elif shape is not None and key in metadata.objects:
            wrong.append(f"{key}: an object in the checkpoint, a tensor here")
        elif shape is not None and key in metadata.tensors and metadata.tensors[key].shape != shape:
            wrong.append(f"{key}: {metadata.tensors[key].shape} in the checkpoint, {shape} here")
    if wrong:
        raise CheckpointError(f"{directory}: does not fit this model:\n  " + _lines(wrong))
    stored = metadata.tensors.keys() | set(metadata.objects)
    missing = sorted(key for key in stored - requested.keys() if not skip(key))
    return KeyReport(sorted(requested.keys() - stored), missing)


def react(report: KeyReport, strictness: str, metadata: Contents, directory: object, log: bool) -> KeyReport:
    """Raise or log as `strictness` says; what is left is for the caller. `log` is true on one rank."""
    reaction = STRICTNESS[strictness]
    stored = [*metadata.tensors, *metadata.objects]
    unexpected = [_with_near(key, stored) for key in report.unexpected[:200]] + report.unexpected[200:]
    texts = {
        "unexpected": f"asked for but not in the checkpoint ({len(report.unexpected)}):\n  " + _lines(unexpected),
        "missing": f"in the checkpoint but asked for by no rank ({len(report.missing)}):\n  " + _lines(report.missing),
    }
    raised = [texts[kind] for kind in texts if getattr(report, kind) and getattr(reaction, kind) == RAISE]
    if raised:
        raise CheckpointError(f"{directory}: keys " + "\nkeys ".join(raised))
    for kind in texts:
        if log and getattr(report, kind) and getattr(reaction, kind) == LOG:
            logger.warning("%s: keys %s", directory, texts[kind])
    return KeyReport(
        report.unexpected if reaction.unexpected == RETURN else [], report.missing if reaction.missing == RETURN else []
    )


def _with_near(key: str, stored: list[str]) -> str:
    near = difflib.get_close_matches(key, stored, n=2, cutoff=0.75)
    return f"{key} (there is {' and '.join(near)})" if near else key


def _lines(lines: list[str], shown: int = 50) -> str:
    return "\n  ".join(lines[:shown]) + (f"\n  ... and {len(lines) - shown} more" if len(lines) > shown else "")
