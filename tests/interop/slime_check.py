"""slime's converter makes the same Hugging Face tensors of our checkpoints as `convert.py`.

    python -m tests.interop.slime_check PYTHON WORK SOURCE

PYTHON is an interpreter with the imports of the converter, WORK an empty directory, and SOURCE a
checkout of slime.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

REPOSITORY = Path(__file__).resolve().parents[2]
TRAINING = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 2 --lr 1e-3 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --untie-embeddings-and-output-weights --disable-bias-linear "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 1 "
    "--eval-iters 0 --use-distributed-optimizer --device cpu --distributed-backend gloo"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --kv-channels 8 --qk-layernorm "
    "--expert-model-parallel-size 2"
)
MODELS = {"llama": "--ffn-hidden-size 48", "qwen3_moe": EXPERTS}


def main() -> None:
    python, work, slime = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    for model, options in MODELS.items():
        train(work / model, options)
        ours = convert(work / model)
        theirs = convert_with_slime(python, work / model, slime, model)
        assert theirs.keys() == ours.keys(), theirs.keys() ^ ours.keys()
        for name, tensor in ours.items():
            # It removes the row of NullTokenizer's end of document.
            rows = theirs[name].shape[0]
            assert rows == len(tensor) or (rows == 63 and len(tensor) == 64), name
            assert torch.equal(theirs[name], tensor[:rows]), name
        print(f"{model}: {len(ours)} tensors are equal, bitwise", flush=True)


def train(directory: Path, options: str) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = [*TRAINING.split(), *options.split(), "--save", str(directory / "run")]
    subprocess.run(
        [sys.executable, *launcher, "pretrain_gpt.py", *flags],
        check=True,
        cwd=REPOSITORY,
    )


def convert(directory: Path) -> dict[str, torch.Tensor]:
    program = [sys.executable, "tools/checkpoint/convert.py", "--saver", "hf"]
    paths = ["--load-dir", str(directory / "run"), "--save-dir", str(directory / "ours")]
    subprocess.run([*program, *paths], check=True, cwd=REPOSITORY)
    return read_model(directory / "ours")


def convert_with_slime(
    python: str, directory: Path, slime: Path, model: str
) -> dict[str, torch.Tensor]:
    program = [python, str(slime / "tools" / "convert_torch_dist_to_hf.py")]
    (iteration,) = (directory / "run").glob("iter_*")
    paths = ["--input-dir", str(iteration), "--output-dir", str(directory / "theirs")]
    flags = ["--model-name", model, "--origin-hf-dir", str(directory / "ours")]
    environment = os.environ | {"PYTHONPATH": str(slime), "HF_HUB_OFFLINE": "1"}
    subprocess.run([*program, *paths, *flags], check=True, env=environment)
    return read_model(directory / "theirs")


def read_model(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


if __name__ == "__main__":
    main()
