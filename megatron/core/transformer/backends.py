"""Selection of the backend that implements the building blocks of layers."""

from __future__ import annotations

from megatron.core.transformer.layer_spec import LOCAL, LayerSpec
from megatron.core.transformer.transformer_config import TransformerConfig


def select_layer_spec(config: TransformerConfig) -> LayerSpec:
    """Return the building blocks of --transformer-impl.

    Raises ValueError if Transformer Engine is required but cannot be imported.
    """
    if config.transformer_impl == "local":
        return LOCAL
    try:
        # Imported on demand: it is an optional dependency and takes seconds to import.
        from megatron.core.transformer.transformer_engine.layers import TRANSFORMER_ENGINE
    except (ImportError, OSError, RuntimeError) as error:
        # It is not installed, lacks a library, or was built for another version of torch.
        raise ValueError(
            "--transformer-impl transformer_engine: Transformer Engine cannot be imported "
            f"({error}). Install it with pip install --no-build-isolation '.[te]' (docs/gpu.md), "
            "or use --transformer-impl local"
        ) from error
    return TRANSFORMER_ENGINE
