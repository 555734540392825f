"""Compare checkpoints of other trainers with the state that they have gathered.

python -m tests.interop.training_folders_check DIRECTORY
"""

import sys
import tempfile
from pathlib import Path

import torch

from tests.support.training_folders import FOLDERS, assert_is_gathered


def main() -> None:
    for directory in sorted(Path(sys.argv[1]).iterdir()):
        expected = torch.load(directory / "expected.pt", weights_only=True)
        (directory / "expected.pt").unlink()
        with tempfile.TemporaryDirectory() as work:
            folder = directory / FOLDERS.get(directory.name, ".")
            assert_is_gathered(folder, expected, Path(work))
        print(f"{directory.name}: weights and moments bitwise: ok", flush=True)


if __name__ == "__main__":
    main()
