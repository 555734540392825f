"""Write a corpus from text that every machine has: the sources and docstrings of Python's standard library.

One JSON document per module (`{"text": ...}`), docstrings of its functions and classes as documents of their own.
"""

import argparse
import ast
import json
import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def documents(root: Path) -> Iterator[str]:
    """Source of every module, then its longer docstrings, in a fixed order."""
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts or "tests" in path.parts:
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, UnicodeDecodeError, SyntaxError):
            continue
        yield source
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                docstring = ast.get_docstring(node)
                if docstring and len(docstring) > 200:
                    yield f"{node.name}: {docstring}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="JSONL file to write")
    parser.add_argument("--megabytes", type=float, default=8.0, help="stop after this much text")
    args = parser.parse_args()

    texts = list(documents(Path(sysconfig.get_paths()["stdlib"])))
    random.Random(0).shuffle(texts)  # so that the validation split is of the same kind as the training split
    temporary = args.output.with_suffix(".tmp")
    size = count = 0
    with temporary.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
            size, count = size + len(text), count + 1
            if size >= args.megabytes * 1e6:
                break
    os.replace(temporary, args.output)
    print(f"corpus: {count} documents, {size / 1e6:.1f} MB -> {args.output}")


if __name__ == "__main__":
    main()
