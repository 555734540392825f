"""Adapters have the gradients of `W + alpha / r B A`, and their flags are checked."""

import shlex
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

from megatron.core.models import GPTModel
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.adapters.adapted_layers import reset_magnitudes
from megatron.training.adapters.targets import add_adapters, find_unmatched_targets
from megatron.training.config.lora_options import LoraConfig
from megatron.training.config.parsing import parse_args
from tests.support.lora_runs import FLAGS, MODEL

GROUPS = 2
HEAD_DIM = 8
CONFIG = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=GROUPS,
    ffn_hidden_size=48,
    max_position_embeddings=16,
    vocab_size=40,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
EXPERTS = replace(
    CONFIG,
    num_experts=4,
    moe_ffn_hidden_size=48,
    moe_shared_expert_intermediate_size=48,
)
LORA = LoraConfig(lora_rank=3, lora_alpha=12.0)
TOKENS = torch.arange(20).view(2, 10) * 7 % 40


def build(lora=None, config=CONFIG):
    """Return the model with the same base weights; adapters have random values."""
    model = GPTModel(config)
    if lora is not None:
        add_adapters(model, lora, TensorParallelRng(0, 0))
    model.initialize(1)
    reset_magnitudes(model)
    generator = torch.Generator().manual_seed(2)
    for name, param in model.named_parameters():
        if ".lora_" in name and not name.endswith("lora_A"):
            param.data.add_(torch.randn(param.shape, generator=generator), alpha=0.1)
    return model


def compute_loss(model, weights=None):
    args = (TOKENS, torch.arange(10).expand(2, 10))
    kwargs = {"labels": TOKENS.roll(-1, 1)}
    if weights is None:
        return model(*args, **kwargs).mean()
    return functional_call(model, weights, args, kwargs).mean()


def find_rows(path):
    """Return the rows of a projection, as transformers orders them in matrices of their own."""
    if ".linear_qkv." in path:
        rows = torch.arange(64).view(GROUPS, 4, HEAD_DIM)
        heads = {"q_proj": rows[:, :2], "k_proj": rows[:, 2], "v_proj": rows[:, 3]}
        return heads[path.rpartition(".")[2]].flatten()

    if ".linear_fc1." in path:
        return torch.arange(96).view(2, 48)[int("up_proj" in path)]
    return slice(None)


def adapt_weight(weight, rows, matrices, path):
    """Return the weight with the change of one projection, by the formula."""
    adapted = weight[..., rows, :] + 4.0 * matrices[f"{path}.lora_B"] @ matrices[f"{path}.lora_A"]
    magnitude = matrices.get(f"{path}.lora_magnitude_vector")
    if magnitude is not None:
        norm = adapted.norm(dim=-1, keepdim=True).detach()
        adapted = magnitude.unsqueeze(-1) * adapted / norm
    result = weight.clone()
    result[..., rows, :] = adapted
    return result


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_gradients_are_those_of_the_formula(config, dora):
    adapted = build(replace(LORA, lora_dora=dora), config)
    loss = compute_loss(adapted)
    loss.backward()
    matrices = {
        name: param.detach().clone().requires_grad_()
        for name, param in adapted.named_parameters()
        if ".lora_" in name
    }
    plain = build(config=config)
    weights = {name: param.detach().clone() for name, param in plain.named_parameters()}
    paths = [name.removesuffix(".lora_A") for name in matrices if name.endswith("lora_A")]

    assert len(matrices) == (3 if dora else 2) * len(paths)
    assert len(paths) >= 2 * 7

    for path in paths:
        key = f"{path.rpartition('.')[0]}.weight"
        weights[key] = adapt_weight(weights[key], find_rows(path), matrices, path)
    expected = compute_loss(plain, weights)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)

    gradients = dict(adapted.named_parameters())
    for name, matrix in matrices.items():
        assert matrix.grad.norm() > 1e-6
        torch.testing.assert_close(gradients[name].grad, matrix.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dora", [False, True])
def test_new_adapters_do_not_change_the_model(dora):
    model = GPTModel(CONFIG)
    add_adapters(model, replace(LORA, lora_dora=dora), TensorParallelRng(0, 0))
    model.initialize(1)
    reset_magnitudes(model)
    torch.testing.assert_close(compute_loss(model), compute_loss(build()), rtol=1e-6, atol=0)


def test_targets_name_layers_or_projections():
    model = build(LoraConfig(lora_rank=2, lora_targets=["q_proj", "v_proj", "mlp.linear_fc2"]))
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert {name.split(".", 3)[3].rpartition(".")[0] for name in trained} == {
        "self_attention.linear_qkv.q_proj",
        "self_attention.linear_qkv.v_proj",
        "mlp.linear_fc2.down_proj",
    }

    compute_loss(model).backward()
    assert all(model.get_parameter(name).grad is not None for name in trained)


def test_targets_that_match_no_layer_are_errors():
    with pytest.raises(ValueError, match=r"linear_fc1x match no layer .* mlp\.linear_fc1\.up_proj"):
        build(LoraConfig(lora_rank=2, lora_targets=["linear_fc1x"]))
    paths = ["mlp.linear_fc1.up_proj"]
    targets = ["up_proj", "linear_fc1", "fc1", "router"]
    assert find_unmatched_targets(paths, targets) == ["fc1", "router"]


def test_dropout_changes_the_adapters_in_training_only():
    model = build(LoraConfig(lora_rank=3, lora_alpha=12.0, lora_dropout=0.5))
    expected = compute_loss(build(LORA))
    assert not torch.equal(compute_loss(model), expected)
    model.eval()
    assert torch.equal(compute_loss(model), expected)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "without a base model"),
        ("--lora-dora --lora-dropout 0.1", "--lora-dora and --lora-dropout 0.1 are mutually excl"),
        (
            "--num-experts 2 --moe-router-enable-expert-bias --moe-router-score-function sigmoid",
            "requires --moe-router-bias-update-rate 0",
        ),
        ("--use-mup", "--use-mup are mutually exclusive"),
        ("--compile", "--compile are mutually exclusive"),
        ("--ckpt-format torch", "requires --ckpt-format torch_dist"),
        ("--lora-base-encoding nf4 --log-params-norm", "nf4 with --log-params-norm, which needs"),
        (
            "--lora-base-encoding nf4 --transformer-impl transformer_engine --bf16 "
            "--fp8-format hybrid",
            "nf4 with --fp8-format hybrid: products with encoded weights are",
        ),
        ("--ema-decay 0.9", "--ema-decay 0.9 are mutually exclusive"),
    ],
)
def test_flags_that_contradict_adapters(flags, message):
    base = "" if not flags else f"--pretrained-checkpoint {MODEL}"
    with pytest.raises(ValueError, match=message):
        parse_args(shlex.split(f"{FLAGS} {base} {flags}"), 1)


def test_flags_of_adapters_require_a_rank():
    flags = FLAGS.replace("--lora-rank 4", "") + f"--load {MODEL} --finetune"
    with pytest.raises(ValueError, match="--lora-alpha 8.0 requires --lora-rank"):
        parse_args(shlex.split(flags), 1)
