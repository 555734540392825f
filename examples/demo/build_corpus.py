"""Write a corpus of plain English from text that this machine has: the docstrings of Python and of
what is installed.

One JSON document per docstring (`{"text": ...}`), of which only the paragraphs that read as prose
are kept: sentences without code, tables and markup.
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


def sources() -> Iterator[Path]:
    """Python's own modules, then those of the packages that `make setup` installs, in a fixed
    order.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    yield from sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    for package in PACKAGES:
        yield from sorted((Path(sysconfig.get_paths()["purelib"]) / package).rglob("*.py"))


def docstrings(path: Path) -> Iterator[str]:
    """The texts in triple quotes; parsing the files would take ten times as long."""
    for text in re.findall(
        r'"""(.*?)"""', path.read_text(encoding="utf-8", errors="ignore"), re.DOTALL
    ):
        yield inspect.cleandoc(text)


def prose(text: str) -> str:
    """The paragraphs that are made of sentences, each on one line."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return "\n".join(p for p in paragraphs if len(p.split()) >= 6 and PROSE.fullmatch(p))


def documents() -> Iterator[str]:
    """Every text once: derived classes repeat the docstrings of their bases."""
    seen = set()
    for path in sources():
        for text in map(prose, docstrings(path)):
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
    for text in documents():
        texts.append(text)
        size += len(text)
        if size >= args.megabytes * 1e6:
            break
    random.Random(0).shuffle(
        texts
    )  # so that the validation split is of the same kind as the training split
    temporary = args.output.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    os.replace(temporary, args.output)
    print(f"corpus: {len(texts)} documents, {size / 1e6:.1f} MB -> {args.output}")


if __name__ == "__main__":
    main()
