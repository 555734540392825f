"""A compact Megatron-style GPT training stack."""

__version__ = "0.2.0"
