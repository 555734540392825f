"""Let DeepSpeed save checkpoints of its engine, and compare our readers with their oracles.

    python -m tests.interop.deepspeed_engine_check DIRECTORY PYTHON [CASE ...]

PYTHON is that of an environment with deepspeed, transformers and accelerate. With DIRECTORY alone,
checkpoints that are already there are compared.
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
    "trainer-zero1": 2,
    "trainer-zero2-offload": 2,
    "trainer-zero3-bf16": 2,
    "trainer-zero3-offload": 2,
    "accelerate-zero2-bf16": 2,
    "accelerate-zero3": 2,
}
CONVERT = HERE.parents[1] / "tools/checkpoint/convert.py"


def write(python: str, root: Path, case: str) -> None:
    if case.startswith("megatron"):
        script = [HERE / "deepspeed_megatron_write.py", root / case]
        if "bf16" in case:
            script.append("--bf16")
    elif case.startswith("zero"):
        script = [HERE / "deepspeed_engine_write.py", root, case]
    else:
        script = [HERE / "deepspeed_trainer_write.py", root, case]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS[case]]
    command = [str(word) for word in (python, *torchrun, *script)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def check(root: Path, case: str) -> None:
    if case.startswith("megatron"):
        test_engine.test_megatron_deepspeed_is_read_as_its_universal_form(case, root)
    else:
        checkpoint = case if case.startswith("zero") else f"{case}/checkpoint-3"
        test_engine.test_tensors_are_those_of_deepspeed(checkpoint, root)
        test_engine.test_training_continues_as_in_deepspeed(checkpoint, root)
        command = [CONVERT, "--saver", "torch_dist", "--verify-target"]
        command += ["--load-dir", root / checkpoint, "--save-dir", root / f"{case}-converted"]
        arguments = [str(word) for word in (sys.executable, *command)]
        subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
    print(f"{case}: ok")


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for case in sys.argv[3:] or RANKS:
        if len(sys.argv) > 2:
            write(sys.argv[2], root, case)
        check(root, case)
