"""Which values of a model's fields go together: every rule yields what is wrong, with the values
and the way out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def layer_pattern(text: str) -> int | list[int]:
    """--moe-layer-freq: an integer, or lists of 0 and 1 joined by + and repeated by *, as ([0]*3+[1]*61)."""

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.List):
            return [value(element) for element in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            left = value(node.left)
            right = value(node.right)
            if (
                isinstance(node.op, ast.Mult)
                and isinstance(left, list)
                and type(right) is int
                and right < 10_000
            ):
                return left * right
            if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
                return left + right
        raise ValueError(f"{text!r} is no pattern of layers")

    try:
        return value(ast.parse(text.strip(), mode="eval").body)  # type: ignore[no-any-return]
    except (SyntaxError, RecursionError):
        raise ValueError(f"{text!r} is no pattern of layers") from None


def missing(config: TransformerConfig) -> Iterator[str]:
    """What the defaults of other fields cannot be derived without."""
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if getattr(config, name) < 1:
            yield f"--{name.replace('_', '-')} must be given and positive, got {getattr(config, name)}"
    evenly = config.hidden_size % max(config.num_attention_heads, 1) == 0
    if config.kv_channels is None and not evenly and not config.multi_latent_attention:
        yield (
            f"--hidden-size {config.hidden_size} is not a multiple of --num-attention-heads "
            f"{config.num_attention_heads}: change one of them or give --kv-channels"
        )


def _of_a_dense_model(config: TransformerConfig) -> Iterator[str]:
    if config.query_groups < 1 or config.num_attention_heads % config.query_groups:
        yield (
            f"--num-attention-heads {config.num_attention_heads} is not a multiple of "
            f"--num-query-groups {config.num_query_groups}"
        )
    if config.ffn_size < 1:
        yield f"--hidden-size {config.hidden_size} is too small for --swiglu without --ffn-hidden-size: give one"
    named = ("swiglu", "quick_geglu", "geglu", "squared_relu")
    activations = [name for name in named if getattr(config, name)]
    if len(activations) > 1:
        yield f"{' and '.join('--' + name.replace('_', '-') for name in activations)} exclude each other"
    if config.bf16 and config.fp16:
        yield "--bf16 and --fp16 exclude each other"
    yield from _of_back_end(config)
    yield from _of_windows(config)
    yield from _of_norms(config)
    if config.attends_in_blocks and config.attention_dropout:
        cap = config.attn_logit_softcapping
        kind = config.softmax_type
        what = f"--softmax-type {kind}" if cap is None else f"--attn-logit-softcapping {cap}"
        yield (
            f"{what} with --attention-dropout {config.attention_dropout}: the kernels that change scores so have no "
            "dropout. Give --attention-dropout 0"
        )
    for name, default in (("glu_linear_offset", 0.0), ("activation_func_clamp_value", None)):
        if getattr(config, name) != default and not config.quick_geglu:
            yield f"--{name.replace('_', '-')} {getattr(config, name)} needs --quick-geglu, whose gate it changes"
    if config.recompute_granularity == "full" and (
        config.recompute_method is None or not config.recompute_num_layers
    ):
        yield "--recompute-granularity full needs --recompute-method and --recompute-num-layers"

    if config.use_rope_scaling and config.rope_type == "yarn":
        yield "--use-rope-scaling (of Llama 3) and --rope-type yarn exclude each other"
    if config.rope_type == "yarn" and not (
        config.rotary_scaling_factor and config.original_max_position_embeddings
    ):
        yield (
            f"--rope-type yarn: --rotary-scaling-factor {config.rotary_scaling_factor} and "
            f"--original-max-position-embeddings {config.original_max_position_embeddings} must be positive"
        )


def _of_windows(config: TransformerConfig) -> Iterator[str]:
    skip = config.window_attn_skip_freq
    if isinstance(skip, list) and (len(skip) != config.num_layers or not set(skip) <= {0, 1}):
        yield (
            f"--window-attn-skip-freq {skip} must have a 0 or a 1 for each of the --num-layers {config.num_layers}"
        )
    if isinstance(skip, int) and skip < 1:
        yield f"--window-attn-skip-freq must be positive, got {skip}"
    if config.window_size is None and skip is not None:
        yield f"--window-attn-skip-freq {skip} needs --window-size"


def _of_norms(config: TransformerConfig) -> Iterator[str]:
    if config.norm_placement != "pre" and (config.has_experts or config.multi_latent_attention):
        other = "--num-experts" if config.has_experts else "--multi-latent-attention"
        yield f"--norm-placement {config.norm_placement} does not go with {other}: take pre"
    if config.qk_layernorm_across_heads and (
        not config.qk_layernorm or config.normalization != "RMSNorm"
    ):
        yield "--qk-layernorm-across-heads needs --qk-layernorm and --normalization RMSNorm"


def _of_latent_attention(config: TransformerConfig) -> Iterator[str]:
    if not config.multi_latent_attention:
        return
    for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
        value = getattr(config, name)
        if value is None and name == "q_lora_rank":
            continue
        if value is None or value < 1 or (name == "qk_pos_emb_head_dim" and value % 2):
            kind = "even and positive" if name == "qk_pos_emb_head_dim" else "positive"
            yield f"--{name.replace('_', '-')} must be {kind}, got {value}"
    if config.query_groups != config.num_attention_heads:
        yield "--multi-latent-attention has keys and values for every head: leave out --group-query-attention"
    if config.rotary_interleaved or config.add_qkv_bias:
        flags = ("--rotary-interleaved", "--add-qkv-bias")
        given = [
            name
            for name, on in zip(
                flags, (config.rotary_interleaved, config.add_qkv_bias), strict=True
            )
            if on
        ]
        yield f"--multi-latent-attention does not go with {' and '.join(given)}"


def _of_back_end(config: TransformerConfig) -> Iterator[str]:
    fp8 = config.fp8 is not None
    bits = "fp8" if config.fp8 is not None else "fp4"
    narrow = (
        f"--{bits}-format {config.fp8 or config.fp4}" if config.low_precision is not None else None
    )
    fused_loss = config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te"
    for given, name in (
        (narrow, narrow),
        (fused_loss, "--cross-entropy-fusion-impl te"),
        (config.apply_rope_fusion, "--apply-rope-fusion"),
    ):
        if given and config.transformer_impl == "local":
            yield f"{name} needs --transformer-impl transformer_engine, which has the kernels"
    if config.apply_rope_fusion and (config.multi_latent_attention or config.rope_type == "yarn"):
        yield "--apply-rope-fusion: its kernel neither scales (yarn) nor takes latent attention; leave it out"
    if narrow and not config.bf16:
        yield f"{narrow} needs --bf16: what is not in {bits} is in bfloat16"
    if narrow:
        for name, size in (
            ("--hidden-size", config.hidden_size),
            ("--ffn-hidden-size", config.ffn_size),
        ):
            if size % 16:
                yield f"{name} {size} is not a multiple of 16, as the kernels of {bits} need"
    if fp8 and config.fp4 is not None:
        yield f"{narrow} and --fp4-format {config.fp4} exclude each other"
    if config.fp4 is not None and config.has_experts:
        yield f"--fp4-format {config.fp4} does not support experts: grouped products have no nvfp4; take --fp8-format"
    if config.fp8_param_gather and (not fp8 or config.fp8_recipe == "mxfp8"):
        yield (
            "--fp8-param-gather needs --fp8-format, and --fp8-recipe delayed, tensorwise or blockwise: mxfp8 weights "
            "are two tensors, which a shard of the main parameters cannot fill"
        )


def _of_experts(config: TransformerConfig) -> Iterator[str]:
    experts = config.num_experts or 0
    topk = config.moe_router_topk
    bad = "--moe-router-topk"
    if config.moe_ffn_size < 1:
        yield f"--moe-ffn-hidden-size must be positive, got {config.moe_ffn_hidden_size}"
    if not 1 <= topk <= experts:
        yield f"{bad} {topk} must lie between 1 and --num-experts {experts}"
    if topk == 1 and config.score_function == "softmax" and not config.softmax_before_choice:
        yield f"{bad} 1 needs --moe-router-pre-softmax: a softmax over one expert teaches nothing"
    if isinstance(config.moe_layer_freq, int):
        if config.moe_layer_freq < 1:
            yield f"--moe-layer-freq must be positive, got {config.moe_layer_freq}"
    elif len(config.moe_layer_freq) != config.num_layers or not set(config.moe_layer_freq) <= {
        0,
        1,
    }:
        yield (
            f"--moe-layer-freq {config.moe_layer_freq} must have a 0 or a 1 for each of the --num-layers "
            f"{config.num_layers}"
        )
    if config.add_bias_linear and config.has_shared_experts:
        yield "--moe-shared-expert-intermediate-size needs --disable-bias-linear: shared experts have no biases"
    if config.moe_router_enable_expert_bias and config.moe_router_score_function != "sigmoid":
        yield "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid"
    if config.moe_shared_expert_gate and not config.moe_shared_expert_intermediate_size:
        yield "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size, the expert that it is for"
    yield from _of_groups(config, experts, topk)
    yield from _of_balance(config)


def _of_groups(config: TransformerConfig, experts: int, topk: int) -> Iterator[str]:
    groups = config.moe_router_num_groups
    taken = config.moe_router_group_topk
    if (groups is None) != (taken is None):
        yield f"--moe-router-num-groups {groups} and --moe-router-group-topk {taken} go together"
    elif not groups or not taken:
        return
    elif config.moe_router_group_score_topk is not None:
        scores = config.moe_router_group_score_topk
        if not 1 <= scores <= experts // groups:
            yield f"--moe-router-group-score-topk {scores} must lie between 1 and {experts // groups} per group"
    elif groups < taken or experts % groups or topk % taken or topk * groups > experts * taken:
        yield (
            f"--moe-router-num-groups {groups} must divide --num-experts {experts}, and --moe-router-group-topk "
            f"{taken} be at most {groups} and divide --moe-router-topk {topk} into shares that fit a group"
        )


def _of_balance(config: TransformerConfig) -> Iterator[str]:
    kinds = config.moe_router_load_balancing_type
    coefficients = config.moe_aux_loss_coeff
    if len(kinds) != len(coefficients):
        yield f"--moe-aux-loss-coeff {coefficients} must have one value for each of {kinds}"
    if len(set(kinds)) < len(kinds):
        yield f"--moe-router-load-balancing-type {kinds} says one twice"
    if "sinkhorn" in kinds:
        yield from _of_sinkhorn(config)
    if "global_aux_loss" in kinds and config.recompute_granularity == "full":
        yield (
            "--moe-router-load-balancing-type global_aux_loss with --recompute-granularity full: recomputed layers "
            "would count their tokens twice; take aux_loss or seq_aux_loss"
        )
    if config.moe_pad_expert_input_to_capacity and config.moe_expert_capacity_factor is None:
        yield "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor"
    if config.moe_pad_expert_input_to_capacity and config.moe_router_enable_expert_bias:
        yield (
            "--moe-pad-expert-input-to-capacity with --moe-router-enable-expert-bias: padding gives all experts "
            "the same load, so that the bias never moves; leave one out"
        )


def _of_sinkhorn(config: TransformerConfig) -> Iterator[str]:
    others = {
        "other losses": len(config.moe_router_load_balancing_type) > 1,
        f"--moe-aux-loss-coeff {config.moe_aux_loss_coeff}": any(config.moe_aux_loss_coeff),
        "--moe-router-score-function sigmoid": config.moe_router_score_function == "sigmoid",
        "--moe-router-num-groups": config.moe_router_num_groups,
        "--moe-router-topk-scaling-factor": config.moe_router_topk_scaling_factor,
        "--moe-expert-capacity-factor": config.moe_expert_capacity_factor is not None,
    }
    given = [name for name, on in others.items() if on]
    if given:
        yield f"--moe-router-load-balancing-type sinkhorn does not go with {', '.join(given)}: leave that out"


def problems(config: TransformerConfig) -> Iterator[str]:
    """All that is wrong, once nothing is missing."""
    yield from _of_a_dense_model(config)
    yield from _of_latent_attention(config)
    if config.has_experts:
        yield from _of_experts(config)
