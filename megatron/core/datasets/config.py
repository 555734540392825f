"""Options of the datasets, and the parsing of --data-path lists and --split fractions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.core.flags import FlagSection, flag
from megatron.core.wings import resolve

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, Split, Split] = ("train", "valid", "test")

Fractions = tuple[float, float]


@dataclass(frozen=True)
class Blend:
    """Datasets to mix.

    `weights` sum to 1; None means in proportion to their sizes, each read once.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


def parse_blend(values: Sequence[str], flag: str) -> Blend:
    """Parse `path`, `path path ...` or `weight path weight path ...`.

    A list of even length contains weights if every other value, from the first on, is a number.
    """
    if not values:
        raise ValueError(f"{flag} is empty: give a path, paths, or weights and paths in turn")

    # Paths only
    candidates = values[::2]
    candidate_weights = [_parse_number(value) for value in candidates]
    has_numbers = any(weight is not None for weight in candidate_weights)
    if len(values) % 2 or not has_numbers:
        return Blend(tuple(values))

    # Weights and paths in turn
    weights = []
    for value, weight in zip(candidates, candidate_weights, strict=True):
        if weight is None:
            raise ValueError(
                f"{flag}: {value!r} in {' '.join(values)!r} must be a weight: give only paths, or "
                "a weight before each path"
            )
        if not 0 < weight < float("inf"):
            raise ValueError(
                f"{flag}: weight {value} of {' '.join(values)!r} must be positive and finite; to "
                "exclude a path, leave it out"
            )
        weights.append(weight)
    # Normalize, so that weights may be given as percentages or token counts.
    total = sum(weights)
    normalized = tuple(weight / total for weight in weights)
    return Blend(tuple(values[1::2]), normalized)


def _parse_number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def parse_split(text: str) -> tuple[Fractions | None, Fractions | None, Fractions | None]:
    """Parse `a,b,c`, shares of train, valid and test, into intervals of [0, 1].

    Missing shares are 0; an empty interval is None.
    """
    shares: list[float] = []
    for entry in text.split(","):
        share = _parse_number(entry)
        if share is None or not 0 <= share < float("inf") or len(shares) == 3:
            raise ValueError(
                f"--split {text!r}: expected up to three non-negative numbers such as 969,30,1"
            )
        shares.append(share)
    total = sum(shares)
    if total == 0:
        raise ValueError(f"--split {text!r}: at least one share must be positive")

    # Consecutive intervals
    intervals: list[Fractions | None] = [None, None, None]
    low = 0.0
    for index, share in enumerate(shares):
        high = low + share / total
        if high > low:
            intervals[index] = (low, high)
        low = high
    train, valid, test = intervals
    return train, valid, test


def compute_sequence_range(fractions: Fractions, num_sequences: int) -> tuple[int, int]:
    """Return the sequences `[first, last)` of a split.

    As in Megatron-LM, both ends are rounded to the nearest integer, halves to the even one.
    """
    low, high = fractions
    return round(low * num_sequences), round(high * num_sequences)


_READ_SPLIT_LISTS = "megatron.core.datasets.split_lists:read_split_lists"
DEFAULT_SPLIT = "969, 30, 1"


@dataclass
class GPTDatasetConfig(FlagSection):
    """Options of the data and of its samples. Field names are Megatron-LM's argument names."""

    seq_length: int = flag(0, required=True)
    """Number of tokens per sample."""
    seed: int = flag(1234, at_least=0, at_most=2**32 - 1)
    """Seed of the shuffles of documents and samples, and of all other random numbers of a run."""
    data_path: list[str] | None = flag(None)
    """Data of all splits, divided by --split: a prefix (of a .bin and an .idx), several prefixes,
    or weights and prefixes in turn (30 a 70 b). Instead of a prefix, text may be given, which is
    tokenized before training: a JSONL (.gz, .zst) or parquet file, a pattern, or the folder of a
    data set.
    """
    json_keys: str = flag("text")
    """Field of JSON lines, or column of tables, with the text of --data-path."""
    append_eod: bool = flag(True)
    """Append the end-of-document token to every document of the text of --data-path."""
    skip_bad_lines: int = flag(0, at_least=0)
    """Skip up to N lines of the text of --data-path that cannot be tokenized, and report them."""
    tokenization_workers: int | None = flag(None, positive=True)
    """Processes per node that tokenize the text of --data-path. Default: one per core."""
    split: str | None = flag(None)
    """Shares of train, validation and test in --data-path, e.g. 969,30,1 (the default). A split
    without a share does not exist.
    """
    train_data_path: list[str] | None = flag(None)
    """Data of the training split, in the form of --data-path."""
    valid_data_path: list[str] | None = flag(None)
    """Data of the validation split, in the form of --data-path."""
    test_data_path: list[str] | None = flag(None)
    """Data of the test split, in the form of --data-path."""
    data_args_path: str | None = flag(None)
    """File with the values of --data-path, for blends that are too long for a command line."""
    per_split_data_args_path: str | None = flag(None)
    """JSON file {"train": [...], "valid": [...], "test": [...]} with the values of
    --train-data-path, --valid-data-path and --test-data-path.
    """
    data_cache_path: str | None = flag(None)
    """Directory of the built indices, and of the tokens of text, shared by all ranks. Default:
    cache/GPTDataset_indices next to the data.
    """
    mock_data: bool = flag(False)
    """Train on generated sequences with a structure that a model can learn, without data files."""
    mmap_bin_files: bool = flag(True)
    """Map .bin files into memory; --no-mmap-bin-files reads them explicitly."""
    reset_position_ids: bool = flag(False)
    """Restart positions at 0 after each end-of-document token."""
    reset_attention_mask: bool = flag(False)
    """Restrict attention to each document; batches contain the document number of each token."""
    eod_mask_loss: bool = flag(False)
    """Exclude positions whose input is the end-of-document token from the loss."""
    create_attention_mask_in_dataloader: bool = flag(True)
    """Pass document numbers to the model, as --reset-attention-mask requires. Batches never contain
    masks: the causal mask is implied.
    """
    mid_level_dataset_surplus: float = flag(0.005, at_least=0)
    """Additional samples of each member of a weighted blend, as a fraction of its share."""
    num_dataset_builder_threads: int = flag(1, positive=True)
    """Threads that open the datasets of a blend and build their indices."""

    fim_data: bool = flag(False)
    """Fill in the middle: reorder documents according to the --fim-* flags (Bavarian et al. 2022).
    Does not apply to --mock-data.
    """
    fim_rate: float = flag(0.5, at_least=0, at_most=1)
    """Fraction of documents that are reordered."""
    fim_spm_rate: float = flag(0.5, at_least=0, at_most=1)
    """Fraction of the reordered documents that begin with the suffix (SPM) instead of the prefix
    (PSM).
    """
    fim_split_sample: str | None = flag(None)
    """Token that separates fragments of a document, each of which is reordered separately."""
    fim_fragment_rate: float | None = flag(None, at_least=0, at_most=1)
    """Fraction of fragments that are reordered, in the documents that --fim-rate selects."""
    fim_no_prefix: str | None = flag(None)
    """Do not reorder documents and fragments whose text begins with this prefix."""
    fim_prefix_token: str = flag("<fim_prefix>")
    """Token before the prefix."""
    fim_middle_token: str = flag("<fim_middle>")
    """Token before the middle."""
    fim_suffix_token: str = flag("<fim_suffix>")
    """Token before the suffix."""
    fim_pad_token: str = flag("<fim_pad>")
    """Token that pads a sample whose text has become shorter."""
    fim_eod_token: str = flag("<|endoftext|>")
    """Token between documents."""

    sft: bool = flag(
        False,
        requires={
            "tokenizer_type": ("HuggingFaceTokenizer", "PretrainedFromHF", "TokenizerFromFile")
        },
        excludes={"mock_data": True, "fim_data": True, "eod_mask_loss": True},
    )
    """Supervised fine-tuning: --data-path and similar flags specify JSONL (.gz), parquet and arrow
    files, patterns, or folders of data sets with messages or prompt and completion. With
    --reset-attention-mask (and --reset-position-ids) several examples share a sequence as
    documents, otherwise each one is padded.
    """
    sft_train_on: str = flag(
        "assistant", choices=("assistant", "last", "all"), requires={"sft": True}
    )
    """Tokens that count for the loss: those of assistant messages and completions, only those of
    the last one of each example, or all.
    """
    sft_too_long: str = flag(
        "truncate", choices=("truncate", "drop", "error"), requires={"sft": True}
    )
    """Handling of examples of more than --seq-length + 1 tokens."""
    sft_exclude: list[str] | None = flag(None, requires={"sft": True})
    """Text that does not count for the loss, as pairs of strings that it begins and ends with, e.g.
    "<think>" "</think>" "<tool_call>" "</tool_call>". Both strings are excluded, too.
    """
    dpo: bool = flag(
        False,
        requires={"sft": True, "reset_attention_mask": True, "reset_position_ids": True},
        excludes={"sft_train_on": "all", "mtp_num_layers": True},
    )
    """Direct preference optimization (Rafailov et al. 2023): the records of --sft have chosen and
    rejected completions. A sample is a pair, and the reference the loaded model.
    """
    dpo_beta: float = flag(0.1, positive=True, requires={"dpo": True})
    """Factor of the log-probability ratios in the loss of --dpo: larger values keep the model
    closer to the reference.
    """

    # These fields are not flags; callers may change them.
    # Read seq_length + 1 tokens per sample, so that each position has a label; otherwise the last
    # position has none.
    add_extra_token_to_sequence: bool = True
    # Drop the tokens at the end of the validation split that do not fill a sample, instead of
    # padding them.
    drop_last_partial_validation_sequence: bool = True
    # Compare cached indices with their digests. As this reads whole arrays, one process per node is
    # enough.
    verify_index_cache: bool = True

    def find_problems(self) -> Iterator[str]:
        if self.reset_attention_mask and not self.create_attention_mask_in_dataloader:
            yield (
                "--reset-attention-mask and --no-create-attention-mask-in-dataloader are mutually "
                "exclusive: the latter disables document numbers"
            )
        if self.fim_data and self.fim_split_sample is not None and self.fim_fragment_rate is None:
            yield f"--fim-split-sample {self.fim_split_sample} requires --fim-fragment-rate"
        try:  # report malformed options now, before any process group exists
            self.split_intervals()
            self.sources()
        except ValueError as error:
            yield str(error)

    def fim_options(self) -> dict[str, object]:
        """Return the options of fill-in-the-middle; empty without --fim-data."""
        if not self.fim_data:
            return {}
        names = [name for name in vars(self) if name.startswith("fim_") and name != "fim_data"]
        return {name: getattr(self, name) for name in names}

    @property
    def extra_tokens(self) -> int:
        return int(self.add_extra_token_to_sequence)

    def data_paths(self) -> list[str]:
        """Return the data paths of all splits, each once, although splits and blends share them."""
        paths: dict[str, None] = {}  # an ordered set
        for blend, _ in self.sources().values():
            paths.update(dict.fromkeys(blend.prefixes))
        return list(paths)

    def sources(self) -> dict[Split, tuple[Blend, Fractions]]:
        """Return the blend of each split with data, and the range of each member that it reads.

        Empty for mock data.
        """
        # Exactly one source of data must be given.
        paths: dict[Split, list[str] | None] = {
            "train": self.train_data_path,
            "valid": self.valid_data_path,
            "test": self.test_data_path,
        }
        split_paths = {split: path for split, path in paths.items() if path is not None}
        options = {
            "--mock-data": self.mock_data or None,
            "--data-path": self.data_path,
            "--data-args-path": self.data_args_path,
            "/".join(f"--{split}-data-path" for split in split_paths): split_paths or None,
            "--per-split-data-args-path": self.per_split_data_args_path,
        }
        specified_options = [name for name, value in options.items() if value is not None]
        if not specified_options:
            raise ValueError(
                "no data: give --data-path, --train-data-path (and --valid-, --test-data-path) or "
                "--mock-data"
            )
        if len(specified_options) > 1:
            raise ValueError(
                f"{' and '.join(specified_options)} are mutually exclusive: each specifies all data"
            )
        if self.mock_data:
            return {}

        # One blend for all splits
        if self.data_path is not None or self.data_args_path is not None:
            words = self.data_path
            flag_name = "--data-path"
            if self.data_args_path is not None:
                words = read_text(self.data_args_path, "--data-args-path").split()
                flag_name = self.data_args_path
            assert words is not None
            blend = parse_blend(words, flag_name)
            sources = {}
            for split, interval in self.split_intervals().items():
                sources[split] = (blend, interval)
            return sources

        # A blend for each split
        if self.split is not None:
            raise ValueError(
                f"--split {self.split} requires --data-path; {specified_options[0]} already "
                "specifies the data of each split"
            )
        if self.per_split_data_args_path is not None:
            split_paths = resolve(_READ_SPLIT_LISTS)(self.per_split_data_args_path)
        whole = (0.0, 1.0)
        sources = {}
        for split, path in split_paths.items():
            blend = parse_blend(path, f"{specified_options[0]} ({split})")
            sources[split] = (blend, whole)
        return sources

    def split_intervals(self) -> dict[Split, Fractions]:
        """Return the interval of the data of each split that has a share in --split."""
        text = DEFAULT_SPLIT if self.split is None else self.split
        intervals: dict[Split, Fractions] = {}
        for split, interval in zip(SPLITS, parse_split(text), strict=True):
            if interval is not None:
                intervals[split] = interval
        return intervals


def read_text(path: str, flag_name: str) -> str:
    if not Path(path).is_file():
        raise ValueError(f"{flag_name} {path}: no such file")
    return Path(path).read_text(encoding="utf-8")
