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
    config = model_config(source.args, source.tensors[WORD_EMBEDDINGS].shape[0], source.description)
    keys = [key for key in source.tensors if not key.startswith("optimizer.")]
    return _Forward(
        config,
        {
            key: read_whole(source, optimizer_key("param", key) if main else key).double()
            for key in keys
        },
    ).logits(tokens)


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
            prefix = f"decoder.layers.{layer}."
            hidden = hidden + self.attention(
                self.norm(hidden, prefix + "self_attention.linear_qkv.layer_norm_"),
                prefix + "self_attention.",
            )
            hidden = hidden + self.mlp(
                self.norm(hidden, prefix + "mlp.linear_fc1.layer_norm_"), prefix + "mlp."
            )
        hidden = self.norm(hidden, "decoder.final_layernorm.")
        head = (
            "output_layer.weight" if config.untie_embeddings_and_output_weights else WORD_EMBEDDINGS
        )
        return hidden @ self.weights[head].t()

    def linear(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        return F.linear(x, self.weights[prefix + "weight"], self.weights.get(prefix + "bias"))

    def norm(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        if self.config.normalization == "LayerNorm":
            x = x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.config.norm_epsilon)
        return x * self.weights[prefix + "weight"] + self.weights.get(prefix + "bias", 0.0)

    def mlp(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        x = self.linear(x, prefix + "linear_fc1.")
        if self.config.swiglu:
            gate, up = x.chunk(2, dim=-1)
            x = F.silu(gate) * up
        else:
            x = F.gelu(x, approximate="tanh" if self.config.tanh_gelu else "none")
        return self.linear(x, prefix + "linear_fc2.")

    def attention(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        config = self.config
        groups = config.query_groups
        head_dim = config.head_dim
        heads = config.num_attention_heads
        batch, length, _ = x.shape
        qkv = self.linear(x, prefix + "linear_qkv.").view(
            batch, length, groups, heads // groups + 2, head_dim
        )
        q = qkv[..., :-2, :]
        k = qkv[..., -2:-1, :]
        v = qkv[..., -1:, :]
        if config.qk_layernorm:
            q = self.norm(q, prefix + "q_layernorm.")
            k = self.norm(k, prefix + "k_layernorm.")
        if config.position_embedding_type == "rope":
            q = self.rotate(q)
            k = self.rotate(k)
        scores = torch.einsum("bsgqd,btgqd->bgqst", q, k.expand_as(q)) / math.sqrt(head_dim)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        if config.position_embedding_type == "alibi":
            scores = scores - alibi_slopes(heads).view(groups, -1, 1, 1) * distance
        hidden = distance < 0
        if config.window_size:
            hidden = hidden | (distance > config.window_size[0])
        attention = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        context = torch.einsum("bgqst,btgqd->bsgqd", attention, v.expand_as(q))
        return self.linear(
            context.reshape(batch, length, heads * head_dim), prefix + "linear_proj."
        )

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, g, q, d]; pairs are (i, i + d/2) of the rotated part."""
        angles = torch.arange(x.shape[1]).double()[:, None] * self.frequencies()
        cos, sin = (f(angles)[:, None, None, :] for f in (torch.cos, torch.sin))
        x, kept = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, kept], dim=-1)

    def frequencies(self) -> torch.Tensor:
        config = self.config
        rotated = int(config.head_dim * config.rotary_percent)
        frequencies = config.rotary_base ** -(torch.arange(0, rotated, 2).double() / rotated)
        if not config.use_rope_scaling:
            return frequencies
        turns = config.rope_original_max_position_embeddings * frequencies / (2 * math.pi)
        low = config.rope_low_freq_factor
        high = config.rope_high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / config.rope_scaling_factor)


def alibi_slopes(heads: int) -> torch.Tensor:
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (j + 1) / power) for j in range(power)]
    slopes += [2 ** (-4 * (j + 1) / power) for j in range(0, 2 * (heads - power), 2)]
    return torch.tensor(slopes).double()
