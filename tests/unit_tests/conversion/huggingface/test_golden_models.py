"""Golden models and models of transformers: imported, exported and compared."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from megatron.conversion.huggingface.directory import HuggingFaceSource
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.options import WriteOptions
from megatron.core.run_checkpoint.formats import is_huggingface
from tests import ROOT
from tests.support.boxes import index_box
from tests.support.compare import assert_same, read_whole
from tests.support.distributed import DistributedPool
from tests.unit_tests.conversion.filled_model import model_logits, tensor_parallel_logits
from tests.unit_tests.conversion.reference_forward import reference_logits

GOLDEN = ROOT / "tests/golden" / "hf"
READS_NEW_CONFIGS = (
    int(transformers.__version__.split(".")[0]) >= 5
)  # the golden configs are of transformers 5
MODELS = ("gpt2", "llama", "qwen2")


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("name", MODELS)
def test_golden_logits(name: str) -> None:
    """Compute the golden logits with the imported weights."""
    tokens = torch.from_numpy(np.load(GOLDEN / name / "input_ids.npy"))
    expected = torch.from_numpy(np.load(GOLDEN / name / "logits.npy"))
    source = HuggingFaceSource(GOLDEN / name)
    assert_close(reference_logits(source, tokens).float(), expected, atol=1e-4, rtol=0)
    for stages in (1, 2):
        assert_close(model_logits(source, tokens, stages), expected, atol=1e-4, rtol=0)


def test_golden_logits_on_two_tensor_parallel_ranks(pool: DistributedPool) -> None:
    for name in MODELS:
        tokens = torch.from_numpy(np.load(GOLDEN / name / "input_ids.npy"))
        expected = torch.from_numpy(np.load(GOLDEN / name / "logits.npy"))
        for actual in pool.run(tensor_parallel_logits, 2, HuggingFaceSource(GOLDEN / name), tokens):
            assert_close(actual, expected, atol=1e-4, rtol=0)


def test_golden_logits_with_sinks() -> None:
    """Compare gpt-oss with the model itself: the reference forward has no sinks."""
    tokens, expected = (
        torch.from_numpy(np.load(GOLDEN / f"gpt_oss/{name}.npy"))
        for name in ("input_ids", "logits")
    )
    source = HuggingFaceSource(GOLDEN / "gpt_oss")
    for stages in (1, 2):
        assert_close(model_logits(source, tokens, stages), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", (*MODELS, "gpt_oss"))
def test_golden_round_trip(name: str, tmp_path: Path) -> None:
    """Import and export again: same tensors, logits, and configuration."""
    assert is_huggingface(GOLDEN / name)
    source = HuggingFaceSource(GOLDEN / name)
    assert source.unused == []
    assert source.training is None
    assert write_huggingface(source, tmp_path / "out", WriteOptions(trusted=(GOLDEN / name,))) == []
    assert_same(stored_tensors(tmp_path / "out"), stored_tensors(GOLDEN / name))
    actual = logits(tmp_path / "out", torch.from_numpy(np.load(GOLDEN / name / "input_ids.npy")))
    assert_close(actual, torch.from_numpy(np.load(GOLDEN / name / "logits.npy")), atol=1e-5, rtol=0)
    if READS_NEW_CONFIGS:
        assert meaning(tmp_path / "out") == meaning(GOLDEN / name)


def meaning(directory: Path) -> dict[str, Any]:
    """What transformers makes of a config.json, less what has two spellings: n_inner null is 4h,
    say.
    """
    spelled_twice = ("_name_or_path", "transformers_version", "n_inner", "max_window_layers")
    config = AutoConfig.from_pretrained(directory).to_dict()
    return {name: value for name, value in config.items() if name not in spelled_twice}


def test_both_generations_of_config(tmp_path: Path) -> None:
    """Fields of transformers 4.x and 5.x have the same meaning."""
    for path in (GOLDEN / "llama").iterdir():
        shutil.copy(path, tmp_path)
    new = HuggingFaceSource(tmp_path).args
    shutil.copy(GOLDEN / "llama" / "config_4x_style.json", tmp_path / "config.json")
    assert HuggingFaceSource(tmp_path).args == new
    assert new["tokenizer_type"] == "HuggingFaceTokenizer"
    assert new["tokenizer_model"] == str(tmp_path)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
}
SMALL = {"vocab_size": 131, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 6, "max_position_embeddings": 64, "initializer_range": 0.3}
GPT2_SMALL = {
    "vocab_size": 131,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": 40,
    "initializer_range": 0.3,
}
BLOOM_SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "n_layer": 2,
    "n_head": 6,
    "initializer_range": 0.3,
}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}

MATRIX = {
    "llama-mha": ("Llama", SMALL),
    "llama-mqa-tied": ("Llama", SMALL | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-gqa-head-dim": (
        "Llama",
        SMALL | {"num_key_value_heads": 2, "head_dim": 12, "rms_norm_eps": 1e-4},
    ),
    "llama-bias": (
        "Llama",
        SMALL | {"num_key_value_heads": 3, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3-rope": (
        "Llama",
        SMALL
        | {"num_key_value_heads": 2, "head_dim": 16, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    ),
    "mistral-window": ("Mistral", SMALL | {"num_key_value_heads": 3, "sliding_window": 7}),
    "mistral-no-window": (
        "Mistral",
        SMALL | {"num_key_value_heads": 2, "head_dim": 10, "sliding_window": None},
    ),
    "phi3-gqa-window": (
        "Phi3",
        SMALL | {"num_key_value_heads": 2, "sliding_window": 7, "pad_token_id": 0},
    ),
    "phi3-partial-rope-tied": (
        "Phi3",
        SMALL
        | {
            "rope_parameters": PARTIAL,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-4,
        },
    ),
    "qwen2-gqa": ("Qwen2", SMALL | {"num_key_value_heads": 2, "rope_theta": 1e6}),
    "qwen2-window-tied": (
        "Qwen2",
        SMALL | WINDOW | {"num_key_value_heads": 6, "tie_word_embeddings": True},
    ),
    "qwen3-head-dim": ("Qwen3", SMALL | {"num_key_value_heads": 3, "head_dim": 20}),
    "qwen3-window": (
        "Qwen3",
        SMALL | WINDOW | {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "gpt2": ("GPT2", GPT2_SMALL),
    "gpt2-erf-inner-untied": (
        "GPT2",
        GPT2_SMALL | {"activation_function": "gelu", "n_inner": 56, "tie_word_embeddings": False},
    ),
    "bloom": ("Bloom", BLOOM_SMALL),
    "bloom-untied": (
        "Bloom",
        BLOOM_SMALL | {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
    ),
}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save a model with random parameters, norms and biases included, for every row of MATRIX."""
    root = tmp_path_factory.mktemp("matrix")
    for index, (name, (family, fields)) in enumerate(MATRIX.items()):
        torch.manual_seed(index)
        config = getattr(transformers, f"{family}Config")(**fields)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(root / name, max_shard_size="60KB")
    return {name: root / name for name in MATRIX}


@pytest.mark.parametrize("name", MATRIX)
def test_models_of_transformers_round_trip(
    name: str, matrix: dict[str, Path], tmp_path: Path
) -> None:
    """Import (same logits in an independent forward) and export (same tensors and logits)."""
    original = matrix[name]
    tokens = torch.randint(131, (2, 29), generator=torch.Generator().manual_seed(3))
    source = HuggingFaceSource(original)
    expected = logits(original, tokens)
    assert_close(reference_logits(source, tokens).float(), expected, atol=1e-4, rtol=1e-5)
    assert_close(model_logits(source, tokens), expected, atol=1e-4, rtol=1e-5)

    write_huggingface(source, tmp_path / "out", WriteOptions(max_shard_size=70_000, workers=2))
    assert_same(stored_tensors(tmp_path / "out"), stored_tensors(original))
    assert_close(logits(tmp_path / "out", tokens), expected, atol=1e-5, rtol=0)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    total = sum(tensor.nbytes for tensor in stored_tensors(original).values())
    assert index["metadata"]["total_size"] == total
    assert len(set(index["weight_map"].values())) > 1


@pytest.mark.parametrize("name", ["llama-gqa-head-dim", "gpt2", "qwen3-window"])
def test_boxes_equal_slices_of_the_tensor(name: str, matrix: dict[str, Path]) -> None:
    source = HuggingFaceSource(matrix[name])
    random = np.random.default_rng(0)
    for key, info in source.tensors.items():
        whole = read_whole(source, key)
        for _ in range(5):
            start = [int(random.integers(extent)) for extent in info.shape]
            shape = tuple(
                int(random.integers(extent - at)) + 1
                for at, extent in zip(start, info.shape, strict=True)
            )
            box = index_box(start, shape)
            assert torch.equal(source.tensors[key].read(tuple(start), shape), whole[box]), (
                key,
                start,
                shape,
            )
