"""Multi-token prediction: the losses and gradients of megatron-core."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.models import GPTModel
from megatron.core.run_checkpoint.keys import find_norm_key
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.run import Loss, compute_objective
from pretrain_gpt import loss_func

GOLDEN = Path(__file__).parents[3] / "golden" / "megatron_mtp" / "llama.npz"
CONFIG = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "vocab_size": 40,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "mtp_num_layers": 2,
    "mtp_loss_scaling_factor": 0.3,
}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def read_golden(prefix):
    with np.load(GOLDEN) as arrays:
        return {
            key.removeprefix(prefix): torch.from_numpy(arrays[key])
            for key in arrays.files
            if key.startswith(prefix)
        }


def rename_norms(tensors):
    """Return tensors under our keys, which name a norm after the projection that follows."""
    return {find_norm_key(key, tensors): values for key, values in tensors.items()}


def build(**changes):
    model = GPTModel(TransformerConfig(**CONFIG | changes), make_vocab_size_divisible_by=1)
    model.initialize(seed=3)
    return model


def compute_loss(model):
    batch = read_golden("")
    tokens, labels, mask = batch["tokens"], batch["labels"], batch["loss_mask"]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    output = model(tokens, positions, labels=labels, loss_mask=mask)
    loss = loss_func(output.next_token, mask)
    return output, Loss(*loss[:2], output.mtp_totals, output.mtp_num_tokens)


@pytest.mark.parametrize("kind", ["mean", "per_token"])
@pytest.mark.parametrize("changes", [{}, RECOMPUTE])
def test_losses_and_gradients_are_those_of_megatron_core(kind, changes):
    model = build(**changes)
    weights = rename_norms(read_golden("weights/"))
    assert weights.keys() == model.sharded_state_dict().keys()
    model.load_state_dict(weights)
    output, loss = compute_loss(model)
    sums, num_tokens = loss.stack()
    means = sums / num_tokens
    compute_objective(means if kind == "mean" else sums, model.config).backward()

    expected = read_golden(f"{kind}/")
    torch.testing.assert_close(output.next_token, expected["losses"], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(means[1:], expected["mtp_losses"], atol=1e-6, rtol=1e-6)
    gradients = rename_norms(read_golden(f"{kind}/gradients/"))
    for key, param in model.named_parameters():
        scale = gradients[key].abs().max().item()
        torch.testing.assert_close(
            param.grad,
            gradients[key],
            atol=2e-6 * scale,
            rtol=1e-5,
            msg=lambda m, k=key: f"{k}: {m}",
        )


def test_factor_zero_does_not_change_the_gradients_of_the_model():
    plain = build(mtp_num_layers=None)
    batch = read_golden("")
    tokens, labels, mask = batch["tokens"], batch["labels"], batch["loss_mask"]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    loss_func(plain(tokens, positions, labels=labels), mask).total.backward()
    model = build(mtp_loss_scaling_factor=0.0)
    _, loss = compute_loss(model)
    compute_objective(loss.stack()[0], model.config).backward()
    params = dict(model.named_parameters())
    for key, param in plain.named_parameters():
        assert torch.equal(param.grad, params[key].grad), key


def test_logits_do_not_depend_on_the_depths():
    tokens = read_golden("")["tokens"]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    assert torch.equal(build()(tokens, positions), build(mtp_num_layers=0)(tokens, positions))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "alibi"}, r"rope or none \(now alibi\)"),
        ({"embedding_layernorm": True}, "--mtp-num-layers 2 and --embedding-layernorm are"),
    ],
)
def test_unsupported_combinations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**CONFIG | changes)
