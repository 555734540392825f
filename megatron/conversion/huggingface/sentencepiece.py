"""A SentencePiece model as `tokenizer.json`, so that transformers splits text exactly as training did.

transformers' own Llama tokenizer adds no space before a text that begins with one, which SentencePiece does. The file
written here says the same as the model: prefix, spaces, pieces and their merges, bytes for what is unknown.
"""

from __future__ import annotations

from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

SPACE = "\u2581"
_PROBE = "  a  \u00bd\uff21 "  # spaces and characters that a normalizer would change


def sentencepiece_tokenizer(model: Path) -> Tokenizer | None:
    """The same tokenizer for transformers; None for a model that it could not repeat exactly.

    That is one that normalizes text, or a unigram model (it chooses otherwise between segmentations of equal score).
    """
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    scores = [processor.get_score(number) for number in range(processor.vocab_size())]
    if any(score != int(score) for score in scores):  # of BPE they count down from 0, in the order of the merges
        return None
    plain, normalized = _PROBE.replace(" ", SPACE), processor.normalize(_PROBE)
    if normalized not in (plain, SPACE + plain):
        return None
    prefix = normalized != plain
    pieces = [processor.id_to_piece(number) for number in range(len(scores))]
    tokenizer = Tokenizer(_model(processor, pieces, scores))
    steps = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    undo = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *undo]
    )
    special = [p for n, p in enumerate(pieces) if processor.is_control(n) or processor.is_unknown(n)]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])
    return tokenizer


def _model(processor: sentencepiece.SentencePieceProcessor, pieces: list[str], scores: list[float]) -> models.BPE:
    numbers = {piece: number for number, piece in enumerate(pieces)}
    return models.BPE(
        numbers,
        _merges(numbers, scores),
        unk_token=pieces[processor.unk_id()],
        fuse_unk=True,
        byte_fallback=any(processor.is_byte(number) for number in range(len(pieces))),
    )


def _merges(numbers: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the best pieces first."""
    ranked = []
    for piece, number in numbers.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in numbers and right in numbers:
                ranked.append((-scores[number], numbers[left], numbers[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]
