"""Quantized matrices of other libraries are decoded to the same bits; and ours for the libraries.

    python -m tests.interop.quantized_check read DIRECTORY
    python -m tests.interop.quantized_check write DIRECTORY

`read` compares the cases that `quantized_write.py` wrote; `write` exports a model in each encoding
of compressed-tensors, and what we decode from it, for `quantized_load.py`.
"""

import sys
from pathlib import Path

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.options import WriteOptions
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.support.quantized import check_case

SIZES = {"hidden_size": 64, "kv_channels": 16, "ffn_hidden_size": 96}


def read(directory: Path) -> None:
    names = []
    for path in sorted(directory.glob("*/*/expected.safetensors")):
        check_case(path.parent)
        names.append(path.parent.name)
    assert names
    print(f"{len(set(names))} encodings, {len(names)} matrices: same bits: ok")


def write(directory: Path) -> None:
    for target in ("fp8-channel", "nvfp4"):
        source = random_source(LLAMA_ARGS | SIZES, optimizer=False)
        write_huggingface(source, directory / target, WriteOptions(quantization=target))
        convert(directory / target, directory / f"{target}-decoded", "hf")


def main() -> None:
    {"read": read, "write": write}[sys.argv[1]](Path(sys.argv[2]))


if __name__ == "__main__":
    main()
