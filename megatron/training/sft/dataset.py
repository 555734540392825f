"""Samples of fine-tuning: rows of whole examples, in an order that is shuffled by epoch."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import NoReturn

import numpy as np

from megatron.core.datasets import Dataset, GPTDatasetConfig, Sample
from megatron.core.datasets.blend import BlendedDataset
from megatron.core.datasets.builder import NO_TRAINING_DATA
from megatron.core.datasets.config import SPLITS, Blend, Fractions, Split
from megatron.core.datasets.index_cache import Arrays, compute_digest, load_or_build
from megatron.training.config.run_config import Config
from megatron.training.data.loaders import build_on_one_rank_per_node_first
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.data.tokenizer_libraries import load_huggingface
from megatron.training.run import Datasets
from megatron.training.sft.chat_template import ExampleEncoder
from megatron.training.sft.corpus import SFTCorpus
from megatron.training.sft.packing import pack_best_fit

logger = logging.getLogger(__name__)

PREVIEW_TOKENS = 400


@functools.lru_cache(maxsize=4)
def shuffle_rows(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """Return the order of the rows in an epoch."""
    return np.random.RandomState([seed, epoch]).permutation(num_rows)


class SFTDataset:
    """Rows of a split of a corpus.

    A row contains whole examples: several with --reset-attention-mask, otherwise one, and with
    --dpo a chosen and a rejected one. Sample i is row `i mod R` of the order for epoch `i div R`,
    where R is the number of rows, so it depends on the seed only.

    Args:
        corpus: all examples.
        examples: half-open range of the examples of the split.
        split: name of the split.
        num_samples: length of the dataset; None for one epoch.
        config: data flags.
        padding: token that fills rows.
    """

    def __init__(
        self,
        corpus: SFTCorpus,
        examples: tuple[int, int],
        split: Split,
        num_samples: int | None,
        config: GPTDatasetConfig,
        padding: int,
    ) -> None:
        self.corpus = corpus
        self.split = split
        self.config = config
        self.padding = padding
        self._first_example, self._last_example = examples
        is_packed = config.reset_attention_mask
        description = {
            "class": "SFTDataset",
            "corpus": corpus.digest,
            "examples": list(examples),
            "seq_length": config.seq_length,
            "too_long": config.sft_too_long,
            "is_packed": is_packed,
        }
        self.digest = compute_digest(description)  # of the rows
        self.fingerprint = compute_digest({**description, "seed": config.seed})
        arrays = load_or_build(
            corpus.cache_directory,
            f"SFTDataset-{split}",
            description,
            self._build_rows,
            config.verify_index_cache,
        )
        self.row_starts = arrays["row_starts"]  # [rows + 1], positions in row_examples
        self.row_examples = arrays["row_examples"]
        self.num_samples = self.num_rows if num_samples is None else num_samples
        # With --dpo: log-probability of the chosen minus that of the rejected completion of each
        # row under the reference model, float32.
        self.reference_margins: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        """Return the number of rows of an epoch."""
        return len(self.row_starts) - 1

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        """Return inputs, labels and masks of a row, as `finish_sample` does."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        epoch, position = divmod(index, self.num_rows)
        order = shuffle_rows(self.config.seed, epoch, self.num_rows)
        return self.read_row(int(order[position]))

    def read_row(self, row: int) -> Sample:
        """Return inputs, labels and masks of a row.

        The loss mask is 1 where a label is trained on, and -1 in a rejected example (--dpo).
        Positions of different documents do not attend to each other.
        """
        length = self.config.seq_length
        tokens = np.full(length, self.padding, dtype=np.int64)
        labels = np.full(length, self.padding, dtype=np.int64)
        loss_mask = np.zeros(length, dtype=np.float32)
        documents = np.zeros(length, dtype=np.int64)
        position_ids = np.arange(length)

        # Examples follow each other; the rest of the row is padding.
        examples = self.get_examples(row)
        limits = self._compute_limits(np.array(examples)).tolist()
        end = 0
        for example, limit in zip(examples, limits, strict=True):
            ids, is_trained = self.corpus.read(example)
            ids = ids[:limit]
            start = end
            end = start + len(ids) - 1
            # Position i predicts token i + 1 of the same example.
            tokens[start:end] = ids[:-1]
            labels[start:end] = ids[1:]
            is_rejected = self.config.dpo and example % 2 == 1
            sign = -1 if is_rejected else 1
            loss_mask[start:end] = is_trained[1 : len(ids)] * sign
            # The next example, or the padding, is another document.
            documents[end:] += 1
            if self.config.reset_position_ids:
                position_ids[end:] = np.arange(length - end)

        sample: Sample = {
            "loss_mask": loss_mask,
            "tokens": tokens,
            "labels": labels,
            "position_ids": position_ids,
        }
        if self.config.reset_attention_mask:
            sample["documents"] = documents
        if self.reference_margins is not None:
            # A value per position, so that context parallelism slices it like the other fields
            margin = self.reference_margins[row]
            sample["reference_margins"] = np.full(length, margin)
        return sample

    def get_examples(self, row: int) -> list[int]:
        """Return the examples of a row, as indices of the corpus."""
        start = self.row_starts[row]
        end = self.row_starts[row + 1]
        examples: list[int] = self.row_examples[start:end].tolist()
        return examples

    def _find_too_long(self, examples: np.ndarray) -> np.ndarray:
        """Return whether each example, or the pair it is in, is longer than a sequence.

        `examples` are whole records: with --dpo, pairs.
        """
        per_record = self.corpus.examples_per_record
        num_inputs = self.corpus.lengths[examples] - 1  # the last token is a label only
        inputs_of_records = num_inputs.reshape(-1, per_record).sum(axis=1)
        is_too_long = inputs_of_records > self.config.seq_length
        return np.repeat(is_too_long, per_record)

    def _compute_limits(self, examples: np.ndarray) -> np.ndarray:
        """Return the maximum number of tokens of each example.

        The examples of a pair that is too long are cut to half a sequence each. The last token of
        an example is a label only.
        """
        length = self.config.seq_length
        shortened_length = length // self.corpus.examples_per_record
        is_too_long = self._find_too_long(examples)
        return np.where(is_too_long, shortened_length, length) + 1

    def _build_rows(self) -> Arrays:
        """Apply --sft-too-long, and assign the examples to rows."""
        examples = self._select_examples()
        if self.config.dpo or not self.config.reset_attention_mask:
            row_starts = np.arange(0, len(examples) + 1, self.corpus.examples_per_record)
            return {"row_starts": row_starts, "row_examples": examples}

        # Pack several examples into a row.
        limits = self._compute_limits(examples)
        num_inputs = np.minimum(self.corpus.lengths[examples], limits) - 1
        rows = pack_best_fit(num_inputs, self.config.seq_length)
        examples_per_row = np.bincount(rows)
        order = np.argsort(rows, kind="stable")
        return {
            "row_starts": np.append(0, np.cumsum(examples_per_row)),
            "row_examples": examples[order],
        }

    def _select_examples(self) -> np.ndarray:
        """Return the examples of the split that --sft-too-long keeps.

        Raises ValueError if there are none, or if one is too long and the policy is "error".
        """
        policy = self.config.sft_too_long
        examples = np.arange(self._first_example, self._last_example)
        is_too_long = self._find_too_long(examples)
        if policy == "error" and is_too_long.any():
            self._raise_too_long(examples[is_too_long])
        if policy == "drop":
            is_kept = ~is_too_long
        else:
            # A truncated example may have no token left that is trained on.
            per_record = self.corpus.examples_per_record
            is_trained = self.corpus.first_trained[examples] < self._compute_limits(examples)
            is_trained_record = is_trained.reshape(-1, per_record).all(axis=1)
            is_kept = np.repeat(is_trained_record, per_record)
        if not is_kept.any():
            raise ValueError(
                f"the {self.split} split of {self.corpus.name} has no examples (of "
                f"{len(examples)}, {is_too_long.sum()} are longer than --seq-length "
                f"{self.config.seq_length}): give it a larger share in --split or data of its own, "
                "raise --seq-length, or do not use the split (--eval-iters 0)"
            )
        return examples[is_kept]

    def _raise_too_long(self, examples: np.ndarray) -> NoReturn:
        """Raise ValueError for examples that are longer than a sequence."""
        per_record = self.corpus.examples_per_record
        example = int(examples[0])
        num_tokens = self.corpus.lengths[example : example + per_record].sum()
        num_others = len(examples) // per_record - 1
        raise ValueError(
            f"{self.corpus.locate(example)}: the {'pair' if self.config.dpo else 'example'} has "
            f"{num_tokens} tokens, more than --seq-length {self.config.seq_length} + "
            f"{per_record}, as do {num_others} others of the {self.split} split: raise "
            "--seq-length, or use --sft-too-long truncate or drop"
        )

    def describe(self, num_samples: int) -> str:
        """Return the numbers of examples, rows and epochs, and how full the rows are."""
        lengths = self.corpus.lengths[self.row_examples]
        limits = self._compute_limits(self.row_examples)
        num_truncated = int((lengths > limits).sum())
        num_dropped = self._last_example - self._first_example - len(lengths)
        num_inputs = np.minimum(lengths, limits) - 1
        fill = num_inputs.sum() / (self.num_rows * self.config.seq_length)
        num_epochs = num_samples / self.num_rows
        return (
            f"{self.split}: {self.corpus.name}: {len(lengths)} examples ({num_truncated} "
            f"truncated, {num_dropped} dropped) in {self.num_rows} sequences of "
            f"{self.config.seq_length} tokens, {fill:.1%} full; {num_samples} samples are "
            f"{num_epochs:.2f} epochs"
        )


def format_preview(dataset: SFTDataset, tokenizer: Tokenizer) -> str:
    """Return the text of the first training example, with [[ ]] around text that is trained on."""
    order = shuffle_rows(dataset.config.seed, 0, dataset.num_rows)
    example = dataset.get_examples(int(order[0]))[0]  # with --dpo the chosen one
    ids, is_trained = dataset.corpus.read(example)
    num_tokens = min(len(ids), PREVIEW_TOKENS, dataset.config.seq_length + 1)
    ids = ids[:num_tokens]
    is_trained = is_trained[:num_tokens]

    # Runs of tokens that are all trained on, or all not
    run_starts = np.flatnonzero(np.diff(is_trained)) + 1
    texts = []
    start = 0
    for end in [*run_starts.tolist(), num_tokens]:
        text = tokenizer.detokenize(ids[start:end].tolist())
        texts.append(f"[[{text}]]" if is_trained[start] else text)
        start = end
    if num_tokens < dataset.corpus.lengths[example]:
        texts.append(" ...")
    return (
        f"example {example} of {dataset.corpus.name}, trained on the text in [[ ]]:\n"
        f"{''.join(texts)}"
    )


def set_length_in_samples(config: Config, tokenizer: Tokenizer) -> None:
    """Set --train-samples to the samples of --sft-epochs epochs. Collective."""
    epochs = config.training.sft_epochs
    assert epochs is not None

    def count_rows(verify: bool) -> int:
        """Return the number of rows of an epoch of the training data."""
        data = replace(config.data, verify_index_cache=verify)
        sources = data.sources()
        if "train" not in sources:
            raise ValueError(NO_TRAINING_DATA)
        blend, fractions = sources["train"]
        if blend.weights is not None:
            raise ValueError(
                f"--sft-epochs {epochs} and the weights of the training data are mutually "
                "exclusive, as an epoch of a weighted blend is undefined: remove the weights, or "
                "give the length with --train-samples"
            )
        encoder = _make_encoder(data, tokenizer)
        corpus = SFTCorpus(blend.prefixes, data, encoder)
        examples = corpus.find_examples(fractions)
        padding = _find_padding(tokenizer)
        dataset = SFTDataset(corpus, examples, "train", None, data, padding)
        return dataset.num_rows

    num_rows = build_on_one_rank_per_node_first(count_rows, needs_data=True)
    assert num_rows is not None
    config.training.train_samples = epochs * num_rows


def _make_encoder(data: GPTDatasetConfig, tokenizer: Tokenizer) -> ExampleEncoder:
    """Return the encoder of the data flags."""
    huggingface_tokenizer = load_huggingface(tokenizer.config)
    exclude = data.sft_exclude or ()
    return ExampleEncoder(huggingface_tokenizer, data.sft_train_on, exclude, data.dpo)


def _find_padding(tokenizer: Tokenizer) -> int:
    """Return the token that fills rows."""
    return tokenizer.eod if tokenizer.pad is None else tokenizer.pad


def build_sft_datasets(
    config: Config, num_samples: tuple[int, int, int], tokenizer: Tokenizer
) -> Datasets:
    """Build the training, validation and test samples of --sft.

    The first rank of a node tokenizes the data, the others map its cache.
    """
    data = config.data
    encoder = _make_encoder(data, tokenizer)
    padding = _find_padding(tokenizer)
    corpora: dict[tuple[str, ...], SFTCorpus] = {}

    def build_member(
        paths: tuple[str, ...], fractions: Fractions, split: Split, count: int | None
    ) -> SFTDataset:
        """Return the samples of one split of some files."""
        if paths not in corpora:
            corpora[paths] = SFTCorpus(paths, data, encoder)
        corpus = corpora[paths]
        examples = corpus.find_examples(fractions)
        return SFTDataset(corpus, examples, split, count, data, padding)

    def build_split(blend: Blend, fractions: Fractions, split: Split, count: int) -> Dataset:
        """Return the samples of one split of all files."""
        # Without weights, the files are one data set.
        if blend.weights is None:
            single = build_member(blend.prefixes, fractions, split, count)
            logger.info(single.describe(count))
            return single
        members = []
        for path in blend.prefixes:
            members.append(build_member((path,), fractions, split, count))
        dataset = BlendedDataset(
            members,
            blend.weights,
            count,
            members[0].corpus.cache_directory,
            f"SFTBlend-{split}",
            data.verify_index_cache,
        )
        member_samples = np.bincount(dataset.dataset_index, minlength=len(members)).tolist()
        for member, num_member_samples in zip(members, member_samples, strict=True):
            logger.info(member.describe(num_member_samples))
        return dataset

    sources = data.sources()
    datasets: list[Dataset | None] = []
    for split, count in zip(SPLITS, num_samples, strict=True):
        dataset = None
        if count != 0 and split in sources:
            blend, fractions = sources[split]
            dataset = build_split(blend, fractions, split, count)
        datasets.append(dataset)
    train, valid, test = datasets
    if train is None and num_samples[0] != 0:
        raise ValueError(NO_TRAINING_DATA)
    if train is not None:
        first = train.members[0] if isinstance(train, BlendedDataset) else train
        assert isinstance(first, SFTDataset)
        logger.info(format_preview(first, tokenizer))
    return train, valid, test
