"""Models, one pipeline chunk at a time."""

from megatron.core.models.gpt import ChunkSpec, GPTModel, make_chunk_specs

__all__ = ["ChunkSpec", "GPTModel", "make_chunk_specs"]
