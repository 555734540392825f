"""merge.py equals mergekit's linear method bit for bit, on fp32 models.

    python -m tests.interop.mergekit_check PYTHON WORK

PYTHON is an interpreter with mergekit, and WORK an empty directory.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron.conversion.huggingface.directory_writer import write_huggingface
from tests.support.memory_source import LLAMA_ARGS, random_source
from tools.checkpoint import merge

# Most products of these weights are not exact.
WEIGHTS = {"even": (0.5, 0.5), "uneven": (0.3, 0.5, 0.2), "extrapolation": (1.7, -0.7)}


def check_weights(python: str, work: Path, weights: tuple[float, ...]) -> None:
    """Merge models with both programs, and compare every tensor."""
    lines = ["merge_method: linear", "dtype: float32", "models:"]
    inputs = []
    for index, weight in enumerate(weights):
        model = work / f"model{index}"
        if not model.exists():
            source = random_source(LLAMA_ARGS, optimizer=False, seed=index)
            write_huggingface(source, model)
        lines.append(f"  - model: {model}")
        lines.append(f"    parameters: {{weight: {weight}}}")
        inputs.append(f"{model}:{weight}")
    lines.append("parameters: {normalize: false}")
    (work / "linear.yaml").write_text("\n".join(lines))

    theirs = work / "theirs"
    command = [python, "-m", "mergekit.scripts.run_yaml", work / "linear.yaml", theirs]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    subprocess.run(
        [*map(str, command), "--no-copy-tokenizer"],
        check=True,
        env=environment,
        capture_output=True,
    )
    sys.argv = ["merge", "--input", *inputs, "--output", str(work / "ours"), "--overwrite"]
    merge.main()

    expected = load_file(theirs / "model.safetensors")
    actual = load_file(work / "ours" / "model.safetensors")
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == torch.float32, name
        assert torch.equal(actual[name], tensor), name


def main() -> None:
    python, work = sys.argv[1:]
    for name, weights in WEIGHTS.items():
        check_weights(python, Path(work), weights)
        print(f"{name}: all tensors are bitwise those of mergekit", flush=True)


if __name__ == "__main__":
    main()
