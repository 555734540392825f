"""Parts of `TransformerConfig`: precision and performance options, and experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.flags import flag
from megatron.core.wings import resolve

if TYPE_CHECKING:
    import torch

# Conditions under which a field has an effect (`transformer_config.find_conditions`)
_MOE = {"has_experts": True}
_DROPPING = _MOE | {"drops_tokens": True}
_SHARED = _MOE | {"has_shared_experts": True}
_GROUPS = _MOE | {"has_groups": True}
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj")


_PARSE_LAYER_PATTERN = "megatron.core.transformer.layer_pattern:parse_layer_pattern"


def parse_layer_pattern(text: str) -> int | list[int]:
    """Parse a pattern of layers, see `layer_pattern.parse_layer_pattern`."""
    pattern: int | list[int] = resolve(_PARSE_LAYER_PATTERN)(text)
    return pattern


@dataclass(kw_only=True)
class ComputeOptions:
    """Precision, backend, fused kernels, overlaps and recomputation.

    None of them changes the weights of a model, and results change by rounding only.
    """

    bf16: bool = flag(False, excludes={"fp16": True})
    """bfloat16 parameters and arithmetic, fp32 gradients and main parameters."""
    fp16: bool = flag(False)
    """float16 parameters and arithmetic with loss scaling, fp32 gradients and main parameters."""
    transformer_impl: str = flag("local", choices=("local", "transformer_engine"))
    """Implementation of the layers: plain torch or Transformer Engine. It also selects the
    parameter names of Megatron-LM legacy files. Results are equal up to rounding; checkpoints do
    not depend on it.
    """
    norm_impl: str = flag("torch", choices=("torch", "apex"))
    """Implementation of the norms of local layers: torch or apex's fused kernels."""
    fp8: str | None = flag(
        None,
        "--fp8-format",
        choices=("e4m3", "hybrid"),
        requires={"bf16": True, "transformer_impl": "transformer_engine"},
        excludes={"fp4": True},
        reason="the kernels are Transformer Engine's; everything that is not in fp8 is in bfloat16",
    )
    """Compute matrix products of the layers in fp8 (Micikevicius et al. 2022): e4m3 only, or e4m3
    with e5m2 for gradients (hybrid).
    """
    fp8_recipe: str = flag("delayed", choices=("delayed", "tensorwise", "blockwise", "mxfp8"))
    """FP8 scaling recipe: from maxima of earlier steps (delayed), of the whole tensor (tensorwise),
    of blocks (blockwise), or of 32 elements (mxfp8).
    """
    fp8_margin: int = flag(0)
    """With delayed scaling: divide scales by 2 to this power."""
    fp8_amax_history_len: int = flag(1, positive=True)
    """With delayed scaling: length of the history of maxima."""
    fp8_amax_compute_algo: str = flag("most_recent", choices=("most_recent", "max"))
    """With delayed scaling: use the most recent maximum or the largest one of the history."""
    fp8_param_gather: bool = flag(
        False,
        requires={
            "fp8": True,
            "fp8_recipe": ("delayed", "tensorwise", "blockwise"),
            "use_distributed_optimizer": True,
        },
        reason="it changes the all-gather of the distributed optimizer; mxfp8 weights are two "
        "tensors, which cannot be filled from a shard of the main parameters",
    )
    """Keep and gather the weights of the layers in fp8. Training and checkpoints use the fp32 main
    parameters.
    """
    fp4: str | None = flag(
        None,
        "--fp4-format",
        choices=("e2m1",),
        requires={"bf16": True, "transformer_impl": "transformer_engine"},
        excludes={"experts": True},
        reason="the kernels are Transformer Engine's, which has no grouped ones; everything that "
        "is not in fp4 is in bfloat16. Use --fp8-format with experts",
    )
    """Compute matrix products of the layers in fp4 (Blackwell)."""
    fp4_recipe: str = flag("nvfp4", choices=("nvfp4",))
    """FP4 scaling recipe: from the maxima of 16 elements (NVFP4)."""
    first_last_layers_bf16: bool = flag(False)
    """Compute the first and the last layers in bf16 instead of fp8 or fp4; the two options below
    set their numbers.
    """
    num_layers_at_start_in_bf16: int = flag(1, at_least=0)
    """Number of first layers in bf16 with --first-last-layers-bf16."""
    num_layers_at_end_in_bf16: int = flag(1, at_least=0)
    """Number of last layers in bf16 with --first-last-layers-bf16."""

    # Communication of tensor parallelism in Transformer Engine
    tp_comm_overlap: bool = flag(False)
    """Overlap collectives of tensor parallelism with matrix products (Transformer Engine)."""
    tp_comm_overlap_cfg: str | None = flag(None)
    """YAML file that configures each of these overlaps. Default: Transformer Engine's settings."""
    tp_comm_overlap_ag: bool = flag(True, "--no-tp-comm-overlap-ag", "--disable-tp-comm-overlap-ag")
    """Overlap all-gathers, with --tp-comm-overlap."""
    tp_comm_overlap_rs: bool = flag(True, "--no-tp-comm-overlap-rs", "--disable-tp-comm-overlap-rs")
    """Overlap reduce-scatters, with --tp-comm-overlap."""
    tp_comm_overlap_rs_dgrad: bool = flag(False)
    """Also overlap reduce-scatters with the computation of input gradients."""
    tp_comm_bulk_dgrad: bool = flag(True, "--no-tp-comm-bulk-dgrad", "--disable-tp-comm-bulk-dgrad")
    """Overlap the all-gather of inputs with the computation of their gradients."""
    tp_comm_bulk_wgrad: bool = flag(True, "--no-tp-comm-bulk-wgrad", "--disable-tp-comm-bulk-wgrad")
    """Overlap the reduce-scatter of input gradients with the computation of weight gradients."""
    tp_comm_bootstrap_backend: str = flag("nccl", choices=("nccl", "mpi", "gloo"))
    """Backend of torch.distributed that initializes the buffers of these overlaps."""

    # Fused kernels
    cross_entropy_loss_fusion: bool = flag(False)
    """Compute the loss using --cross-entropy-fusion-impl. Without this flag it is native, which is
    fused as well.
    """
    cross_entropy_fusion_impl: str = flag("native", choices=("native", "te"))
    """Output layer and loss in one operation (native), or Transformer Engine's kernel on the
    logits.
    """
    bias_swiglu_fusion: bool = flag(True, "--no-bias-swiglu-fusion")
    """Compute SwiGLU and its gradient in one Triton kernel each, on CUDA."""
    rope_fusion: bool = flag(True, "--no-rope-fusion")
    """Rotate queries and keys in a Triton kernel, on CUDA."""
    bias_dropout_fusion: bool = flag(True, "--no-bias-dropout-fusion")
    """Compute the residual sum and the norm of it in one Triton kernel for each direction, on CUDA.
    """

    # Recomputation of activations
    recompute_granularity: str | None = flag(None, choices=("full", "selective"))
    """Recompute activations in the backward pass: whole layers (full) or parts of them (selective).
    """
    recompute_modules: list[str] | None = flag(None, choices=RECOMPUTE_MODULES)
    """With selective: attention without its projections (core_attn, the default), the outputs of
    the norms before attention and MLP (layernorm), the whole MLP (mlp), the experts of a layer with
    router and dispatch (moe), their activation functions (moe_act), and latent attention from the
    latent vectors on (mla_up_proj).
    """
    recompute_method: str | None = flag(None, choices=("uniform", "block"))
    """With full: recompute all layers in groups of --recompute-num-layers (uniform), or only the
    first --recompute-num-layers of a chunk (block).
    """
    recompute_num_layers: int | None = flag(None, positive=True)
    """Number of layers per group (uniform) or per chunk (block)."""

    @property
    def params_dtype(self) -> torch.dtype:
        # Imported here, because tools parse these flags before they import torch.
        import torch

        if self.bf16:
            return torch.bfloat16
        if self.fp16:
            return torch.float16
        return torch.float32

    @property
    def low_precision(self) -> str | None:
        """Recipe of the layers' matrix products if they are in fp8 or fp4."""
        if self.fp8 is not None:
            return self.fp8_recipe
        if self.fp4 is not None:
            return self.fp4_recipe
        return None

    @property
    def recomputes_mtp(self) -> bool:
        """Return whether layers for multi-token prediction are recomputed.

        They are not the first layers of a chunk, which --recompute-method block selects.
        """
        return self.recompute_granularity == "full" and self.recompute_method == "uniform"

    def recomputes(self, module: str) -> bool:
        """Return whether `module` of RECOMPUTE_MODULES is recomputed selectively."""
        if self.recompute_granularity != "selective":
            return False
        selected = self.recompute_modules or ["core_attn"]
        return module in selected


@dataclass(kw_only=True)
class ExpertOptions:
    """Mixture of experts: experts, router, load balancing and dispatch."""

    # Experts
    num_experts: int | None = flag(None, at_least=0, decides="shapes", meaning="experts")
    """Number of experts of a layer with experts (Shazeer et al. 2017). Default, 0 or 1: all layers
    are dense.
    """
    moe_layer_freq: int | list[int] = flag(
        1, parse=parse_layer_pattern, decides="shapes", when=_MOE, meaning="moe_layer_pattern"
    )
    """Every N-th layer has experts, starting with the first; or a pattern of 1 (experts) and 0
    (dense), e.g. [0]*3+[1]*61.
    """
    moe_ffn_hidden_size: int | None = flag(None, positive=True, decides="shapes", when=_MOE)
    """Inner width of an expert. Default: --ffn-hidden-size."""
    moe_shared_expert_intermediate_size: int | None = flag(None, decides="shapes", when=_MOE)
    """Inner width of the shared expert, which processes every token. Default: no shared expert."""
    moe_shared_expert_gate: bool = flag(False, decides="shapes", when=_SHARED)
    """Multiply the shared expert's output by a learned gate."""
    moe_average_shared_expert: bool = flag(False, decides="mathematics", when=_SHARED)
    """Average the outputs of the shared and the selected experts instead of adding them (Command
    A+).
    """

    # Choice of experts
    moe_router_topk: int = flag(2, decides="mathematics", when=_MOE)
    """Number of experts per token."""
    moe_router_pre_softmax: bool = flag(
        False, decides="mathematics", when=_MOE, meaning="softmax_before_choice"
    )
    """Compute the softmax over all experts before the top-k selection instead of over the selected
    ones.
    """
    moe_router_score_function: str = flag(
        "softmax",
        choices=("softmax", "sigmoid"),
        decides="mathematics",
        when=_MOE,
        meaning="score_function",
    )
    """Function that turns the router's logits into scores."""
    moe_router_normalize_sigmoid: bool = flag(
        True,
        "--no-moe-router-normalize-sigmoid",
        decides="mathematics",
        when=_MOE,
        meaning="normalizes_sigmoid",
    )
    """With sigmoid scores and more than one expert per token: divide the weights of the selected
    experts by their sum. --no-moe-router-normalize-sigmoid uses the plain scores (North Mini).
    """
    moe_router_normalize_top1: bool = flag(
        False, decides="mathematics", when=_MOE, meaning="normalizes_sigmoid"
    )
    """With one expert per token: divide its weight by itself, as normalizing models of transformers
    do. Only losses of load balancing train the router then.
    """
    moe_router_num_groups: int | None = flag(None, decides="mathematics", when=_MOE)
    """Number of groups of experts; a token uses experts of --moe-router-group-topk groups only."""
    moe_router_group_topk: int | None = flag(None, decides="mathematics", when=_MOE)
    """Number of groups that a token's experts are selected from."""
    moe_router_group_score_topk: int | None = flag(
        None, decides="mathematics", when=_GROUPS, meaning="group_score_topk"
    )
    """Groups are ranked by the sum of this number of their best scores (2 in DeepSeek-V3). Default,
    and the only choice in Megatron-LM: --moe-router-topk / --moe-router-group-topk.
    """
    moe_router_topk_scaling_factor: float | None = flag(
        None, positive=True, decides="mathematics", when=_MOE, meaning="topk_scaling_factor"
    )
    """Factor of the weights of the selected experts."""
    moe_router_enable_expert_bias: bool = flag(False, decides="shapes", when=_MOE)
    """Select experts by scores plus a bias that balances their load (DeepSeek-V3)."""
    moe_router_bias_update_rate: float = flag(1e-3, at_least=0)
    """Change of the expert bias per step."""
    moe_router_dtype: str | None = flag(
        None, choices=("fp32", "fp64"), decides="mathematics", when=_MOE
    )
    """Precision of the router. Default: the precision of the model."""

    # Load balancing
    moe_router_load_balancing_type: list[str] = flag(
        ("aux_loss",), choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
    )
    """Load balancing losses: over a micro-batch (aux_loss), over each sequence (seq_aux_loss), or
    over all micro-batches so far in a step (global_aux_loss). sinkhorn instead balances the tokens
    of a rank without a loss (Clark et al. 2022).
    """
    moe_aux_loss_coeff: list[float] = flag((0.0,))
    """Coefficient of each of these losses."""
    moe_z_loss_coeff: float | None = flag(None, at_least=0)
    """Coefficient of the z-loss, which keeps the router's logits small (Zoph et al. 2022)."""
    moe_router_force_load_balancing: bool = flag(False)
    """Route tokens randomly, for benchmarks: a router with initial weights overloads some experts.
    """

    # Capacity and transport
    moe_expert_capacity_factor: float | None = flag(
        None, positive=True, decides="mathematics", when=_MOE
    )
    """Capacity of an expert as a multiple of its even share; drop tokens beyond it. Default: no
    limit.
    """
    moe_token_drop_policy: str = flag(
        "probs", choices=("probs", "position"), decides="mathematics", when=_DROPPING
    )
    """Tokens that an expert drops beyond its capacity: those with the lowest weights (probs) or the
    last ones (position).
    """
    moe_pad_expert_input_to_capacity: bool = flag(False)
    """Accepted with a capacity factor for compatibility, without effect: expert inputs are not
    padded, which does not change results.
    """
    moe_token_dispatcher_type: str = flag(
        "allgather",
        choices=("allgather", "alltoall"),
        aliases={"flex": "alltoall"},  # via DeepEP or HybridEP
    )
    """Transport of tokens to experts: all tokens to all ranks, or each token to its experts' ranks.
    """

    def _convert_losses_to_lists(self) -> None:
        """Convert single values, which Megatron-LM stores for a single loss, to lists."""
        loss_types: Any = self.moe_router_load_balancing_type
        if isinstance(loss_types, str):
            loss_types = [loss_types]
        coefficients: Any = self.moe_aux_loss_coeff
        if not isinstance(coefficients, list | tuple):
            coefficients = [coefficients]
        self.moe_router_load_balancing_type = list(loss_types)
        self.moe_aux_loss_coeff = list(coefficients)

    @property
    def experts(self) -> int:
        """Number of experts of a layer with experts; 0 in a dense model."""
        if self.num_experts is None or self.num_experts <= 1:
            return 0
        return self.num_experts

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
        """Return whether weights are the softmax over all experts instead of the chosen ones."""
        is_first = self.moe_router_pre_softmax or self.by_sinkhorn
        return is_first and self.score_function == "softmax"

    @property
    def score_function(self) -> str:
        """Function that turns the router's logits into scores, which sinkhorn selects itself."""
        if self.by_sinkhorn and self.moe_router_topk == 1:
            return "sigmoid"
        return self.moe_router_score_function

    @property
    def normalizes_sigmoid(self) -> bool:
        if self.score_function != "sigmoid":
            return True  # without effect: other scores add up to 1
        # A single weight becomes a constant without a gradient.
        is_possible = self.moe_router_topk > 1 or self.moe_router_normalize_top1
        return is_possible and self.moe_router_normalize_sigmoid

    @property
    def group_score_topk(self) -> int:
        """Number of the best scores of a group, whose sum is its rank."""
        if self.moe_router_group_score_topk:
            return self.moe_router_group_score_topk
        num_groups = self.moe_router_group_topk or 1
        return self.moe_router_topk // num_groups

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
        """Coefficient of each enabled load balancing loss."""
        enabled = {}
        pairs = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff, strict=True)
        for loss_type, coefficient in pairs:
            if loss_type != "none" and coefficient:
                enabled[loss_type] = coefficient
        return enabled


# ---- Metrics of experts in logs and TensorBoard ----

LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Names in logs, as in Megatron-LM, by --moe-router-load-balancing-type."""
Z_LOSS = "z_loss"
LOAD = "load"
"""The largest load of an expert divided by the mean load."""


def get_metric_names(config: ExpertOptions) -> list[str]:
    """Return the names of the metrics that the routers of a model measure."""
    names = [LOSS_NAMES[loss_type] for loss_type in config.load_balancing]
    if config.moe_z_loss_coeff:
        names.append(Z_LOSS)
    return [*names, LOAD]
