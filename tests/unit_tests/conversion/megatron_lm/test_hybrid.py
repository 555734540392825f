"""Checkpoints of HybridModel, and optimizers of Megatron-LM that are not converted."""

import pytest
import torch

from megatron.conversion.convert import compare, convert
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import ReadOptions, WriteOptions
from megatron.core.dist_checkpointing import (
    CheckpointError,
    ShardedTensor,
    load_common,
    read_metadata,
    save,
)
from megatron.core.run_checkpoint.formats import find_checkpoint, open_found
from tests.support.compare import assert_same, read_all
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.support.unpacked import unpacked

MOE_ARGS = LLAMA_ARGS | {"num_experts": 4, "moe_ffn_hidden_size": 24}


def test_golden_file_equals_its_source(tmp_path_factory):
    found = open_checkpoint(unpacked(tmp_path_factory, "megatron_hybrid/llama"))
    source = read_all(random_source(LLAMA_ARGS))
    weights = {key: value for key, value in source.items() if not key.startswith("optimizer.")}
    assert_same(read_all(found), weights)
    assert found.args["num_layers"] == 2


@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        (LLAMA_ARGS, "*-*-"),
        (MOE_ARGS, "*E*E"),
        (MOE_ARGS | {"moe_layer_freq": [0, 1]}, "*-*E"),
    ],
    ids=["dense", "experts", "mixed"],
)
def test_written_checkpoint_is_that_of_hybrid_model(tmp_path, tmp_path_factory, args, pattern):
    source = random_source(args)
    write_torch_dist(source, tmp_path / "gpt")
    options = WriteOptions(hybrid_layers=True)
    convert(tmp_path / "gpt", tmp_path / "hybrid", "torch_dist", options=options, verify=True)

    stored = load_common(tmp_path / "hybrid/iter_0000007")["args"]
    assert (stored.num_layers, stored.hybrid_layer_pattern) == (4, pattern)
    metadata = read_metadata(tmp_path / "hybrid/iter_0000007")
    assert "optimizer.state.exp_avg.decoder.layers.1.mlp.router.weight" in metadata.tensors or (
        pattern[1] == "-"
    )
    assert "output_layer._extra_state/shard_0_1" in metadata.objects
    assert "decoder.layers.2.self_attention.linear_qkv._extra_state/shard_0_1" in metadata.objects
    if args is LLAMA_ARGS:
        golden = unpacked(tmp_path_factory, "megatron_hybrid/llama") / "iter_0000007"
        weights = {key for key in metadata.tensors if not key.startswith("optimizer.")}
        assert weights == read_metadata(golden).tensors.keys()

    # And back, as convert.py and as a run read it.
    checkpoint = find_checkpoint(tmp_path / "hybrid")
    for found in (open_checkpoint(tmp_path / "hybrid"), open_found(checkpoint)):
        assert compare(source, found) == len(source.tensors)
        assert found.training.param_groups == source.training.param_groups
        assert found.args["num_layers"] == 2


def test_other_layers_are_rejected(tmp_path):
    def save_layers(name, *keys):
        state = {}
        for key in ("embedding.word_embeddings.weight", "decoder.final_norm.weight", *keys):
            state[key] = ShardedTensor.replicated(key, torch.zeros(4, 4))
        save(state, tmp_path / name, common=load_common(tmp_path / "gpt"))

    write_torch_dist(random_source(LLAMA_ARGS), tmp_path / "gpt")
    attention = "decoder.layers.0.self_attention.linear_qkv.weight"
    save_layers("mamba", attention, "decoder.layers.1.mixer.in_proj.weight")
    with pytest.raises(CheckpointError, match=r"layer 1 of HybridModel has mixer"):
        open_checkpoint(tmp_path / "mamba")
    save_layers("order", attention.replace("0", "1"), "decoder.layers.0.mlp.linear_fc1.weight")
    with pytest.raises(CheckpointError, match=r"layers of HybridModel are -\*"):
        open_checkpoint(tmp_path / "order")
    with pytest.raises(ValueError, match="mutually exclusive"):
        convert(
            tmp_path / "gpt",
            tmp_path / "out",
            "torch_dist",
            options=WriteOptions(hybrid_layers=True, stacked_layers=True),
        )


@pytest.mark.parametrize("prefix", ["", "chained_0."])
@pytest.mark.parametrize(
    ("optimizer", "state"),
    [("adaptive_muon", "moment2_buffer"), ("muon", "moment2_buffer"), ("soap", "Q_L")],
)
def test_other_optimizers_are_rejected_by_name(tmp_path, prefix, optimizer, state):
    """Several optimizers of one run number their keys: the optimizer must not be lost silently."""
    source = random_source(LLAMA_ARGS, optimizer=False)
    write_torch_dist(source, tmp_path / "gpt")
    common = load_common(tmp_path / "gpt")
    common["args"].optimizer = optimizer
    content = {}
    for key, value in source.values.items():
        content[key] = ShardedTensor.replicated(key, value)
    key = f"{prefix}optimizer.state.{state}.decoder.layers.0.mlp.linear_fc2.weight"
    content[key] = ShardedTensor.replicated(key, torch.zeros(32, 48))
    save(content, tmp_path / "run", common=common)
    with pytest.raises(CheckpointError, match=f"optimizer is {optimizer}.*--no-load-optim"):
        open_checkpoint(tmp_path / "run")
    weights = open_checkpoint(tmp_path / "run", read_options=ReadOptions(no_optim=True))
    assert compare(source, weights) == len(source.tensors)
