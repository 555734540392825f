"""Tensors that the model does not have are copied byte for byte (`--keep-foreign`), or reported."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.huggingface.weight_files import (
    check_weight_files,
    write_weight_files,
)
from megatron.conversion.opening import open_checkpoint, require_checkpoint
from megatron.conversion.options import ReadOptions, WriteOptions
from megatron.core.dist_checkpointing.saving.commit import no_progress
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.unit_tests.conversion.convert_tool import run_convert

# A vision tower, a sparse indexer of a layer, quantized data, a scalar and an empty tensor.
FOREIGN = {
    "model.visual.patch_embed.weight": torch.randn(6, 3, 2, 2),
    "model.layers.1.self_attn.indexer.wk.weight": torch.randn(8, 32).bfloat16(),
    "model.layers.0.linear_attn.A_log": torch.tensor([float("nan"), -0.0, 1e-45]),
    "model.layers.0.packed": torch.arange(12, dtype=torch.int8).view(3, 4),
    "model.layers.0.packed_scale": torch.randn(2, 4).to(torch.float8_e4m3fn),
    "model.num_batches": torch.tensor(7),
    "model.empty": torch.zeros(0, 4),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a Llama model with more tensors than it uses, and a field of config.json."""
    directory = tmp_path / "model"
    write_huggingface(random_source(LLAMA_ARGS | {"bf16": True}, optimizer=False), directory)
    weights = directory / "model.safetensors"
    save_file(load_file(weights) | FOREIGN, weights, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["vision_config"] = {"depth": 2}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def convert(saver: str, source: Path, target: Path, *flags: object) -> str:
    done = run_convert("--saver", saver, "--load-dir", source, "--save-dir", target, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_bytes(directory: Path) -> dict[str, tuple[object, ...]]:
    """Return shape, dtype and bytes of every tensor of a Hugging Face directory."""
    contents: dict[str, tuple[object, ...]] = {}
    for path in directory.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            flat = tensor.reshape(-1).view(torch.uint8)
            contents[name] = (tensor.shape, tensor.dtype, flat.tolist())
    return contents


@pytest.mark.parametrize("layout", [(), ("--target-tensor-parallel-size", 2)])
def test_foreign_tensors_return_bitwise(
    model: Path, tmp_path: Path, layout: tuple[object, ...]
) -> None:
    keep = ("--keep-foreign", "--verify-target")
    ignore = ("--hf-ignore-fields", "vision_config")
    said = convert("torch_dist", model, tmp_path / "dist", *keep, *ignore)

    for name in FOREIGN:
        assert f"foreign, copied as it is: {name}" in said

    convert("legacy", tmp_path / "dist", tmp_path / "legacy", *keep, *layout)
    convert("hf", tmp_path / "legacy", tmp_path / "result", *keep, "--max-shard-size", "20KB")
    assert len(list((tmp_path / "result").glob("*.safetensors"))) > 1
    assert read_bytes(tmp_path / "result") == read_bytes(model)

    result = json.loads((tmp_path / "result" / "config.json").read_text())
    assert result["vision_config"] == {"depth": 2}


@pytest.mark.parametrize("saver", ["hf", "torch_dist", "legacy", "universal"])
def test_foreign_tensors_are_taken_from_another_checkpoint(
    model: Path, tmp_path: Path, saver: str
) -> None:
    """A run does not save them, so they come from the checkpoint that it was trained from."""
    write_huggingface(random_source(LLAMA_ARGS | {"bf16": True}, seed=7), tmp_path / "trained")
    ignore = ("--hf-ignore-fields", "vision_config")
    convert("torch_dist", model, tmp_path / "original", "--keep-foreign", *ignore)
    keep = ("--keep-foreign", tmp_path / "original")
    said = convert(saver, tmp_path / "trained", tmp_path / "whole", *keep, "--verify-target")
    assert "foreign, copied as it is: model.visual.patch_embed.weight" in said

    convert("hf", tmp_path / "whole", tmp_path / "result", "--keep-foreign", *ignore)
    expected = read_bytes(model) | read_bytes(tmp_path / "trained")
    assert read_bytes(tmp_path / "result") == expected

    result = json.loads((tmp_path / "result" / "config.json").read_text())
    assert result["vision_config"] == {"depth": 2}


def test_foreign_tensors_return_from_universal(model: Path, tmp_path: Path) -> None:
    """DeepSpeed's directories of parameters are unchanged; foreign tensors have their own file."""
    keep = ("--keep-foreign", "--verify-target")
    ignore = ("--hf-ignore-fields", "vision_config")
    convert("universal", model, tmp_path / "plain", *ignore)
    said = convert("universal", model, tmp_path / "universal", *keep, *ignore)

    for name in FOREIGN:
        assert f"foreign, copied as it is: {name}" in said

    (kept,) = (tmp_path / "universal").glob("*/zero")
    (plain,) = (tmp_path / "plain").glob("*/zero")
    assert sorted(path.name for path in kept.iterdir()) == sorted(p.name for p in plain.iterdir())

    tensors = torch.load(kept.parent / "foreign.pt", weights_only=True)
    assert tensors.keys() == FOREIGN.keys()
    assert tensors["model.layers.0.packed"].equal(FOREIGN["model.layers.0.packed"])

    convert("hf", tmp_path / "universal", tmp_path / "result", *keep)
    assert read_bytes(tmp_path / "result") == read_bytes(model)

    result = json.loads((tmp_path / "result" / "config.json").read_text())
    assert result["vision_config"] == {"depth": 2}


@pytest.fixture(scope="module")
def indexed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of transformers with DeepSeek's sparse attention of 8 tokens."""
    torch.manual_seed(3)
    config = transformers.DeepseekV32Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=2,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        index_topk=8,
        index_head_dim=8,
        index_n_heads=2,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    directory = tmp_path_factory.mktemp("indexed") / "model"
    transformers.DeepseekV32ForCausalLM(config).save_pretrained(directory)
    return directory


def test_sparse_indexers_return_bitwise(indexed_model: Path, tmp_path: Path) -> None:
    """Layers are split over TP 2 x PP 2; their indexers, which the trainer lacks, are whole."""
    keep = ("--keep-foreign", "--verify-target")
    layout = ("--target-tensor-parallel-size", 2, "--target-pipeline-parallel-size", 2)
    said = convert("torch_dist", indexed_model, tmp_path / "dist", *keep)
    assert "foreign, copied as it is: model.layers.3.self_attn.indexer.wk.weight" in said

    convert("legacy", tmp_path / "dist", tmp_path / "legacy", *keep, *layout)
    assert len(list((tmp_path / "legacy").glob("*/mp_rank_*"))) == 4

    convert("hf", tmp_path / "legacy", tmp_path / "result", *keep)
    assert read_bytes(tmp_path / "result") == read_bytes(indexed_model)

    # transformers computes the same, beyond the number of tokens of the indexer, too.
    tokens = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(5))
    logits = []
    for directory in (indexed_model, tmp_path / "result"):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
        assert model.config.index_topk == 8
        with torch.no_grad():
            logits.append(model(tokens).logits)

    assert torch.equal(*logits)


def test_sparse_indexers_are_not_dropped_silently(indexed_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layers 0-3 have a sparse indexer .* --keep-foreign"):
        open_checkpoint(indexed_model)

    # A checkpoint without the indexers is not exported as a model with them.
    convert("torch_dist", indexed_model, tmp_path / "dist", "--keep-foreign")
    said = convert("hf", tmp_path / "dist", tmp_path / "result")
    assert "unused in the source: model.layers.0.self_attn.indexer.wk.weight" in said

    result = json.loads((tmp_path / "result" / "config.json").read_text())
    assert result["model_type"] == "deepseek_v3"
    assert "index_topk" not in result


@pytest.mark.parametrize(
    ("model_type", "field", "kind"),
    [
        ("olmo_hybrid", "layer_types", "linear_attention"),
        ("zamba2", "layers_block_type", "hybrid"),
        ("nemotron_h", "layers_block_type", "mamba"),
    ],
)
def test_layers_of_other_kinds_are_refused_by_number(
    model_type: str, field: str, kind: str, tmp_path: Path
) -> None:
    config = {"model_type": model_type, field: [kind, kind, "full_attention", kind]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = f"it has {kind} in layers 0-1, 3, which the trainer does not have"
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path, read_options=ReadOptions(keep_foreign=True))


def test_unknown_parameters_of_deepspeed_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    ignore = ("--hf-ignore-fields", "vision_config")
    convert("universal", model, tmp_path / "universal", *ignore)
    (zero,) = (tmp_path / "universal").glob("*/zero")
    folder = next(path for path in zero.iterdir() if path.is_dir())
    shutil.copytree(folder, zero / "visual.patch_embed.weight")
    flags = ("--load-dir", tmp_path / "universal", "--keep-foreign", "--saver", "hf")
    done = run_convert(*flags, "--save-dir", tmp_path / "out")
    assert "visual.patch_embed.weight are not parameters of a GPT" in done.stderr


def test_other_dtype_leaves_foreign_tensors(model: Path, tmp_path: Path) -> None:
    flags = ("--keep-foreign", "--hf-ignore-fields", "vision_config", "--dtype", "fp32")
    convert("hf", model, tmp_path / "result", *flags)
    result = read_bytes(tmp_path / "result")
    assert result["model.embed_tokens.weight"][1] == torch.float32
    original = read_bytes(model)
    assert {name: result[name] for name in FOREIGN} == {name: original[name] for name in FOREIGN}


@pytest.mark.parametrize("middle", ["torch_dist", "legacy", "universal"])
def test_foreign_tensors_are_reported_without_the_flag(
    model: Path, tmp_path: Path, middle: str
) -> None:
    ignore = ("--hf-ignore-fields", "vision_config")
    convert(middle, model, tmp_path / "kept", "--keep-foreign", *ignore)

    for source, flags in ((model, ignore), (tmp_path / "kept", ())):
        said = convert("hf", source, tmp_path / f"to_hf_{source.name}", *flags)
        for name in FOREIGN:
            assert f"not carried: unused in the source: {name}" in said
        assert "unused tensors are copied with --keep-foreign" in said
        assert not FOREIGN.keys() & read_bytes(tmp_path / f"to_hf_{source.name}").keys()


def write_rank_files(
    directory: Path, model: Path, foreign: dict[tuple[int, int], dict[str, torch.Tensor]]
) -> Path:
    """Write a legacy checkpoint with TP 2 x PP 2; `foreign` are tensors of rank (tp, pp)."""
    sizes = ("--target-tensor-parallel-size", 2, "--target-pipeline-parallel-size", 2)
    convert("legacy", model, directory, *sizes)

    for (tp, pp), tensors in foreign.items():
        folder = require_checkpoint(directory).directory / f"mp_rank_{tp:02d}_{pp:03d}"
        content = torch.load(folder / "model_optim_rng.pt", weights_only=False)
        content["model"] |= tensors
        torch.save(content, folder / "model_optim_rng.pt")
    return directory


def read_foreign(directory: Path) -> dict[str, torch.Tensor]:
    source = open_checkpoint(directory, read_options=ReadOptions(keep_foreign=True))
    tensors = {}
    for key, info in source.tensors.items():
        if key.startswith("foreign."):
            zeros = (0,) * len(info.shape)
            tensors[key.removeprefix("foreign.")] = source.tensors[key].read(zeros, info.shape)
    return tensors


@pytest.fixture
def plain_model(tmp_path: Path) -> Path:
    """Return a Llama model of two layers without other tensors."""
    write_huggingface(random_source(LLAMA_ARGS, optimizer=False), tmp_path / "plain")
    return tmp_path / "plain"


def test_foreign_tensors_of_ranks_are_joined(plain_model: Path, tmp_path: Path) -> None:
    """Split over TP along two axes, equal on all ranks, and numbered by stage."""
    columns = torch.randn(4, 6).bfloat16()
    rows = torch.arange(10, dtype=torch.int16).view(5, 2)  # uneven
    buffer = torch.tensor([float("nan"), -0.0])
    indexer = [torch.randn(8, 3) for _ in range(2)]  # by layer
    foreign = {}
    for tp in range(2):
        for pp in range(2):
            foreign[tp, pp] = {
                "decoder.layers.0.indexer.weight": indexer[pp].chunk(2)[tp].clone(),
                "buffer": buffer,
            }
        foreign[tp, 0]["vision.columns"] = columns.chunk(2, 1)[tp].clone()
        foreign[tp, 0]["vision.rows"] = rows.split([3, 2])[tp].clone()

    legacy = write_rank_files(tmp_path / "legacy", plain_model, foreign)
    splits = ("vision.columns=1", "vision.rows=0", "decoder.layers.*.indexer.weight=0")
    keep = ("--keep-foreign", "--verify-target")
    convert("torch_dist", legacy, tmp_path / "dist", *keep, "--foreign-split", *splits)
    expected = {
        "decoder.layers.0.indexer.weight": indexer[0],
        "decoder.layers.1.indexer.weight": indexer[1],
        "buffer": buffer,
        "vision.columns": columns,
        "vision.rows": rows,
    }
    actual = read_foreign(tmp_path / "dist")

    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        assert torch.equal(actual[name].view(torch.uint8), value.view(torch.uint8)), name


A = torch.arange(6.0).view(2, 3)
REFUSED = {
    "unequal": (
        {(0, 0): {"vision.weight": A}, (1, 0): {"vision.weight": A + 1}},
        (),
        "so 2 tensor-parallel ranks split it: give --foreign-split vision.weight=AXIS",
    ),
    "missing_rank": (
        {(0, 0): {"vision.weight": A}},
        (),
        "1 of 2 tensor-parallel ranks have vision.weight",
    ),
    "unequal_stages": (
        {(tp, pp): {"vision.weight": A + pp} for tp in range(2) for pp in range(2)},
        (),
        "pipeline stages have values of their own",
    ),
    "other_shapes": (
        {(0, 0): {"vision.weight": A}, (1, 0): {"vision.weight": A.t().clone()}},
        ("--foreign-split", "vision.weight=0"),
        "cannot be joined along axis 0",
    ),
    "axis_too_large": (
        {(tp, 0): {"vision.weight": A} for tp in range(2)},
        ("--foreign-split", "vision.weight=2"),
        "cannot be joined along axis 2",
    ),
    "unknown_name": ({}, ("--foreign-split", "vision.*=0"), "no rank has such a tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ranks_that_disagree_are_refused(case: str, plain_model: Path, tmp_path: Path) -> None:
    foreign, flags, reason = REFUSED[case]
    legacy = write_rank_files(tmp_path / "legacy", plain_model, foreign)
    target = ("--saver", "torch_dist", "--save-dir", tmp_path / "out")
    done = run_convert("--load-dir", legacy, *target, "--keep-foreign", *flags)
    assert reason in done.stderr
    assert not (tmp_path / "out").exists()


def test_tensors_that_expert_parallel_ranks_split_are_refused(tmp_path: Path) -> None:
    args = LLAMA_ARGS | {"num_experts": 4, "moe_ffn_hidden_size": 24}
    write_huggingface(random_source(args, optimizer=False), tmp_path / "plain")
    legacy = tmp_path / "legacy"
    convert("legacy", tmp_path / "plain", legacy, "--target-expert-model-parallel-size", 2)
    folders = sorted(require_checkpoint(legacy).directory.glob("mp_rank_*"))
    assert len(folders) == 2

    for index, folder in enumerate(folders):
        content = torch.load(folder / "model_optim_rng.pt", weights_only=False)
        content["model"]["decoder.layers.1.mlp.experts.scales"] = A + index
        torch.save(content, folder / "model_optim_rng.pt")

    target = ("--saver", "torch_dist", "--save-dir", tmp_path / "out")
    done = run_convert("--load-dir", legacy, *target, "--keep-foreign")
    assert "decoder.layers.1.mlp.experts.scales of mp_rank_00_000 differs" in done.stderr
    assert "tensors that expert-parallel ranks split" in done.stderr


def test_foreign_tensors_of_ranks_are_reported_without_the_flag(
    plain_model: Path, tmp_path: Path
) -> None:
    legacy = write_rank_files(tmp_path / "legacy", plain_model, {(1, 0): {"vision.weight": A}})
    said = convert("hf", legacy, tmp_path / "out")
    assert "unused in the source: mp_rank_01_000: vision.weight" in said

    needs = run_convert(
        "--load-dir",
        legacy,
        "--saver",
        "hf",
        "--save-dir",
        tmp_path / "b",
        "--foreign-split",
        "a=0",
    )
    assert "--foreign-split requires --keep-foreign" in needs.stderr


def test_selected_layers_with_foreign_tensors_are_refused(model: Path, tmp_path: Path) -> None:
    flags = ("--load-dir", model, "--keep-foreign", "--hf-ignore-fields", "vision_config")
    target = ("--save-dir", tmp_path / "out")
    layers = run_convert(*flags, *target, "--saver", "hf", "--layers", "0")
    assert "--layers and --keep-foreign are mutually exclusive" in layers.stderr
    assert not (tmp_path / "out").exists()


def test_foreign_name_of_another_part_is_refused(model: Path, tmp_path: Path) -> None:
    weights = model / "model.safetensors"
    name = "optimizer.state.exp_avg.output_layer.weight"
    save_file(load_file(weights) | {name: torch.zeros(2)}, weights)
    flags = ("--load-dir", model, "--keep-foreign", "--hf-ignore-fields", "vision_config")
    done = run_convert(*flags, "--saver", "torch_dist", "--save-dir", tmp_path / "out")
    assert f"torch_dist checkpoints store another tensor as {name}" in done.stderr


def test_export_is_compared_with_the_plan(tmp_path: Path) -> None:
    source = random_source(LLAMA_ARGS, optimizer=False)
    source.values["foreign.a"] = torch.zeros(2, 2)
    source.values["foreign.b"] = torch.zeros(3)
    planned = {name: source.tensors[f"foreign.{name}"] for name in ("a", "b")}
    write_weight_files(tmp_path, "model", planned, 10**9, 1, no_progress)
    check_weight_files(tmp_path, planned)

    with pytest.raises(ValueError, match="2 tensors were written, 1 were expected; b differs"):
        check_weight_files(tmp_path, {"a": planned["a"]})


def test_index_and_shards_must_list_the_same_tensors(tmp_path: Path) -> None:
    source = random_source(LLAMA_ARGS, optimizer=False)
    write_huggingface(source, tmp_path / "model", WriteOptions(max_shard_size=20_000))
    index_path = tmp_path / "model" / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    weight_map = {name: file for name, file in index["weight_map"].items() if file != shards[-1]}
    index_path.write_text(json.dumps(index | {"weight_map": weight_map}))

    with pytest.raises(ValueError, match=f"does not list 1 of {len(shards)} shards: {shards[-1]}"):
        open_checkpoint(tmp_path / "model")
