"""transformers loads exports that are quantized, and has the values that we decode.

    python quantized_load.py QUANTIZED DECODED

Both are directories of one model, the second without quantization.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig


def main() -> None:
    quantized, decoded = sys.argv[1:]
    settings = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        quantized, dtype=torch.float32, quantization_config=settings
    )
    expected = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
    tensors = model.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(tensors[name].float(), value), name
    print(f"{quantized}: {len(expected.state_dict())} tensors of transformers: same bits: ok")


if __name__ == "__main__":
    main()
