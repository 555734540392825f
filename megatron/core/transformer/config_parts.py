"""Parts of `TransformerConfig`: how a model is computed, and its experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.flags import flag
from megatron.core.lazy_import import lazy_module
from megatron.core.transformer.model_rules import layer_pattern

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

_MOE = {"has_experts": True}
_DROPPING = _MOE | {"drops_tokens": True}
_SHARED = _MOE | {"has_shared_experts": True}
_GROUPS = _MOE | {"has_groups": True}
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj")


@dataclass(kw_only=True)
class ComputeOptions:
    """Precision, backend, fused kernels, overlaps and recomputation: the same weights and, to
    rounding, results.
    """

    bf16: bool = flag(False)
    """bfloat16 parameters and arithmetic, fp32 gradients and main parameters."""
    fp16: bool = flag(False)
    """float16 parameters and arithmetic with loss scaling, fp32 gradients and main parameters."""
    transformer_impl: str = flag("local", choices=("local", "transformer_engine"))
    """What computes the layers: plain torch, or Transformer Engine; also whose modules of
    Megatron-LM legacy files are for. Results are the same to rounding, and so are checkpoints.
    """
    norm_impl: str = flag("torch", choices=("torch", "apex"))
    """What computes the norms of local layers: torch, or apex's fused kernels."""
    fp8: str | None = flag(None, "--fp8-format", choices=("e4m3", "hybrid"))
    """Matrix products of the layers in fp8 (Micikevicius et al. 2022): e4m3 throughout, or e5m2 for
    gradients.
    """
    fp8_recipe: str = flag("delayed", choices=("delayed", "tensorwise", "blockwise", "mxfp8"))
    """How fp8 tensors are scaled: by the maxima of earlier steps, by their own, by those of blocks,
    of 32 elements.
    """
    fp8_margin: int = flag(0)
    """With delayed scaling: scales are smaller by 2 to this power."""
    fp8_amax_history_len: int = flag(1, positive=True)
    """With delayed scaling: number of maxima that are kept."""
    fp8_amax_compute_algo: str = flag("most_recent", choices=("most_recent", "max"))
    """With delayed scaling: which of them decides."""
    fp8_param_gather: bool = flag(False)
    """Keep and gather the weights of the layers in fp8; the fp32 main parameters are what is
    trained and stored.
    """
    fp4: str | None = flag(None, "--fp4-format", choices=("e2m1",))
    """Matrix products of the layers in 4 bits (Blackwell)."""
    fp4_recipe: str = flag("nvfp4", choices=("nvfp4",))
    """How fp4 tensors are scaled: by the maxima of 16 elements (NVFP4)."""
    first_last_layers_bf16: bool = flag(False)
    """Keep the first and the last layers out of fp8 or fp4, as many as the two options below say.
    """
    num_layers_at_start_in_bf16: int = flag(1, at_least=0)
    """Layers at the start with --first-last-layers-bf16."""
    num_layers_at_end_in_bf16: int = flag(1, at_least=0)
    """Layers at the end with --first-last-layers-bf16."""
    tp_comm_overlap: bool = flag(False)
    """Overlap collectives of tensor parallelism with the matrix products that they are for
    (Transformer Engine).
    """
    tp_comm_overlap_cfg: str | None = flag(None)
    """YAML file with the way of each of these overlaps. Default: Transformer Engine's."""
    tp_comm_overlap_ag: bool = flag(True, "--no-tp-comm-overlap-ag", "--disable-tp-comm-overlap-ag")
    """Do not overlap all-gathers."""
    tp_comm_overlap_rs: bool = flag(True, "--no-tp-comm-overlap-rs", "--disable-tp-comm-overlap-rs")
    """Do not overlap reduce-scatters."""
    tp_comm_overlap_rs_dgrad: bool = flag(False)
    """Overlap reduce-scatters with the gradients of inputs, too."""
    tp_comm_bulk_dgrad: bool = flag(True, "--no-tp-comm-bulk-dgrad", "--disable-tp-comm-bulk-dgrad")
    """Do not overlap the all-gather of inputs with their gradients."""
    tp_comm_bulk_wgrad: bool = flag(True, "--no-tp-comm-bulk-wgrad", "--disable-tp-comm-bulk-wgrad")
    """Do not overlap the reduce-scatter of the inputs' gradients with those of weights."""
    tp_comm_bootstrap_backend: str = flag("nccl", choices=("nccl", "mpi", "gloo"))
    """Backend of torch.distributed that the buffers of these overlaps are set up over."""
    cross_entropy_loss_fusion: bool = flag(False)
    """Take the loss from --cross-entropy-fusion-impl; native, which is fused in any case, without
    it.
    """
    cross_entropy_fusion_impl: str = flag("native", choices=("native", "te"))
    """The output layer with the loss in one, or Transformer Engine's kernel on the logits."""
    apply_rope_fusion: bool = flag(False)
    """Rotate queries and keys by Transformer Engine's kernel."""
    recompute_granularity: str | None = flag(None, choices=("full", "selective"))
    """Recompute activations in backward: whole layers (full) or parts of them (selective)."""
    recompute_modules: list[str] | None = flag(None, choices=RECOMPUTE_MODULES)
    """With selective: attention without its projections (core_attn, the default), the two norms in
    front of the projections (layernorm: their outputs are not kept), the whole MLP (mlp), a layer's
    experts with router and dispatch (moe) or what they compute between their matrices (moe_act),
    latent attention from its narrow vectors on (mla_up_proj).
    """
    recompute_method: str | None = flag(None, choices=("uniform", "block"))
    """With full: groups of --recompute-num-layers layers (uniform), or the first so many layers of
    a chunk (block).
    """
    recompute_num_layers: int | None = flag(None, positive=True)
    """Number of layers per group (uniform) or per chunk (block)."""

    @property
    def params_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32

    @property
    def low_precision(self) -> str | None:
        """The recipe of the layers' matrix products, where they are in fp8 or fp4."""
        return (
            self.fp8_recipe
            if self.fp8 is not None
            else self.fp4_recipe
            if self.fp4 is not None
            else None
        )

    def recomputes(self, module: str) -> bool:
        """Whether --recompute-granularity selective recomputes this one of RECOMPUTE_MODULES."""
        return self.recompute_granularity == "selective" and module in (
            self.recompute_modules or ["core_attn"]
        )


@dataclass(kw_only=True)
class ExpertOptions:
    """Layers of experts, and the router that chooses among them."""

    num_experts: int | None = flag(None, at_least=0, decides="shapes", meaning="experts")
    """Number of experts of a layer with experts (Shazeer et al. 2017); without it, or 0 or 1, all
    layers are dense.
    """
    moe_layer_freq: int | list[int] = flag(
        1, parse=layer_pattern, decides="shapes", when=_MOE, meaning="moe_layer_pattern"
    )
    """Every N-th layer has experts, from the first on; or a pattern of 1 (experts) and 0 (dense),
    as [0]*3+[1]*61.
    """
    moe_ffn_hidden_size: int | None = flag(None, decides="shapes", when=_MOE)
    """Inner width of an expert. Default: --ffn-hidden-size."""
    moe_shared_expert_intermediate_size: int | None = flag(None, decides="shapes", when=_MOE)
    """Inner width of the shared expert, to which every token goes. Default: none."""
    moe_shared_expert_gate: bool = flag(False, decides="shapes", when=_SHARED)
    """Multiply the shared expert's output by a learned gate."""
    moe_router_topk: int = flag(2, decides="mathematics", when=_MOE)
    """Number of experts that a token goes to."""
    moe_router_pre_softmax: bool = flag(
        False, decides="mathematics", when=_MOE, meaning="softmax_before_choice"
    )
    """Softmax over all experts before the choice, in place of over the chosen ones after it."""
    moe_router_score_function: str = flag(
        "softmax",
        choices=("softmax", "sigmoid"),
        decides="mathematics",
        when=_MOE,
        meaning="score_function",
    )
    """How the router's logits become scores."""
    moe_router_num_groups: int | None = flag(None, decides="mathematics", when=_MOE)
    """Groups of experts, of which a token's experts come from --moe-router-group-topk."""
    moe_router_group_topk: int | None = flag(None, decides="mathematics", when=_MOE)
    """Number of groups that a token's experts come from."""
    moe_router_group_score_topk: int | None = flag(
        None, decides="mathematics", when=_GROUPS, meaning="group_score_topk"
    )
    """A group is as good as the sum of so many of its best scores (2 in DeepSeek-V3). Default, and
    all that Megatron-LM has: --moe-router-topk / --moe-router-group-topk.
    """
    moe_router_topk_scaling_factor: float | None = flag(
        None, positive=True, decides="mathematics", when=_MOE, meaning="topk_scaling_factor"
    )
    """Factor of the weights of the chosen experts."""
    moe_router_enable_expert_bias: bool = flag(False, decides="shapes", when=_MOE)
    """Add a bias to the scores that choose, which follows the load of the experts (DeepSeek-V3)."""
    moe_router_bias_update_rate: float = flag(1e-3, at_least=0)
    """By how much a step moves the expert bias."""
    moe_router_dtype: str | None = flag(
        None, choices=("fp32", "fp64"), decides="mathematics", when=_MOE
    )
    """Precision of the router. Default: that of the model."""
    moe_router_load_balancing_type: list[str] = flag(
        ("aux_loss",), choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
    )
    """Losses that keep the experts in use: over a micro-batch, each sequence, or all micro-batches
    so far in a step; or sinkhorn, by which a rank's tokens are spread evenly without a loss (Clark
    et al. 2022).
    """
    moe_aux_loss_coeff: list[float] = flag((0.0,))
    """Coefficient of each of these losses."""
    moe_z_loss_coeff: float | None = flag(None, at_least=0)
    """Coefficient of the loss on the size of the router's logits (Zoph et al. 2022)."""
    moe_router_force_load_balancing: bool = flag(False)
    """Let the router choose at random, for measurements: new weights use some experts far more than
    others.
    """
    moe_expert_capacity_factor: float | None = flag(
        None, positive=True, decides="mathematics", when=_MOE
    )
    """Drop tokens beyond this many times an expert's even share. Default: none is dropped."""
    moe_token_drop_policy: str = flag(
        "probs", choices=("probs", "position"), decides="mathematics", when=_DROPPING
    )
    """Which tokens an expert without room drops: those with the lowest weights, or the last ones.
    """
    moe_pad_expert_input_to_capacity: bool = flag(False)
    """Accepted with a capacity; inputs of experts have the sizes that they need, and the results
    are the same.
    """
    moe_token_dispatcher_type: str = flag("allgather", choices=("allgather", "alltoall"))
    """How tokens reach the ranks of their experts: all tokens to all ranks, or each to its own."""

    def _list_losses(self) -> None:
        """Megatron-LM stores a single value where there is one loss."""
        kinds: Any = self.moe_router_load_balancing_type
        coefficients: Any = self.moe_aux_loss_coeff
        self.moe_router_load_balancing_type = [kinds] if isinstance(kinds, str) else list(kinds)
        self.moe_aux_loss_coeff = (
            list(coefficients) if isinstance(coefficients, list | tuple) else [coefficients]
        )

    @property
    def experts(self) -> int:
        """Experts of a layer that has some; 0 in a dense model."""
        return self.num_experts if self.num_experts is not None and self.num_experts > 1 else 0

    @property
    def has_experts(self) -> bool:
        return self.experts > 0

    @property
    def has_shared_experts(self) -> bool:
        return bool(self.moe_shared_expert_intermediate_size)

    @property
    def by_sinkhorn(self) -> bool:
        return self.moe_router_load_balancing_type == ["sinkhorn"]

    @property
    def softmax_before_choice(self) -> bool:
        return (
            self.moe_router_pre_softmax or self.by_sinkhorn
        ) and self.score_function == "softmax"

    @property
    def score_function(self) -> str:
        return (
            "sigmoid"
            if self.by_sinkhorn and self.moe_router_topk == 1
            else self.moe_router_score_function
        )

    @property
    def group_score_topk(self) -> int:
        return self.moe_router_group_score_topk or self.moe_router_topk // (
            self.moe_router_group_topk or 1
        )

    @property
    def topk_scaling_factor(self) -> float:
        return self.moe_router_topk_scaling_factor or 1.0

    @property
    def drops_tokens(self) -> bool:
        return self.moe_expert_capacity_factor is not None

    @property
    def moe_ffn_size(self) -> int:
        assert self.moe_ffn_hidden_size is not None
        return self.moe_ffn_hidden_size

    @property
    def load_balancing(self) -> dict[str, float]:
        """Coefficients of the losses that are on."""
        pairs = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff, strict=True)
        return {kind: coefficient for kind, coefficient in pairs if kind != "none" and coefficient}
