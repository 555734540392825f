"""transformers reads GGUF files that this project wrote as it reads their conversions to its own.

    python tests/interop/gguf_load.py WORK

Each directory in WORK has `gguf/model.gguf` and `hf`. Runs in an environment with gguf.
"""

import sys
from pathlib import Path

import gguf
import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    for directory in sorted(Path(sys.argv[1]).iterdir()):
        reader = gguf.GGUFReader(directory / "gguf/model.gguf")
        types = sorted({tensor.tensor_type.name for tensor in reader.tensors})
        read = AutoModelForCausalLM.from_pretrained(
            directory / "gguf", gguf_file="model.gguf", dtype=torch.float32
        )
        converted = AutoModelForCausalLM.from_pretrained(directory / "hf", dtype=torch.float32)
        expected = converted.state_dict()
        for name, tensor in read.state_dict().items():
            assert torch.equal(tensor, expected[name]), (directory.name, name)
        tokens = torch.arange(24)[None]
        difference = (read(tokens).logits - converted(tokens).logits).abs().max()
        assert difference < 1e-5, (directory.name, difference)
        print(f"{directory.name} ({', '.join(types)}): logits within {difference:.1e}", flush=True)


if __name__ == "__main__":
    main()
