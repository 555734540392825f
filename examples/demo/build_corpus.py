"""Write a corpus of plain English from the docstrings of Python and of installed packages.

Each docstring is one JSON document (`{"text": ...}`). Only paragraphs of prose are kept: sentences
without code, tables and markup.
"""

import argparse
import inspect
import json
import os
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PROSE = re.compile(r"[A-Z][A-Za-z0-9 ,;:'()-]+[.]([A-Za-z0-9 ,.;:'()-]+[.])?")
PACKAGES = ("torch", "numpy", "sympy", "networkx", "matplotlib", "setuptools", "tensorboard", "pip")


def find_sources() -> Iterator[Path]:
    """Yield Python's own modules, then those of installed packages, in a fixed order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    yield from sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    for package in PACKAGES:
        yield from sorted((Path(sysconfig.get_paths()["purelib"]) / package).rglob("*.py"))


def find_docstrings(path: Path) -> Iterator[str]:
    """Yield the texts in triple quotes; parsing the files would take ten times as long."""
    for text in re.findall(
        r'"""(.*?)"""', path.read_text(encoding="utf-8", errors="ignore"), re.DOTALL
    ):
        yield inspect.cleandoc(text)


def extract_prose(text: str) -> str:
    """Return the paragraphs that consist of sentences, each on one line."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return "\n".join(p for p in paragraphs if len(p.split()) >= 6 and PROSE.fullmatch(p))


def find_documents() -> Iterator[str]:
    """Yield every text once: derived classes repeat the docstrings of their bases."""
    seen = set()
    for path in find_sources():
        for text in map(extract_prose, find_docstrings(path)):
            if text and text not in seen:
                seen.add(text)
                yield text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="JSONL file to write")
    parser.add_argument("--megabytes", type=float, default=4.0, help="stop after this much text")
    args = parser.parse_args()

    texts = []
    size = 0
    for text in find_documents():
        texts.append(text)
        size += len(text)
        if size >= args.megabytes * 1e6:
            break
    # The training and the validation split must have the same kinds of text.
    random.Random(0).shuffle(texts)
    temporary = args.output.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    os.replace(temporary, args.output)
    print(f"corpus: {len(texts)} documents, {size / 1e6:.1f} MB -> {args.output}")


if __name__ == "__main__":
    main()
