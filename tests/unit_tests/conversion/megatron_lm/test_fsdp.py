"""Checkpoints of Megatron-FSDP equal the torch_dist checkpoints of the same state."""

from argparse import Namespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.conversion.checkpoint_conversion import compare, convert
from megatron.conversion.opening import open_checkpoint, require_checkpoint
from megatron.conversion.options import ReadOptions
from megatron.core.dist_checkpointing import CheckpointError, write_tracker
from megatron.core.run_checkpoint.formats import find_problem
from megatron.core.run_checkpoint.keys import split_key
from tests.support.compare import assert_same, read_all
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.support.unpacked import unpacked

MOE_ARGS = LLAMA_ARGS | {"num_experts": 4, "moe_ffn_hidden_size": 24}
CASES = {
    "dense_fp32": LLAMA_ARGS,
    "dense_bf16": LLAMA_ARGS | {"bf16": True, "params_dtype": torch.bfloat16},
    "experts_bf16": MOE_ARGS | {"bf16": True, "params_dtype": torch.bfloat16},
    "sgd_bf16": LLAMA_ARGS | {"optimizer": "sgd", "bf16": True, "params_dtype": torch.bfloat16},
}


@pytest.mark.parametrize(
    ("fsdp", "torch_dist"),
    [
        ("mixtral_fp32", "mixtral_fp32/single_fully_reshardable"),
        ("deepseek_fp32_initial", "deepseek_fp32/initial"),
    ],
)
def test_golden_files_equal_their_sources(tmp_path_factory, fsdp, torch_dist):
    converted = open_checkpoint(unpacked(tmp_path_factory, f"megatron_fsdp/{fsdp}"))
    original = open_checkpoint(unpacked(tmp_path_factory, f"megatron_moe/{torch_dist}"))
    assert_same(read_all(converted), read_all(original))
    assert converted.unused == []
    assert converted.training.param_groups == original.training.param_groups
    assert converted.training.scheduler == original.training.scheduler
    assert converted.training.iteration == original.training.iteration


def make_names(key, shape, args):
    """Return the (name, first row, expert) of each tensor that Megatron-FSDP stores of `key`."""
    experts = [None]
    names = [key]
    if ".experts.experts." in key:
        experts = range(shape[0])
        names = [f"{key.replace('.experts.experts.', '.experts.')}{e}" for e in experts]
    is_gated = ".linear_fc1.weight" in key
    for name, expert in zip(names, experts, strict=True):
        if is_gated:
            yield f"{name}_w", 0, expert
            yield f"{name}_v", 1, expert
        else:
            yield name, None, expert


def build_version_1(source):
    """Return the state dict that a run of version 1 saves, from Megatron-LM's source code."""
    args = Namespace(**source.args, consumed_train_samples=28, consumed_valid_samples=4)
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "num_floating_point_operations_so_far": 1.5e18,
        "opt_param_scheduler": source.training.scheduler,
        "rng_state": {"(0, 0)": [{"random_rng_state": (3, (1, 2), None)}]},
    }
    state["model"], states = split_tensors(source, "module.", "module.module.module.")
    meta = {}
    for key in source.tensors:
        parameter, kind = split_key(key)
        if kind == "param":
            has_decay = len(source.tensors[key].shape) > 1
            meta[f"module.module.module.{parameter}"] = source.training.param_groups[not has_decay]

    state["optimizer"] = {"state": states, "param_to_group_meta": meta}
    return state


def split_tensors(source, wrappers, optimizer_wrappers):
    """Return weights (the fp32 main parameters) and moments by name."""
    model = {}
    states: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in source.values.items():
        parameter, state = split_key(key)
        if state is None:
            continue
        for name, half, expert in make_names(parameter, value.shape, source.args):
            shard = value if expert is None else value[expert]
            if half is not None:
                shard = shard.chunk(2)[half]
            if state == "param":
                model[wrappers + name] = shard.clone()
            else:
                states.setdefault(optimizer_wrappers + name, {})[state] = shard.clone()
    return model, states


def test_layers_for_prediction_have_the_name_of_their_module(tmp_path):
    """Megatron-LM's converter renames them from torch_dist's name (0.17 and later)."""
    source = random_source(LLAMA_ARGS | {"mtp_num_layers": 2})
    state = build_version_1(source)
    for tensors in (state["model"], state["optimizer"]["state"]):
        for name in list(tensors):
            tensors[name.replace(".transformer_layer.", ".mtp_model_layer.")] = tensors.pop(name)
    assert any("mtp.layers.1.mtp_model_layer.mlp" in name for name in state["model"])

    state["common_state/shard_0_1"] = {"args": state["args"]}  # copied from torch_dist files
    dcp.save(state, checkpoint_id=tmp_path / "run/iter_0000007")
    write_tracker(tmp_path / "run", 7)
    actual = open_checkpoint(tmp_path / "run")

    assert actual.tensors.keys() == source.tensors.keys()
    assert compare(source, actual) == len(source.tensors)
    assert actual.unused == []


@pytest.mark.parametrize("case", CASES)
def test_version_1_is_read_with_its_optimizer(tmp_path, case):
    source = random_source(CASES[case])
    dcp.save(build_version_1(source), checkpoint_id=tmp_path / "run/iter_0000007")
    write_tracker(tmp_path / "run", 7)
    actual = open_checkpoint(tmp_path / "run")

    assert compare(source, actual) == len(source.tensors)
    assert actual.unused == []
    assert actual.training.param_groups == source.training.param_groups
    assert actual.training.scheduler == source.training.scheduler
    assert (actual.training.iteration, actual.training.consumed_train_samples) == (7, 28)

    # Weights alone, and as a checkpoint of this program.
    weights = open_checkpoint(tmp_path / "run", read_options=ReadOptions(no_optim=True))
    assert not any(key.startswith("optimizer.") for key in weights.tensors)
    assert weights.training.param_groups is None

    convert(tmp_path / "run", tmp_path / "ours", "torch_dist", verify=True)


def test_foreign_tensors_are_copied_bitwise(tmp_path):
    """Tensors of the model that are not its parameters, of any shape and dtype."""
    foreign = {
        "visual.patch_embed.weight": torch.randn(6, 3, 2).bfloat16(),
        "decoder.layers.0.indexer.weight_w": torch.arange(12, dtype=torch.int8).view(3, 4),
        "num_batches": torch.tensor(7),
    }
    source = random_source(LLAMA_ARGS)
    state = build_version_1(source)
    for name, value in foreign.items():
        state["model"][f"module.{name}"] = value
    dcp.save(state, checkpoint_id=tmp_path / "run/iter_0000007")
    write_tracker(tmp_path / "run", 7)
    left_out = open_checkpoint(tmp_path / "run")
    assert left_out.unused == sorted(f"model.module.{name}" for name in foreign)

    keep = ReadOptions(keep_foreign=True)
    convert(tmp_path / "run", tmp_path / "ours", "torch_dist", read_options=keep, verify=True)
    found = open_checkpoint(tmp_path / "ours", read_options=keep)
    for name, value in foreign.items():
        zeros = (0,) * value.dim()
        copied = found.tensors[f"foreign.{name}"].read(zeros, tuple(value.shape))
        assert copied.dtype == value.dtype
        assert torch.equal(copied, value)


@pytest.mark.parametrize("case", ["dense_fp32", "dense_bf16"])
def test_version_2_takes_the_model_from_flags(tmp_path, case):
    """Version 2 saves torch's state dicts of the model and of the optimizer, without arguments."""
    source = random_source(CASES[case])
    model, states = split_tensors(source, "", "")
    model = {name: value for name, value in model.items() if not name.endswith(("_w", "_v"))}
    states = {name: value for name, value in states.items() if not name.endswith(("_w", "_v"))}
    for key, value in source.values.items():  # version 2 does not separate gate and up
        parameter, kind = split_key(key)
        if ".linear_fc1.weight" in key and kind == "param":
            model[parameter] = value
        elif ".linear_fc1.weight" in key and kind is not None:
            states.setdefault(parameter, {})[kind] = value

    groups = []
    for index, group in enumerate(source.training.param_groups):
        group = {name: value for name, value in group.items() if name != "step"}
        members = [name for name in model if (model[name].dim() == 1) == bool(index)]
        groups.append(group | {"params": members})

    for state in states.values():
        state["step"] = torch.tensor(7.0)
    optimizer = {"state": states, "param_groups": groups}
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "run")

    with pytest.raises(CheckpointError, match="no arguments are stored.*--num-layers"):
        open_checkpoint(tmp_path / "run")

    actual = open_checkpoint(tmp_path / "run", read_options=ReadOptions(args=source.args))
    assert compare(source, actual) == len(source.tensors)
    assert actual.unused == []
    assert actual.training.param_groups == source.training.param_groups


def test_damage_is_reported(tmp_path):
    source = random_source(LLAMA_ARGS)
    state = build_version_1(source)
    del state["model"]["module.decoder.layers.1.mlp.linear_fc1.weight_v"]
    dcp.save(state, checkpoint_id=tmp_path / "half")

    with pytest.raises(CheckpointError, match="lacks decoder.layers.1.mlp.linear_fc1.weight"):
        open_checkpoint(tmp_path / "half")

    state = build_version_1(source)
    state["model"]["module.decoder.layers.1.mlp.linear_fc2.weight"] = torch.ones(32, 49)
    dcp.save(state, checkpoint_id=tmp_path / "wide")

    with pytest.raises(CheckpointError, match=r"weight has shape \(32, 49\), which is not a part"):
        open_checkpoint(tmp_path / "wide")

    dcp.save(build_version_1(source), checkpoint_id=tmp_path / "run/iter_0000007")
    shard = tmp_path / "run/iter_0000007/__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])

    assert "bytes instead of" in find_problem(shard.parent)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        require_checkpoint(tmp_path / "run")
