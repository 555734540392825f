"""Train an export with peft and trl, and read what they save.

    python -m tests.interop.peft_trl_check PYTHON WORK

PYTHON is an interpreter with peft and trl, and WORK an empty directory.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

from megatron.conversion.convert import open_checkpoint
from megatron.conversion.huggingface.directory import write_huggingface
from megatron.conversion.model_space.source import read_whole
from tests.interop import peft_trl_train
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.unit_tests.conversion.filled_model import model_logits

TOKENS = torch.arange(20).view(1, 20)


def main() -> None:
    python, work = sys.argv[1], Path(sys.argv[2])
    source = random_source(LLAMA_ARGS, optimizer=False)
    write_huggingface(source, work / "model")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    script = str(Path(peft_trl_train.__file__))
    subprocess.run([python, script, str(work)], check=True, env=environment)

    for name in ("peft", "trl"):
        trained = open_checkpoint(work / name)
        assert trained.unused == [] and trained.tensors == source.tensors
        changed = sum(
            not torch.equal(read_whole(trained, key), source.values[key]) for key in source.tensors
        )
        assert changed > 0
        expected = torch.load(work / f"{name}_logits.pt")
        found = model_logits(trained, TOKENS)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
        error = (found - expected).abs().max().item()
        print(f"{name}: {changed} tensors were trained; logits within {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
