"""Directories of NeMo 2: weights, optimizer, configuration and tokenizer."""

import shutil
from pathlib import Path

import pytest
import torch
from sentencepiece import SentencePieceProcessor
from transformers import AutoTokenizer

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.opening import open_checkpoint
from megatron.core.run_checkpoint.formats import find_checkpoint
from tests import ROOT
from tests.support.nemo import check_nemo

GOLDEN = ROOT / "tests/golden/nemo_directories"
TEXT = "def main() -> None:"


@pytest.mark.parametrize("name", ["llama", "gpt", "qwen3_moe"])
def test_state_is_that_of_megatron_core(name: str, tmp_path: Path) -> None:
    check_nemo(GOLDEN / name, tmp_path)
    checkpoint = find_checkpoint(GOLDEN / name)
    assert checkpoint is not None
    assert checkpoint.format == "nemo"

    source = open_checkpoint(GOLDEN / name)
    assert any(key.startswith("optimizer.state.exp_avg.decoder") for key in source.tensors)

    training = source.training
    assert (training.iteration, training.consumed_train_samples) == (2, 16)

    decayed, plain = training.param_groups
    assert (decayed["wd_mult"], plain["wd_mult"], decayed["step"]) == (1.0, 0.0, 2)
    assert decayed["weight_decay"] == plain["weight_decay"] == 0.1


def test_configuration_is_that_of_flags() -> None:
    args = open_checkpoint(GOLDEN / "llama").args
    assert args["use_rope_scaling"]
    assert args["rope_original_max_position_embeddings"] == 16
    assert args["swiglu"]
    assert args["untie_embeddings_and_output_weights"]
    assert (args["lr"], args["adam_beta2"], args["weight_decay"]) == (0.001, 0.95, 0.1)
    assert args["params_dtype"] == torch.float32

    args = open_checkpoint(GOLDEN / "gpt").args
    assert args["bias_gelu_fusion"]
    assert not args["swiglu"]
    assert "kv_channels" not in args or args["kv_channels"] == 4


def test_tokenizer_is_that_of_exports(tmp_path: Path) -> None:
    original = GOLDEN / "llama/context/nemo_tokenizer"
    assert open_checkpoint(GOLDEN / "llama").args["tokenizer_model"] == str(original)

    convert(GOLDEN / "llama", tmp_path / "llama", "hf")
    convert(GOLDEN / "llama", tmp_path / "run", "torch_dist")
    for directory in (tmp_path / "llama", tmp_path / "run/iter_0000002/tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        assert tokenizer.encode(TEXT) == AutoTokenizer.from_pretrained(original).encode(TEXT)
    convert(GOLDEN / "gpt", tmp_path / "gpt", "hf")
    processor = SentencePieceProcessor(model_file=str(GOLDEN / "gpt/context/tokenizer.model"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "gpt")
    assert tokenizer.encode(TEXT, add_special_tokens=False) == processor.encode(TEXT)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("gpt.model.base.GPTConfig", "gpt.model.gemma.GemmaConfig", "gemma.GemmaConfig' are not"),
        ("gpt.model.base.GPTConfig", "ssm.SSMConfig", "are not read.*export it to a model of"),
        ("torch._C._nn.gelu", "nemo.collections.llm.fn.activation.openai_gelu", "openai_gelu"),
        ("fp32_residual_connection: false", "fp32_residual_connection: true", "not supported"),
        ("config:\n", "config: !!python/name:os.system\n", "tags are not supported"),
    ],
)
def test_other_models_are_refused(old: str, new: str, reason: str, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(GOLDEN / "gpt", tmp_path / "model"))
    path = directory / "context/model.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=reason):
        open_checkpoint(directory)


def test_other_weights_and_tokenizers_are_reported(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(GOLDEN / "gpt", tmp_path / "model"))
    path = directory / "context/model.yaml"
    content = path.read_text()
    path.write_text(content.replace("special_tokens: null", "special_tokens: {a: <a>}"))
    (note,) = [note for note in open_checkpoint(directory).unused if "tokenizer" in note]
    assert note.startswith("the tokenizer SentencePieceTokenizer with special_tokens: give")

    path.write_text(content)
    (directory / "weights/.metadata").unlink()
    with pytest.raises(ValueError, match=r"weights in weights/ in the format torch_dist.*'hf'"):
        open_checkpoint(directory)


def test_tokenizer_on_the_hub_is_named(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(GOLDEN / "llama", tmp_path / "model"))
    path = directory / "context/model.yaml"
    artifact = "{_target_: nemo.lightning.io.artifact.file.DirOrStringArtifact, attr: org/name}"
    path.write_text(path.read_text().replace("name: nemo_tokenizer", f"name: {artifact}"))
    assert open_checkpoint(directory).args["tokenizer_model"] == "org/name"


@pytest.mark.parametrize("name", ["../../tokenizer.model", "/tokenizer.model"])
def test_tokenizer_outside_of_the_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(GOLDEN / "gpt", tmp_path / "model"))
    path = directory / "context/model.yaml"
    path.write_text(path.read_text().replace("model_path: tokenizer.model", f"model_path: {name}"))
    with pytest.raises(ValueError, match=f"tokenizer is '{name}', which is outside"):
        open_checkpoint(directory)


def test_unread_directories_are_named(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(GOLDEN / "gpt", tmp_path / "run/step=2"))
    with pytest.raises(ValueError, match="has checkpoints of NeMo: give one of them, e.g. .*step="):
        open_checkpoint(directory.parent)
    (directory / "context/model.yaml").unlink()
    with pytest.raises(ValueError, match=r"of NeMo 2 without context/model.yaml.*target 'hf'"):
        open_checkpoint(directory)
