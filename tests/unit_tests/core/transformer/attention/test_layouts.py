"""Memory layouts of the tensors that attention passes to kernels of CUDA, without a GPU."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core import private_operators
from megatron.core.parallel_state import Axis
from megatron.core.transformer.attention import blockwise
from megatron.core.transformer.attention.kernels import (
    Block,
    Documents,
    Scoring,
    attend,
    attend_backward,
)
from megatron.core.transformer.attention.masks import AttentionMask
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.fake_tensors import record_fake_calls
from tests.support.local_exchange import LocalExchange

LENGTH = 32
BATCH = 2
HEADS = 4
CUDA = torch.device("cuda")
EFFICIENT = "_scaled_dot_product_efficient_attention_backward"
FLASH = "_flash_attention_backward"
LOCAL = {  # head_dim, and whether there is a mask (ALiBi)
    "alibi": (16, True),
    "wide heads": (264, False),
    "misaligned heads, alibi": (12, True),
}
BLOCKWISE = {  # head_dim, and position embedding
    "alibi": (16, "alibi"),
    "wide heads": (264, "rope"),
    "misaligned heads, alibi": (12, "alibi"),
    "causal": (16, "rope"),
}


def make_heads(head_dim, num_heads=HEADS):
    """Return `[b, heads, s, d]` in the layout of a layer: `[s, b, heads, d]` in memory."""
    memory = torch.empty(LENGTH, BATCH, num_heads, head_dim, device=CUDA, dtype=torch.bfloat16)
    return memory.permute(1, 2, 0, 3)


def assert_kernels_are_not_misled(calls):
    """Check the layouts that kernel_backward.h and flash_bwd_kernel.h of torch assume."""
    num_checked = 0
    for operator, args in calls:
        if operator == EFFICIENT:
            num_checked += 1
            out = args[5]
            lse = args[6]
            _, heads, _, head_dim = out.shape
            assert out.stride()[2:] == (heads * head_dim, 1), (tuple(out.shape), out.stride())
            assert lse.stride(2) == 1
        elif operator == FLASH:
            num_checked += 1
            lse = args[5]
            assert lse.is_contiguous(), (tuple(lse.shape), lse.stride())

    assert num_checked > 0


def make_documents():
    """Return two documents in sample 0 and one in sample 1."""
    every_head = slice(None)
    slices = (
        (slice(0, 1), every_head, slice(0, 9)),
        (slice(1, 2), every_head, slice(0, LENGTH)),
        (slice(0, 1), every_head, slice(9, LENGTH)),
    )
    offsets = torch.empty(4, dtype=torch.int32, device=CUDA)
    return Documents(slices, offsets, LENGTH)


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("name", LOCAL)
def test_local_attention(name, has_documents):
    head_dim, is_masked = LOCAL[name]
    with record_fake_calls() as calls:
        query = make_heads(head_dim)
        key = make_heads(head_dim, 2)
        value = make_heads(head_dim, 2)
        documents = make_documents() if has_documents else None
        mask = None
        if is_masked:
            mask = torch.empty(1, HEADS, LENGTH, LENGTH, device=CUDA, dtype=torch.bfloat16)
        every = slice(None)
        block = Block(every, every, causal=not is_masked, mask=mask, documents=documents)

        out, lse = attend(query, key, value, block, Scoring())
        dout = make_heads(head_dim)
        attend_backward(dout, query, key, value, out, lse, block, Scoring())
        assert_kernels_are_not_misled(calls)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", BLOCKWISE)
def test_context_parallelism(name, rank):
    head_dim, positions = BLOCKWISE[name]
    config = TransformerConfig(1, 64, HEADS, position_embedding_type=positions)
    saved = SimpleNamespace()

    def save(*tensors):
        saved.saved_tensors = tensors

    saved.save_for_backward = save
    with record_fake_calls() as calls:
        mask = AttentionMask(config, (0, 1), None)
        query = make_heads(head_dim)
        key_value = torch.stack((make_heads(head_dim), make_heads(head_dim)))
        function = blockwise._BlockwiseAttention
        cp = Axis(rank, 2, (0, 1))
        exchange = LocalExchange([key_value, key_value])
        function.forward(saved, query, key_value, None, mask, None, cp, exchange, Scoring())
        function.backward(saved, make_heads(head_dim))
        assert_kernels_are_not_misled(calls)


def refuse(message, function, *args):
    with pytest.raises(ValueError, match=message):
        function(*args)


def make_lse():
    return torch.empty(BATCH, HEADS, LENGTH, device=CUDA)


def make_strided_lse():
    return torch.empty(BATCH, LENGTH, HEADS, device=CUDA).transpose(1, 2)


def test_misleading_layouts_of_efficient_attention_are_refused():
    """Layouts that the kernel would misread raise an error before the call."""
    with record_fake_calls() as calls:
        heads = make_heads(16)
        lse = make_lse()
        out, _ = private_operators.run_efficient_attention(heads, heads, heads, None, True, None)
        backward = private_operators.run_efficient_attention_backward
        inputs = (heads, heads, heads, heads, None)
        options = (True, None)
        backward(*inputs, out, lse, *options)

        refuse("lay it out as", backward, *inputs, heads, lse, *options)
        refuse("lay it out as", backward, *inputs, out.contiguous(), lse, *options)
        refuse("reads it as torch.bfloat16", backward, *inputs, out.float(), lse, *options)
        refuse("lse has", backward, *inputs, out, lse.bfloat16(), *options)
        refuse("lse has", backward, *inputs, out, lse[:, :, :31], *options)
        refuse("lse has", backward, *inputs, out, make_strided_lse(), *options)

    assert [operator for operator, _ in calls].count(EFFICIENT) == 1


def test_misleading_layouts_of_flash_attention_are_refused():
    with record_fake_calls() as calls:
        packed = make_heads(16).transpose(1, 2)
        sizes = (None, LENGTH, LENGTH, True, None, None)

        backward = private_operators.run_flash_attention_backward
        inputs = (packed, packed, packed, packed, packed)
        backward(*inputs, make_lse(), *sizes)
        refuse("lse has", backward, *inputs, make_strided_lse(), *sizes)
        longer = torch.empty(BATCH, HEADS, 2 * LENGTH, device=CUDA)
        refuse("lse has", backward, *inputs, longer[:, :, LENGTH:], *sizes)

        forward = private_operators.run_flash_attention
        odd = torch.empty(BATCH, LENGTH, HEADS, 18, device=CUDA, dtype=torch.bfloat16)
        refuse("align rows of heads", forward, odd, odd, odd, *sizes)
        refuse("align rows of heads", forward, odd[..., 1:17], packed, packed, *sizes)
        memory = torch.empty(4 + packed.numel(), device=CUDA, dtype=torch.bfloat16)
        misaligned = memory[4:].view(packed.shape)
        refuse("align rows of heads", forward, packed, misaligned, packed, *sizes)

    assert [operator for operator, _ in calls].count(FLASH) == 1


def test_misleading_offsets_of_grouped_products_are_refused():
    with record_fake_calls():
        multiply = private_operators.multiply_groups
        matrices = torch.empty(8, 16, 32, device=CUDA, dtype=torch.bfloat16)
        rows = torch.empty(64, 16, device=CUDA, dtype=torch.bfloat16)
        strided_ends = torch.empty(8, 2, dtype=torch.int32, device=CUDA)[:, 0]
        refuse("contiguous int32", multiply, rows, matrices, strided_ends)
        wide_ends = torch.empty(8, dtype=torch.int64, device=CUDA)
        refuse("contiguous int32", multiply, rows, matrices, wide_ends)


def test_misleading_tensors_of_the_cpu_are_refused():
    attention = private_operators.run_cpu_attention
    heads = torch.randn(BATCH, HEADS, LENGTH, 16)
    options = (None, True, None)
    refuse("rows of heads", attention, heads.mT.contiguous().mT, heads, heads, *options)
    refuse("batch of 2", attention, heads, heads[:1], heads[:1], *options)
    refuse("keys have the shape", attention, heads, heads, heads[:, :, 1:], *options)
    out, lse = attention(heads, heads, heads, *options)
    backward = private_operators.run_cpu_attention_backward
    inputs = (heads, heads, heads, heads)
    refuse("query's shape", backward, *inputs, out[:, :, 1:], lse, *options)
    refuse("it must have the shape", backward, *inputs, out, lse[:, :, 1:], *options)
    x = torch.randn(4, 8)
    refuse("has the shape", private_operators.write_silu_gradient, x, x, x[:2])
    refuse("only fp32", private_operators.multiply_with_onednn, x, x.bfloat16(), None)
