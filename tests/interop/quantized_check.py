"""Quantized matrices of other libraries are decoded to the same bits.

    python -m tests.interop.quantized_check DIRECTORY

DIRECTORY contains directories that `quantized_write.py` wrote.
"""

import sys
from pathlib import Path

from tests.support.quantized import check_case


def main() -> None:
    names = []
    for path in sorted(Path(sys.argv[1]).glob("*/*/expected.safetensors")):
        check_case(path.parent)
        names.append(path.parent.name)
    assert names
    print(f"{len(set(names))} encodings, {len(names)} matrices: same bits: ok")


if __name__ == "__main__":
    main()
