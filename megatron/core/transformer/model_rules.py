"""Rules for the combined values of a model's fields.

Each rule yields a message per violation, with the values, the reason and the fix.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.transformer.model_options import ModelOptions


def find_size_problems(config: ModelOptions) -> Iterator[str]:
    """Yield the problems of the sizes from which the defaults of other fields are derived."""
    # The default head width is hidden_size / heads. Latent attention has widths of its own.
    needs_default = config.kv_channels is None and not config.multi_latent_attention
    if needs_default and config.hidden_size % config.num_attention_heads:
        yield (
            f"--hidden-size {config.hidden_size} is not a multiple of --num-attention-heads "
            f"{config.num_attention_heads}: change one of them or give --kv-channels"
        )


def _format_flag(field: str) -> str:
    """Return the command-line spelling of a field."""
    return "--" + field.replace("_", "-")


def find_problems(config: ModelOptions) -> Iterator[str]:
    """Yield all problems of a configuration without missing fields."""
    yield from _check_attention(config)
    yield from _check_mlp(config)
    yield from _check_backend(config)
    yield from _check_windows(config)
    yield from _check_norms(config)
    yield from _check_parallel_residual(config)
    yield from _check_recomputation(config)
    yield from _check_positions(config)
    yield from _check_latent_attention(config)
    yield from _check_multi_token_prediction(config)
    if config.has_experts:
        yield from _check_experts(config)


def _check_attention(config: ModelOptions) -> Iterator[str]:
    if config.query_groups < 1 or config.num_attention_heads % config.query_groups:
        yield (
            f"--num-attention-heads {config.num_attention_heads} is not a multiple of "
            f"--num-query-groups {config.num_query_groups}"
        )
    # Published models limit queries and keys after their norm, which may follow the limits here.
    has_later_norm = config.qk_layernorm and not config.qk_layernorm_across_heads
    if config.clip_qkv is not None and has_later_norm:
        yield (
            f"--clip-qkv {config.clip_qkv} supports --qk-layernorm only with "
            "--qk-layernorm-across-heads: leave one of them out"
        )
    # Such scores are computed by `blockwise_attention`, whose kernels do not have dropout.
    if config.attends_in_blocks and config.attention_dropout:
        if config.attn_logit_softcapping is not None:
            reason = f"--attn-logit-softcapping {config.attn_logit_softcapping}"
        else:
            reason = f"--softmax-type {config.softmax_type}"
        yield (
            f"{reason} with --attention-dropout {config.attention_dropout}: the kernels that "
            "modify scores do not support dropout. Give --attention-dropout 0"
        )


def _check_mlp(config: ModelOptions) -> Iterator[str]:
    # 8/3 of the width, rounded down to a multiple of 64, is 0 for widths below 24.
    if config.ffn_size < 1:
        yield (
            f"--hidden-size {config.hidden_size} is too small for --swiglu without "
            "--ffn-hidden-size: give one"
        )
    activations = []
    for name in ("swiglu", "quick_geglu", "geglu", "squared_relu", "relu", "xielu"):
        if getattr(config, name):
            activations.append(_format_flag(name))
    if len(activations) > 1:
        yield f"{' and '.join(activations)} are mutually exclusive"
    if config.xielu and config.has_experts:
        yield "--xielu does not support --num-experts: its slopes are those of one MLP"
    # The parameters of its gate do not affect other activation functions.
    if config.quick_geglu:
        return
    gate_defaults = {"glu_linear_offset": 0.0, "activation_func_clamp_value": None}
    for name, default in gate_defaults.items():
        value = getattr(config, name)
        if value != default:
            yield f"{_format_flag(name)} {value} needs --quick-geglu, whose gate it changes"


def _check_backend(config: ModelOptions) -> Iterator[str]:
    # Neither of them means fp32.
    if config.bf16 and config.fp16:
        yield "--bf16 and --fp16 are mutually exclusive"
    if config.transformer_impl == "local":
        yield from _find_options_without_local_kernels(config)
    if config.apply_rope_fusion and (config.multi_latent_attention or config.rope_type != "rope"):
        yield (
            "--apply-rope-fusion does not support --multi-latent-attention or --rope-type "
            f"{config.rope_type}: leave it out"
        )
    if config.low_precision is not None:
        yield from _check_low_precision(config)
    if config.fp8_param_gather and (config.fp8 is None or config.fp8_recipe == "mxfp8"):
        yield (
            "--fp8-param-gather needs --fp8-format, and --fp8-recipe delayed, tensorwise or "
            "blockwise: mxfp8 weights are two tensors, which cannot be filled from a shard of the "
            "main parameters"
        )


def _find_options_without_local_kernels(config: ModelOptions) -> Iterator[str]:
    options = []
    if config.low_precision is not None:
        options.append(_format_low_precision_flag(config))
    if config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te":
        options.append("--cross-entropy-fusion-impl te")
    if config.apply_rope_fusion:
        options.append("--apply-rope-fusion")
    for option in options:
        yield f"{option} needs --transformer-impl transformer_engine, which has the kernels"


def _format_low_precision_flag(config: ModelOptions) -> str:
    if config.fp8 is not None:
        return f"--fp8-format {config.fp8}"
    return f"--fp4-format {config.fp4}"


def _check_low_precision(config: ModelOptions) -> Iterator[str]:
    flag = _format_low_precision_flag(config)
    dtype = "fp8" if config.fp8 is not None else "fp4"
    if not config.bf16:
        yield f"{flag} needs --bf16: everything that is not in {dtype} is in bfloat16"
    # The kernels require both dimensions of every matrix to be multiples of 16.
    sizes = {"--hidden-size": config.hidden_size, "--ffn-hidden-size": config.ffn_size}
    for name, size in sizes.items():
        if size % 16:
            yield f"{name} {size} is not a multiple of 16, as the {dtype} kernels require"
    if config.fp8 is not None and config.fp4 is not None:
        yield f"{flag} and --fp4-format {config.fp4} are mutually exclusive"
    if config.fp4 is not None and config.has_experts:
        yield (
            f"--fp4-format {config.fp4} does not support experts: grouped nvfp4 kernels do not "
            "exist; use --fp8-format"
        )


def _check_windows(config: ModelOptions) -> Iterator[str]:
    skip = config.window_attn_skip_freq
    # One entry per layer, or every n-th layer.
    if isinstance(skip, list) and not _is_pattern(skip, config.num_layers):
        yield (
            f"--window-attn-skip-freq {skip} must have a 0 or a 1 for each of the --num-layers "
            f"{config.num_layers}"
        )
    if isinstance(skip, int) and skip < 1:
        yield f"--window-attn-skip-freq must be positive, got {skip}"
    # The pattern selects layers; --window-size enables windows.
    if config.window_size is None and skip is not None:
        yield f"--window-attn-skip-freq {skip} needs --window-size"


def _is_pattern(values: list[int], num_layers: int) -> bool:
    """Return whether `values` are a 0 or a 1 for each layer."""
    return len(values) == num_layers and set(values) <= {0, 1}


def _check_norms(config: ModelOptions) -> Iterator[str]:
    if not config.norm_weights:
        flag = "--no-norm-weights"
        if config.transformer_impl == "transformer_engine":
            yield f"{flag} does not support --transformer-impl transformer_engine: use local"
        if config.apply_layernorm_1p:
            yield f"{flag} and --apply-layernorm-1p are mutually exclusive"
    if config.qk_layernorm_across_heads:
        is_rms_norm = config.normalization == "RMSNorm"
        if not (config.qk_layernorm and is_rms_norm):
            yield "--qk-layernorm-across-heads needs --qk-layernorm and --normalization RMSNorm"
    if config.qk_layernorm_after_rope:
        flag = "--qk-layernorm-after-rope"
        if not config.qk_layernorm:
            yield f"{flag} needs --qk-layernorm"
        if config.qk_layernorm_across_heads or config.multi_latent_attention:
            yield (
                f"{flag} does not support --qk-layernorm-across-heads and "
                "--multi-latent-attention: leave it out"
            )


def _check_parallel_residual(config: ModelOptions) -> Iterator[str]:
    if not config.share_parallel_norm:
        return
    if not config.parallel_residual:
        yield "--share-parallel-norm needs --parallel-residual"
    unsupported = {
        f"--norm-placement {config.norm_placement}": config.norm_placement != "pre",
        "--recompute-modules layernorm": config.recomputes("layernorm"),
    }
    for option, is_given in unsupported.items():
        if is_given:
            yield f"--share-parallel-norm does not support {option}: leave one of them out"


def _check_recomputation(config: ModelOptions) -> Iterator[str]:
    if config.recompute_granularity != "full":
        return
    if config.recompute_method is None or not config.recompute_num_layers:
        yield "--recompute-granularity full needs --recompute-method and --recompute-num-layers"


def _check_positions(config: ModelOptions) -> Iterator[str]:
    if config.scale_alibi and config.position_embedding_type != "alibi":
        yield "--scale-alibi needs --position-embedding-type alibi"
    yield from _check_no_rope_freq(config)
    if config.query_length_scaling:
        flag = f"--query-length-scaling {config.query_length_scaling}"
        has_rope = config.multi_latent_attention or config.position_embedding_type == "rope"
        if config.rope_type != "yarn" or not has_rope:
            yield f"{flag} needs --rope-type yarn"
    # The remaining rules are those of YaRN and LongRoPE.
    if config.rope_type == "rope":
        return
    if config.use_rope_scaling:
        yield (
            f"--use-rope-scaling (Llama 3) and --rope-type {config.rope_type} are mutually "
            "exclusive"
        )
    if not (config.rotary_scaling_factor and config.original_max_position_embeddings):
        yield (
            f"--rope-type {config.rope_type}: --rotary-scaling-factor "
            f"{config.rotary_scaling_factor} and --original-max-position-embeddings "
            f"{config.original_max_position_embeddings} must be positive"
        )
    if config.rope_type == "longrope":
        yield from _check_longrope(config)


def _check_longrope(config: ModelOptions) -> Iterator[str]:
    if config.multi_latent_attention:
        yield "--rope-type longrope does not support --multi-latent-attention"
        return
    if config.rotary_stretch != 1.0:
        yield (
            "--rope-type longrope and --rotary-seq-len-interpolation-factor are mutually exclusive"
        )
    # RoPE rotates pairs of elements, each with a frequency of its own.
    pairs = int(config.head_dim * config.rotary_percent) // 2
    for name in ("longrope_short_factor", "longrope_long_factor"):
        factors = getattr(config, name) or []
        if len(factors) != pairs or min(factors) <= 0:
            yield (
                f"--rope-type longrope: {_format_flag(name)} needs a positive number for each of "
                f"the {pairs} rotated pairs of a head, got {factors}"
            )


def _check_no_rope_freq(config: ModelOptions) -> Iterator[str]:
    freq = config.no_rope_freq
    if freq is None:
        return
    if isinstance(freq, int) and freq < 1:
        yield f"--no-rope-freq must be positive, got {freq}"
    if isinstance(freq, list) and not _is_pattern(freq, config.num_layers):
        yield (
            f"--no-rope-freq {freq} must have a 0 or a 1 for each of the --num-layers "
            f"{config.num_layers}"
        )
    if config.multi_latent_attention or config.position_embedding_type != "rope":
        yield (
            f"--no-rope-freq {freq} needs --position-embedding-type rope, without "
            "--multi-latent-attention"
        )


def _check_latent_attention(config: ModelOptions) -> Iterator[str]:
    if not config.multi_latent_attention:
        return
    for name in ("kv_lora_rank", "qk_head_dim", "v_head_dim", "qk_pos_emb_head_dim"):
        if getattr(config, name) is None:
            yield f"--multi-latent-attention requires --{name.replace('_', '-')}"
    # RoPE rotates pairs of elements.
    rotated = config.qk_pos_emb_head_dim
    if rotated is not None and rotated % 2:
        yield f"--qk-pos-emb-head-dim must be even and positive, got {rotated}"
    # All heads expand the same latent vector, so they do not form groups.
    if config.query_groups != config.num_attention_heads:
        yield (
            "--multi-latent-attention has keys and values for every head: leave out "
            "--group-query-attention"
        )
    unsupported = []
    if config.rotary_interleaved:
        unsupported.append("--rotary-interleaved")
    if config.add_qkv_bias:
        unsupported.append("--add-qkv-bias")
    if config.attention_output_gate:
        unsupported.append("--attention-output-gate")
    if config.clip_qkv is not None:
        unsupported.append(f"--clip-qkv {config.clip_qkv}")
    if unsupported:
        yield f"--multi-latent-attention does not support {' and '.join(unsupported)}"


def _check_multi_token_prediction(config: ModelOptions) -> Iterator[str]:
    if not config.num_mtp_layers:
        return
    option = f"--mtp-num-layers {config.mtp_num_layers}"
    position_type = config.position_embedding_type
    if position_type not in ("rope", "none"):
        yield (
            f"--position-embedding-type {position_type} with {option}: the last pipeline stage has "
            "word embeddings, but no position embeddings. Use rope or none"
        )
    if config.embedding_layernorm:
        yield (
            f"--embedding-layernorm with {option}: the last pipeline stage has word embeddings, "
            "but not their norm. Leave one of them out"
        )


def _check_experts(config: ModelOptions) -> Iterator[str]:
    yield from _check_moe_layer_freq(config)
    yield from _check_topk(config)
    if config.add_bias_linear and config.has_shared_experts:
        yield (
            "--moe-shared-expert-intermediate-size needs --disable-bias-linear: shared experts do "
            "not have biases"
        )
    if config.moe_shared_expert_gate and not config.moe_shared_expert_intermediate_size:
        yield "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size"
    if config.moe_average_shared_expert and not config.has_shared_experts:
        yield "--moe-average-shared-expert needs --moe-shared-expert-intermediate-size"
    yield from _check_groups(config)
    yield from _check_load_balancing(config)


def _check_moe_layer_freq(config: ModelOptions) -> Iterator[str]:
    freq = config.moe_layer_freq
    if isinstance(freq, int):
        if freq < 1:
            yield f"--moe-layer-freq must be positive, got {freq}"
    elif not _is_pattern(freq, config.num_layers):
        yield (
            f"--moe-layer-freq {freq} must have a 0 or a 1 for each of the --num-layers "
            f"{config.num_layers}"
        )


def _check_topk(config: ModelOptions) -> Iterator[str]:
    topk = config.moe_router_topk
    if not 1 <= topk <= config.experts:
        yield f"--moe-router-topk {topk} must be between 1 and --num-experts {config.experts}"
    # The weights of the chosen experts sum to 1; with one expert the weight is constant.
    is_softmax = config.score_function == "softmax"
    if topk == 1 and is_softmax and not config.softmax_before_choice:
        yield (
            "--moe-router-topk 1 needs --moe-router-pre-softmax: a softmax over one expert has no "
            "gradient"
        )


def _check_groups(config: ModelOptions) -> Iterator[str]:
    experts = config.experts
    topk = config.moe_router_topk
    groups = config.moe_router_num_groups
    group_topk = config.moe_router_group_topk
    if (groups is None) != (group_topk is None):
        yield (
            f"--moe-router-num-groups {groups} and --moe-router-group-topk {group_topk} must be "
            "given together"
        )
        return
    if not groups or not group_topk:
        return
    if config.moe_router_group_score_topk is not None:
        scores = config.moe_router_group_score_topk
        if not 1 <= scores <= experts // groups:
            yield (
                f"--moe-router-group-score-topk {scores} must be between 1 and "
                f"{experts // groups}, the experts per group"
            )
        return
    # The score of a group is the sum over its topk / group_topk best experts.
    # Each chosen group contributes the same number of experts.
    is_even = experts % groups == 0 and topk % group_topk == 0
    fits_in_groups = groups >= group_topk and topk * groups <= experts * group_topk
    if not (is_even and fits_in_groups):
        yield (
            f"--moe-router-num-groups {groups} must divide --num-experts {experts}, and "
            f"--moe-router-group-topk {group_topk} must be at most {groups} and divide "
            f"--moe-router-topk {topk} into shares that fit in a group"
        )


def _check_load_balancing(config: ModelOptions) -> Iterator[str]:
    kinds = config.moe_router_load_balancing_type
    coefficients = config.moe_aux_loss_coeff
    if len(kinds) != len(coefficients):
        yield f"--moe-aux-loss-coeff {coefficients} must have one value for each of {kinds}"
    if len(set(kinds)) < len(kinds):
        yield f"--moe-router-load-balancing-type {kinds} contains duplicates"
    if "sinkhorn" in kinds:
        yield from _check_sinkhorn(config)
    # The counts of tokens accumulate over the micro-batches of a step.
    if "global_aux_loss" in kinds and config.recompute_granularity == "full":
        yield (
            "--moe-router-load-balancing-type global_aux_loss with --recompute-granularity full: "
            "recomputed layers would count their tokens twice; use aux_loss or seq_aux_loss"
        )
    # Padding gives every expert the same number of tokens.
    if config.moe_pad_expert_input_to_capacity:
        if config.moe_expert_capacity_factor is None:
            yield "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor"
        if config.moe_router_enable_expert_bias:
            yield (
                "--moe-pad-expert-input-to-capacity with --moe-router-enable-expert-bias: padding "
                "gives all experts the same load, so the bias never changes; leave one out"
            )


def _check_sinkhorn(config: ModelOptions) -> Iterator[str]:
    # Options without an effect on the choice by sinkhorn, and whether they are given
    options = {
        "other losses": len(config.moe_router_load_balancing_type) > 1,
        f"--moe-aux-loss-coeff {config.moe_aux_loss_coeff}": any(config.moe_aux_loss_coeff),
        "--moe-router-score-function sigmoid": config.moe_router_score_function == "sigmoid",
        "--moe-router-enable-expert-bias": config.moe_router_enable_expert_bias,
        "--moe-router-num-groups": config.moe_router_num_groups,
        "--moe-router-topk-scaling-factor": config.moe_router_topk_scaling_factor,
        "--moe-expert-capacity-factor": config.moe_expert_capacity_factor is not None,
    }
    unsupported = []
    for name, is_given in options.items():
        if is_given:
            unsupported.append(name)
    if unsupported:
        yield (
            "--moe-router-load-balancing-type sinkhorn does not support "
            f"{', '.join(unsupported)}: leave that out"
        )
