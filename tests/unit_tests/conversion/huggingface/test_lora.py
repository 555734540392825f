"""LoRA adapters that a conversion merges, compared with peft's golden files and with torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from megatron.conversion.checkpoint_conversion import WRITERS, convert
from megatron.conversion.editing.edits import apply_edits
from megatron.conversion.huggingface import adapter_changes
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.model_space.optimizer_states import optimizer_states
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import EditOptions, ReadOptions, WriteOptions
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS
from tests import GOLDEN
from tests.support.compare import read_whole
from tests.support.live_tensors import LiveTensors
from tests.support.memory_source import GPT_ARGS, LLAMA_ARGS, random_source
from tests.unit_tests.conversion.convert_tool import run_convert, run_merge

ADAPTERS = sorted(path.name for path in (GOLDEN / "peft").iterdir() if path.is_dir())
HIDDEN = 32
RANK = 3
ROWS = 67
ATTENTION = "model.layers.0.self_attn"
MIXTRAL_ARGS = LLAMA_ARGS | {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "hf_model_type": "mixtral",
}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def make_pair(
    module: str, out_size: int, in_size: int, rank: int = RANK
) -> dict[str, torch.Tensor]:
    """Return the matrices of a linear layer."""
    return {
        f"{module}.lora_A.weight": draw(rank, in_size),
        f"{module}.lora_B.weight": draw(out_size, rank, seed=1),
    }


def write_adapter(directory: Path, tensors: Mapping[str, torch.Tensor], **fields: Any) -> Path:
    """Create the files that `PeftModel.save_pretrained` writes."""
    directory.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK} | fields
    (directory / "adapter_config.json").write_text(json.dumps(config))
    renamed = {f"base_model.model.{name}": value for name, value in tensors.items()}
    save_file(renamed, directory / "adapter_model.safetensors")
    return directory


DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def load_tensors(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def merge(base: Path, target: Path, *adapters: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Convert a model of transformers with adapters, and return its tensors."""
    edits = EditOptions(adapters=adapters)
    convert(base, target, "hf", options=WriteOptions(edits=edits, **options), verify=True)
    return load_tensors(target)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_huggingface(random_source(LLAMA_ARGS, optimizer=False), tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def tied_llama(tmp_path: Path) -> Path:
    args = LLAMA_ARGS | {"untie_embeddings_and_output_weights": False}
    write_huggingface(random_source(args, optimizer=False), tmp_path / "tied")
    return tmp_path / "tied"


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    write_huggingface(random_source(MIXTRAL_ARGS, optimizer=False), tmp_path / "mixtral")
    return tmp_path / "mixtral"


# ---- Files of peft ----


@pytest.mark.parametrize("name", ADAPTERS)
def test_golden_adapter_is_merged_as_by_peft(name: str, tmp_path: Path) -> None:
    base = GOLDEN / "hf" / name.rpartition("_")[0]
    adapter = GOLDEN / "peft" / name
    expected = load_file(adapter / "merged.safetensors")
    dtype = next(iter(expected.values())).dtype
    merged = merge(base, tmp_path / "merged", adapter, dtype=DTYPE_NAMES[dtype])
    before = load_tensors(base)

    for key, value in merged.items():
        if key in expected:
            assert_rounded_equally(value, expected.pop(key))
        elif key == "lm_head.weight" and key not in before:
            assert torch.equal(value, before["model.embed_tokens.weight"].to(dtype))
        elif ".1.mlp.experts" not in key:
            assert torch.equal(value, before[key].to(dtype)), key

    assert not expected


def assert_rounded_equally(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare fp32 values up to their last bits, which depend on the processor.

    Another order of operations changes the last bit of several percent of 16-bit values.
    """
    if expected.dtype == torch.float32:
        assert_close(found, expected, rtol=1e-6, atol=1e-6)
        return
    assert_close(found, expected, rtol=1e-2, atol=1e-3)
    assert (found != expected).double().mean() < 0.005


@pytest.mark.parametrize("through", list(WRITERS))
def test_base_model_may_be_in_any_format(through: str, tmp_path: Path) -> None:
    base = GOLDEN / "hf/gpt2"
    adapter = GOLDEN / "peft/gpt2_dora"
    expected = merge(base, tmp_path / "expected", adapter)
    convert(base, tmp_path / "base", through)
    actual = merge(tmp_path / "base", tmp_path / "merged", adapter)

    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


# ---- Compared with torch ----


def test_scaled_product_is_added(llama: Path, tmp_path: Path) -> None:
    """Compare with one product of whole matrices, also in parts of the result."""
    tensors = make_pair(f"{ATTENTION}.v_proj", 16, HIDDEN) | make_pair(
        "model.layers.1.mlp.down_proj",
        HIDDEN,
        48,
    )
    adapter = write_adapter(tmp_path / "adapter", tensors, alpha_pattern={"1.mlp.*": 7})
    actual = merge(llama, tmp_path / "merged", adapter, max_shard_size=10**6)
    expected = load_tensors(llama)
    for module, scaling in ((f"{ATTENTION}.v_proj", 2.0), ("model.layers.1.mlp.down_proj", 7 / 3)):
        product = tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
        expected[f"{module}.weight"] += product * scaling

    for key, value in expected.items():
        assert torch.equal(actual[key], value), key

    source = apply_edits(
        open_checkpoint(llama),
        WriteOptions(edits=EditOptions(adapters=(adapter,))),
    )
    key = "decoder.layers.0.self_attention.linear_qkv.weight"
    whole = read_whole(source, key)
    for offset, shape in (((0, 0), (1, 1)), ((7, 3), (20, 5)), ((60, 31), (4, 1))):
        expected_box = whole[offset[0] : offset[0] + shape[0], offset[1] : offset[1] + shape[1]]
        assert torch.equal(source.tensors[key].read(offset, shape), expected_box)


def test_large_matrices_are_computed_in_parts(tmp_path: Path) -> None:
    """Parts of more rows than are computed at once equal those of a product of whole matrices."""
    args = LLAMA_ARGS | {"ffn_hidden_size": 1000, "hidden_size": 128}
    write_huggingface(random_source(args, optimizer=False), tmp_path / "base")
    module = "model.layers.0.mlp.up_proj"
    tensors = make_pair(module, 1000, 128)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    source = apply_edits(
        open_checkpoint(tmp_path / "base"),
        WriteOptions(edits=EditOptions(adapters=(adapter,))),
    )
    product = tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
    expected = load_tensors(tmp_path / "base")[f"{module}.weight"] + product * 2.0
    # Rows of gate and up are one tensor.
    for first in (0, 1, 500, 935, 936, 999):
        actual = source.tensors["decoder.layers.0.mlp.linear_fc1.weight"].read(
            (1000 + first, 0),
            (1, 128),
        )
        assert torch.equal(actual[0], expected[first])


@pytest.mark.parametrize("use_dora", [False, True])
def test_memory_is_a_few_rows(use_dora: bool, tmp_path: Path) -> None:
    """DoRA of an embedding reads the matrix whole, but does not compute the product whole."""
    rows, columns = 4096, 1024
    args = LLAMA_ARGS | {"hidden_size": columns, "num_layers": 1, "bf16": True}
    write_huggingface(random_source(args, rows, optimizer=False), tmp_path / "base")
    name = "model.embed_tokens"
    tensors = {
        f"{name}.lora_embedding_A": draw(RANK, rows),
        f"{name}.lora_embedding_B": draw(columns, RANK),
    }
    if use_dora:
        tensors[f"{name}.lora_magnitude_vector"] = draw(columns).abs()
    adapter = write_adapter(tmp_path / "adapter", tensors, use_dora=use_dora)
    source = apply_edits(
        open_checkpoint(tmp_path / "base"),
        WriteOptions(edits=EditOptions(adapters=(adapter,))),
    )
    with LiveTensors() as live, mock.patch.object(adapter_changes, "_MAX_PRODUCT", 1 << 20):
        source.tensors[WORD_EMBEDDINGS].read((1000, 0), (100, columns))
    product_bytes = 4 * rows * columns
    assert 0 < live.peak < product_bytes * (1.25 if use_dora else 0.1)


def test_weights_are_cast_before_the_merge(tmp_path: Path) -> None:
    """With --dtype fp32 the base weights are the main parameters of a bf16 run."""
    run = random_source(LLAMA_ARGS | {"bf16": True})
    write_torch_dist(run, tmp_path / "run")
    tensors = make_pair(f"{ATTENTION}.o_proj", HIDDEN, HIDDEN)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    product = 2.0 * (
        tensors[f"{ATTENTION}.o_proj.lora_B.weight"] @ tensors[f"{ATTENTION}.o_proj.lora_A.weight"]
    )
    key = "decoder.layers.0.self_attention.linear_proj.weight"
    main = run.values[f"optimizer.state.param.{key}"]
    for dtype in (torch.float32, torch.bfloat16):
        name = DTYPE_NAMES[dtype]
        actual = merge(tmp_path / "run", tmp_path / name, adapter, dtype=name)
        expected = (main.to(dtype) + product).to(dtype)
        assert torch.equal(actual[f"{ATTENTION}.o_proj.weight"], expected)


def test_product_of_an_embedding_is_rounded_first(llama: Path, tmp_path: Path) -> None:
    """PEFT casts it to the dtype of the weights, unlike that of a linear layer."""
    name = "model.embed_tokens"
    pair = {
        f"{name}.lora_embedding_A": draw(RANK, ROWS),
        f"{name}.lora_embedding_B": draw(HIDDEN, RANK),
    }
    adapter = write_adapter(tmp_path / "adapter", pair)
    actual = merge(llama, tmp_path / "merged", adapter, dtype="bf16")[f"{name}.weight"]
    weight = load_tensors(llama)[f"{name}.weight"].bfloat16()
    product = (pair[f"{name}.lora_embedding_B"] @ pair[f"{name}.lora_embedding_A"]).T * 2.0

    assert torch.equal(actual, weight + product.bfloat16())
    assert not torch.equal(actual, (weight + product).bfloat16())


def test_optimizer_state_is_dropped(tmp_path: Path) -> None:
    write_torch_dist(random_source(LLAMA_ARGS), tmp_path / "run")
    tensors = make_pair(f"{ATTENTION}.o_proj", HIDDEN, HIDDEN)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    arguments = (
        "--saver",
        "torch_dist",
        "--load-dir",
        tmp_path / "run",
        "--save-dir",
        tmp_path / "to",
    )
    done = run_convert(*arguments, "--lora", adapter)

    assert done.returncode == 0, done.stderr
    assert "optimizer state: dropped" in done.stdout
    assert f"{adapter}: changed 1 tensors" in done.stdout

    result = open_checkpoint(tmp_path / "to")
    assert not optimizer_states(result.tensors)
    assert result.training.iteration == 7


def test_adapters_are_merged_one_after_the_other(llama: Path, tmp_path: Path) -> None:
    """DoRA depends on the weights to which the first adapter was added."""
    module = f"{ATTENTION}.q_proj"
    first = write_adapter(tmp_path / "first", make_pair(module, HIDDEN, HIDDEN))
    magnitude = {f"{module}.lora_magnitude_vector": draw(HIDDEN).abs() + 0.5}
    second = write_adapter(
        tmp_path / "second",
        make_pair(module, HIDDEN, HIDDEN) | magnitude,
        use_dora=True,
    )
    merge(llama, tmp_path / "one", first)
    expected = merge(tmp_path / "one", tmp_path / "two", second)
    actual = merge(llama, tmp_path / "merged", first, second)

    for key, value in expected.items():
        assert torch.equal(actual[key], value), key

    lengths = actual[f"{module}.weight"].norm(dim=1)
    assert_close(lengths, magnitude[f"{module}.lora_magnitude_vector"])


def test_merged_checkpoints_are_the_base_model(llama: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", make_pair(f"{ATTENTION}.q_proj", HIDDEN, HIDDEN))
    expected = merge(llama, tmp_path / "expected", adapter)
    inputs = (f"{llama}:0.5", f"{llama}:0.5")
    done = run_merge("--input", *inputs, "--output", tmp_path / "merged", "--lora", adapter)
    assert done.returncode == 0, done.stderr
    for key, value in load_tensors(tmp_path / "merged").items():
        assert torch.equal(value, expected[key]), key


def test_layers_are_selected_after_the_merge(llama: Path, tmp_path: Path) -> None:
    module = "model.layers.1.self_attn.q_proj"
    adapter = write_adapter(tmp_path / "adapter", make_pair(module, HIDDEN, HIDDEN))
    merged = merge(llama, tmp_path / "merged", adapter)
    edits = EditOptions(adapters=(adapter,), layers=(1, 0))
    convert(llama, tmp_path / "swapped", "hf", options=WriteOptions(edits=edits))
    actual = load_tensors(tmp_path / "swapped")[f"{ATTENTION}.q_proj.weight"]
    assert torch.equal(actual, merged[f"{module}.weight"])


def test_tokens_added_before_training(llama: Path, tmp_path: Path) -> None:
    """Modules that were trained as a whole may have more rows, which the base model needs first."""
    tensors = {
        "model.embed_tokens.weight": draw(ROWS + 2, HIDDEN),
        "lm_head.weight": draw(ROWS + 2, HIDDEN, seed=1),
    }
    modules = ["embed_tokens", "lm_head"]
    adapter = write_adapter(tmp_path / "adapter", tensors, modules_to_save=modules)

    with pytest.raises(CheckpointError, match="give --target-vocab-size 69"):
        merge(llama, tmp_path / "merged", adapter)

    edits = EditOptions(adapters=(adapter,), target_vocab_size=ROWS + 2)
    convert(llama, tmp_path / "grown", "hf", options=WriteOptions(edits=edits))
    actual = load_tensors(tmp_path / "grown")

    for key, value in tensors.items():
        assert torch.equal(actual[key], value)


@pytest.mark.parametrize(
    "prefix",
    ["", "language_model.model.", "model.language_model.", "model.text_model."],
)
def test_names_of_other_classes(prefix: str, llama: Path, tmp_path: Path) -> None:
    """AutoModel names modules without `model.`, and multimodal models with more prefixes."""
    module = f"{ATTENTION}.q_proj"
    tensors = make_pair(module, HIDDEN, HIDDEN)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    expected = merge(llama, tmp_path / "expected", adapter)
    renamed = {prefix + name.removeprefix("model."): value for name, value in tensors.items()}
    actual = merge(llama, tmp_path / "merged", write_adapter(tmp_path / "renamed", renamed))
    assert torch.equal(actual[f"{module}.weight"], expected[f"{module}.weight"])


# ---- Tied embeddings ----


@pytest.mark.parametrize("module", ["model.embed_tokens", "lm_head"])
def test_change_of_one_tied_module_separates_them(
    module: str, tied_llama: Path, tmp_path: Path
) -> None:
    tensors = {f"{module}.weight": draw(ROWS, HIDDEN)}
    adapter = write_adapter(
        tmp_path / "adapter",
        tensors,
        modules_to_save=[module.removeprefix("model.")],
    )
    actual = merge(tied_llama, tmp_path / "merged", adapter)
    embedding = load_tensors(tied_llama)["model.embed_tokens.weight"]

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(actual[name], tensors.get(name, embedding))
    assert not json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"]


def test_equal_changes_keep_modules_tied(tied_llama: Path, tmp_path: Path) -> None:
    """With `ensure_weight_tying` peft writes the matrices of the embedding twice."""
    pair = make_pair("lm_head", ROWS, HIDDEN)
    embedding = {
        "model.embed_tokens.lora_embedding_A": pair["lm_head.lora_B.weight"].t().contiguous(),
        "model.embed_tokens.lora_embedding_B": pair["lm_head.lora_A.weight"].t().contiguous(),
    }
    alone = write_adapter(tmp_path / "alone", embedding)
    both = write_adapter(tmp_path / "both", embedding | pair, ensure_weight_tying=True)
    expected = merge(tied_llama, tmp_path / "separated", alone)
    actual = merge(tied_llama, tmp_path / "merged", both)
    assert "lm_head.weight" not in actual

    name = "model.embed_tokens.weight"
    assert torch.equal(actual[name], expected[name])
    assert torch.equal(expected["lm_head.weight"], load_tensors(tied_llama)[name])


def test_trained_tokens_keep_modules_tied(tied_llama: Path, tmp_path: Path) -> None:
    name = "model.embed_tokens"
    rows = {f"{name}.token_adapter.trainable_tokens_delta": draw(2, HIDDEN)}
    adapter = write_adapter(tmp_path / "adapter", rows, trainable_token_indices=[66, 4])
    actual = merge(tied_llama, tmp_path / "merged", adapter)
    expected = load_tensors(tied_llama)
    (values,) = rows.values()
    expected[f"{name}.weight"][[66, 4]] = values

    assert actual.keys() == expected.keys()
    assert torch.equal(actual[f"{name}.weight"], expected[f"{name}.weight"])


# ---- Experts ----


def test_separate_and_packed_experts_are_equal(mixtral: Path, tmp_path: Path) -> None:
    """transformers 4 has a linear layer per expert, transformers 5 one parameter for all."""
    experts, width = 4, 24
    layer = "model.layers.0"
    separate = {}
    packed = {}
    sizes = {"w1": (width, HIDDEN), "w3": (width, HIDDEN), "w2": (HIDDEN, width)}
    pairs = {}
    for expert in range(experts):
        for name, (out_size, in_size) in sizes.items():
            module = f"{layer}.block_sparse_moe.experts.{expert}.{name}"
            pairs[expert, name] = (
                draw(RANK, in_size, seed=10 * expert + len(pairs)),
                draw(out_size, RANK, seed=10 * expert + len(pairs) + 1),
            )
            separate[f"{module}.lora_A.weight"], separate[f"{module}.lora_B.weight"] = pairs[
                expert, name
            ]

    # Of the packed parameter of gate and up, half of the ranks belong to each.
    a = [torch.cat([pairs[e, "w1"][0], pairs[e, "w3"][0]]) for e in range(experts)]
    b = [torch.block_diag(pairs[e, "w1"][1], pairs[e, "w3"][1]) for e in range(experts)]
    inner = f"{layer}.mlp.experts.base_layer"
    packed[f"{inner}.lora_A.weight"] = torch.cat(a)
    packed[f"{inner}.lora_B.weight"] = torch.stack(b, dim=-1).flatten(1)
    outer = f"{layer}.mlp.experts"
    packed[f"{outer}.lora_A.weight"] = torch.cat([pairs[e, "w2"][0] for e in range(experts)])
    b = [pairs[e, "w2"][1] for e in range(experts)]
    packed[f"{outer}.lora_B.weight"] = torch.stack(b, dim=-1).flatten(1)

    pattern = r".*\.gate_up_proj"
    expected = merge(mixtral, tmp_path / "expected", write_adapter(tmp_path / "v4", separate))
    adapter = write_adapter(
        tmp_path / "v5",
        packed,
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        rank_pattern={pattern: 2 * RANK},
        alpha_pattern={pattern: 4 * RANK},
    )
    actual = merge(mixtral, tmp_path / "merged", adapter)
    before = load_tensors(mixtral)

    for key, value in expected.items():
        assert torch.equal(actual[key], value), key
        assert torch.equal(value, before[key]) == (f"{layer}.block_sparse_moe.experts" not in key)


def test_router_under_both_names(mixtral: Path, tmp_path: Path) -> None:
    module = "model.layers.1.block_sparse_moe.gate"
    old = write_adapter(tmp_path / "v4", make_pair(module, 4, HIDDEN))
    expected = merge(mixtral, tmp_path / "expected", old)[f"{module}.weight"]
    new = write_adapter(
        tmp_path / "v5",
        make_pair("model.layers.1.mlp.gate", 4, HIDDEN),
        target_parameters=["gate.weight"],
    )
    actual = merge(mixtral, tmp_path / "merged", new)[f"{module}.weight"]

    assert torch.equal(actual, expected)
    assert not torch.equal(actual, load_tensors(mixtral)[f"{module}.weight"])


SIZES = {
    "vocab_size": ROWS,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SIZES),
        transformers.Phi3Config(**SIZES),
        transformers.GPTNeoXConfig(**SIZES),
        transformers.MixtralConfig(**SIZES, **EXPERTS),
        transformers.Qwen3MoeConfig(
            **SIZES,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=20,
        ),
        transformers.GraniteMoeConfig(**SIZES, **EXPERTS),
    ],
    ids=lambda config: config.model_type,
)
def test_names_of_modules_in_memory(config: Any, tmp_path: Path) -> None:
    """Replace all parameters under the names that adapters have, which are not those of files."""
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "base")
    tensors = {}
    for index, (name, parameter) in enumerate(model.named_parameters()):
        tensors[name] = draw(*parameter.shape, seed=index)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    merge(tmp_path / "base", tmp_path / "merged", adapter)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")

    for name, parameter in merged.named_parameters():
        assert torch.equal(parameter, tensors.pop(name)), name
    assert not tensors


# ---- Tensors that the model does not have ----


@pytest.mark.parametrize("prefix", ["", "model."])
def test_foreign_tensors_are_changed(prefix: str, llama: Path, tmp_path: Path) -> None:
    """Releases of transformers have towers in `model.` or next to it."""
    tensors = load_tensors(llama)
    tensors["vision.proj.weight"] = draw(8, 12)
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    module = f"{prefix}vision.proj"
    pair = make_pair(module, 8, 12)
    adapter = write_adapter(tmp_path / "adapter", pair)
    edits = WriteOptions(edits=EditOptions(adapters=(adapter,)))

    with pytest.raises(CheckpointError, match="--keep-foreign"):
        convert(llama, tmp_path / "merged", "hf", options=edits)

    report = convert(
        *(llama, tmp_path / "merged", "hf"),
        read_options=ReadOptions(keep_foreign=True),
        options=edits,
        verify=True,
    )
    product = pair[f"{module}.lora_B.weight"] @ pair[f"{module}.lora_A.weight"]
    actual = load_tensors(tmp_path / "merged")["vision.proj.weight"]

    assert torch.equal(actual, tensors["vision.proj.weight"] + product * 2.0)
    assert report.foreign == {"vision.proj.weight": "copied, unless an adapter changes it"}


# ---- Errors ----

PAIR = make_pair(f"{ATTENTION}.q_proj", HIDDEN, HIDDEN)
A, B = PAIR


@pytest.mark.parametrize(
    "tensors, fields, message",
    [
        (PAIR, {"peft_type": "ADALORA"}, "peft_type 'ADALORA' is not supported, only LORA is"),
        (PAIR, {"r": 4}, r"lora_A.weight has shape \[3, 32\], but .* make it \[4, 32\]"),
        (PAIR, {"r": 0}, "r is 0, but must be a whole number"),
        (PAIR, {"lora_alpha": "2"}, "lora_alpha is '2', but must be a finite number"),
        (PAIR, {"use_dora": True}, "no lora_magnitude_vector"),
        (PAIR, {"layer_replication": [[0, 2]]}, "layer_replication is not supported"),
        (PAIR, {"megatron_config": {"tp": 2}}, "megatron_config is not supported"),
        (PAIR, {"alora_invocation_tokens": [1]}, "alora_invocation_tokens is not supported"),
        (PAIR, {"init_lora_weights": "pissa_niter_4"}, "change the weights of the base model"),
        (PAIR, {"new_variant": True}, "fields that are not known .*'new_variant'"),
        (PAIR, {"rank_pattern": {"(a+)+": 3}}, "groups .* without repetition"),
        (PAIR, {"rank_pattern": {".*": 3, ".?" * 512: 3}}, "more than 1024 characters"),
        (PAIR, {"alpha_pattern": {"[": 3}}, r"alpha_pattern has the pattern '\[', which is not su"),
        ({A: PAIR[A]}, {}, "has lora_A, but no lora_B"),
        ({B: PAIR[B]}, {}, "has lora_B, but no lora_A"),
        ({A: PAIR[A], B: PAIR[B].long()}, {}, "dtype torch.int64"),
        ({A: PAIR[A], B: PAIR[B][:-1]}, {}, r"\[31, 3\], but .* make it \[32, 3\]"),
        (make_pair("model.layers.2.mlp.up_proj", 48, 32), {}, "2 of 2 .*layers.2.mlp.up_proj"),
        (make_pair(f"{ATTENTION}.q_proj.base_layer", 32, 32), {}, "2 of 2 .*q_proj.base_layer"),
        (PAIR | {"score.weight": draw(2, 32)}, {}, "1 of 3 .*base_model.model.score.weight"),
        (
            PAIR | {f"{ATTENTION}.q_proj.lora_magnitude_vector": draw(32)},
            {},
            "lora_magnitude_vector is not used by an adapter with this configuration",
        ),
        (PAIR | {f"{ATTENTION}.q_proj.lora_B.bias": draw(32)}, {"lora_bias": True}, "does not hav"),
        (
            {"model.embed_tokens.token_adapter.trainable_tokens_delta": draw(1, 32)},
            {"trainable_token_indices": {"embed_tokens": [70]}},
            "trains token 70, but the model has 67 .* --target-vocab-size 71",
        ),
        (
            {"model.embed_tokens.token_adapter.trainable_tokens_delta": draw(1, 32)},
            {"trainable_token_indices": {"wte": [1]}},
            "no tokens of model.embed_tokens",
        ),
        (
            PAIR | {f"{ATTENTION}.q_proj.base_layer.bias": draw(32)},
            {"bias": "lora_only"},
            "1 of 3 .*q_proj.base_layer.bias",
        ),
        (
            {
                f"{ATTENTION}.q_proj.weight": draw(32, 32),
                f"{ATTENTION}.q_proj.base_layer.weight": draw(32, 32),
            },
            {},
            "changes of the same tensor",
        ),
        ({}, {}, "the adapter has no tensors"),
        (
            {"model.embed_tokens.token_adapter.trainable_tokens_delta": draw(2, 32)},
            {"trainable_token_indices": [1, 1]},
            "a token twice",
        ),
    ],
)
def test_adapter_that_cannot_be_merged(
    tensors: dict[str, torch.Tensor],
    fields: dict[str, Any],
    message: str,
    llama: Path,
    tmp_path: Path,
) -> None:
    adapter = write_adapter(tmp_path / "adapter", tensors, **fields)
    with pytest.raises(CheckpointError, match=message):
        merge(llama, tmp_path / "merged", adapter)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "llama"]


def test_directory_without_an_adapter(llama: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "saved", PAIR)
    (tmp_path / "saved").rename(tmp_path / "llama/named")
    with pytest.raises(CheckpointError, match="--lora: .*in its folders named"):
        merge(llama, tmp_path / "merged", llama)
    (llama / "named/adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither adapter_model.safetensors nor .*\.bin"):
        merge(llama, tmp_path / "merged", llama / "named")


def test_adapter_is_not_overwritten(llama: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", PAIR)
    arguments = ("--saver", "hf", "--load-dir", llama, "--save-dir", adapter, "--overwrite")
    done = run_convert(*arguments, "--lora", adapter)
    assert done.returncode
    assert "which would be lost" in done.stderr
    assert (adapter / "adapter_model.safetensors").exists()


def test_model_without_a_family_has_no_adapters(tmp_path: Path) -> None:
    """Adapters name modules of transformers."""
    write_torch_dist(random_source(GPT_ARGS | {"squared_relu": True}), tmp_path / "run")
    adapter = write_adapter(tmp_path / "adapter", PAIR)
    edits = WriteOptions(edits=EditOptions(adapters=(adapter,)))
    with pytest.raises(ValueError, match="--lora: .* is not a model of transformers"):
        convert(tmp_path / "run", tmp_path / "merged", "torch_dist", options=edits)
