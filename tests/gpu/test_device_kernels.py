"""The operations of a layer on a device against the same in fp32 on the CPU: values and gradients."""

import pytest
import torch

from megatron.core.module import Normal, ParamInfo
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel import TensorParallelRng, VocabParallelEmbedding, linear_cross_entropy
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.transformer_config import TransformerConfig

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # of the largest element
CPU = torch.device("cpu")
LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
    "group_query_attention": True, "num_query_groups": 2, "attention_dropout": 0.0,
}  # fmt: skip


def config(dtype: torch.dtype, **options) -> TransformerConfig:
    return TransformerConfig(1, 64, 4, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16, **options)


def attention(dtype, device, **options):
    rng = TensorParallelRng(0, 0, device)
    return SelfAttention(config(dtype, **LLAMA, **options), tp=Axis(), rng=rng, device=device)


MODULES = {
    "RMSNorm": lambda dtype, device: Norm(config(dtype, **LLAMA), 64, partial_grad=False, device=device),
    "LayerNorm": lambda dtype, device: Norm(config(dtype), 64, partial_grad=False, device=device),
    "SwiGLU": lambda dtype, device: MLP(config(dtype, **LLAMA), tp=Axis(), device=device),
    "GELU": lambda dtype, device: MLP(config(dtype), tp=Axis(), device=device),
    "attention": attention,
    "windows, norms of heads": lambda *place: attention(*place, window_size=(5, 0), qk_layernorm=True),
}


def results(module, values, dtype, device):
    """Output, gradient of the input, gradients of the parameters, in fp32 on the CPU."""
    with torch.no_grad():
        for param, value in zip(module.parameters(), values["weights"], strict=True):
            param.copy_(value)
    x = values["x"].to(device, dtype, copy=True).requires_grad_()
    y = module(x)
    y.backward(values["dy"].to(device, dtype))
    return [t.detach().float().cpu() for t in (y, x.grad, *(param.grad for param in module.parameters()))]


def assert_close(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_layers(name, dtype, device):
    torch.manual_seed(0)
    reference = MODULES[name](torch.float32, CPU)
    values = {"x": torch.randn(16, 2, 64).to(dtype), "dy": torch.randn(16, 2, 64).to(dtype)}
    values["weights"] = [(0.2 * torch.randn(param.shape)).to(dtype) for param in reference.parameters()]
    expected = results(reference, values, torch.float32, CPU)
    found = results(MODULES[name](dtype, torch.device(device)), values, dtype, device)
    assert_close(found, expected, TOLERANCES[dtype])


def loss(dtype, device, hidden, weight, labels):
    hidden, weight = (t.to(device, dtype, copy=True).requires_grad_() for t in (hidden, weight))
    losses = linear_cross_entropy(hidden, weight, labels.to(device), vocab_size=90, tp=Axis())
    losses.mean().backward()
    return [t.detach().float().cpu() for t in (losses, hidden.grad, weight.grad)]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_loss(dtype, device):
    torch.manual_seed(0)
    hidden, weight = torch.randn(16, 2, 64).to(dtype), (0.2 * torch.randn(96, 64)).to(dtype)
    labels = torch.randint(0, 90, (16, 2))
    logits = (hidden.double() @ weight.double().t())[..., :90]
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(16, 2)
    found = loss(dtype, device, hidden, weight, labels)
    assert_close(found[:1], [plain.float()], TOLERANCES[dtype])
    assert_close(found, loss(torch.float32, CPU, hidden, weight, labels), TOLERANCES[dtype])


def test_embedding_gradient_is_the_same_every_time(device):
    torch.manual_seed(0)
    tokens, dy = torch.randint(0, 8, (64, 4), device=device), torch.randn(64, 4, 32, device=device)
    grads = []
    for _ in range(3):
        module = VocabParallelEmbedding(8, 32, info=ParamInfo(Normal(0.1)), tp=Axis(), device=torch.device(device))
        module.initialize(1)
        module.weight.main_grad = torch.zeros(8, 32, device=device)
        module(tokens).backward(dy)
        grads.append(module.weight.main_grad)
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
    summed = torch.zeros(8, 32).index_add(0, tokens.cpu().flatten(), dy.cpu().flatten(0, 1))
    assert_close([grads[0].cpu()], [summed], 1e-5)
