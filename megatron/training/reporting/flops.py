"""Floating-point operations of a model, counted from its shape."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig


def model_flops_per_token(config: TransformerConfig, seq_length: int, vocab_size: int) -> float:
    """Operations of forward and backward per token: 2 per multiply-add, backward twice the forward.

    Counts the matrix products that the mathematics needs: projections, MLP, attention over the keys that the causal
    mask (and the window) leaves, logits. Neither recomputed activations nor element-wise work count
    (Chowdhery et al. 2022, "PaLM", appendix B; the convention of Megatron-LM's TFLOP/s).
    """
    attention_width = config.num_attention_heads * config.head_dim
    qkv = config.hidden_size * (config.num_attention_heads + 2 * config.query_groups) * config.head_dim
    scores_and_values = 2 * attention_width * attended_keys(config, seq_length)
    projection = attention_width * config.hidden_size
    mlp = (3 if config.gated else 2) * config.hidden_size * config.ffn_size
    layer = qkv + scores_and_values + projection + mlp
    logits = config.hidden_size * vocab_size
    return 6 * (config.num_layers * layer + logits)


def attended_keys(config: TransformerConfig, seq_length: int) -> float:
    """Keys that a token sees on average: half the sequence, or less with a sliding window."""
    left = seq_length if config.window_size is None or config.window_size[0] < 0 else config.window_size[0]
    left = min(left, seq_length)
    return left - left * left / (2 * seq_length)
