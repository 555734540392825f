"""Checkpoints of HybridModel, and optimizers of Megatron-LM that are not converted."""

import argparse

import numpy as np
import pytest
import torch

from megatron.conversion.checkpoint_conversion import compare, convert
from megatron.conversion.editing.edits import describe_model
from megatron.conversion.megatron_lm.hybrid import make_gpt_arguments
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import ReadOptions, WriteOptions
from megatron.core.dist_checkpointing import (
    CheckpointError,
    Reader,
    ShardedTensor,
    load_common,
    read_metadata,
    save,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.run_checkpoint.formats import find_checkpoint, open_found
from megatron.core.run_checkpoint.keys import is_weight
from tests.support.compare import assert_same, read_all
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.support.unpacked import unpacked

MOE_ARGS = LLAMA_ARGS | {"num_experts": 4, "moe_ffn_hidden_size": 24}
LATENT_ARGS = LLAMA_ARGS | {
    "group_query_attention": False,
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
# In golden/megatron_hybrid/patterns
PATTERNS = {
    "dense_first": "*-*E",
    "latent": "+-+E",
    "predicting": "*-*E/*E/*E",
    "latent_predicting": "+-+-/+-",
}


def test_golden_file_equals_its_source(tmp_path_factory):
    actual = open_checkpoint(unpacked(tmp_path_factory, "megatron_hybrid/llama"))
    source = read_all(random_source(LLAMA_ARGS))
    weights = {key: value for key, value in source.items() if not key.startswith("optimizer.")}
    assert_same(read_all(actual), weights)
    assert actual.args["num_layers"] == 2


@pytest.mark.parametrize("name", PATTERNS)
def test_losses_are_those_of_hybrid_model(tmp_path_factory, name):
    """Losses of the next token and of each depth of prediction, in training mode, and logits."""
    directory = unpacked(tmp_path_factory, "megatron_hybrid/patterns") / name
    source = open_checkpoint(directory)
    assert source.unused == []

    model = GPTModel(describe_model(source), make_vocab_size_divisible_by=1)
    weights = {key: value for key, value in read_all(source).items() if is_weight(key)}
    assert weights.keys() == model.sharded_state_dict().keys()

    for key, entry in model.sharded_state_dict().items():
        for box in entry.boxes:
            box.tensor.copy_(source.tensors[key].read(box.offset, box.tensor.shape))

    arrays = np.load(directory / "expected.npz")
    expected = {key: torch.from_numpy(arrays[key]) for key in arrays.files}
    tokens = expected["tokens"]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(tokens.shape)
    losses = model(tokens, positions, labels=expected["labels"], loss_mask=mask)
    if "mtp_losses" in expected:
        depths = losses.mtp_totals / losses.mtp_num_tokens
        torch.testing.assert_close(depths, expected["mtp_losses"], atol=2e-6, rtol=1e-6)
        losses = losses.next_token

    torch.testing.assert_close(losses, expected["losses"], atol=2e-6, rtol=1e-6)

    logits = model.eval()(tokens, positions)
    torch.testing.assert_close(logits, expected["logits"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", PATTERNS)
def test_written_checkpoint_has_all_tensors_of_hybrid_model(tmp_path, tmp_path_factory, name):
    """Keys and values of weights and optimizer are those that Megatron-core wrote."""
    directory = unpacked(tmp_path_factory, "megatron_hybrid/patterns") / name
    options = WriteOptions(hybrid_layers=True)
    convert(directory, tmp_path / "ours", "torch_dist", options=options)
    args = load_common(tmp_path / "ours/iter_0000002")["args"]
    assert (args.num_layers, args.hybrid_layer_pattern) == (4, PATTERNS[name])

    ours = Reader(tmp_path / "ours/iter_0000002")
    theirs = Reader(directory / "iter_0000002")
    assert ours.metadata.tensors.keys() == theirs.metadata.tensors.keys()
    for key in theirs.metadata.tensors:
        assert torch.equal(ours.view(key).read_all(), theirs.view(key).read_all()), key

    requested = {key for key in theirs.metadata.objects if "_extra_state" in key}
    assert requested <= ours.metadata.objects.keys()


def test_patterns_of_layers_count_those_of_hybrid_model(tmp_path):
    """Layer i of the GPT model attends in layer 2 i, also if every n-th layer has no window."""
    args = LLAMA_ARGS | {
        "num_layers": 3,
        "window_size": (4, 0),
        "window_attn_skip_freq": 2,
        "no_rope_freq": [0, 1, 0],
        "decoder_first_pipeline_num_layers": 1,
    }
    write_torch_dist(random_source(args, optimizer=False), tmp_path / "gpt")
    options = WriteOptions(hybrid_layers=True)
    convert(tmp_path / "gpt", tmp_path / "hybrid", "torch_dist", options=options)
    stored = load_common(tmp_path / "hybrid/release")["args"]

    assert stored.window_attn_skip_freq == [1, 1, 0, 0, 1, 1]
    assert stored.no_rope_freq == [0, 0, 1, 1, 0, 0]
    assert stored.decoder_first_pipeline_num_layers == 2

    read = open_checkpoint(tmp_path / "hybrid").args
    assert read["window_attn_skip_freq"] == [1, 0, 1]
    assert read["no_rope_freq"] == [0, 1, 0]
    assert read["decoder_first_pipeline_num_layers"] == 1

    # Of six layers every third has no window: the second MLP, and the last one.
    arguments = argparse.Namespace(window_attn_skip_freq=3, no_rope_freq=3)
    gpt = make_gpt_arguments(arguments, "*-*-*-", [])
    assert (gpt.window_attn_skip_freq, gpt.no_rope_freq) == ([1, 0, 1], [0, 1, 0])
    with pytest.raises(ValueError, match=r"no_rope_freq is \[0, 1\]: layers for multi-token"):
        make_gpt_arguments(argparse.Namespace(no_rope_freq=3), "*-*-/*-", [])


@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        (LLAMA_ARGS, "*-*-"),
        (LATENT_ARGS | {"mtp_num_layers": 1}, "+-+-/+-"),
        (MOE_ARGS, "*E*E"),
        (MOE_ARGS | {"moe_layer_freq": [0, 1]}, "*-*E"),
    ],
    ids=["dense", "latent", "experts", "mixed"],
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
    assert "decoder.layers.2.self_attention.linear_proj._extra_state/shard_0_1" in metadata.objects

    if args is LLAMA_ARGS:
        golden = unpacked(tmp_path_factory, "megatron_hybrid/llama") / "iter_0000007"
        weights = {key for key in metadata.tensors if not key.startswith("optimizer.")}
        assert weights == read_metadata(golden).tensors.keys()

    # And back, as convert.py and as a run read it.
    checkpoint = find_checkpoint(tmp_path / "hybrid")
    for actual in (open_checkpoint(tmp_path / "hybrid"), open_found(checkpoint)):
        assert compare(source, actual) == len(source.tensors)
        assert actual.training.param_groups == source.training.param_groups
        assert actual.args["num_layers"] == 2


def test_other_layers_are_rejected(tmp_path):
    def save_layers(name, *keys):
        state = {}
        for key in ("embedding.word_embeddings.weight", "decoder.final_norm.weight", *keys):
            state[key] = ShardedTensor.replicated(key, torch.zeros(4, 4))
        save(state, tmp_path / name, common=load_common(tmp_path / "gpt"))

    write_torch_dist(random_source(LLAMA_ARGS), tmp_path / "gpt")
    attention = "decoder.layers.0.self_attention.linear_qkv.weight"
    save_layers("mamba", attention, "decoder.layers.1.mixer.in_proj.weight")

    with pytest.raises(CheckpointError, match=r"layer 1 of HybridModel has mixer: Mamba \(M\)"):
        open_checkpoint(tmp_path / "mamba")

    save_layers("whole", attention, "decoder.layers.0.mlp.linear_fc1.weight")
    with pytest.raises(CheckpointError, match=r"layer 0 of HybridModel has mlp, self_attention"):
        open_checkpoint(tmp_path / "whole")

    mlps = ("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc2.weight")
    depth = "mtp.layers.0.mtp_model_layer.layers"
    experts = (f"{depth}.0.self_attention.linear_qkv.weight", f"{depth}.1.mlp.router.weight")
    save_layers("depth", attention, *mlps, *experts)

    with pytest.raises(CheckpointError, match=r"depth 0 .* has the layers \*E, but .* \(\*-\)"):
        open_checkpoint(tmp_path / "depth")

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
