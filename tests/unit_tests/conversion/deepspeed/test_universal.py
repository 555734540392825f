"""Reading and writing DeepSpeed universal checkpoints."""

import argparse
import csv
import dataclasses
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.deepspeed.universal import UniversalSource
from megatron.conversion.deepspeed.universal_writer import write_universal
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.model_space.optimizer_states import optimizer_key
from megatron.conversion.options import ReadOptions, WriteOptions
from megatron.core.run_checkpoint.formats import find_problem, list_formats, read_latest
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS
from megatron.core.run_checkpoint.source import Source
from megatron.core.safe_files import safe_load
from tests import GOLDEN
from tests.support.compare import read_whole
from tests.support.distributed import DistributedPool
from tests.support.memory_source import (
    BLOOM_ARGS,
    GPT_ARGS,
    LLAMA_ARGS,
    MemorySource,
    random_source,
)
from tests.unit_tests.conversion.filled_model import chunk, model_logits, tensor_parallel_logits
from tests.unit_tests.conversion.reference_forward import reference_logits

ARCHIVES = GOLDEN / "deepspeed_universal"
SETS = ("gpt_fp32_tp2_pp2", "gpt_blockqkv_fp32_tp2", "gpt_nopipe_bf16_dp2", "bloom_bf16_tp2_pp2")
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("universal")
    for name in SETS:
        with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
            archive.extractall(root)
    return root


def at(root: Path) -> Path:
    """Return the directory named in `latest_universal` in `root`, or `root`."""
    return root / (read_latest(root) or "")


def opened(
    root: Path, args: dict[str, Any] | None = None, qkv_layout: str | None = None
) -> UniversalSource:
    return UniversalSource(at(root), ReadOptions(args or {}, qkv_layout=qkv_layout))


def array(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.load(path))


@pytest.mark.parametrize("name", SETS)
def test_golden_checkpoint_gives_the_golden_logits(name: str, golden: Path) -> None:
    """Covers names, layers, the order of q, k and v, the vocabulary and the arguments."""
    source = opened(golden / name)
    tokens = array(golden / name / "input_ids.npy")
    expected = array(golden / name / "logits.npy")
    assert_close(reference_logits(source, tokens, main=True).float(), expected, atol=1e-6, rtol=0)
    for stages in (1, 2):
        assert_close(model_logits(source, tokens, stages, main=True), expected, atol=1e-6, rtol=0)


def test_golden_logits_on_two_tensor_parallel_ranks(golden: Path, pool: DistributedPool) -> None:
    for name in ("gpt_blockqkv_fp32_tp2", "gpt_fp32_tp2_pp2"):
        tokens = array(golden / name / "input_ids.npy")
        expected = array(golden / name / "logits.npy")
        for actual in pool.run(tensor_parallel_logits, 2, opened(golden / name), tokens):
            assert_close(actual, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "rows"),
    [(SETS[0], 256), (SETS[1], 256), ("bloom_bf16_tp2_pp2", 288)],
)
def test_training_continues_as_in_the_original_run(name: str, rows: int, golden: Path) -> None:
    """Covers weights, both moments, the step, the groups and the learning rate."""
    source = opened(golden / name, {"vocab_size": rows})
    model = chunk(source, main=True)

    assert source.training is not None
    assert source.training.param_groups is not None

    optimizer = adamw(model, source)
    batches = array(golden / name / "batches_iter7_12.npy")
    positions = torch.arange(32)[None]
    with (golden / name / "loss_resume.csv").open() as file:
        rows_of_log = list(csv.DictReader(file))

    for batch, log in zip(batches, rows_of_log, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = float(log["lr_used"])
        optimizer.zero_grad()
        loss = model(batch[:, :-1], positions.expand(4, -1), labels=batch[:, 1:]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert loss.item() == pytest.approx(float(log["lm_loss"]), abs=1e-5)
        assert norm.item() == pytest.approx(float(log["grad_norm"]), abs=2e-3)
        optimizer.step()


def adamw(model: torch.nn.Module, source: Source) -> torch.optim.AdamW:
    """Return torch's optimizer with the state of a checkpoint."""
    assert source.training is not None
    assert source.training.param_groups is not None

    decay, no_decay = source.training.param_groups
    keys = {entry.local: key for key, entry in model.sharded_state_dict().items()}  # type: ignore[operator]
    groups = []
    for known, of_group in ((decay, lambda p: p.dim() > 1), (no_decay, lambda p: p.dim() == 1)):
        params = [p for p in model.parameters() if of_group(p)]
        groups.append(
            {"params": params} | {k: known[k] for k in ("lr", "betas", "eps", "weight_decay")}
        )

    optimizer = torch.optim.AdamW(groups)
    for parameter, key in keys.items():
        state: dict[str, Any] = {"step": torch.tensor(float(decay["step"]))}
        for name in ("exp_avg", "exp_avg_sq"):
            padded = torch.zeros_like(parameter)
            value = read_whole(source, optimizer_key(name, key))
            padded[: len(value)] = value
            state[name] = padded
        optimizer.state[parameter] = state
    return optimizer


def test_training_state_of_golden_checkpoints(golden: Path) -> None:
    training = opened(golden / "gpt_fp32_tp2_pp2").training
    assert training is not None
    assert training.param_groups is not None
    assert training.scheduler is not None
    assert (training.iteration, training.consumed_train_samples) == (6, 24)
    assert [group["step"] for group in training.param_groups] == [6, 6]
    assert [group["weight_decay"] for group in training.param_groups] == [0.1, 0.0]
    assert training.scheduler["num_steps"] == 24
    assert training.scheduler["lr_decay_style"] == "cosine"

    bloom = opened(golden / "bloom_bf16_tp2_pp2").training
    assert bloom is not None
    assert bloom.param_groups is not None
    assert bloom.scheduler == training.scheduler  # other names, the same schedule
    assert [group["step"] for group in bloom.param_groups] == [6, 6]  # counted: step.pt is missing


@pytest.mark.parametrize("name", SETS)
def test_written_files_equal_the_original_files(name: str, golden: Path, tmp_path: Path) -> None:
    """Every parameter file is equal except for known differences."""
    rows = {"bloom_bf16_tp2_pp2": 288}.get(name)
    source = opened(golden / name, {"vocab_size": rows} if rows else None)
    style = "no-pipeline" if "nopipe" in name else None
    blocks = 2 if "blockqkv" in name else None
    write_universal(
        source,
        tmp_path / "out",
        WriteOptions(blocks, universal_style=style, qkv_blocks=blocks is not None, workers=2),
    )
    ours = at(tmp_path / "out")
    theirs = at(golden / name)
    assert ours.name == theirs.name

    folders = {path.name for path in (theirs / "zero").iterdir() if path.is_dir()}
    assert {path.name for path in (ours / "zero").iterdir() if path.is_dir()} == folders

    for folder in folders:
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            actual = safe_load(ours / "zero" / folder / f"{state}.pt")
            expected = safe_load(theirs / "zero" / folder / f"{state}.pt")
            assert torch.equal(actual.pop("param"), expected.pop("param")), (folder, state)
            if "gpt" in name and "nopipe" not in name:  # written by the current converter from TP2
                assert actual == expected
        if (theirs / "zero" / folder / "step.pt").exists():
            assert torch.equal(safe_load(ours / "zero" / folder / "step.pt"), torch.tensor(6.0))

    if name != "bloom_bf16_tp2_pp2":
        assert_same_run(ours, theirs)


def assert_same_run(ours: Path, theirs: Path) -> None:
    actual, expected = (safe_load(path / "zero" / "optimizer_state.pt") for path in (ours, theirs))
    for mine, original in zip(actual["param_groups"], expected["param_groups"], strict=True):
        assert mine.items() <= original.items()

    state, original = (safe_load(path / "mp_rank_00_model_states.pt") for path in (ours, theirs))
    for scheduler in (state["lr_scheduler"], original["lr_scheduler"]):
        del scheduler[
            "num_tokens"
        ]  # counted one step late by the original; of use for schedules by tokens only

    for key in (
        "lr_scheduler",
        "global_steps",
        "global_samples",
        "skipped_steps",
        "iteration",
        "checkpoint_version",
    ):
        assert state[key] == original[key], key

    for field in (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "add_position_embedding",
    ):
        assert getattr(state["args"], field) == getattr(original["args"], field)

    assert state["args"].consumed_train_samples == 24
    assert (
        sum(len(group) for group in state["param_shapes"])
        == len(list((ours / "zero").iterdir())) - 1
    )


ROUND_TRIPS = {
    "llama": LLAMA_ARGS | {"bf16": True},
    "llama-everything": LLAMA_ARGS
    | {
        "qk_layernorm": True,
        "window_size": (5, 0),
        "use_rope_scaling": True,
        "add_qkv_bias": True,
        "kv_channels": 6,
    },
    "gpt": GPT_ARGS | {"fp16": True},
    "gpt-erf-untied": GPT_ARGS
    | {"bias_gelu_fusion": False, "untie_embeddings_and_output_weights": True},
    "bloom": BLOOM_ARGS,
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
@pytest.mark.parametrize("style", [None, "no-pipeline"])
def test_round_trip_keeps_tensors_and_training_state(
    name: str, style: str | None, tmp_path: Path
) -> None:
    """Covers models of every style of names."""
    if name == "bloom" and style is not None:
        pytest.skip("Megatron-DeepSpeed has no such model")
    source = random_source(ROUND_TRIPS[name] | {"lr": 3e-3})
    assert source.training is not None

    source.training.grad_scaler = {"scale": 1024.0, "growth_tracker": 3}
    write_universal(source, tmp_path / "out", WriteOptions(universal_style=style))
    back = opened(tmp_path / "out")

    assert back.tensors == source.tensors
    assert back.training == source.training
    for key in source.tensors:
        assert torch.equal(read_whole(back, key), source.values[key]), key

    tokens = torch.arange(20).view(2, 10)
    assert torch.equal(reference_logits(back, tokens), reference_logits(source, tokens))
    assert (
        back.args.items()
        >= {key: value for key, value in source.args.items() if key != "seq_length"}.items()
    )


@pytest.mark.parametrize("number", [0, 1, None])
def test_dense_model_in_any_spelling_is_read_back(number: int | None, tmp_path: Path) -> None:
    """--num-experts 0 and 1 are stored in checkpoints of dense models."""
    source = random_source(GPT_ARGS | {"num_experts": number})
    write_universal(source, tmp_path, WriteOptions())
    back = opened(tmp_path)

    assert back.args["num_experts"] is None
    assert back.tensors == source.tensors

    # Megatron-DeepSpeed has a list with the experts of each layer.
    (path,) = tmp_path.glob("*_universal/mp_rank_00_model_states.pt")
    state = torch.load(path, weights_only=False)
    assert state["args"].num_experts == [1]

    # Earlier versions of this program stored the number.
    state["args"].num_experts = number
    torch.save(state, path)
    assert opened(tmp_path).args["num_experts"] is None


@pytest.mark.parametrize("style", ["pipeline", "bigscience"])
def test_schedule_is_kept_completely(tmp_path: Path, style: str) -> None:
    """Including the fields that the schedules of DeepSpeed's programs do not have."""
    source = random_source(GPT_ARGS)
    assert source.training is not None
    assert source.training.scheduler is not None

    source.training.scheduler |= {
        "init_lr": 1e-5,
        "wsd_decay_steps": 16,
        "wsd_decay_style": "minus_sqrt",
        "lr_decay_style": "WSD",
    }
    write_universal(source, tmp_path, WriteOptions(universal_style=style))
    training = opened(tmp_path).training

    assert training is not None
    assert training.scheduler == source.training.scheduler


def test_unsupported_models_and_missing_optimizers_are_refused(tmp_path: Path) -> None:
    args = ROUND_TRIPS["llama-everything"]
    notes = write_universal(random_source(args, optimizer=False), tmp_path / "out")
    for part in (
        "window_size",
        "use_rope_scaling",
        "qk_layernorm",
        "add_qkv_bias",
        "moments are zero",
    ):
        assert any(part in note for note in notes), part

    back = opened(tmp_path / "out")
    assert not read_whole(back, optimizer_key("exp_avg", QKV)).any()
    assert back.training is not None
    assert back.training.iteration == 0


def test_qkv_block_layout(tmp_path: Path) -> None:
    """The layout follows from the arguments, or from --universal-qkv-layout."""
    source = random_source(GPT_ARGS)
    write_universal(source, tmp_path / "out", WriteOptions(2, qkv_blocks=True))
    assert torch.equal(read_whole(opened(tmp_path / "out"), QKV), source.values[QKV])

    misread = read_whole(opened(tmp_path / "out", qkv_layout="groups"), QKV)
    assert not torch.equal(misread, source.values[QKV])

    write_universal(MemorySource(source.args | {"x": 1}, source.values), tmp_path / "plain")
    assert not torch.equal(
        read_whole(opened(tmp_path / "plain", {"tensor_model_parallel_size": 2}, "tp-blocks"), QKV),
        source.values[QKV],
    )
    with pytest.raises(ValueError, match="is not one of groups, tp-blocks"):
        opened(tmp_path / "plain", qkv_layout="thirds")

    llama = random_source(LLAMA_ARGS)
    with pytest.raises(ValueError, match="no --group-query-attention"):
        write_universal(llama, tmp_path / "llama", WriteOptions(2, qkv_blocks=True))

    write_universal(llama, tmp_path / "llama")
    with pytest.raises(ValueError, match="something else than grouped-query attention"):
        opened(tmp_path / "llama", qkv_layout="tp-blocks")


def edit(path: Path, change: Any) -> None:
    value = torch.load(path, weights_only=False)
    torch.save(change(value), path)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Write a plain GPT as a universal checkpoint; return the inner directory."""
    write_universal(random_source(GPT_ARGS), tmp_path / "written")
    return at(tmp_path / "written")


def test_directory_without_arguments_requires_flags(written: Path) -> None:
    """Arguments that shapes and names imply are inferred, the others are flags."""
    expected = opened(written)
    edit(
        written / "mp_rank_00_model_states.pt",
        lambda state: {k: v for k, v in state.items() if k != "args"},
    )

    with pytest.raises(ValueError, match="give --num-attention-heads"):
        opened(written)

    source = opened(written, {"num_attention_heads": 4})
    assert source.tensors == expected.tensors
    assert all(
        torch.equal(read_whole(source, key), read_whole(expected, key)) for key in source.tensors
    )

    edit(written / "mp_rank_00_model_states.pt", lambda s: s | {"universal_checkpoint_info": {}})
    assert (
        opened(written, {"num_attention_heads": 4}).tensors == expected.tensors
    )  # vocab_tensor tells

    def unmark(entry: dict) -> dict:
        return {key: value for key, value in entry.items() if key != "vocab_tensor"}

    edit(written / "zero" / "tied_modules.embed.word_embeddings.weight" / "fp32.pt", unmark)

    with pytest.raises(
        ValueError,
        match=r"does not separate tokens from padding: give --vocab-size \(rows: 67\)",
    ):
        opened(written, {"num_attention_heads": 4})

    shorter = opened(written, {"num_attention_heads": 4, "vocab_size": 60})
    assert shorter.tensors[WORD_EMBEDDINGS].shape == (60, 32)


def test_position_embedding_type_is_required(tmp_path: Path) -> None:
    write_universal(random_source(LLAMA_ARGS), tmp_path / "out")
    converted = at(tmp_path / "out")
    edit(
        converted / "mp_rank_00_model_states.pt",
        lambda state: {k: v for k, v in state.items() if k != "args"},
    )

    with pytest.raises(ValueError, match="give --position-embedding-type"):
        opened(converted, {"num_attention_heads": 4})

    source = opened(converted, {"num_attention_heads": 4, "position_embedding_type": "rope"})
    assert source.args["num_query_groups"] == 2
    assert source.args["swiglu"]


def test_flat_tensors_of_zero_3(written: Path) -> None:
    """Every rank has a model-state file, tensors are flat, and the vocabulary is padded."""
    expected = opened(written)
    values = {key: read_whole(expected, key) for key in expected.tensors}
    model_state = written / "mp_rank_00_model_states.pt"
    shutil.copy(model_state, written / "zero_pp_rank_1_mp_rank_00_model_states.pt")
    model_state.rename(written / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    for path in (written / "zero").glob("*/[fe]*.pt"):
        edit(path, lambda entry: entry["param"].flatten())
    columns = values[WORD_EMBEDDINGS].shape[1]
    for path in (written / "zero").glob("*word_embeddings.weight/[fe]*.pt"):
        edit(path, lambda flat: torch.cat([flat, torch.ones(3 * columns)]))
    assert find_problem(written) is None

    source = opened(written)
    assert source.tensors == expected.tensors
    assert all(torch.equal(read_whole(source, key), value) for key, value in values.items())

    box = source.tensors[QKV].read((7, 3), (11, 5))
    assert torch.equal(box, values[QKV][7:18, 3:8])


def exclude_embedding(groups: list[dict[str, Any]], shapes: list[dict[str, Any]]) -> str:
    name = "tied_modules.embed.word_embeddings.weight"
    shapes[1][name] = shapes[0].pop(name)
    return rf"{name} is in a parameter group without weight decay"


def split_group(groups: list[dict[str, Any]], shapes: list[dict[str, Any]]) -> str:
    groups.append(groups[0] | {"lr": 0.5 * groups[0]["lr"]})
    shapes.append({})
    return "parameter groups have different values of lr"


def test_weight_decay_of_all_parameters_is_kept(written: Path, tmp_path: Path) -> None:
    """One group, as of an optimizer that DeepSpeed makes. Universal files cannot express it."""
    state = torch.load(written / "mp_rank_00_model_states.pt", weights_only=False)
    del state["megatron_param_groups"]  # an entry of this program
    state["param_shapes"] = [state["param_shapes"][0] | state["param_shapes"][1]]
    torch.save(state, written / "mp_rank_00_model_states.pt")
    edit(
        written / "zero" / "optimizer_state.pt",
        lambda optimizer: optimizer | {"param_groups": optimizer["param_groups"][:1]},
    )
    source = opened(written)

    assert source.training is not None
    assert source.training.param_groups is not None

    groups = source.training.param_groups
    assert [group["wd_mult"] for group in groups] == [1.0, 1.0]
    assert groups[0]["weight_decay"] == groups[1]["weight_decay"] == 0.1
    with pytest.raises(ValueError, match="weight decay of biases and norms, which DeepSpeed's"):
        convert(written, tmp_path / "again", "universal")


@pytest.mark.parametrize("change", [exclude_embedding, split_group])
def test_other_parameter_groups_are_refused(written: Path, change: Any) -> None:
    """Training would continue with other hyperparameters of some parameters."""
    state = torch.load(written / "mp_rank_00_model_states.pt", weights_only=False)
    del state["megatron_param_groups"]  # an entry of this program
    optimizer = torch.load(written / "zero" / "optimizer_state.pt")
    torch.save(state, written / "mp_rank_00_model_states.pt")
    assert opened(written).training is not None

    message = change(optimizer["param_groups"], state["param_shapes"])
    torch.save(state, written / "mp_rank_00_model_states.pt")
    torch.save(optimizer, written / "zero" / "optimizer_state.pt")

    with pytest.raises(ValueError, match=f"{message}.*--no-optim"):
        opened(written)

    weights = UniversalSource(written, ReadOptions(no_optim=True))
    assert weights.training is not None
    assert weights.training.param_groups is None


def test_frozen_parameters_are_refused(written: Path) -> None:
    folder = next((written / "zero").glob("*word_embeddings.weight"))
    shape = torch.load(folder / "fp32.pt")["param"].shape
    shutil.rmtree(folder)
    edit(
        written / "mp_rank_00_model_states.pt",
        lambda state: state | {"frozen_param_shapes": {folder.name: shape}},
    )

    with pytest.raises(ValueError, match=rf"leaves out frozen parameters \({folder.name}\)"):
        opened(written)


def test_dynamic_loss_scale_is_reported_as_lost(written: Path) -> None:
    assert opened(written).unused == []
    edit(
        written / "zero" / "optimizer_state.pt",
        lambda state: state | {"dynamic_loss_scale": True},
    )
    assert opened(written).unused == ["state: loss_scaler"]


def test_damaged_moments_are_refused(written: Path) -> None:
    moment = written / "zero" / "2.input_layernorm.weight" / "exp_avg.pt"
    content = moment.read_bytes()

    def read_moment() -> torch.Tensor:
        return read_whole(opened(written), optimizer_key("exp_avg", LAYER_NORM))

    moment.unlink()
    missing = r"is incomplete: .*2\.input_layernorm\.weight/exp_avg\.pt is missing"
    with pytest.raises(ValueError, match=missing):
        read_moment()

    moment.write_bytes(content[:300])
    with pytest.raises(ValueError, match=r"exp_avg\.pt"):
        read_moment()

    for value, description in (
        (torch.zeros(2), r"float32 of shape \[2\]"),
        (torch.zeros(32, dtype=torch.int), "int32"),
    ):
        moment.write_bytes(content)
        edit(moment, lambda _, value=value: {"param": value})
        message = rf"exp_avg\.pt of 2\.input_layernorm\.weight has torch\.{description}"
        with pytest.raises(ValueError, match=message):
            read_moment()


def test_steps_must_be_equal(written: Path) -> None:
    step_file = written / "zero" / "3.mlp.dense_h_to_4h.bias" / "step.pt"
    edit(step_file, lambda step: step + 1)
    with pytest.raises(ValueError, match=r"different steps: \[7, 8\]"):
        opened(written)


def test_missing_and_foreign_parameters_are_refused(written: Path, tmp_path: Path) -> None:
    bias = written / "zero" / "3.mlp.dense_4h_to_h.bias"
    shutil.move(bias, tmp_path / "bias")
    with pytest.raises(ValueError, match=r"it lacks decoder\.layers\.1\.mlp\.linear_fc2\.bias"):
        opened(written)

    shutil.move(tmp_path / "bias", bias)
    (written / "zero" / "5.moe.gate.weight").mkdir()
    with pytest.raises(ValueError, match=r"5\.moe\.gate\.weight are not parameters of a GPT"):
        opened(written)


def test_arguments_must_fit_the_shapes(written: Path, tmp_path: Path) -> None:
    model_states = written / "mp_rank_00_model_states.pt"

    def change_size(state: dict) -> dict:
        args = vars(state["args"]) | {"ffn_hidden_size": 100}
        return state | {"args": argparse.Namespace(**args)}

    edit(model_states, change_size)
    message = r"dense_h_to_4h\.weight has shape \[128, 32\], its arguments make it \[100, 32\]"
    with pytest.raises(ValueError, match=message):
        opened(written)

    model_states.unlink()
    with pytest.raises(ValueError, match="it has no mp_rank_00_model_states.pt"):
        opened(written)
    with pytest.raises(ValueError, match="is not a DeepSpeed universal checkpoint"):
        opened(tmp_path)


def test_models_of_transformers_are_refused_with_the_way_out(tmp_path: Path) -> None:
    """DeepSpeed 0.19.8 stores experts under the names of its AutoEP layers."""
    torch.save({}, tmp_path / "mp_rank_00_model_states.pt")
    folder = tmp_path / "zero/model.layers.0.mlp.experts.w1"
    folder.mkdir(parents=True)
    entry = {"param": torch.zeros(4, 24, 32), "is_expert_param": True, "ep_num_experts": 4}
    torch.save(entry, folder / "fp32.pt")

    with pytest.raises(ValueError, match=r"with or without experts \(AutoEP\).*save_16bit_model"):
        opened(tmp_path)


LAYER_NORM = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"


def test_unsupported_arguments_are_refused(written: Path) -> None:
    def squared(state: dict) -> dict:
        state["args"] = argparse.Namespace(
            **vars(state["args"]),
            apply_residual_connection_post_layernorm=True,
        )
        return state

    edit(written / "mp_rank_00_model_states.pt", squared)

    with pytest.raises(
        ValueError,
        match="apply_residual_connection_post_layernorm = True, which is not supported",
    ):
        opened(written)


def test_bloom_to_transformers(golden: Path, tmp_path: Path) -> None:
    """A BLOOM-era directory straight to transformers, whose model gives the golden logits."""
    from transformers import AutoModelForCausalLM

    name = golden / "bloom_bf16_tp2_pp2"
    write_huggingface(opened(name, {"bf16": False}), tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf",
        attn_implementation="eager",
    ).eval()
    with torch.no_grad():
        assert_close(
            model(array(name / "input_ids.npy")).logits,
            array(name / "logits.npy"),
            atol=1e-5,
            rtol=0,
        )


def test_yarn_is_reported_as_unsupported_by_other_readers(tmp_path: Path) -> None:
    yarn = LLAMA_ARGS | {"rope_type": "yarn", "rotary_scaling_factor": 4.0}
    lost = [
        write_universal(random_source(args), tmp_path / str(n))
        for n, args in enumerate((LLAMA_ARGS, yarn))
    ]
    assert [any(note.startswith("rope_type: ") for note in notes) for notes in lost] == [
        False,
        True,
    ]


def test_unsupported_model_is_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="--rotary-interleaved: Megatron-DeepSpeed has no such model",
    ):
        write_universal(random_source(LLAMA_ARGS | {"rotary_interleaved": True}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_interrupted_write_is_not_a_checkpoint(tmp_path: Path) -> None:
    class Failing(MemorySource):
        @property
        def tensors(self):
            def fail(offset, shape):
                raise OSError("disk full")

            tensors = super().tensors
            for key, tensor in tensors.items():
                if key.endswith("exp_avg_sq.decoder.final_layernorm.weight"):
                    tensors[key] = dataclasses.replace(tensor, read=fail)
            return tensors

    source = random_source(GPT_ARGS)
    with pytest.raises(OSError, match="disk full"):
        write_universal(Failing(source.args, source.values, source.training), tmp_path / "out")
    assert not (tmp_path / "out" / "latest_universal").exists()
    assert not list_formats(tmp_path / "out")


def test_impossible_names_and_sizes_are_refused(written: Path) -> None:
    """More heads than columns, two names of one parameter, an embedding that is not a matrix."""

    def too_many(state: dict) -> dict:
        del state["args"]
        return state

    edit(written / "mp_rank_00_model_states.pt", too_many)
    given = {"num_attention_heads": 1000, "position_embedding_type": "learned_absolute"}
    with pytest.raises(ValueError, match="--num-attention-heads|hidden_size"):
        opened(written, given)

    shutil.copytree(written / "zero" / "4.weight", written / "zero" / "5.weight")

    with pytest.raises(
        ValueError,
        match=r"\d+\.weight and other names are the same parameters of a GPT",
    ):
        opened(written)

    shutil.rmtree(written / "zero" / "5.weight")
    (embedding,) = written.glob("zero/*.word_embeddings.weight/fp32.pt")
    edit(embedding, lambda _: {"param": torch.tensor(1.0)})

    with pytest.raises(ValueError, match="has no word embedding"):
        opened(written)
