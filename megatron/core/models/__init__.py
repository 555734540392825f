"""Models: what stands on one pipeline chunk."""

from megatron.core.models.gpt import ChunkSpec, GPTModel, make_chunk_specs

__all__ = ["ChunkSpec", "GPTModel", "make_chunk_specs"]
