"""A SentencePiece BPE model written as `tokenizer.json`.

Without it transformers would use its own Llama tokenizer, which adds no space before a text that
begins with one, as SentencePiece does. The tokenizer made here has the same prefix, spaces, pieces
and merges, and the same bytes for unknown characters, so it splits text as training did.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing import CheckpointError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer

_SPACE = "\u2581"
_PROBE = "  a  \u00bd\uff21 "  # spaces and characters that a normalizer would change


def open_model(content: bytes) -> SentencePieceProcessor:
    """Open a model that `check_model` has accepted."""
    import sentencepiece  # here, because other tokenizers do not need it

    return sentencepiece.SentencePieceProcessor(model_proto=content)


def check_model(content: bytes, location: str) -> None:
    """Raise CheckpointError unless `content` is a SentencePiece model with finite scores."""
    import sentencepiece  # here, because other tokenizers do not need it

    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{location} is not a SentencePiece model") from error
    for token_id in range(processor.vocab_size()):
        score = processor.get_score(token_id)
        if not math.isfinite(score):
            raise CheckpointError(
                f"{location}: piece {token_id} has score {score}: scores must be finite, so this "
                "SentencePiece model is damaged"
            )


def make_tokenizer(
    processor: SentencePieceProcessor,
) -> Tokenizer | None:
    """Return the same tokenizer for transformers; None for a model that it cannot repeat exactly.

    Those are models that normalize text, and unigram models, for which it chooses other
    segmentations of equal score.
    """
    import tokenizers  # here, because other tokenizers do not need it

    count = processor.vocab_size()
    scores = [processor.get_score(token_id) for token_id in range(count)]
    # Scores of a BPE model are whole numbers that count down from 0 in the order of the merges.
    if not all(score.is_integer() for score in scores):
        return None
    unchanged = _PROBE.replace(" ", _SPACE)
    normalized = processor.normalize(_PROBE)
    if normalized not in (unchanged, _SPACE + unchanged):
        return None
    has_prefix = normalized != unchanged

    # Model: pieces and merges.
    tokens = [processor.id_to_piece(token_id) for token_id in range(count)]
    token_ids = {token: token_id for token_id, token in enumerate(tokens)}
    bpe = tokenizers.models.BPE(
        token_ids,
        _make_merges(token_ids, scores),
        unk_token=tokens[processor.unk_id()],
        fuse_unk=True,
        byte_fallback=any(processor.is_byte(token_id) for token_id in range(count)),
    )
    tokenizer = tokenizers.Tokenizer(bpe)

    # Spaces, and the one before the text.
    steps: list[Any] = [tokenizers.normalizers.Replace(" ", _SPACE)]
    undo: list[Any] = [
        tokenizers.decoders.Replace(_SPACE, " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
    ]
    if has_prefix:
        steps.insert(0, tokenizers.normalizers.Prepend(_SPACE))
        undo.append(tokenizers.decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = tokenizers.normalizers.Sequence(steps)
    tokenizer.decoder = tokenizers.decoders.Sequence(undo)

    # Special pieces.
    special = []
    for token_id, token in enumerate(tokens):
        if processor.is_control(token_id) or processor.is_unknown(token_id):
            special.append(tokenizers.AddedToken(token, normalized=False, special=True))
    tokenizer.add_special_tokens(special)
    return tokenizer


def _make_merges(token_ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return every way to make a piece of two others, best pieces first."""
    ranks: dict[tuple[str, str], tuple[float, int, int]] = {}
    for token, token_id in token_ids.items():
        for cut in range(1, len(token)):
            left = token[:cut]
            right = token[cut:]
            if left in token_ids and right in token_ids:
                ranks[left, right] = (-scores[token_id], token_ids[left], token_ids[right])
    return sorted(ranks, key=lambda merge: ranks[merge])


def compute_scores(
    token_ids: dict[str, int], merges: list[list[str]] | list[str]
) -> dict[str, float]:
    """Return the scores with which SentencePiece makes pieces in the order of a list of merges.

    Raises ValueError for merges that are not those of a SentencePiece model, which makes a piece of
    any two others and has one score for all ways to make it.
    """
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        pairs.append((left, right))

    # Scores count down from 0 in the order of the merges.
    scores: dict[str, float] = {}
    order: list[float] = []
    for left, right in pairs:
        piece = left + right
        scores.setdefault(piece, -float(len(scores)))
        order.append(scores[piece])
    is_sorted = order == sorted(order, reverse=True)

    # All ways to make a piece must be merges.
    by_id = [0.0] * (max(token_ids.values(), default=-1) + 1)
    for piece, token_id in token_ids.items():
        by_id[token_id] = scores.get(piece, 0.0)
    possible = _make_merges(token_ids, by_id)
    if not is_sorted or set(possible) != set(pairs):
        raise ValueError("its merges are not those of a SentencePiece model")
    return scores
