"""Train a SentencePiece vocabulary (BPE, byte fallback) that keeps newlines and indentation, on a
JSONL corpus.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import sentencepiece


def read_lines(corpus: Path, megabytes: float) -> Iterator[str]:
    """Yield the lines of the documents, up to this much text."""
    size = 0
    with corpus.open(encoding="utf-8") as file:
        for row in file:
            for line in json.loads(row)["text"].splitlines():
                yield line
                size += len(line)
            if size >= megabytes * 1e6:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path, help="JSONL corpus")
    parser.add_argument("output", type=Path, help="model file to write, ending in .model")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--megabytes", type=float, default=2.0, help="size of the text to train on")
    args = parser.parse_args()

    temporary = args.output.with_suffix(".tmp")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=read_lines(args.corpus, args.megabytes),
        model_prefix=str(temporary),
        vocab_size=args.vocab_size,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["\n"],
        num_threads=2,
        minloglevel=1,
    )
    Path(f"{temporary}.vocab").unlink()
    os.replace(f"{temporary}.model", args.output)
    print(f"vocabulary: {args.vocab_size} pieces -> {args.output}")


if __name__ == "__main__":
    main()
