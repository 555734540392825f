"""Models: what stands on one pipeline chunk."""

from megatron.core.models.gpt import ChunkPlace, GPTModel, chunk_places

__all__ = ["ChunkPlace", "GPTModel", "chunk_places"]
