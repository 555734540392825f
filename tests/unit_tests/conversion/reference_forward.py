"""A plain fp64 forward pass of a checkpoint in model space, written from the definitions."""

import math

import torch
from torch.nn import functional as F

from megatron.conversion.model_space.model import model_config
from megatron.conversion.model_space.optimizer_states import optimizer_key
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS
from megatron.core.run_checkpoint.source import Source
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.compare import read_whole


def reference_logits(source: Source, tokens: torch.Tensor, main: bool = False) -> torch.Tensor:
    """Return logits [b, s, vocab] for `tokens` [b, s], from the weights or main parameters."""
    vocab_size = source.tensors[WORD_EMBEDDINGS].shape[0]
    config = model_config(source.args, vocab_size, source.description)
    weights = {}
    for key in source.tensors:
        if not key.startswith("optimizer."):
            stored_key = optimizer_key("param", key) if main else key
            weights[key] = read_whole(source, stored_key).double()
    return _Forward(config, weights).logits(tokens)


class _Forward:
    def __init__(self, config: TransformerConfig, weights: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.weights = weights

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        config = self.config
        length = tokens.shape[1]
        hidden = self.weights[WORD_EMBEDDINGS][tokens]
        if config.position_embedding_type == "learned_absolute":
            hidden = hidden + self.weights["embedding.position_embeddings.weight"][:length]
        if config.embedding_layernorm:
            hidden = self.norm(hidden, "embedding.word_embeddings_layernorm.")

        for layer in range(config.num_layers):
            prefix = f"decoder.layers.{layer}.self_attention."
            x = self.norm(hidden, prefix + "linear_qkv.layer_norm_")
            hidden = hidden + self.attention(x, prefix)
            prefix = f"decoder.layers.{layer}.mlp."
            x = self.norm(hidden, prefix + "linear_fc1.layer_norm_")
            hidden = hidden + self.mlp(x, prefix)

        hidden = self.norm(hidden, "decoder.final_layernorm.")
        head = WORD_EMBEDDINGS
        if config.untie_embeddings_and_output_weights:
            head = "output_layer.weight"
        return hidden @ self.weights[head].t()

    def linear(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        weight = self.weights[prefix + "weight"]
        bias = self.weights.get(prefix + "bias")
        return F.linear(x, weight, bias)

    def norm(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        if self.config.normalization == "LayerNorm":
            x = x - x.mean(-1, keepdim=True)
        variance = x.square().mean(-1, keepdim=True)
        x = x / torch.sqrt(variance + self.config.norm_epsilon)
        bias = self.weights.get(prefix + "bias", 0.0)
        return x * self.weights[prefix + "weight"] + bias

    def mlp(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        x = self.linear(x, prefix + "linear_fc1.")
        if self.config.swiglu:
            gate, up = x.chunk(2, dim=-1)
            x = F.silu(gate) * up
        else:
            approximation = "tanh" if self.config.tanh_gelu else "none"
            x = F.gelu(x, approximate=approximation)
        return self.linear(x, prefix + "linear_fc2.")

    def attention(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        config = self.config
        groups = config.query_groups
        head_dim = config.head_dim
        heads = config.num_attention_heads
        batch, length, _ = x.shape

        # [b, s, groups, queries of a group + key + value, head_dim]
        qkv = self.linear(x, prefix + "linear_qkv.")
        qkv = qkv.view(batch, length, groups, heads // groups + 2, head_dim)
        q = qkv[..., :-2, :]
        k = qkv[..., -2:-1, :]
        v = qkv[..., -1:, :]
        if config.qk_layernorm:
            q = self.norm(q, prefix + "q_layernorm.")
            k = self.norm(k, prefix + "k_layernorm.")
        if config.position_embedding_type == "rope":
            q = self.rotate(q)
            k = self.rotate(k)

        scores = torch.einsum("bsgqd,btgqd->bgqst", q, k.expand_as(q))
        scores = scores / math.sqrt(head_dim)
        positions = torch.arange(length)
        distance = positions[:, None] - positions[None, :]
        if config.position_embedding_type == "alibi":
            slopes = alibi_slopes(heads).view(groups, -1, 1, 1)
            scores = scores - slopes * distance
        is_masked = distance < 0
        if config.window_size:
            is_masked = is_masked | (distance > config.window_size[0])
        attention = scores.masked_fill(is_masked, float("-inf")).softmax(-1)

        context = torch.einsum("bgqst,btgqd->bsgqd", attention, v.expand_as(q))
        context = context.reshape(batch, length, heads * head_dim)
        return self.linear(context, prefix + "linear_proj.")

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate `x` [b, s, g, q, d]; pairs are (i, i + d/2) of the rotated dimensions."""
        positions = torch.arange(x.shape[1]).double()
        angles = positions[:, None] * self.frequencies()
        cos = angles.cos()[:, None, None, :]
        sin = angles.sin()[:, None, None, :]
        rotated = 2 * cos.shape[-1]
        first, second = x[..., :rotated].chunk(2, dim=-1)
        unrotated = x[..., rotated:]
        return torch.cat(
            [
                first * cos - second * sin,
                second * cos + first * sin,
                unrotated,
            ],
            dim=-1,
        )

    def frequencies(self) -> torch.Tensor:
        config = self.config
        rotated = int(config.head_dim * config.rotary_percent)
        exponents = torch.arange(0, rotated, 2).double() / rotated
        frequencies = config.rotary_base**-exponents
        if not config.use_rope_scaling:
            return frequencies

        # Llama 3.1: low frequencies are divided by the factor, with a ramp in between.
        turns = config.rope_original_max_position_embeddings * frequencies / (2 * math.pi)
        low = config.rope_low_freq_factor
        high = config.rope_high_freq_factor
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (unscaled + (1 - unscaled) / config.rope_scaling_factor)


def alibi_slopes(heads: int) -> torch.Tensor:
    """Return the slope of each head, as in Press et al. 2022."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    # Heads beyond a power of two take every other slope of twice as many heads.
    for head in range(0, 2 * (heads - power), 2):
        slopes.append(2 ** (-4 * (head + 1) / power))
    return torch.tensor(slopes).double()
