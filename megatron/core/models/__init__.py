"""Models: what stands on one pipeline chunk."""

from megatron.core.models.gpt import GPTModel

__all__ = ["GPTModel"]
