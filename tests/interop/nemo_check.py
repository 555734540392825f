"""Archives and directories that programs here wrote are the models of megatron-core.

python -m tests.interop.nemo_check WORK
"""

import sys
from pathlib import Path

from tests.support.nemo import check_nemo


def main() -> None:
    work = Path(sys.argv[1])
    for path in sorted([*work.glob("*.nemo"), *work.glob("*/context")]):
        path = path.parent if path.name == "context" else path
        check_nemo(path, work / "exports" / path.name)
        print(f"{path.name}: weights bitwise, logits of transformers equal", flush=True)


if __name__ == "__main__":
    main()
