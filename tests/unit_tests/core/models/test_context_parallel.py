"""A sequence split over ranks gives the losses and gradients of the whole one, whatever a token may
see.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.models import GPTModel
from megatron.core.module import param_info
from megatron.core.parallel_state import ParallelConfig, ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.attention.kernels import (
    Block,
    CpuAttention,
    Scoring,
    attend,
    attend_backward,
)
from megatron.core.transformer.placement import ContextParallel, Placement, compute_local_positions
from megatron.core.transformer.transformer_block import TransformerLayer
from megatron.core.transformer.transformer_config import TransformerConfig

SEQ = 32
BATCH = 2
LLAMA = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "ffn_hidden_size": 48, "vocab_size": 53,
    "group_query_attention": True, "num_query_groups": 4, "max_position_embeddings": SEQ,
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
    "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
CASES = {  # what changes, and whether documents are masked
    "causal, rope, groups": ({}, False),
    "window": ({"window_size": (5, 0)}, False),
    "documents": ({}, True),
    "window, documents": ({"window_size": (9, 0)}, True),
    "alibi": ({"position_embedding_type": "alibi"}, False),
    "alibi, documents": ({"position_embedding_type": "alibi"}, True),
    "learned, biases": (
        {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "swiglu": False,
         "add_bias_linear": True, "group_query_attention": False}, False,
    ),
    "qk norm, recomputed attention": ({"qk_layernorm": True, "recompute_granularity": "selective"}, False),
    "softcap, window in every second layer": (
        {"attn_logit_softcapping": 0.1, "window_size": (5, 0), "window_attn_skip_freq": 2, "rotary_base_local": 50.0,
         "norm_placement": "both"}, False,
    ),
    "softcap, documents, norm across heads": (
        {"attn_logit_softcapping": 0.1, "qk_layernorm": True, "qk_layernorm_across_heads": True}, True,
    ),
    "sinks, window in every second layer": (
        {"softmax_type": "learnable", "window_size": (5, 0), "window_attn_skip_freq": 2}, False,
    ),
    "off-by-one, documents, recomputed attention": (
        {"softmax_type": "off-by-one", "recompute_granularity": "selective"}, True,
    ),
    "recomputed layers": (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, False,
    ),
}  # fmt: skip
WAYS = ["p2p", "all_gather", "a2a"]
MIXED = ["a2a", "p2p"]  # one for each layer


def batch(documents):
    tokens = torch.randint(53, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(1))
    whole = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(SEQ).expand(BATCH, SEQ),
        "weights": torch.linspace(0.5, 2.0, SEQ).expand(BATCH, SEQ),
    }
    if documents:  # of 11 tokens, ending in the midst of chunks
        whole["documents"] = torch.stack((torch.arange(SEQ), torch.arange(5, SEQ + 5))) // 11
    return whole


def losses_and_gradients(rank, world_size, cases, tp, way):
    """Of every case: this rank's positions, its losses there, {name: gradient of the whole batch},
    and its TP rank.
    """
    parallel = ParallelConfig(
        tp, 1, context_parallel_size=world_size // tp, cp_comm_type=way, sequence_parallel=tp > 1
    )
    ps = ParallelState.create(parallel) if world_size > 1 else ParallelState.for_rank(parallel)
    positions = compute_local_positions(SEQ, ps.cp.rank, ps.cp.size)
    return {case: (positions, *one_case(case, ps), ps.tp.rank) for case in cases}


def one_case(case, ps):
    changes, documents = CASES[case]
    cp = ContextParallel.from_parallel_state(ps)
    model = GPTModel(
        TransformerConfig(**(LLAMA | changes)),
        tp=ps.tp,
        cp=cp,
        sequence_parallel=ps.config.sequence_parallel,
        make_vocab_size_divisible_by=4,
        rng=TensorParallelRng(11, ps.tp.rank),
    )
    model.initialize(seed=3)
    part = cp.select_local(batch(documents))
    losses = model(
        part["tokens"], part["position_ids"], labels=part["labels"], documents=part.get("documents")
    )
    (losses * part["weights"]).sum().backward()
    for param in model.parameters():
        for axis in (ps.dp_cp, *([ps.tp] if param_info(param).partial_grad else [])):
            if axis.size > 1:
                dist.all_reduce(param.grad, group=axis.group)
    return losses.detach(), {name: param.grad for name, param in model.named_parameters()}


@pytest.fixture(scope="module")
def of_whole_sequences():
    return losses_and_gradients(0, 1, CASES, 1, "p2p")


def close(got, expected, what):
    torch.testing.assert_close(
        got, expected, atol=1e-5, rtol=1e-5, msg=lambda message: f"{what}: {message}"
    )


@pytest.mark.parametrize("way", [*WAYS, MIXED])
@pytest.mark.parametrize("cp", [2, 4])
def test_losses_and_gradients_are_those_of_whole_sequences(pool, of_whole_sequences, way, cp):
    held = []
    for results in pool.run(losses_and_gradients, cp, list(CASES), 1, way):
        for case, (positions, losses, gradients, _) in results.items():
            _, expected_losses, expected, _ = of_whole_sequences[case]
            close(losses, expected_losses[:, positions], case)
            for name, gradient in expected.items():
                close(gradients[name], gradient, f"{case}: {name}")
        held += positions.tolist()
    assert sorted(held) == list(range(SEQ))


@pytest.mark.parametrize("way", WAYS)
def test_with_tensor_and_sequence_parallelism(pool, of_whole_sequences, way):
    """TP2 x CP2: activations are [s / 4, b, h]; every rank of TP has its part of the gradients."""
    cases = [
        "causal, rope, groups",
        "alibi, documents",
        "learned, biases",
        "sinks, window in every second layer",
    ]
    of_tp_alone = pool.run(losses_and_gradients, 2, cases, 2, way)
    for results in pool.run(losses_and_gradients, 4, cases, 2, way):
        for case, (positions, losses, gradients, tp_rank) in results.items():
            close(losses, of_whole_sequences[case][1][:, positions], case)
            for name, gradient in of_tp_alone[tp_rank][case][2].items():
                close(gradients[name], gradient, f"{case}: {name}")


def saved_bytes(rank, world_size, way):
    """What a layer leaves in the graph, parameters and tables aside."""
    ps = ParallelState.create(ParallelConfig(context_parallel_size=world_size, cp_comm_type=way))
    config = TransformerConfig(
        **LLAMA | {"num_query_groups": 8}
    )  # older versions of torch keep a copy for each head
    layer = TransformerLayer(
        config, Placement(ps.tp, TensorParallelRng(0, 0), ContextParallel.from_parallel_state(ps))
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(64 // world_size, BATCH, 32, requires_grad=True)
    layer(x)  # the tables exist from now on
    rotary = layer.self_attention.rotary(len(x), x.dtype, x.device)
    lasting = {
        t.untyped_storage().data_ptr() for t in (*layer.parameters(), rotary.cos, rotary.sin)
    }
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in lasting:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    y.sum().backward()
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_keeps_a_part_of_the_activations(pool, way):
    """With a2a the output of attention twice: as its kernel gave it, and as the projection takes
    it.
    """
    (whole,) = pool.run(saved_bytes, 1, way)
    output = 64 * BATCH * 32 * 4
    assert pool.run(saved_bytes, 4, way) == [(whole + output * (way == "a2a")) / 4] * 4


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_kernels_of_a_block_are_those_of_attention(device, dtype, tolerance, masked):
    """Output and gradients of one block alone are torch's; its log-sum-exp is that of the scores."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (
        torch.randn(2, heads, 24, 16, generator=generator).to(device, dtype)
        for heads in (4, 2, 2, 4)
    )
    mask = torch.zeros(1, 1, 24, 24, dtype=dtype, device=device) if masked else None
    if mask is not None:
        mask[..., 7:] = torch.finfo(dtype).min / 2
    block = Block(slice(None), slice(None), causal=mask is None, mask=mask)
    out, lse = attend(q, k, v, block, Scoring())
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(
        *inputs, mask, is_causal=mask is None, enable_gqa=True
    )
    expected.backward(g)
    scores = q.float() @ k.repeat_interleave(2, 1).float().transpose(2, 3) / 4
    scores = scores + (mask if mask is not None else torch.full_like(scores, -torch.inf).triu(1))
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=tolerance, rtol=tolerance)
    for got, want in zip(
        (out, *attend_backward(g, q, k, v, out, lse, block, Scoring())),
        (expected, *inputs),
        strict=True,
    ):
        torch.testing.assert_close(
            got, want if want is expected else want.grad, atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("kind", ["causal", "seen", "added"])
def test_low_precision_attends_in_fp32_on_a_cpu(kind):
    """Bitwise the fp32 kernel's output, cast; gradients as close to fp32's as those of torch's bf16
    kernel.
    """
    generator = torch.Generator().manual_seed(2)
    q, g = torch.randn(2, 2, 8, 24, 16, generator=generator).bfloat16()
    k, v = torch.randn(2, 2, 4, 24, 16, generator=generator).bfloat16()
    seen = torch.ones(24, 24, dtype=torch.bool).tril() & ~torch.ones(24, 24, dtype=torch.bool).tril(
        -6
    )
    mask = {
        "causal": None,
        "seen": seen,
        "added": torch.zeros(1, 1, 24, 24).masked_fill(~seen, -3.5).bfloat16(),
    }[kind]

    def results(attention, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
        out = attention(
            *inputs, mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
        )
        out.backward(g.to(dtype))
        return [out.detach(), *(x.grad for x in inputs)]

    def sdpa(q, k, v, mask):
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=True, scale=0.2
        )

    exact = results(sdpa, torch.float32)
    torch_bf16 = results(sdpa, torch.bfloat16)
    ours = results(lambda q, k, v, mask: CpuAttention.apply(q, k, v, mask, 0.2), torch.bfloat16)
    assert torch.equal(ours[0], exact[0].bfloat16())
    for name, got, want, peer in zip(
        ("dq", "dk", "dv"), ours[1:], exact[1:], torch_bf16[1:], strict=True
    ):
        assert got.dtype == torch.bfloat16
        assert (got - want).abs().max() <= 1.1 * (peer - want).abs().max(), name
