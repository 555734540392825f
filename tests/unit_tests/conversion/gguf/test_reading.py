"""GGUF files of llama.cpp's converter as the models that they were made from."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron.conversion.gguf.architectures import read_config
from megatron.conversion.gguf.gguf_reader import open_gguf
from tests import ROOT
from tests.support.compare import read_all
from tests.support.gguf import check_blocks, check_model
from tests.unit_tests.conversion.convert_tool import run_convert

GOLDEN = ROOT / "tests/golden/gguf"
MODELS = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))


def test_blocks_have_the_values_of_the_gguf_package() -> None:
    check_blocks(GOLDEN / "blocks.safetensors")


@pytest.mark.parametrize("name", MODELS)
def test_models_are_the_originals(name: str, tmp_path: Path) -> None:
    check_model(GOLDEN / name, tmp_path)


def test_quantized_model_has_the_logits_of_transformers(tmp_path: Path) -> None:
    result = run_convert(
        *("--saver", "hf", "--load-dir", GOLDEN / "quantized/model.gguf"),
        *("--save-dir", tmp_path / "hf"),
    )
    assert result.returncode == 0, result.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    logits = model(torch.arange(16)[None]).logits
    expected = load_file(GOLDEN / "quantized/logits.safetensors")["logits"]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


def test_boxes_are_those_of_the_whole_tensor() -> None:
    source = open_gguf(GOLDEN / "quantized")
    whole = read_all(source)
    key = "decoder.layers.0.self_attention.linear_qkv.weight"
    box = source.tensors[key].read((5, 100), (9, 60))
    assert torch.equal(box, whole[key][5:14, 100:160])


def test_shards_are_one_model(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "shards", tmp_path / "shards")
    first, second, _ = sorted((tmp_path / "shards").iterdir())
    directory = read_all(open_gguf(tmp_path / "shards"))
    shard = read_all(open_gguf(second))
    assert directory.keys() == shard.keys()
    assert all(torch.equal(directory[key], shard[key]) for key in directory)
    second.unlink()
    with pytest.raises(ValueError, match=r"00002-of-00003\.gguf is missing: model-00001"):
        open_gguf(first)


def test_one_of_several_models_must_be_named(tmp_path: Path) -> None:
    for name in ("a", "b", "mmproj-a"):
        shutil.copy(GOLDEN / "qwen2/model.gguf", tmp_path / f"{name}.gguf")
    with pytest.raises(ValueError, match=r"several GGUF models \(a.gguf, b.gguf\): give the path"):
        open_gguf(tmp_path)
    assert open_gguf(tmp_path / "b.gguf").args["hf_model_type"] == "qwen2"
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").unlink()
    with pytest.raises(ValueError, match="has no GGUF file of a language model"):
        open_gguf(tmp_path)


def write_changed(name: str, path: Path, *changes: tuple[bytes, bytes]) -> Path:
    """Write a golden file with other bytes, each in all places."""
    content = (GOLDEN / name / "model.gguf").read_bytes()
    for old, new in changes:
        assert old in content
        content = content.replace(old, new)
    path.write_bytes(content)
    return path


def encode_count(value: int) -> bytes:
    return value.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([(b"GGUF\3", b"GGML\3")], "does not begin with GGUF"),
        ([(b"GGUF\3\0\0\0", b"GGUF\0\0\0\3")], "version 50331648, big-endian, only"),
        ([(b"GGUF\3\0\0\0", b"GGUF\3\0\0\0" + encode_count(1 << 60))], "more than it has room for"),
        ([(b"qwen2.block_count\4", b"qwen2.block_count\x63")], "has the unknown type 99"),
        ([(b"qwen2.block_count", b"qwen2.other_count")], "the metadata lack qwen2.block_count"),
        ([(b"qwen2.context_length", b"qwen2.contest_length")], "qwen2.contest_length = 256. Use"),
        (
            [(b"\5\0\0\0\0\0\0\0qwen2", b"\5\0\0\0\0\0\0\0qwen9")],
            "'qwen9' is not supported, only ll",
        ),
        ([(b"token_embd.weight\2", b"token_embd.weight\7")], "token_embd.weight has 7 dimensions"),
        ([(b"token_embd.weight", b"output_embd.weigh")], "it has no token_embd.weight"),
        ([(b"attn_q.weight", b"attn_x.weight")], "lack .*q_proj.weight"),
        ([(b"attn_k.weight", b"attn_q.weight")], "attn_q.weight occurs twice"),
    ],
)
def test_damaged_headers_are_refused(
    changes: list[tuple[bytes, bytes]], reason: str, tmp_path: Path
) -> None:
    path = write_changed("qwen2", tmp_path / "model.gguf", *changes)
    with pytest.raises(ValueError, match=reason) as error:
        open_gguf(path)
    assert str(path) in str(error.value)


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    content = (GOLDEN / "qwen2/model.gguf").read_bytes()
    for length in (3, 20, 300, len(content) - 32):
        path = tmp_path / "model.gguf"
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="damaged, or its download is incomplete"):
            open_gguf(path)


BASE = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
}


@pytest.mark.parametrize(
    ("scaling_type", "expected"),
    [
        ({}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scaling.type": "linear"}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scaling.type": "none"}, None),
    ],
)
def test_factor_without_a_type_is_linear_as_in_llama_cpp(scaling_type, expected) -> None:
    metadata = BASE | {"llama.rope.scaling.factor": 4.0} | scaling_type
    assert read_config(metadata, [], None).get("rope_scaling") == expected


@pytest.mark.parametrize(
    ("entry", "value"),
    [("attention.key_length", "16"), ("attention.key_length", [16, 8]), ("rope.freq_base", "a")],
)
def test_values_of_another_type_are_refused(entry: str, value: object) -> None:
    metadata = BASE | {f"llama.{entry}": value}
    with pytest.raises(ValueError, match=f"llama.{entry} is .*, but must be"):
        read_config(metadata, [], torch.ones(8))


def test_other_factors_than_those_of_llama3_are_refused(tmp_path: Path) -> None:
    base = torch.tensor([5e5]).numpy().tobytes()
    other_base = torch.tensor([4e5]).numpy().tobytes()
    path = write_changed("llama3", tmp_path / "model.gguf", (base, other_base))
    with pytest.raises(ValueError, match="rope_freqs.weight is not a scaling of Llama 3"):
        open_gguf(path)
