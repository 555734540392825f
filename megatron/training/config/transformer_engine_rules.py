"""Restrictions of Transformer Engine on flags of several sections."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.run_config import Config


def find_low_precision_problems(config: Config) -> Iterator[str]:
    """Yield problems of the matrices and tokens of a rank with the kernels of fp8 and fp4.

    Source: Transformer Engine 2.20, `assert_dim_for_fp8_exec` and `is_quantizable`.
    """
    model = config.model
    if model.multi_latent_attention:
        return
    parallel = config.parallel
    tp_size = parallel.tp_size
    ranks = f"--tensor-model-parallel-size {tp_size}"
    recipe = f"--fp4-format {model.fp4}"
    if model.fp8 is not None:
        recipe = f"--fp8-recipe {model.fp8_recipe}"
    features = 16
    tokens = 8
    if model.low_precision == "mxfp8":
        features = tokens = 32
    elif model.low_precision == "nvfp4":
        tokens = 16

    # Features per rank: the rows or columns of a matrix that tensor parallelism splits.
    heads = f"{model.num_attention_heads} heads x --kv-channels {model.head_dim}"
    split = {heads: model.num_attention_heads * model.head_dim}
    if 0 in model.moe_layer_pattern:
        split[f"--ffn-hidden-size {model.ffn_size}"] = model.ffn_size
    for name, size in split.items():
        if size % (tp_size * features):
            yield (
                f"{name} / {ranks} = {size / tp_size:g} per rank is not a multiple of {features}, "
                f"as {recipe} requires: change one of them"
            )

    # Tokens of a micro-batch on a rank
    splits = parallel.cp_size * (tp_size if parallel.sequence_parallel else 1)
    size = config.data.seq_length * config.training.micro_batch_size
    if size % (splits * tokens):
        yield (
            f"--seq-length {config.data.seq_length} x --micro-batch-size "
            f"{config.training.micro_batch_size} / {splits} ranks of tensor and context "
            f"parallelism = {size / splits:g} tokens per rank is not a multiple of {tokens}, as "
            f"{recipe} requires: change one of them"
        )


def find_attention_problems(config: Config) -> Iterator[str]:
    """Yield features that Transformer Engine's attention over p2p and all_gather lacks."""
    model = config.model
    parallel = config.parallel
    if parallel.cp_size == 1 or len(parallel.cp_comm_type) not in (1, model.num_layers):
        return

    # Find a communication type of a layer that does not support each feature.
    unsupported: dict[str, str] = {}  # flag -> communication type
    for layer in range(model.num_layers):
        comm_type = parallel.cp_comm_type_of(layer)
        if comm_type == "a2a":
            continue
        if config.data.reset_attention_mask:
            unsupported.setdefault("--reset-attention-mask", comm_type)
        if model.position_embedding_type == "alibi":
            unsupported.setdefault("--position-embedding-type alibi", comm_type)
        if comm_type == "p2p" and model.get_window(layer) is not None:
            unsupported.setdefault("--window-size", comm_type)
    for flag_name, comm_type in unsupported.items():
        yield (
            f"{flag_name} with --cp-comm-type {comm_type} requires --transformer-impl local; "
            "with transformer_engine use --cp-comm-type a2a"
        )
