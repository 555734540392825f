"""Configuration of a tiny model with experts."""

from megatron.core.transformer.transformer_config import TransformerConfig

BASE = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "add_bias_linear": False,
    "vocab_size": 288,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 1e-2,
}


def make_config(**options):
    return TransformerConfig(**(BASE | options))
