"""GGUF files that are written, compared with those of llama.cpp's converter."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.gguf.architectures import (
    ARCHITECTURES,
    ROPE_FACTORS,
    make_metadata,
)
from megatron.conversion.gguf.blocks import ENCODINGS, encode_q8_0
from megatron.conversion.gguf.file_format import GGUFTensor, open_model
from megatron.conversion.gguf.gguf_reader import open_gguf
from megatron.conversion.gguf.writer import write_gguf
from megatron.conversion.model_space.foreign import foreign_key
from megatron.conversion.options import WriteOptions
from megatron.core.dist_checkpointing.saving.commit import no_progress
from megatron.core.safe_files.reading import read_json
from tests import ROOT
from tests.support.compare import read_all
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.unit_tests.conversion.convert_tool import run_convert

GOLDEN = ROOT / "tests/golden/gguf"
MODELS = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))
Q8_0 = next(encoding for encoding in ENCODINGS.values() if encoding.name == "Q8_0")


def read_bytes(tensor: GGUFTensor) -> bytes:
    with tensor.path.open("rb") as file:
        file.seek(tensor.position)
        num_blocks = torch.Size(tensor.shape).numel() // tensor.encoding.block_size
        return file.read(num_blocks * tensor.encoding.block_bytes)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "quantized"])
def test_file_is_that_of_the_converter(name: str, tmp_path: Path) -> None:
    original = open_model(GOLDEN / name / "model.gguf")
    source = open_gguf(GOLDEN / name / "model.gguf")
    write_gguf(source, tmp_path / "out", WriteOptions(), no_progress)
    written = open_model(tmp_path / "out/model.gguf")
    assert written.tensors.keys() == original.tensors.keys()

    for tensor_name, tensor in written.tensors.items():
        expected = original.tensors[tensor_name]
        assert (tensor.shape, tensor.encoding) == (expected.shape, expected.encoding)
        if tensor_name != ROPE_FACTORS:  # which the converter computes in fp32
            assert read_bytes(tensor) == read_bytes(expected), tensor_name

    for key, value in written.metadata.items():
        assert original.metadata.get(key, value) == value, key


def test_blocks_are_those_of_the_gguf_package() -> None:
    tensors = load_file(GOLDEN / "blocks.safetensors")
    encoded = encode_q8_0(tensors["Q8_0.elements"])
    assert torch.equal(encoded, tensors["Q8_0.encoded"])


def test_decoded_blocks_are_encoded_to_the_same_bytes() -> None:
    assert Q8_0.decode is not None

    generator = torch.Generator().manual_seed(1)
    blocks = torch.randn(20_000, 32, generator=generator)
    # Also scales that are subnormal or zero in fp16.
    blocks = torch.ldexp(blocks, torch.randint(-40, 20, (20_000, 1), generator=generator))
    blocks[::7, 3:] = 0
    blocks[::11] = 0
    encoded = encode_q8_0(blocks)
    assert torch.equal(encode_q8_0(Q8_0.decode(encoded)), encoded)


def test_values_without_a_scale_are_refused() -> None:
    for value in (torch.inf, torch.nan, 1e7):
        with pytest.raises(ValueError, match="--quantize q8_0: values are not finite, or larger"):
            encode_q8_0(torch.full((1, 32), value))


def test_tensor_without_a_scale_is_named(tmp_path: Path) -> None:
    args = LLAMA_ARGS | {"ffn_hidden_size": 64}
    source = random_source(args, optimizer=False)
    source.values["decoder.layers.1.mlp.linear_fc2.weight"][3, 5] = torch.nan
    options = WriteOptions(quantization="q8_0")
    with pytest.raises(ValueError, match=r"blk\.1\.ffn_down\.weight: --quantize q8_0"):
        write_gguf(source, tmp_path / "out", options, no_progress)


def test_whole_numbers_are_floats_where_llama_cpp_reads_floats() -> None:
    config = read_json(GOLDEN / "qwen3/config.json")
    scaling = {"rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1}
    config |= {"rope_theta": 1000000, "rope_scaling": scaling}
    metadata = make_metadata("qwen3", ARCHITECTURES["qwen3"], config)

    for entry in (
        "freq_base",
        "scaling.factor",
        "scaling.yarn_beta_fast",
        "scaling.yarn_beta_slow",
    ):
        assert isinstance(metadata[f"qwen3.rope.{entry}"], float), entry


def test_foreign_tensors_are_refused(tmp_path: Path) -> None:
    source = random_source(LLAMA_ARGS, optimizer=False)
    source.values[foreign_key("rotary.inv_freq")] = torch.ones(4)
    with pytest.raises(ValueError, match=r"GGUF has no name for rotary\.inv_freq: give --saver hf"):
        write_gguf(source, tmp_path / "out", WriteOptions(), no_progress)
    assert not (tmp_path / "out").exists()


def test_unchanged_matrices_keep_their_bytes_through_a_run(tmp_path: Path) -> None:
    args = LLAMA_ARGS | {"hidden_size": 64, "kv_channels": 16, "ffn_hidden_size": 96}
    options = WriteOptions(quantization="q8_0")
    write_gguf(random_source(args), tmp_path / "a", options, no_progress)
    convert(tmp_path / "a", tmp_path / "run", "torch_dist")
    result = run_convert(
        *("--saver", "gguf", "--quantize", "q8_0", "--load-dir", tmp_path / "run"),
        *("--save-dir", tmp_path / "b"),
    )

    assert result.returncode == 0, result.stderr
    assert "not carried: the tokenizer: the model has none" in result.stdout

    first = (tmp_path / "a/model.gguf").read_bytes()
    assert first == (tmp_path / "b/model.gguf").read_bytes()


def test_written_file_is_verified(tmp_path: Path) -> None:
    source = GOLDEN / "qwen3_moe/model.gguf"
    report = convert(source, tmp_path / "out", "gguf", verify=True)
    assert report.verified == len(read_all(open_gguf(source)))


@pytest.mark.parametrize(
    ("args", "options", "reason"),
    [
        ({"window_size": (8, 0)}, {}, "cannot express window_size"),
        ({"normalization": "LayerNorm"}, {}, "of type .* are not supported, only mistral"),
    ],
)
def test_other_models_are_refused(args, options, reason: str, tmp_path: Path) -> None:
    source = random_source(LLAMA_ARGS | args, optimizer=False)
    with pytest.raises(ValueError, match=reason):
        write_gguf(source, tmp_path / "out", WriteOptions(**options), no_progress)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("saver", "quantization"), [("hf", "q8_0"), ("gguf", "nvfp4")])
def test_encodings_belong_to_a_format(saver: str, quantization: str, tmp_path: Path) -> None:
    options = WriteOptions(quantization=quantization)
    with pytest.raises(ValueError, match=f"{quantization} is not an encoding of --saver {saver}"):
        convert(GOLDEN / "qwen2/model.gguf", tmp_path / "out", saver, options=options)
