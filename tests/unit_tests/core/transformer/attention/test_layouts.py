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
LOCAL = {  # size of a head, whether there is a mask (ALiBi), and documents
    "alibi": (16, True, False),
    "alibi, documents": (16, True, True),
    "wide heads": (264, False, False),
    "wide heads, documents": (264, False, True),
    "misaligned heads, alibi": (12, True, False),
    "misaligned heads, alibi, documents": (12, True, True),
}
BLOCKWISE = {  # size of a head, and position embedding
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
    """The layouts that kernel_backward.h and flash_bwd_kernel.h of torch assume."""
    num_checked = 0
    for operator, args in calls:
        if operator == EFFICIENT:
            num_checked += 1
            out = args[5]
            _, heads, _, head_dim = out.shape
            assert out.stride()[2:] == (heads * head_dim, 1), (tuple(out.shape), out.stride())
            assert args[6].stride(2) == 1
        elif operator == FLASH:
            num_checked += 1
            lse = args[5]
            assert lse.is_contiguous(), (tuple(lse.shape), lse.stride())
    assert num_checked > 0


@pytest.mark.parametrize("name", LOCAL)
def test_local_attention(name):
    head_dim, is_masked, has_documents = LOCAL[name]
    slices = []
    for sample, length in ((0, 9), (1, LENGTH)):
        samples = slice(sample, sample + 1)
        slices.append((samples, slice(None), slice(0, length)))
    slices.append((slice(0, 1), slice(None), slice(9, LENGTH)))
    with record_fake_calls() as calls:
        query = make_heads(head_dim)
        key = make_heads(head_dim, 2)
        value = make_heads(head_dim, 2)
        documents = None
        if has_documents:
            offsets = torch.empty(4, dtype=torch.int32, device=CUDA)
            documents = Documents(tuple(slices), offsets, LENGTH)
        mask = None
        if is_masked:
            mask = torch.empty(1, HEADS, LENGTH, LENGTH, device=CUDA, dtype=torch.bfloat16)
        every = slice(None)
        block = Block(every, every, causal=mask is None, mask=mask, documents=documents)
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


def test_misleading_layouts_are_refused():
    """What kernels would misread raises an error before the call."""
    with record_fake_calls() as calls:
        heads = make_heads(16)
        lse = torch.empty(BATCH, HEADS, LENGTH, device=CUDA)
        efficient = private_operators.run_efficient_attention_backward
        out, _ = private_operators.run_efficient_attention(heads, heads, heads, None, True, None)
        inputs = (heads, heads, heads, heads, None)
        options = (True, None)
        efficient(*inputs, out, lse, *options)
        refuse("lay it out as", efficient, *inputs, heads, lse, *options)
        refuse("lay it out as", efficient, *inputs, out.contiguous(), lse, *options)
        refuse("reads it as torch.bfloat16", efficient, *inputs, out.float(), lse, *options)
        refuse("lse has", efficient, *inputs, out, lse.bfloat16(), *options)
        refuse("lse has", efficient, *inputs, out, lse[:, :, :31], *options)
        strided_rows = torch.empty(BATCH, LENGTH, HEADS, device=CUDA).transpose(1, 2)
        refuse("lse has", efficient, *inputs, out, strided_rows, *options)

        flash = private_operators.run_flash_attention_backward
        packed = heads.transpose(1, 2)
        sizes = (None, LENGTH, LENGTH, True, None, None)
        flash(packed, packed, packed, packed, packed, lse, *sizes)
        refuse("lse has", flash, *[packed] * 5, strided_rows, *sizes)
        longer = torch.empty(BATCH, HEADS, 2 * LENGTH, device=CUDA)
        refuse("lse has", flash, *[packed] * 5, longer[:, :, LENGTH:], *sizes)
        odd = torch.empty(BATCH, LENGTH, HEADS, 18, device=CUDA, dtype=torch.bfloat16)
        forward = private_operators.run_flash_attention
        refuse("align rows of heads", forward, odd, odd, odd, *sizes)
        refuse("align rows of heads", forward, odd[..., 1:17], packed, packed, *sizes)
        offset = torch.empty(4 + packed.numel(), device=CUDA, dtype=torch.bfloat16)[4:]
        refuse("align rows of heads", forward, packed, offset.view(packed.shape), packed, *sizes)

        ends = torch.empty(8, 2, dtype=torch.int32, device=CUDA)[:, 0]
        matrices = torch.empty(8, 16, 32, device=CUDA, dtype=torch.bfloat16)
        rows = torch.empty(64, 16, device=CUDA, dtype=torch.bfloat16)
        refuse("contiguous int32", private_operators.multiply_groups, rows, matrices, ends)
        wide_ends = torch.empty(8, dtype=torch.int64, device=CUDA)
        refuse("contiguous int32", private_operators.multiply_groups, rows, matrices, wide_ends)
    assert [operator for operator, _ in calls].count(EFFICIENT) == 1
    assert [operator for operator, _ in calls].count(FLASH) == 1


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
