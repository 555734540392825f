"""Train an export with peft and trl, and read their files; merge adapters as peft does.

    python -m tests.interop.peft_trl_check PYTHON WORK

PYTHON is an interpreter with peft and trl, and WORK an empty directory.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.editing.edits import apply_edits
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.model_space.pieces import is_bitwise_equal
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import EditOptions, WriteOptions
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS
from tests.interop import peft_trl_train
from tests.support.compare import read_whole
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.unit_tests.conversion.filled_model import model_logits

TOKENS = torch.arange(20).view(1, 20)
NUM_ADAPTERS = 100


def check_merge(trial: Path, through_torch_dist: bool) -> int:
    """Return the number of tensors of a merged model, all bitwise those of peft."""
    base = trial / "base"
    if through_torch_dist:
        convert(base, trial / "torch_dist", "torch_dist")
        base = trial / "torch_dist"
    options = WriteOptions(edits=EditOptions(adapters=(trial / "adapter",)))
    merged = apply_edits(open_checkpoint(base), options)
    expected = open_checkpoint(trial / "merged")
    for key in merged.tensors:
        # A model whose adapter has no effect on the output layer remains tied.
        expected_key = key if key in expected.tensors else WORD_EMBEDDINGS
        actual = read_whole(merged, key)
        # Modules that were trained as a whole may be fp32 in peft's model.
        wanted = read_whole(expected, expected_key).to(actual.dtype)
        assert is_bitwise_equal(actual, wanted), f"{trial}: {key}"
    return len(merged.tensors)


def main() -> None:
    python, work = sys.argv[1], Path(sys.argv[2])
    source = random_source(LLAMA_ARGS, optimizer=False)
    write_huggingface(source, work / "model")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    script = str(Path(peft_trl_train.__file__))
    subprocess.run([python, script, str(work)], check=True, env=environment)

    for name in ("peft", "trl"):
        trained = open_checkpoint(work / name)
        assert trained.unused == []
        assert trained.tensors == source.tensors
        changed = sum(
            not torch.equal(read_whole(trained, key), source.values[key]) for key in source.tensors
        )
        assert changed > 0
        expected = torch.load(work / f"{name}_logits.pt")
        actual = model_logits(trained, TOKENS)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)
        error = (actual - expected).abs().max().item()
        print(f"{name}: {changed} tensors were trained; logits within {error:.1e}", flush=True)

    # Imports peft, which this environment does not have.
    script = str(Path(__file__).with_name("peft_adapters.py"))
    count = str(NUM_ADAPTERS)
    trials = work / "adapters"
    subprocess.run([python, script, "trials", str(trials), count], check=True, env=environment)
    num_tensors = 0
    for seed in range(NUM_ADAPTERS):
        num_tensors += check_merge(trials / str(seed), through_torch_dist=seed % 2 == 1)
    print(f"peft: {num_tensors} tensors of {count} merged adapters are bitwise equal", flush=True)


if __name__ == "__main__":
    main()
