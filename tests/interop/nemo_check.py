"""Archives that `nemo_write.py` wrote are the models of megatron-core.

python -m tests.interop.nemo_check WORK
"""

import sys
from pathlib import Path

from tests.support.nemo import check_archive


def main() -> None:
    work = Path(sys.argv[1])
    for path in sorted(work.glob("*.nemo")):
        check_archive(path, work / path.stem)
        print(f"{path.name}: weights bitwise, logits of transformers equal", flush=True)


if __name__ == "__main__":
    main()
