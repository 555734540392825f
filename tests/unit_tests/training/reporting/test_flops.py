"""FLOPs compared with a count of a forward pass and with Megatron-LM's number."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.reporting.measurements import compute_flops_per_token, count_attended_keys

GOLDEN = TransformerConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    kv_channels=8,
    ffn_hidden_size=80,
    group_query_attention=True,
    num_query_groups=2,
    swiglu=True,
)


def test_flops_equal_megatron_lm():
    # num_floating_point_operations_so_far in a checkpoint of Megatron-LM 0.16.1 (core_v0.16.1, this
    # model, sequence 64, padded vocabulary 288) after 5 iterations of 8 samples
    assert compute_flops_per_token(GOLDEN, 64, 288) * 5 * 8 * 64 == 927989760


def test_flops_equal_a_count_of_the_products():
    h = 32
    d = 8
    heads = 4
    groups = 2
    ffn = 80
    seq = 64
    vocab = 100

    def multiply(rows, inner, columns):
        torch.mm(torch.zeros(rows, inner), torch.zeros(inner, columns))

    # The matrix products of one layer
    with FlopCounterMode(display=False) as counter:
        multiply(seq, h, (heads + 2 * groups) * d)
        for _ in range(heads):
            multiply(seq, d, seq)
            multiply(seq, seq, d)
        multiply(seq, heads * d, h)
        multiply(seq, h, 2 * ffn)
        multiply(seq, ffn, h)

    layer = counter.get_total_flops() / seq
    causal = 2 * (2 * heads * d * seq) / 2  # half of the scores and of the weighted sums
    logits = 2 * h * vocab
    expected = 3 * (4 * (layer - causal) + logits)
    assert compute_flops_per_token(GOLDEN, seq, vocab) == expected


def test_layers_for_multi_token_prediction_count_with_projection_and_logits():
    seq = 64
    vocab = 100
    h = GOLDEN.hidden_size
    plain = compute_flops_per_token(GOLDEN, seq, vocab)
    layer = (plain - 6 * h * vocab) / GOLDEN.num_layers
    with_mtp = replace(GOLDEN, mtp_num_layers=2, position_embedding_type="rope")
    extra = 2 * (layer + 6 * (2 * h * h + h * vocab))
    assert compute_flops_per_token(with_mtp, seq, vocab) == plain + extra


@pytest.mark.parametrize(
    ("window", "seq"),
    [(None, 10), ((3, 0), 10), ((20, 0), 10), ((-1, 0), 10)],
)
def test_attended_keys(window, seq):
    """The continuous count misses half a key per token: a token sees itself whole."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        window_size=window,
    )
    left = seq if window is None or window[0] < 0 else min(window[0], seq)
    exact = sum(min(position, left) for position in range(seq)) / seq
    assert count_attended_keys(config, seq) == pytest.approx(exact + 0.5, abs=0.5)
