"""Exports: main parameters, the sidecar of the optimizer, tokenizers, and refused models."""

import dataclasses
import json
import math
import os
import resource
import shutil
import stat
import struct
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.huggingface.directory import HuggingFaceSource
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.model_space.optimizer_states import optimizer_key
from megatron.conversion.options import ReadOptions, WriteOptions
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS
from megatron.core.run_checkpoint.source import Source
from tests import GOLDEN
from tests.support.compare import read_whole
from tests.support.memory_source import (
    BLOOM_ARGS,
    GPT_ARGS,
    LLAMA_ARGS,
    MemorySource,
    random_source,
)
from tests.unit_tests.conversion.reference_forward import reference_logits

LLAMA_GOLDEN = GOLDEN / "hf" / "llama"
SIDECAR = WriteOptions(optim_sidecar=True)


def assert_same_source(found: Source, wanted: Source) -> None:
    assert found.tensors == wanted.tensors
    for key in wanted.tensors:
        assert torch.equal(read_whole(found, key), read_whole(wanted, key)), key


@pytest.mark.parametrize("dtype", [None, "fp32", "bf16"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("args", [LLAMA_ARGS, GPT_ARGS, BLOOM_ARGS], ids=["llama", "gpt", "bloom"])
def test_sidecar_restores_everything(
    args: dict, precision: str, dtype: str | None, tmp_path: Path
) -> None:
    """Weights, optimizer and run come back bitwise, for any dtype of the exported weights."""
    source = random_source(args | {"bf16": precision == "bf16", "lr": 0.003})
    options = WriteOptions(optim_sidecar=True, dtype=dtype, max_shard_size=20_000)
    assert write_huggingface(source, tmp_path / "hf", options) == []

    back = HuggingFaceSource(tmp_path / "hf")
    assert_same_source(back, source)
    assert back.training == source.training
    assert back.training is not source.training
    assert back.args.items() >= source.args.items()


def test_sidecar_keeps_fp32_weights_without_main_parameters(tmp_path: Path) -> None:
    """An fp32 run without main parameters, exported in bf16, keeps its fp32 weights."""
    source = random_source(LLAMA_ARGS)
    source.values = {key: value for key, value in source.values.items() if "state.param" not in key}
    write_huggingface(source, tmp_path / "hf", WriteOptions(optim_sidecar=True, dtype="bf16"))
    back = HuggingFaceSource(tmp_path / "hf")
    for key in source.values:
        assert torch.equal(read_whole(back, key), source.values[key]), key


def test_sidecar_of_other_weights_is_refused(tmp_path: Path) -> None:
    source = random_source(LLAMA_ARGS | {"bf16": True})
    write_huggingface(source, tmp_path / "hf", SIDECAR)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] += 1.0
    save_file(weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    back = HuggingFaceSource(tmp_path / "hf")

    with pytest.raises(
        ValueError,
        match=r"layers\.1\.mlp\.linear_fc1\.weight was changed after the export",
    ):
        read_whole(back, optimizer_key("param", "decoder.layers.1.mlp.linear_fc1.weight"))

    without = HuggingFaceSource(tmp_path / "hf", ReadOptions(no_optim=True))
    assert without.training is None
    assert not any(key.startswith("optimizer.") for key in without.tensors)

    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))

    with pytest.raises(
        ValueError,
        match=r"config\.json was changed after the export \(rotary_base",
    ):
        HuggingFaceSource(tmp_path / "hf")


def test_incomplete_sidecar_is_refused(tmp_path: Path) -> None:
    write_huggingface(
        random_source(GPT_ARGS),
        tmp_path / "hf",
        dataclasses.replace(SIDECAR, max_shard_size=30_000),
    )
    next((tmp_path / "hf" / "megatron_state").glob("optimizer-00002-*")).unlink()

    with pytest.raises(
        ValueError,
        match=r"megatron_state lacks optimizer-00002-of-\d+\.safetensors",
    ):
        HuggingFaceSource(tmp_path / "hf")


def test_main_parameters_are_cast_once(tmp_path: Path) -> None:
    """An fp32 export of a bf16 run contains the fp32 main parameters, not widened weights."""
    source = random_source(LLAMA_ARGS | {"bf16": True})
    lost = write_huggingface(source, tmp_path / "hf", WriteOptions(dtype="fp32"))

    assert len(lost) == 1
    assert "--save-optim-sidecar" in lost[0]

    actual = load_file(tmp_path / "hf" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(
        actual,
        source.values[optimizer_key("param", "decoder.final_layernorm.weight")],
    )

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.dtype == torch.float32


def test_rounded_weights_are_reported(tmp_path: Path) -> None:
    """Some models have fp32 norms and bf16 matrices; an export has one dtype."""
    source = random_source(LLAMA_ARGS | {"bf16": True}, optimizer=False)
    for key, value in source.values.items():
        is_norm = "norm" in key
        source.values[key] = value.float() if is_norm else value.bfloat16()
    notes = write_huggingface(source, tmp_path / "bf16")
    assert [note for note in notes if note.startswith("fp32 precision of 5 weights")]

    notes = write_huggingface(source, tmp_path / "fp32", WriteOptions(dtype="fp32"))
    assert not [note for note in notes if "fp32 precision" in note]

    back = HuggingFaceSource(tmp_path / "fp32")
    for key, value in source.values.items():
        assert torch.equal(read_whole(back, key), value.float()), key


def test_vocabulary_is_cropped(tmp_path: Path) -> None:
    source = random_source(LLAMA_ARGS, vocab_size=96, optimizer=False)
    write_huggingface(source, tmp_path / "hf", WriteOptions(true_vocab_size=67))
    weights = load_file(tmp_path / "hf" / "model.safetensors")

    assert torch.equal(weights["lm_head.weight"], source.values["output_layer.weight"][:67])
    assert torch.equal(weights["model.embed_tokens.weight"], source.values[WORD_EMBEDDINGS][:67])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config.vocab_size == 67
    with pytest.raises(ValueError, match="--true-vocab-size 97 is more than the 96 rows"):
        write_huggingface(source, tmp_path / "more", WriteOptions(true_vocab_size=97))


def test_shards_may_exceed_the_limit_of_open_files(tmp_path: Path) -> None:
    """Export a model in more shards than a process may have open."""
    source = random_source(LLAMA_ARGS, optimizer=False)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, limits[1]))
    try:
        write_huggingface(source, tmp_path / "hf", WriteOptions(max_shard_size=1, workers=2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 16
    assert_same_source(HuggingFaceSource(tmp_path / "hf"), source)


def test_files_are_readable_and_temporary_files_are_removed(tmp_path: Path) -> None:
    write_huggingface(random_source(GPT_ARGS), tmp_path / "hf", SIDECAR)
    files = sorted(path for path in (tmp_path / "hf").rglob("*") if path.is_file())
    names = [str(path.relative_to(tmp_path / "hf")) for path in files]
    state = ["megatron_state/optimizer.safetensors", "megatron_state/state.json"]
    assert names == ["config.json", "generation_config.json", *state, "model.safetensors"]

    (tmp_path / "plain").write_text("")
    usual = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {usual}
    with pytest.raises(ValueError, match="is not empty"):
        write_huggingface(random_source(GPT_ARGS), tmp_path / "hf")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"normalization": "LayerNorm", "qk_layernorm": True},
            "normalization = RMSNorm instead of LayerNorm",
        ),
        (
            {"rotary_percent": 0.5, "qk_layernorm": True},
            r"(rotary_percent = 1.0 instead of 0.5|qk_layernorm = False instead of True)\.",
        ),
        (
            {"rotary_interleaved": True, "qk_layernorm": True},
            "rotary_interleaved = False instead of True",
        ),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p = False instead of True"),
        ({"swiglu": False, "quick_geglu": True}, "quick_geglu = False instead of True"),
        (
            {"add_qkv_bias": True, "qk_layernorm": True},
            "(has_qkv_bias|qk_layernorm) = False instead of True",
        ),
        # Plain MLPs have LayerNorm.
        ({"swiglu": False}, "(normalization = LayerNorm|swiglu = True) instead of"),
        ({"window_size": (7, 2)}, r"window_size = .* instead of \(7, 2\)"),
        # What qk_layernorm_across_heads means without qk_layernorm is not an obstacle of its own.
        (
            {"qk_layernorm": True, "qk_layernorm_across_heads": True, "no_rope_freq": 2},
            r"The closest, smollm3, has qk_layernorm = False instead of True\. Write the model in",
        ),
    ],
)
def test_models_without_a_family_are_refused(change: dict, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"none of the supported models .*{reason}"):
        write_huggingface(random_source(LLAMA_ARGS | change), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("change", "family"),
    [
        ({}, "llama"),
        ({"hf_model_type": "mistral"}, "mistral"),
        ({"hf_model_type": "qwen2"}, "llama"),
        ({"window_size": (7, 0)}, "mistral"),
        ({"position_embedding_type": "none"}, "granitemoehybrid"),
        (
            {"num_attention_heads": 6, "kv_channels": 8},
            "mistral",
        ),  # Llama's heads must divide the hidden size
        ({"rotary_percent": 0.5}, "phi3"),
        ({"normalization": "LayerNorm"}, "stablelm"),
        ({"add_qkv_bias": True}, "qwen2"),
        ({"qk_layernorm": True}, "qwen3"),
        ({"add_bias_linear": True, "use_rope_scaling": True}, "llama"),
    ],
)
def test_family_is_chosen_by_the_model(change: dict, family: str, tmp_path: Path) -> None:
    source = random_source(LLAMA_ARGS | change, optimizer=False)
    write_huggingface(source, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf",
        attn_implementation="eager",
    ).eval()
    assert model.config.model_type == family

    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert_close(
            model(tokens).logits,
            reference_logits(source, tokens).float(),
            atol=1e-4,
            rtol=1e-5,
        )


def test_incomplete_sources_are_refused(tmp_path: Path) -> None:
    source = random_source(LLAMA_ARGS)
    lacking = MemorySource(
        source.args,
        {k: v for k, v in source.values.items() if "layers.1.mlp.linear_fc2" not in k},
    )
    with pytest.raises(ValueError, match=r"lacks decoder\.layers\.1\.mlp\.linear_fc2\.weight"):
        write_huggingface(lacking, tmp_path / "hf")

    other = MemorySource(source.args | {"num_query_groups": 4}, source.values)
    with pytest.raises(
        ValueError,
        match=r"linear_qkv\.weight has shape \(64, 32\), its arguments make it \(96, 32\)",
    ):
        write_huggingface(other, tmp_path / "hf")

    nameless = MemorySource(
        {k: v for k, v in source.args.items() if k != "num_attention_heads"},
        source.values,
    )
    with pytest.raises(ValueError, match="give --num-attention-heads"):
        write_huggingface(nameless, tmp_path / "hf")

    with pytest.raises(
        ValueError,
        match=r"has no optimizer\.state\.exp_avg\..*: --save-optim-sidecar needs",
    ):
        write_huggingface(random_source(LLAMA_ARGS, optimizer=False), tmp_path / "hf", SIDECAR)

    assert not (tmp_path / "hf").exists()


def test_interrupted_export_has_no_config(tmp_path: Path) -> None:
    class Failing(MemorySource):
        @property
        def tensors(self):
            def fail(offset, shape):
                raise OSError("disk full")

            tensors = super().tensors
            for key, tensor in tensors.items():
                if key.endswith("decoder.final_layernorm.weight"):
                    tensors[key] = dataclasses.replace(tensor, read=fail)
            return tensors

    source = random_source(LLAMA_ARGS)
    with pytest.raises(OSError, match="disk full"):
        write_huggingface(Failing(source.args, source.values), tmp_path / "hf")
    assert list((tmp_path / "hf").iterdir()) == []


def test_hugging_face_tokenizer_is_copied(tmp_path: Path) -> None:
    source = HuggingFaceSource(LLAMA_GOLDEN)
    write_huggingface(source, tmp_path / "hf", WriteOptions(trusted=(LLAMA_GOLDEN,)))
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

    for name in names:
        assert (tmp_path / "hf" / name).read_bytes() == (LLAMA_GOLDEN / name).read_bytes()

    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (
        256,
        257,
        None,
    )
    if int(transformers.__version__.split(".")[0]) >= 5:  # the golden tokenizer is
        assert AutoTokenizer.from_pretrained(tmp_path / "hf")("Hi").input_ids[-2:] == [72, 105]

    elsewhere = random_source(
        LLAMA_ARGS | {"tokenizer_model": str(tmp_path / "gone")},
        optimizer=False,
    )
    assert "give --tokenizer" in write_huggingface(elsewhere, tmp_path / "two")[0]

    write_huggingface(elsewhere, tmp_path / "three", WriteOptions(tokenizer=LLAMA_GOLDEN))
    assert (tmp_path / "three" / "tokenizer.json").exists()


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizer_splits_text_as_in_transformers(
    prefix: bool, tmp_path: Path
) -> None:
    processor = train_sentencepiece(
        tmp_path,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
    )
    args = LLAMA_ARGS | {
        "tokenizer_type": "SentencePieceTokenizer",
        "tokenizer_model": str(tmp_path / "t.model"),
    }
    source = random_source(args, vocab_size=processor.vocab_size(), optimizer=False)
    assert write_huggingface(source, tmp_path / "hf", WriteOptions(trusted=(tmp_path,))) == []

    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (
        processor.bos_id(),
        processor.eos_id(),
    )

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in (
        "the dog sat on the cat",
        "  while\n    the dog  ran ",
        " ",
        "",
        "\n\n",
        "\u00e9 \u4e2d",
    ):
        assert tokenizer(text).input_ids == processor.encode(text)
        assert tokenizer.decode(processor.encode(text)) == processor.decode(processor.encode(text))


def test_normalizing_sentencepiece_model_is_reported(tmp_path: Path) -> None:
    processor = train_sentencepiece(tmp_path)
    args = LLAMA_ARGS | {"tokenizer_model": str(tmp_path / "t.model")}
    source = random_source(args, vocab_size=processor.vocab_size(), optimizer=False)
    given = WriteOptions(tokenizer=tmp_path / "t.model")

    assert (
        "would not split text as its SentencePiece model"
        in write_huggingface(source, tmp_path / "hf", given)[0]
    )
    assert (tmp_path / "hf" / "tokenizer.model").read_bytes() == (tmp_path / "t.model").read_bytes()


@pytest.mark.parametrize("score", [math.inf, -math.inf, math.nan])
def test_sentencepiece_model_with_infinite_score_is_refused(score: float, tmp_path: Path) -> None:
    processor = train_sentencepiece(tmp_path, normalization_rule_name="identity")
    last_piece = processor.vocab_size() - 1
    field = b"\x15"  # of the protobuf message of a piece: its score, a 32-bit float
    score_field = field + struct.pack("<f", processor.get_score(last_piece))
    model = (tmp_path / "t.model").read_bytes()
    assert model.count(score_field) == 1

    (tmp_path / "t.model").write_bytes(model.replace(score_field, field + struct.pack("<f", score)))
    source = random_source(LLAMA_ARGS, vocab_size=processor.vocab_size(), optimizer=False)
    (lost,) = write_huggingface(
        source,
        tmp_path / "hf",
        WriteOptions(tokenizer=tmp_path / "t.model"),
    )

    assert f"piece {last_piece} has score {score}: scores must be finite" in lost
    assert not list((tmp_path / "hf").glob("tokenizer*"))


def train_sentencepiece(directory: Path, **options: Any) -> sentencepiece.SentencePieceProcessor:
    (directory / "text").write_text("the cat sat on the mat\n  while the dog  ran\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "text"),
        model_prefix=str(directory / "t"),
        vocab_size=310,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "t.model"))


def test_gpt2_tokenizer_is_copied(tmp_path: Path) -> None:
    vocab = {"<|endoftext|>": 66} | {chr(97 + i): i for i in range(26)} | {"ab": 26}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    args = GPT_ARGS | {
        "vocab_file": str(tmp_path / "vocab.json"),
        "merge_file": str(tmp_path / "merges.txt"),
    }
    trusted = WriteOptions(trusted=(tmp_path,))
    write_huggingface(random_source(args, optimizer=False), tmp_path / "hf", trusted)

    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("abc").input_ids == [26, 2]
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 66

    shutil.rmtree(tmp_path / "hf")
    (tmp_path / "merges.txt").unlink()
    assert (
        "merges.txt does not exist"
        in write_huggingface(random_source(args, optimizer=False), tmp_path / "hf", trusted)[0]
    )


@pytest.mark.parametrize("limit", [1000, 40_000, 100_000])
@pytest.mark.parametrize("exists", [False, True])
def test_full_disk_leaves_nothing_and_keeps_an_existing_export(
    limit: int, exists: bool, tmp_path: Path
) -> None:
    """The limit of a file's size is exceeded at the start or in the middle of the weights, or in
    the optimizer state.
    """
    write_torch_dist(random_source(LLAMA_ARGS, optimizer=True), tmp_path / "source")
    target = tmp_path / "place" / "hf"
    target.parent.mkdir()
    if exists:
        write_huggingface(random_source(GPT_ARGS), target)
    before = {path: path.read_bytes() for path in target.parent.rglob("*") if path.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))

    try:
        with pytest.raises(OSError, match=r"hf was not written\. It needs .* kB of free space"):
            convert(tmp_path / "source", target, "hf", options=SIDECAR, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    after = {path: path.read_bytes() for path in target.parent.rglob("*") if path.is_file()}
    assert after == before
    assert exists or not list(target.parent.iterdir())


def test_verification_counts_rounded_tensors(tmp_path: Path) -> None:
    """fp32 norms of a bf16 model stay fp32 in checkpoints, and are rounded in an export."""
    write_huggingface(random_source(LLAMA_ARGS | {"bf16": True}, optimizer=False), tmp_path / "in")
    path = tmp_path / "in" / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if "norm" in name:
            tensors[name] = tensors[name].float() + 1e-4
    save_file(tensors, path, {"format": "pt"})
    kept = convert(tmp_path / "in", tmp_path / "kept", "torch_dist", verify=True)

    assert kept.rounded == 0
    assert kept.not_carried == []

    exported = convert(tmp_path / "kept", tmp_path / "out", "hf", verify=True)
    assert exported.rounded == sum("norm" in name for name in tensors) == 5
    assert "fp32 precision of 5 weights" in exported.not_carried[0]


@pytest.mark.parametrize("has_tokenizer", [True, False])
@pytest.mark.parametrize("saver", ["torch_dist", "legacy"])
def test_defaults_of_generation_survive_a_checkpoint(
    saver: str, has_tokenizer: bool, tmp_path: Path
) -> None:
    """They may end a text at more tokens than config.json, as in chat models."""
    shutil.copytree(LLAMA_GOLDEN, tmp_path / "in")
    if not has_tokenizer:
        for path in (tmp_path / "in").glob("tokenizer*"):
            path.unlink()
    path = tmp_path / "in" / "generation_config.json"
    defaults = {"temperature": 0.6, "eos_token_id": [2, 257]}
    path.write_text(json.dumps(defaults))
    convert(tmp_path / "in", tmp_path / "run", saver)
    convert(tmp_path / "run", tmp_path / "out", "hf")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == defaults

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == 257
