"""Comparison of GGUF files of llama.cpp's converter with the models that they were made from."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.gguf.blocks import ENCODINGS
from megatron.conversion.huggingface.families import find_family
from megatron.conversion.model_space.model import compute_model_signature, model_config
from megatron.core.safe_files.reading import read_json

# Of the models whose tokenizers are in `golden/gguf_tokenizers`, and texts to compare them by.
VOCAB_SIZE = 352

TEXTS = (
    *("Hello world", " leading", "  two", "x  y   z    ", "", " ", "\n\n\n", "\r\n\r\n x"),
    *("line\n  indented\n\ttab", "don't I'LL we've 'RE", "12345678 3.14 v2", "a/b//c --flag=x"),
    *("naïve café Füße", "cafe\u0301 e\u0301", "你好，世界。", "Привет, мир!", "こんにちは 123"),
    *("🚀🦙 ok 😶\u200d🌫️", "½ Ａ ﬁ", "كيف حالك", "กำลัง", "\0\1", "\u2581x \u00a0 y"),
    *("it resumes", " resumes", "camelCaseWord HTTPServer", "<|im_start|>user\nhi<|im_end|>\n"),
    *("<|im_start|> a <|im_end|> b", "call <tool_call> x </tool_call>"),
)


def check_blocks(path: Path) -> None:
    """Compare decoded blocks with those of the `gguf` package, bitwise."""
    tensors = load_file(path)
    for encoding in ENCODINGS.values():
        if encoding.decode is None:
            continue
        blocks = tensors[f"{encoding.name}.blocks"]
        expected = tensors[f"{encoding.name}.values"]
        assert blocks.shape[1] == encoding.block_bytes, encoding.name
        assert expected.shape[1] == encoding.block_size, encoding.name
        values = encoding.decode(blocks).view(expected.shape)
        assert torch.equal(values.view(torch.int32), expected.view(torch.int32)), encoding.name


def hash_tensor(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of the bytes of a tensor."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def read_signature(directory: Path) -> dict[str, object]:
    """Return the fields of a config.json that determine the model, without its dtype."""
    hf = read_json(directory / "config.json")
    args = find_family(hf).read_config(hf, {})
    config = model_config(args, hf["vocab_size"], str(directory))
    return compute_model_signature(config) | {"max_length": args["max_position_embeddings"]}


def check_model(directory: Path, work: Path) -> None:
    """Convert `model.gguf` to transformers; compare with the original, bitwise."""
    convert(directory / "model.gguf", work / "hf", "hf")
    tensors = load_file(work / "hf/model.safetensors")
    hashes = {name: hash_tensor(tensor) for name, tensor in tensors.items()}
    assert hashes == json.loads((directory / "expected.json").read_text()), directory.name
    assert read_signature(work / "hf") == read_signature(directory), directory.name
