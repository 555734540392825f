"""Models, one pipeline chunk at a time."""

from megatron.core.models.gpt import ChunkSpec, GPTModel, TokenLosses, make_chunk_specs

__all__ = ["ChunkSpec", "GPTModel", "TokenLosses", "make_chunk_specs"]
