"""Rules of the flags of experts that are more than relations between two flags."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.transformer.transformer_config import TransformerConfig


def find_expert_problems(config: TransformerConfig) -> Iterator[str]:
    """Yield a line for each value that does not fit the others."""
    yield from _find_router_problems(config)
    yield from _find_group_problems(config)


def _find_router_problems(config: TransformerConfig) -> Iterator[str]:
    topk = config.moe_router_topk
    if not 1 <= topk <= config.experts:
        yield f"--moe-router-topk {topk} must be between 1 and --num-experts {config.experts}"
    # The weights of the chosen experts sum to 1; with one expert the weight is constant.
    is_softmax = config.score_function == "softmax"
    is_constant = topk == 1 and is_softmax and not config.softmax_before_choice
    if is_constant and not config.moe_router_normalize_top1:
        yield (
            "--moe-router-topk 1 requires --moe-router-pre-softmax: a softmax over one expert "
            "has no gradient (--moe-router-normalize-top1 accepts that)"
        )
    losses = config.moe_router_load_balancing_type
    coefficients = config.moe_aux_loss_coeff
    if len(losses) != len(coefficients):
        yield f"--moe-aux-loss-coeff {coefficients} must have one value for each of {losses}"
    if len(set(losses)) < len(losses):
        yield f"--moe-router-load-balancing-type {losses} contains duplicates"
    if "sinkhorn" in losses and (len(losses) > 1 or any(coefficients)):
        yield (
            f"--moe-router-load-balancing-type {' '.join(losses)} with --moe-aux-loss-coeff "
            f"{coefficients}: sinkhorn balances without a loss; give it alone and with 0"
        )


def _find_group_problems(config: TransformerConfig) -> Iterator[str]:
    experts = config.experts
    topk = config.moe_router_topk
    groups = config.moe_router_num_groups
    group_topk = config.moe_router_group_topk
    if not groups or not group_topk:
        return
    if config.moe_router_group_score_topk is not None:
        scores = config.moe_router_group_score_topk
        if experts % groups or group_topk > groups:
            yield (
                f"--moe-router-num-groups {groups} must divide --num-experts {experts}, and be at "
                f"least --moe-router-group-topk {group_topk}"
            )
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
