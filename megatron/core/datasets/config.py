"""The options of the datasets, and the parsing of --data-path lists and --split fractions.

Every field is read by this package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.core.flags import find_range_problems, flag, raise_problems

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, Split, Split] = ("train", "valid", "test")

Fractions = tuple[float, float]


@dataclass(frozen=True)
class Blend:
    """Datasets to mix: `weights` sum to 1, or are None for a mix in proportion to their sizes, each
    read once.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


def parse_blend(values: Sequence[str], flag: str) -> Blend:
    """`path`, `path path ...` or `weight path weight path ...`.

    A list of even length whose every other value is a number carries weights.
    """
    if not values:
        raise ValueError(f"{flag} is empty: give a path, paths, or weights and paths in turn")
    numbers = [_number(value) for value in values[::2]]
    if len(values) % 2 or all(number is None for number in numbers):
        return Blend(tuple(values))
    for value, number in zip(values[::2], numbers, strict=True):
        if number is None:
            raise ValueError(
                f"{flag}: {value!r} stands where a weight is expected in {' '.join(values)!r}: give either paths only, "
                "or a weight before every path"
            )
        if not 0 < number < float("inf"):
            raise ValueError(
                f"{flag}: weight {value} of {' '.join(values)!r} must be positive and finite; leave out what is "
                "not wanted"
            )
    weights = [number for number in numbers if number is not None]
    total = sum(weights)
    return Blend(tuple(values[1::2]), tuple(weight / total for weight in weights))


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def parse_split(text: str) -> tuple[Fractions | None, Fractions | None, Fractions | None]:
    """`a,b,c` (shares, missing ones are 0) as intervals of [0, 1] for train, valid and test; None where empty."""
    shares = [_number(part) for part in text.split(",")]
    if len(shares) > 3 or any(share is None or not 0 <= share < float("inf") for share in shares):
        raise ValueError(
            f"--split {text!r}: expected up to three non-negative numbers such as 969,30,1"
        )
    values = [share for share in shares if share is not None] + [0.0] * (3 - len(shares))
    total = sum(values)
    if total == 0:
        raise ValueError(f"--split {text!r}: at least one share must be positive")
    bounds = [0.0]
    for value in values:
        bounds.append(bounds[-1] + value / total)
    intervals = [
        (low, high) if high > low else None for low, high in zip(bounds, bounds[1:], strict=False)
    ]
    return intervals[0], intervals[1], intervals[2]


def sequence_range(fractions: Fractions, num_sequences: int) -> tuple[int, int]:
    """`[first, last)` sequences of a split: both ends rounded to the nearest, halves to even, as Megatron-LM does."""
    return round(fractions[0] * num_sequences), round(fractions[1] * num_sequences)


DEFAULT_SPLIT = "969, 30, 1"


@dataclass
class GPTDatasetConfig:
    """Where the tokens come from and how samples are cut from them. Field names are Megatron-LM's
    argument names.
    """

    seq_length: int = flag(0)
    """Number of tokens of a sample."""
    seed: int = flag(1234, at_least=0, at_most=2**32 - 1)
    """Seed of the shuffles of documents and samples (and of everything else that is random in a
    run).
    """
    data_path: list[str] | None = flag(None)
    """Data of all splits, divided by --split: a prefix (of a .bin and an .idx), several, or weights
    and prefixes in turn (30 a 70 b).
    """
    split: str | None = flag(None)
    """Shares of train, validation and test in --data-path, such as 969,30,1 (the default). A split
    without a share does not exist.
    """
    train_data_path: list[str] | None = flag(None)
    """Data of the training split alone, written as --data-path."""
    valid_data_path: list[str] | None = flag(None)
    """Data of the validation split alone, written as --data-path."""
    test_data_path: list[str] | None = flag(None)
    """Data of the test split alone, written as --data-path."""
    data_args_path: str | None = flag(None)
    """File that holds what would follow --data-path, for blends too long for a command line."""
    per_split_data_args_path: str | None = flag(None)
    """JSON file {"train": [...], "valid": [...], "test": [...]} of lists as they would follow
    --train-data-path etc.
    """
    data_cache_path: str | None = flag(None)
    """Directory of the built indices, shared by all ranks. Default: cache/GPTDataset_indices beside
    the data.
    """
    mock_data: bool = flag(False)
    """Train on generated sequences with a structure that a model can learn; no files are read."""
    mmap_bin_files: bool = flag(True)
    """Read .bin files with explicit reads instead of mapping them into memory."""
    reset_position_ids: bool = flag(False)
    """Let positions start at 0 again after every end-of-document token."""
    reset_attention_mask: bool = flag(False)
    """Keep attention within documents: batches carry the number of each token's document."""
    eod_mask_loss: bool = flag(False)
    """Give positions whose input is the end-of-document token no loss."""
    create_attention_mask_in_dataloader: bool = flag(True)
    """Never tell the model of documents. There are no masks in batches in any case: the causal one
    is implied.
    """
    mid_level_dataset_surplus: float = flag(0.005, at_least=0)
    """Share of samples that members of a weighted blend are built with beyond what their weights
    ask for.
    """
    num_dataset_builder_threads: int = flag(1, positive=True)
    """Threads that open datasets and build their indices when there are several."""

    fim_data: bool = flag(False)
    """Fill in the middle: reorder documents by the flags below (Bavarian et al. 2022), except those
    of --mock-data.
    """
    fim_rate: float = flag(0.5, at_least=0, at_most=1)
    """Share of documents that are reordered."""
    fim_spm_rate: float = flag(0.5, at_least=0, at_most=1)
    """Share of those that begin with the suffix (SPM) and not with the prefix (PSM)."""
    fim_split_sample: str | None = flag(None)
    """A token that cuts documents into fragments, each of which is reordered on its own."""
    fim_fragment_rate: float | None = flag(None, at_least=0, at_most=1)
    """Share of the fragments of a document of --fim-rate that are reordered."""
    fim_no_prefix: str | None = flag(None)
    """Leave documents and fragments alone whose text begins with this."""
    fim_prefix_token: str = flag("<fim_prefix>")
    """Token before the prefix."""
    fim_middle_token: str = flag("<fim_middle>")
    """Token before the middle."""
    fim_suffix_token: str = flag("<fim_suffix>")
    """Token before the suffix."""
    fim_pad_token: str = flag("<fim_pad>")
    """Token that fills a sample whose text has become shorter."""
    fim_eod_token: str = flag("<|endoftext|>")
    """Token between documents."""

    # Not flags: properties of how a sample is cut that a caller may change.
    # A sample reads seq_length + 1 tokens, so that every position has a label; without it the last
    # one has none.
    add_extra_token_to_sequence: bool = True
    # Drop the tokens at the end of the validation split that do not fill a sample, rather than
    # padding them.
    drop_last_partial_validation_sequence: bool = True
    # Compare cached indices with their digests. One process of a node is enough: it reads whole
    # arrays.
    verify_index_cache: bool = True

    def __post_init__(self) -> None:
        raise_problems([*find_range_problems(self), *self._problems()])

    def _problems(self) -> Iterator[str]:
        if self.seq_length < 1:
            yield f"--seq-length must be given and positive, got {self.seq_length}"
        if self.reset_attention_mask and not self.create_attention_mask_in_dataloader:
            yield (
                "--reset-attention-mask is carried out by what --no-create-attention-mask-in-dataloader leaves out: "
                "drop one of the two"
            )
        if self.fim_data and self.fim_split_sample is not None and self.fim_fragment_rate is None:
            yield f"--fim-split-sample {self.fim_split_sample} needs --fim-fragment-rate"
        try:
            self.split_intervals()  # malformed options raise now, before any process group exists
            self.sources()
        except ValueError as error:
            yield str(error)

    def fim_options(self) -> dict[str, object]:
        """What reorders documents; empty without --fim-data."""
        names = [name for name in vars(self) if name.startswith("fim_") and name != "fim_data"]
        return {name: getattr(self, name) for name in names} if self.fim_data else {}

    @property
    def extra_tokens(self) -> int:
        return int(self.add_extra_token_to_sequence)

    def sources(self) -> dict[Split, tuple[Blend, Fractions]]:
        """For each split with data: its blend and the part of each member's sequences it reads.
        Empty for mock data.
        """
        paths: dict[Split, list[str] | None]
        paths = {
            "train": self.train_data_path,
            "valid": self.valid_data_path,
            "test": self.test_data_path,
        }
        own = {split: path for split, path in paths.items() if path is not None}
        ways = {
            "--mock-data": self.mock_data or None,
            "--data-path": self.data_path,
            "--data-args-path": self.data_args_path,
            "/".join(f"--{split}-data-path" for split in own): own or None,
            "--per-split-data-args-path": self.per_split_data_args_path,
        }
        given = [name for name, value in ways.items() if value is not None]
        if not given:
            raise ValueError(
                "no data: give --data-path, --train-data-path (and --valid-, --test-data-path) or --mock-data"
            )
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(given)} exclude each other: each of them says where all data comes from"
            )
        if self.mock_data:
            return {}
        if self.data_path is not None or self.data_args_path is not None:
            words = self.data_path
            flag_name = "--data-path"
            if self.data_args_path is not None:
                words = _read_text(self.data_args_path, "--data-args-path").split()
                flag_name = self.data_args_path
            assert words is not None
            blend = parse_blend(words, flag_name)
            return {split: (blend, part) for split, part in self.split_intervals().items()}
        if self.split is not None:
            raise ValueError(
                f"--split {self.split} divides --data-path; {given[0]} already names the data of each split"
            )
        if self.per_split_data_args_path is not None:
            own = _read_lists(self.per_split_data_args_path)
        return {
            split: (parse_blend(path, f"{given[0]} ({split})"), (0.0, 1.0))
            for split, path in own.items()
        }

    def split_intervals(self) -> dict[Split, Fractions]:
        """The part of the data of every split that --split gives a share."""
        intervals = parse_split(DEFAULT_SPLIT if self.split is None else self.split)
        return {
            split: part for split, part in zip(SPLITS, intervals, strict=True) if part is not None
        }


def _read_lists(path: str) -> dict[Split, list[str]]:
    """The lists of --per-split-data-args-path, empty ones left out."""
    try:
        lists = json.loads(_read_text(path, "--per-split-data-args-path"))
    except json.JSONDecodeError as error:
        raise ValueError(f"--per-split-data-args-path {path}: not JSON: {error}") from None
    if (
        not isinstance(lists, dict)
        or not set(lists) <= set(SPLITS)
        or not all(map(_is_list_of_words, lists.values()))
    ):
        raise ValueError(
            f'--per-split-data-args-path {path}: expected {{"train": [...], "valid": [...], "test": [...]}}'
        )
    return {split: list(map(str, lists[split])) for split in SPLITS if lists.get(split)}


def _is_list_of_words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str | int | float) for item in value)


def _read_text(path: str, flag_name: str) -> str:
    if not Path(path).is_file():
        raise ValueError(f"{flag_name} {path}: no such file")
    return Path(path).read_text(encoding="utf-8")
