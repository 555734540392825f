"""Features of the trainer, layouts, and the combinations that the equivalence suite runs.

A model has one value of each group of features. Models are computed, so that they cover pairs; the
program itself reports, with the reason, which combinations do not exist.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

SIZES = (
    "--hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 2e-3 --lr-decay-style cosine "
    "--lr-warmup-fraction 0.3 --init-method-std 0.05 --num-workers 0 --num-threads 1 "
    "--log-interval 1 --eval-interval 3 --eval-iters 1 --mock-data --hidden-dropout 0 "
    "--attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 60 "
    "--make-vocab-size-divisible-by 8 "
    # Without it, the direction of an update by Adam is that of rounding errors where a gradient is
    # zero.
    "--adam-eps 1e-4 "
)
ROPE = "--position-embedding-type rope "
RECOMPUTE_ALL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24 "

# The first value of a group goes with most values of the others.
FEATURES: Mapping[str, Mapping[str, str]] = {
    "positions": {
        "rope": ROPE,
        "learned": "--position-embedding-type learned_absolute --max-position-embeddings 16",
        "partial_interleaved_rope": f"{ROPE} --rotary-percent 0.5 --rotary-interleaved",
        "yarn": f"{ROPE} --rope-type yarn --rotary-scaling-factor 4 "
        "--original-max-position-embeddings 4",
        "llama3_scaling": f"{ROPE} --use-rope-scaling --rope-original-max-position-embeddings 8",
        "rope_in_some_layers": f"{ROPE} --no-rope-freq 2",
        "longrope": f"{ROPE} --rope-type longrope --rotary-scaling-factor 4 "
        "--original-max-position-embeddings 8 --longrope-short-factor 1 1 1 1 "
        "--longrope-long-factor 1 1.5 2.5 4",
        "scaled_queries": f"{ROPE} --rope-type yarn --rotary-scaling-factor 4 "
        "--original-max-position-embeddings 4 --query-length-scaling 0.3",
        "alibi": "--position-embedding-type alibi",
        "no_positions": "--position-embedding-type none",
    },
    "attention": {
        "multi_head": "",
        "grouped_queries": "--group-query-attention --num-query-groups 2",
        "latent": "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
        "--qk-pos-emb-head-dim 8 --v-head-dim 8 --qk-layernorm",
        "learned_sinks": "--softmax-type learnable",
        "sink_of_zero": "--softmax-type off-by-one",
        "windows": "--window-size 5,0 --window-attn-skip-freq 2",
        "gated": "--attention-output-gate --group-query-attention --num-query-groups 2",
        "norms_of_heads": "--qk-layernorm --apply-wd-to-qk-layernorm",
        "norms_across_heads": "--qk-layernorm --qk-layernorm-across-heads",
        "clipped_and_capped": "--clip-qkv 0.5 --attn-logit-softcapping 2 "
        "--final-logit-softcapping 3",
    },
    "norms": {
        "rmsnorm": "--normalization RMSNorm",
        "layernorm": "--normalization LayerNorm",
        "zero_centered": "--normalization RMSNorm --apply-layernorm-1p",
        "norms_after": "--normalization RMSNorm --norm-placement post",
        "norms_before_and_after": "--normalization RMSNorm --norm-placement both",
        "no_norm_weights": "--no-norm-weights",
        "parallel_residual": "--parallel-residual",
        "shared_parallel_norm": "--parallel-residual --share-parallel-norm",
    },
    "mlp": {
        "gelu": "",
        "swiglu": "--swiglu",
        "clamped_quick_geglu": "--quick-geglu --glu-linear-offset 1 "
        "--activation-func-clamp-value 1",
        "squared_relu": "--squared-relu",
        "xielu": "--xielu --disable-bias-linear",
        "experts": f"{EXPERTS} --disable-bias-linear --moe-aux-loss-coeff 0.02",
        "experts_by_sequence": f"{EXPERTS} --disable-bias-linear --moe-z-loss-coeff 1e-2 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.02 "
        "--moe-router-pre-softmax --swiglu",
        "experts_with_bias": f"{EXPERTS} --disable-bias-linear --swiglu "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 1.5 "
        "--moe-router-dtype fp32",
        "experts_with_shared": f"{EXPERTS} --disable-bias-linear --swiglu --moe-layer-freq 2 "
        "--moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate",
        "experts_with_capacity": f"{EXPERTS} --disable-bias-linear --moe-expert-capacity-factor 0.8",
        "experts_with_capacity_by_position": f"{EXPERTS} --disable-bias-linear "
        "--moe-expert-capacity-factor 0.8 --moe-token-drop-policy position",
        "experts_by_sinkhorn": f"{EXPERTS} --disable-bias-linear "
        "--moe-router-load-balancing-type sinkhorn",
        "global_balance": f"{EXPERTS} --disable-bias-linear "
        "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.02",
    },
    "head": {
        "tied": "",
        "untied": "--untie-embeddings-and-output-weights",
        "untied_with_bias": "--untie-embeddings-and-output-weights --output-layer-bias",
        "scaled": "--scale-embeddings --residual-multiplier 0.5 --logits-scaling 2",
        "embedding_norm": "--embedding-layernorm",
        "two_more_tokens": "--mtp-num-layers 2",
    },
    "loss": {
        "mean_of_means": "",
        "per_token": "--calculate-per-token-loss",
        "masked": "--eod-mask-loss",
        "masked_per_token": "--eod-mask-loss --calculate-per-token-loss",
        "documents": "--reset-attention-mask --reset-position-ids --eod-mask-loss",
        "documents_per_token": "--reset-attention-mask --reset-position-ids --eod-mask-loss "
        "--calculate-per-token-loss",
    },
    "optimizer": {
        "adam_clipped": "--weight-decay 0.1 --clip-grad 0.1",
        "adam_not_clipped": "--weight-decay 0.1 --clip-grad 0",
        "decoupled_rates": "--decoupled-lr 1e-3 --decoupled-min-lr 1e-4 --weight-decay 0.1",
        "sgd": "--optimizer sgd --lr 0.1 --weight-decay 0.01",
        "ademamix": "--optimizer ademamix --ademamix-beta3 0.99 --ademamix-alpha 3",
        "muon": "--optimizer muon --muon-nesterov",
        # The sign of a gradient that is zero up to rounding, as of the biases of keys, is random.
        "lion": "--optimizer lion --lr 1e-3 --disable-bias-linear",
        "mup": "--use-mup --mup-base-hidden-size 16",
        "average": "--ema-decay 0.9 --eval-ema",
    },
    "memory": {
        "kept": "",
        "recomputed": RECOMPUTE_ALL,
        "recomputed_attention": "--recompute-granularity selective",
        "recomputed_norms_and_mlp": "--recompute-granularity selective --recompute-modules "
        "layernorm mlp",
    },
    "batches": {
        "constant": "--train-iters 3",
        "growing": "--global-batch-size 8 --rampup-batch-size 4 4 8 --train-samples 20",
        "pairs": "--train-iters 3 --micro-batch-size 2",
    },
}

TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"
CP = "--context-parallel-size 2"
EP = "--expert-model-parallel-size 2"
VPP = f"{PP} --virtual-pipeline-model-parallel-size 2"
ZERO = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--ddp-bucket-size 3000"
)
ALLTOALL = "--moe-token-dispatcher-type alltoall"


@dataclass(frozen=True)
class Layout:
    """Processes and flags; `needs_experts` if without experts it is another layout of the list."""

    processes: int
    flags: str
    needs_experts: bool = False

    @property
    def min_layers(self) -> int:
        """Return how many layers a model needs for all exchanges of the layout."""
        is_split_by_layer = PP in self.flags or "--cp-comm-type a2a p2p a2a" in self.flags
        return 4 if is_split_by_layer else 2


ONE_AXIS: Mapping[str, Layout] = {
    "dp2": Layout(2, ""),
    "zero2": Layout(2, ZERO),
    "tp2": Layout(2, TP),
    "sp2": Layout(2, SP),
    "pp2": Layout(2, PP),
    "vpp2": Layout(2, VPP),
    "cp2_ring": Layout(2, CP),
    "cp2_gathered": Layout(2, f"{CP} --cp-comm-type all_gather"),
    "cp2_heads": Layout(2, f"{CP} --cp-comm-type a2a"),
    "ep2": Layout(2, EP, needs_experts=True),
    "ep2_alltoall": Layout(2, f"{EP} {ALLTOALL} {ZERO}", needs_experts=True),
    "sp2_etp1": Layout(2, f"{SP} --expert-tensor-parallel-size 1", needs_experts=True),
}
TWO_AXES: Mapping[str, Layout] = {
    "tp2_pp2": Layout(4, f"{TP} {PP}"),
    "sp2_vpp2": Layout(4, f"{SP} {VPP}"),
    "sp2_zero2": Layout(4, f"{SP} {ZERO}"),
    "tp2_dp2": Layout(4, TP),
    "sp2_cp2_ring": Layout(4, f"{SP} {CP}"),
    "tp2_cp2_heads": Layout(4, f"{TP} {CP} --cp-comm-type a2a"),
    "pp2_zero2": Layout(4, f"{PP} {ZERO}"),
    "vpp2_dp2": Layout(4, VPP),
    "pp2_cp2_gathered": Layout(4, f"{PP} {CP} --cp-comm-type all_gather"),
    "cp2_ring_zero2": Layout(4, f"{CP} {ZERO}"),
    "zero4": Layout(4, ZERO),
    "ep2_zero4": Layout(4, f"{EP} {ZERO}", needs_experts=True),
    "ep2_alltoall_pp2": Layout(4, f"{EP} {ALLTOALL} {PP}", needs_experts=True),
    "ep2_alltoall_cp2": Layout(4, f"{EP} {ALLTOALL} {CP}", needs_experts=True),
    "sp2_ep2_etp2": Layout(4, f"{SP} {EP} {ALLTOALL} {ZERO}", needs_experts=True),
    "sp2_ep2_etp1": Layout(
        4, f"{SP} {EP} --expert-tensor-parallel-size 1 {ZERO}", needs_experts=True
    ),
}
RARE: Mapping[str, Layout] = {
    "pp2_uneven": Layout(2, f"{PP} --decoder-first-pipeline-num-layers 1"),
    "pp2_by_content": Layout(2, f"{PP} --pipeline-model-parallel-layout Et*3|tL"),
    "cp2_by_layer": Layout(2, f"{CP} --cp-comm-type a2a p2p a2a all_gather"),
    "zero2_without_overlap": Layout(2, "--use-distributed-optimizer"),
}
LAYOUTS: Mapping[str, Layout] = {**ONE_AXIS, **TWO_AXES, **RARE}

# Silent bugs of other programs: name -> (thread, values other than the first ones, layout).
PUBLISHED: Mapping[str, tuple[str, Mapping[str, str], str]] = {
    "mtp_ratio_dp": (
        "NVIDIA/Megatron-LM#7452, finding 3; #4896",
        {"head": "two_more_tokens", "loss": "masked_per_token"},
        "dp2",
    ),
    "mtp_ratio_cp": (
        "NVIDIA/Megatron-LM#7498",
        {"head": "two_more_tokens", "loss": "masked_per_token"},
        "cp2_ring",
    ),
    "clip_marking_tp": (
        "NVIDIA/Megatron-LM#7530, finding 8 of #7452",
        {"attention": "learned_sinks", "optimizer": "adam_clipped"},
        "tp2",
    ),
    "masked_mean_cp": (
        "NVIDIA/Megatron-LM#7513, finding 9 of #7452",
        {"loss": "masked"},
        "cp2_ring",
    ),
    "masked_mean_microbatch": (
        "NVIDIA/Megatron-LM#4590",
        {"loss": "masked_per_token", "batches": "pairs"},
        "dp2",
    ),
    "router_count_tp": (
        "NVIDIA/Megatron-LM#7481, finding 10 of #7452; #5047",
        {"mlp": "experts", "loss": "masked_per_token"},
        "sp2",
    ),
    "aux_loss_dp_average": (
        "NVIDIA/Megatron-LM#7452, appendix C",
        {"mlp": "experts_by_sequence"},
        "zero2",
    ),
    "shared_norm_tp": (
        "NVIDIA/Megatron-LM#7613, finding 11 of #7452",
        {"attention": "norms_of_heads"},
        "tp2",
    ),
    "gather_grad_mode_sp": (
        "NVIDIA/Megatron-LM#7452, appendix B",
        {"head": "untied_with_bias", "mlp": "swiglu"},
        "sp2",
    ),
    "recompute_group_sp": (
        "NVIDIA/Megatron-LM#7452, finding 4",
        {"head": "two_more_tokens", "memory": "recomputed"},
        "sp2",
    ),
    "document_mask_with_windows": (
        "NVIDIA/Megatron-LM#7039",
        {"attention": "windows", "loss": "documents", "batches": "pairs"},
        "cp2_gathered",
    ),
    "expert_grad_ep": ("pytorch/pytorch#160285", {"mlp": "experts"}, "ep2_alltoall"),
    "expert_norm_ep": (
        "NVIDIA/Megatron-LM#5916",
        {"mlp": "experts", "optimizer": "adam_clipped"},
        "sp2_ep2_etp1",
    ),
    "expert_tensor_parallel_size": (
        "NVIDIA/Megatron-LM#5916",
        {"mlp": "experts_with_shared", "optimizer": "adam_clipped"},
        "sp2_etp1",
    ),
    "muon_shard_tp": ("deepspeedai/DeepSpeed#8437", {"optimizer": "muon"}, "sp2_zero2"),
}

Value = tuple[str, str]
"""A group and the name of one of its values."""
Model = tuple[str, ...]
"""The name of one value of each group, in the order of `FEATURES`."""
Find = Callable[[str, int], str | None]
"""(flags, processes) -> why the program refuses them, or None."""


def flags_of(model: Model, num_layers: int = 4) -> str:
    """Return the command line of a model, without its layout."""
    features = [values[name] for values, name in zip(FEATURES.values(), model, strict=True)]
    return f"{SIZES}--num-layers {num_layers} " + " ".join(features)


def make_model(changes: Mapping[str, str]) -> Model:
    """Return the model with the first value of each group, except for `changes`."""
    return tuple(changes.get(group, next(iter(values))) for group, values in FEATURES.items())


def has_experts(model: Model) -> bool:
    """Return whether layers have experts."""
    return "--num-experts" in shlex.split(flags_of(model))


class Models:
    """Models that contain every value and every pair of values of different groups, computed as
    they are needed: the first `num_seeds` contain every value.

    `refused` are the pairs, so far, that the program refuses, with its reason.
    """

    num_seeds = max(len(values) for values in FEATURES.values())

    def __init__(self, find_refusal: Find) -> None:
        self.refused: dict[str, str] = {}
        self._find_refusal = find_refusal
        self._uncovered = dict.fromkeys(
            frozenset(((a, x), (b, y)))
            for a, b in combinations(FEATURES, 2)
            for x in FEATURES[a]
            for y in FEATURES[b]
        )
        self._seen: set[Value] = set()

    def __iter__(self) -> Iterator[Model]:
        while self._uncovered:
            pair = max(self._uncovered, key=lambda pair: len(pair - self._seen))
            reason = self._refuse(dict(pair))
            if reason is not None:
                names = sorted(name for _, name in pair)
                self.refused[" + ".join(names)] = reason
                del self._uncovered[pair]
                continue
            chosen = self._complete(dict(pair))
            self._seen.update(chosen.items())
            for covered in combinations(chosen.items(), 2):
                self._uncovered.pop(frozenset(covered), None)
            yield tuple(chosen[group] for group in FEATURES)

    def _complete(self, chosen: dict[str, str]) -> dict[str, str]:
        """Add the value of each missing group that covers most."""
        for group, values in FEATURES.items():
            if group in chosen:
                continue

            def gain(name: str, group: str = group) -> tuple[bool, int]:
                value = (group, name)
                pairs = (frozenset((value, item)) for item in chosen.items())
                return value not in self._seen, sum(pair in self._uncovered for pair in pairs)

            for name in sorted(values, key=gain, reverse=True):
                if self._refuse({**chosen, group: name}) is None:
                    chosen[group] = name
                    break
            else:
                raise AssertionError(f"no value of {group} goes with {chosen}")
        return chosen

    def _refuse(self, chosen: Mapping[str, str]) -> str | None:
        """Return why the program refuses values, the others being the first of their group."""
        return self._find_refusal(flags_of(make_model(chosen)), 1)
