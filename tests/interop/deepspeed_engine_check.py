"""Let DeepSpeed save checkpoints of its engine, and compare what we read with their oracles.

    python -m tests.interop.deepspeed_engine_check DIRECTORY PYTHON

PYTHON is that of an environment with deepspeed and transformers. With DIRECTORY alone, checkpoints
that are already there are compared.
"""

import subprocess
import sys
from pathlib import Path

from tests.unit_tests.conversion.deepspeed import test_engine

HERE = Path(__file__).parent
RANKS = {
    "zero1": 2,
    "zero2-bf16-tied": 2,
    "zero2-frozen": 3,
    "zero3-bf16-tied": 2,
    "zero3-frozen": 3,
    "megatron-zero1": 4,
    "megatron-bf16": 4,
}


def write(python: str, root: Path, case: str) -> None:
    if case.startswith("megatron"):
        script = [HERE / "deepspeed_megatron_write.py", root / case]
        if "bf16" in case:
            script.append("--bf16")
    else:
        script = [HERE / "deepspeed_engine_write.py", root, case]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS[case]]
    command = [str(word) for word in (python, *torchrun, *script)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def check(root: Path, case: str) -> None:
    if case.startswith("megatron"):
        test_engine.test_megatron_deepspeed_is_read_as_its_universal_form(case, root)
    else:
        test_engine.test_tensors_are_those_of_deepspeed(case, root)
        test_engine.test_training_continues_as_in_deepspeed(case, root)
    print(f"{case}: ok")


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for case in RANKS:
        if len(sys.argv) > 2:
            write(sys.argv[2], root, case)
        check(root, case)
