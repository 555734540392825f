"""Maximal update parametrization: megatron-core's numbers, and the width does not matter."""

import json
import math

import numpy as np
import pytest
import torch

from megatron.core.distributed.distributed_data_parallel import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models import GPTModel
from megatron.core.module import Normal, param_info
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState
from megatron.core.run_checkpoint.keys import find_norm_key
from megatron.core.transformer.transformer_config import TransformerConfig
from tests import GOLDEN

DIRECTORY = GOLDEN / "megatron_mup"
CASES = json.loads((DIRECTORY / "hyperparameters.json").read_text())
CONFIG = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "vocab_size": 40,
    "position_embedding_type": "learned_absolute",
    "max_position_embeddings": 12,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.2,
    "use_mup": True,
}


def read_golden(prefix):
    values = {}
    with np.load(DIRECTORY / "mup.npz") as arrays:
        for key in arrays.files:
            if key.startswith(prefix):
                values[key.removeprefix(prefix)] = torch.from_numpy(arrays[key])
    return values


def rename_norms(values):
    """Return values under our keys, which name a norm after the projection that follows."""
    return {find_norm_key(key, values): value for key, value in values.items()}


def build(**changes):
    model = GPTModel(TransformerConfig(**CONFIG | changes), make_vocab_size_divisible_by=1)
    model.initialize(seed=3)
    return model


def wrap(model, config):
    ps = ParallelState.for_rank(ParallelConfig())
    chunk = DistributedDataParallel(model, DistributedDataParallelConfig(), ps.dp)
    return chunk, MegatronOptimizer([chunk], config, ps)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_megatron_core(case):
    model = build(**CASES[case]["fields"])
    weights = rename_norms(read_golden(f"{case}/weights/"))
    assert weights.keys() == model.sharded_state_dict().keys()
    model.load_state_dict(weights)
    batch = read_golden("")
    positions = torch.arange(12).expand(2, 12)
    losses = model(batch["tokens"], positions, labels=batch["labels"])
    losses.mean().backward()
    torch.testing.assert_close(losses, batch[f"{case}/losses"], atol=1e-6, rtol=1e-6)
    gradients = rename_norms(read_golden(f"{case}/gradients/"))
    for key, param in model.named_parameters():
        expected = gradients[key]
        scale = expected.abs().max().item()
        torch.testing.assert_close(param.grad, expected, atol=2e-6 * scale, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_initial_deviations_are_those_of_megatron_core(case):
    expected = CASES[case]["std"]
    for name, param in build(**CASES[case]["fields"]).named_parameters():
        init = param_info(param).init
        if not isinstance(init, Normal):
            continue
        layer_type = "hidden"
        if name.startswith(("embedding.", "output_layer.")):
            layer_type = "embedding"
        elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            layer_type = "output"
        assert init.std == pytest.approx(expected[layer_type], rel=1e-12), name


@pytest.mark.parametrize("rule", ["adam", "sgd", "muon"])
@pytest.mark.parametrize("case", CASES)
def test_hyperparameters_are_those_of_megatron_core(case, rule):
    model = build(**CASES[case]["fields"])
    config = OptimizerConfig(optimizer=rule, lr=1e-2, min_lr=1e-3, adam_eps=1e-6)
    chunk, optimizer = wrap(model, config)
    groups = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            groups[id(param)] = group
    group_of = {}
    for shard in optimizer.shards:
        for piece in shard.bucket.pieces():
            group_of[id(piece.param)] = groups[id(shard.param)]
    expected = rename_norms(CASES[case][rule])
    defaults = {"max_lr": 1e-2, "min_lr": 1e-3, "eps": 1e-6, "wd_mult": 1.0}
    for name, param in chunk.module.named_parameters():
        group = group_of[id(param)]
        for key, value in (defaults | expected[name]).items():
            if key in group:
                assert group[key] == pytest.approx(value, rel=1e-12), (name, key)


def measure_growth(width, steps=5, **changes):
    """Return the mean change of the logits after each step of Adam."""
    model = build(
        hidden_size=width,
        ffn_hidden_size=2 * width,
        kv_channels=width // 4,
        init_method_std=0.1,
        mup_base_hidden_size=32,
        mup_base_head_dim=8.0,
        **changes,
    )
    chunk, optimizer = wrap(model, OptimizerConfig(lr=5e-3, clip_grad=0.0, weight_decay=0.0))
    batch = read_golden("")
    positions = torch.arange(12).expand(2, 12)
    with torch.no_grad():
        first = model(batch["tokens"], positions)
    changes = []
    for _ in range(steps):
        chunk.zero_grad_buffer()
        losses = chunk(batch["tokens"], positions, labels=batch["labels"])
        losses.mean().backward()
        chunk.finish_grad_sync()
        optimizer.step()
        with torch.no_grad():
            logits = model(batch["tokens"], positions)
        differences = (logits - first).abs()
        changes.append(differences.mean().item())
    return changes


def test_changes_of_the_logits_do_not_grow_with_the_width():
    """The coordinate check of Yang et al. 2022."""
    narrow = measure_growth(64)
    wide = measure_growth(256)
    standard = measure_growth(256, use_mup=False)
    for step, change in enumerate(wide):
        ratio_to_narrow = change / narrow[step]
        assert 0.6 < ratio_to_narrow < 1.2, (step, narrow, wide)
        ratio_without_mup = standard[step] / change
        assert ratio_without_mup > 5, (step, wide, standard)


def test_base_model_is_the_model_without_mup():
    """At the base width only the factor of the scores remains, which a base head compensates."""
    plain = build(use_mup=False)
    base = build(mup_base_hidden_size=16, mup_base_head_dim=4.0)
    params_of_base = dict(base.named_parameters())
    for name, param in plain.named_parameters():
        assert torch.equal(param, params_of_base[name]), name
    assert plain.config.score_scale == 0.5
    assert base.config.score_scale == 0.5
    without_base_head = build(mup_base_head_dim=None)
    assert math.isclose(without_base_head.config.score_scale, 0.25)
